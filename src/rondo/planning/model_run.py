"""A model in an engine of the trainer's, as the formulas of memory and of time take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rondo.config.schema import ModelPart
from rondo.planning.shapes import ModelShape


@dataclass(frozen=True)
class Spread:
    """How one model is spread over ranks: FSDP2 shards what the other axes leave."""

    ranks: int = 1
    """All of them."""
    replicate: int = 1
    """Copies (HSDP)."""
    tensor: int = 1
    """Ranks that cut products."""
    context: int = 1
    """Ranks that divide tokens."""
    expert: int = 1
    """Ranks that hold whole experts."""
    pipeline: int = 1
    """Stages, of Megatron's: each rank has some of the blocks."""
    virtual: int = 1
    """Chunks of blocks of each stage, interleaved with those of the others."""

    @property
    def together(self) -> int:
        """Counts the ranks that have the same rows."""
        return self.tensor * self.context * self.pipeline

    @property
    def copy(self) -> int:
        """Counts the ranks that hold the model once."""
        return self.ranks // self.replicate


@dataclass(frozen=True)
class ModelRun:
    """One model in an engine of the trainer's, on one device."""

    shape: ModelShape
    """Its sizes."""
    layout: Spread = Spread()
    """How it is spread."""
    itemsize: int = 4
    """Bytes of a number at rest."""
    compute: int = 2
    """Bytes of a number in products."""
    head: Literal["lm", "value"] = "lm"
    """What stands on the hidden states."""
    trains: bool = False
    """Whether it learns."""
    lora: int | None = None
    """The rank of its adapters; None: it has none."""
    quantised: bool = False
    """Whether the weights below adapters are in 4 bits."""
    moments: Literal["full", "8bit"] = "full"
    """Of Adam."""
    offload_params: bool = False
    """Whether weights rest in host memory."""
    offload_optimizer: bool = False
    """Whether moments do."""
    streamed: bool = True
    """Whether these come in large buffers; False: tensor by tensor."""
    recompute: Literal["offload"] | bool = True
    """Whether blocks are computed again in the backward pass."""
    reshard: bool = True
    """Whether a block's gathered weights go after its forward pass."""
    mlp_chunk: int | None = None
    """Tokens in an MLP at one time; None: all."""
    logits_bytes: int | None = 512 << 20
    """Of the logits that exist at one time; None: none do."""
    fused: bool = False
    """Whether norms and MLPs are lean: kernels that keep no float32 copy, or code that makes it again."""
    on_host: bool = False
    """Whether the ranks compute on CPUs: gloo copies what it adds up."""
    megatron: bool = False
    """Whether Megatron's layers and pipelines compute it."""
    ends: tuple[int | None, int | None] = (None, None)
    """Blocks of its first and last stage; None: as many as of the others."""
    parts: tuple[ModelPart, ...] = get_args(ModelPart)
    """Of one that trains the parts that learn, or have adapters; without images it is all language."""
    patches: float = 0.0
    """Of images that its tower reads, for each token of a pass."""
    targeted: bool = False
    """Whether adapters are at some modules, which were named: at all of them is the most then."""
