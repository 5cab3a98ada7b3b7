"""Bytes of activations that a forward and backward pass has at its peak, beside what docs/training.md plans.

    python benchmarks/activations.py [--tokens 4096] [--hidden 128] [--intermediate 512] [--layers 4]
    python benchmarks/activations.py --context 2        ranks of this machine that divide the tokens
    python benchmarks/activations.py --images 24        of models that read images, as docs/plan.md has it

Counted, not read off the process: every tensor that torch makes while one row passes, as long as it lives.
Weights and gradients are not among them, nor what a kernel takes and gives back inside. Llama's shape, random
weights, float32, on a CPU. With images Qwen's shapes, whose towers are most of it, beside what
`rondo.planning` plans.
"""

from __future__ import annotations

import argparse
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "src")]

from rondo.config.schema import EngineConfig, ModelPart, OptimizerConfig, TorchBackendConfig  # noqa: E402
from rondo.core.batch import Batch, ragged_rows  # noqa: E402
from rondo.core.columns import IMAGES  # noqa: E402
from rondo.core.images import ImageRef, grey, images_as_text  # noqa: E402
from rondo.models import ModelSource  # noqa: E402
from rondo.planning.memory import passing  # noqa: E402
from rondo.planning.model_run import ModelRun  # noqa: E402
from rondo.planning.shapes import shape_of  # noqa: E402
from rondo.training import ModelSpec, make_engine  # noqa: E402
from rondo.training.views import local_of  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402
from tests.training.helpers import VOCAB, PolicyLoss, make_batch, one_rank_mesh  # noqa: E402
from tests.training.layouts import layout  # noqa: E402

HEAD_WIDTH = 16
SHAPE = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}


class Counted(TorchDispatchMode):
    """Counts the bytes of the tensors that are made inside and still live: now, and at most."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        """known: tensors that were there before, and are not counted where they turn up."""
        super().__init__()
        self.now = self.peak = 0
        self._living = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        made = function(*arguments, **(keywords or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._living or not size:
            return
        self._living.add(key)
        self.now += size
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._living.discard(key)
        self.now -= size


def one_pass(
    rank: int,
    world: int,
    sizes: dict[str, int],
    tokens: int,
    shape: dict[str, int],
    mlp_chunk: int | None = None,
) -> int:
    """Returns the most bytes of a forward and backward pass with checkpointing, on this rank of `world`."""
    views, index, _ = layout(world, **sizes)
    batch = make_batch(((8, tokens - 8),))
    sizes_of_model = {"vocab_size": VOCAB, "max_position_embeddings": tokens, **SHAPE, **shape}
    model = {"model_type": "llama", "head_dim": HEAD_WIDTH, **sizes_of_model}
    model["num_key_value_heads"] = model["num_attention_heads"]
    config = EngineConfig(token_budget=1 << 20, gradient_checkpointing=True)
    backend = TorchBackendConfig(mlp_chunk=mlp_chunk)
    engine = make_engine(ModelSpec(ModelSource(config=model), config, OptimizerConfig(), backend), mesh=views)
    batch = batch if index == 0 else batch.take([])
    engine.forward_backward(batch, PolicyLoss())  # gradients are there from here on
    known = [local_of(one) for one in engine.backend.by_name.values()]
    known += [local_of(one.grad) for one in engine.backend.by_name.values() if one.grad is not None]
    with Counted(known) as counted:
        engine.forward_backward(batch, PolicyLoss())
    return counted.peak


IMAGE_TOKEN = 5
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
_TEXT = {**SHAPE, "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 8192}
_TOWER = {"depth": 6, "hidden_size": 128, "num_heads": 4, "out_hidden_size": 64, "patch_size": 8}
SEEING: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": {**_TEXT, "rope_parameters": _ROPE},
        "vision_config": {
            **_TOWER,
            "intermediate_size": 256,
            "window_size": 64,
            "fullatt_block_indexes": [1, 3],
        },
    },
    "qwen3_vl": {
        "text_config": {
            **_TEXT,
            "head_dim": HEAD_WIDTH,
            "rope_parameters": {**_ROPE, "mrope_interleaved": True},
        },
        "vision_config": {
            **_TOWER,
            "intermediate_size": 512,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [1, 2],
        },
    },
}


@dataclass(frozen=True)
class Seen:
    """A pass with images, all of 256 patches."""

    model_type: str
    """Of `SEEING`."""
    again: bool = True
    """Whether blocks are computed again in the backward pass."""
    freeze: tuple[str, ...] = ()
    """Parts that do not learn."""
    trains: bool = True
    """Whether anything does: else there is a forward pass alone."""

    @property
    def fields(self) -> dict[str, Any]:
        """Returns its config.json."""
        ids = {"image_token_id": IMAGE_TOKEN, "video_token_id": 6}
        ids |= {"vision_start_token_id": 3, "vision_end_token_id": 4}
        return {"model_type": self.model_type, "tie_word_embeddings": True, **ids, **SEEING[self.model_type]}

    def bytes_of(self, number: int) -> tuple[int, int]:
        """Returns the most bytes of a pass with so many images, counted and planned."""
        rows, of_image, answer = 16, 64, 8
        row = np.full(number * (of_image + 1) + 2 * answer, 7)
        images = []
        for image in range(number):
            reference = grey(ImageRef("", "", (1, rows, rows), of_image))
            images.append(replace(reference, sha256=str(image)))
            row[1 + image * (of_image + 1) :][:of_image] = IMAGE_TOKEN
        columns = {"prompt_ids": row[:-answer], "response_ids": row[-answer:]}
        batch = Batch.of(
            {"row_id": np.arange(1), IMAGES: np.array([images_as_text(images)])}
            | {name: ragged_rows([ids], np.int32) for name, ids in columns.items()}
        )
        tokens = len(row) - 1
        run = ModelRun(
            shape_of(self.fields, self.model_type),
            compute=4,
            trains=self.trains,
            recompute=self.again,
            fused=True,
            on_host=True,
            parts=tuple(part for part in get_args(ModelPart) if part not in self.freeze),
            patches=number * rows**2 / tokens,
        )
        return self._counted(batch), sum(passing(run, tokens).values())

    def _counted(self, batch: Batch) -> int:
        config = EngineConfig(token_budget=1 << 20, gradient_checkpointing=self.again, freeze=self.freeze)  # type: ignore[arg-type]
        optimizer = OptimizerConfig() if self.trains else None
        spec = ModelSpec(ModelSource(config=self.fields), config, optimizer)
        engine = make_engine(spec, mesh=one_rank_mesh())

        def compute() -> None:
            if self.trains:
                engine.forward_backward(batch, Likely())
            else:
                engine.forward(batch, {"log_probs": "log_probs"})

        compute()
        parameters = [*engine.backend.by_name.values()]
        known = [local_of(one) for one in parameters]
        known += [local_of(one.grad) for one in parameters if one.grad is not None]
        with Counted(known) as counted:
            compute()
        return counted.peak

    def __str__(self) -> str:
        if not self.trains:
            return f"{self.model_type} | forward alone"
        said = [] if self.again else ["gradient_checkpointing false"]
        said += [f"freeze {', '.join(self.freeze)}"] if self.freeze else []
        return f"{self.model_type} | {'; '.join(said) or 'all learn'}"


class Likely:
    """The sum of log-probs."""

    outputs = ("log_probs",)
    columns = ()

    def __call__(self, outputs: Any, columns: Any, cu_seqlens: Any) -> tuple[Any, Any]:
        return outputs["log_probs"].sum(), {}


SEEN = tuple(
    Seen(model_type, *how)
    for model_type in SEEING
    for how in (
        (True,),
        (False,),
        (True, ("tower",)),
        (True, ("tower", "projector")),
        (True, ("language",)),
        (True, (), False),
    )
)


def images_table(number: int) -> Iterator[str]:
    """Yields the lines of docs/plan.md."""
    yield "| model | | counted, MB | planned | |"
    yield "|---" * 5 + "|"
    for seen in SEEN:
        counted, expected = seen.bytes_of(number)
        error = f"{expected / counted - 1:+.0%}"
        yield f"| {seen} | {counted / 1e6:.1f} | {expected / 1e6:.1f} | {error} |"


def planned(tokens: int, shape: dict[str, int], mlp_chunk: int | None = None) -> int:
    """Returns the bytes that docs/training.md plans for so many tokens of this rank.

    The peak is in the MLP's backward pass of the last block: the inputs of all blocks are kept; of this one,
    what norms and residuals make, queries, keys, values and attention's result before and after it is laid
    out anew, and six times what the MLP is wide.
    """
    shape = {**SHAPE, **shape}
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    inside = min(tokens, mlp_chunk or tokens)
    kept = shape["num_hidden_layers"] + (4 if mlp_chunk is None else 5)
    numbers = tokens * (kept * hidden + 5 * heads * HEAD_WIDTH) + inside * 6 * shape["intermediate_size"]
    once = tokens * (3 * HEAD_WIDTH + heads + 16)  # rotary tables, sums of attention, ids and columns
    return 4 * (numbers + once)


def block_bytes(shape: dict[str, int]) -> int:
    """Returns the bytes of a block's weights, of which some are beside the plan: ranks that share them gather
    parameters and sum gradients; tiles of an MLP have the gradients of its own.
    """
    shape = {**SHAPE, **shape}
    width = 4 * shape["num_attention_heads"] * HEAD_WIDTH + 3 * shape["intermediate_size"]
    return 4 * shape["hidden_size"] * width


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096, help="of the row")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8, help=f"each {HEAD_WIDTH} wide")
    parser.add_argument("--context", type=int, default=1, help="processes that divide the tokens")
    parser.add_argument("--mlp-chunk", type=int, help="tokens in an MLP at one time")
    parser.add_argument("--images", type=int, help="of 256 patches each: other models, see above")
    options = parser.parse_args()
    if options.images is not None:
        print(*images_table(options.images), sep="\n")
        return
    shape = {
        "hidden_size": options.hidden,
        "intermediate_size": options.intermediate,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
    }
    ranks = options.context
    arguments = ({"context": ranks}, options.tokens, shape, options.mlp_chunk)
    expected = planned(options.tokens // ranks, shape, options.mlp_chunk)
    for rank, peak in enumerate(run_ranks(ranks, one_pass, *arguments, timeout=7200)):
        counts = f"{peak / 1e6:.1f} MB counted, {expected / 1e6:.1f} planned ({peak / expected:.3f})"
        print(f"rank {rank}: {counts}; a block's weights: {block_bytes(shape) / 1e6:.1f}")


if __name__ == "__main__":
    main()
