"""Which decode path a model gets on a device, and why; and which models get none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch

from rondo.core.errors import ConfigError
from rondo.models.family import layers_beside_attention, record_of, rope_changes_at
from rondo.models.routers import RouteRecorder
from rondo.platform import on_host
from rondo.rollout.images import Tower
from rondo.rollout.native.compiled import CompiledPath, why_not_compiled
from rondo.rollout.native.generic import GenericPath
from rondo.rollout.native.lean import LeanPath, why_not_lean
from rondo.rollout.native.scheduler import Copy, Prefill, SlotTable

Decode = Literal["auto", "generic", "lean", "compiled"]


class DecodePath(Protocol):
    """The arithmetic behind the decoder; called from the decode thread only."""

    name: str

    @property
    def chunk(self) -> int | None:
        """Returns how many positions of a prompt are computed at one time: their keys and values are a
        function of the tokens up to the last of these, bit for bit. None: of those up to their own, always.
        """
        ...

    spare_blocks: int
    """Blocks of the cache that it keeps for itself."""
    block_nbytes: int
    """Bytes of one block in all layers."""

    def routes(self, blocks: Sequence[int], length: int) -> np.ndarray | None:
        """Returns where a mixture's tokens went, [length, W], of a sequence with these blocks; None: it is
        not kept.
        """
        ...

    def allocate(self, num_blocks: int) -> None:
        """Makes a cache of so many blocks, and its spare ones."""
        ...

    def free(self) -> None: ...

    @property
    def cache_nbytes(self) -> int: ...

    def weights_changed(self) -> None: ...

    def let_go(self) -> None:
        """Gives back what it has derived from the weights, until it is needed again."""
        ...

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copies beginnings of blocks to others, of which none is copied in turn. What lies behind them
        becomes anything finite.
        """
        ...

    def prefill(self, prefills: Sequence[Prefill], table: SlotTable) -> None:
        """Fills the blocks of slots; none reads what another one writes."""
        ...

    def decode(self, rows: np.ndarray, table: SlotTable) -> tuple[np.ndarray, np.ndarray]:
        """Makes one token for each slot of `rows` (int64 [R]), from the table's token at its position.
        Returns ids int64 [R] and log-probs float32 [R]; one that is not finite says that the logits were not.
        """
        ...


def choose_path(
    decode: Decode,
    module: torch.nn.Module,
    *,
    max_context: int,
    dtype: torch.dtype,
    device: torch.device,
    threads: int,
    recorder: RouteRecorder | None = None,
    tower: Tower | None = None,
) -> tuple[DecodePath, str]:
    """Returns the decode path and the reason for it. recorder: of a mixture's routes, which the path keeps.
    tower: of a model that is given images.
    Raises ConfigError when `decode` names one that cannot run the model here.
    """
    if decode not in ("auto", "generic", "lean", "compiled"):
        raise ConfigError(f"rollout.engine.decode={decode}: choose auto, generic, lean or compiled")
    name, reason = decode, f"rollout.engine.decode={decode}"
    if decode == "auto":
        name, reason = "compiled", "the fastest path for this model, dtype and device"
    why_not = ""
    if name == "compiled":
        why_not = why_not_compiled(module, max_context, dtype, device)
        if why_not and decode == "auto":
            name, reason, why_not = "lean", f"not compiled: {why_not}", ""
    if name == "lean":
        why_not = why_not_lean(module, max_context)
        if why_not and decode == "auto":
            name, reason, why_not = "generic", f"neither compiled nor lean: {why_not}", ""
    if why_not:
        raise ConfigError(
            f"rollout.engine.decode={name} cannot be used: {why_not}; set rollout.engine.decode=auto"
        )
    paths: dict[str, Callable[..., DecodePath]] = {
        "generic": GenericPath,
        "lean": LeanPath,
        "compiled": CompiledPath,
    }
    # The others run neither mixtures nor models with images.
    keeps = {"recorder": recorder, "tower": tower} if name == "generic" else {}
    path: DecodePath = paths[name](
        module,
        max_context=max_context,
        dtype=dtype,
        device=device,
        threads=threads,
        **keeps,
    )
    if isinstance(path, GenericPath) and not on_host(device):
        copies = path.why_copies
        reason += f"; keys and values are copied: {copies}" if copies else "; kernels in triton"
    return path, reason


def why_not_in_pieces(model_config: Any) -> str:
    """Returns why prompts with images cannot be computed in pieces, as this engine does; "" if they can."""
    images = record_of(str(model_config.model_type)).images
    if images is None or not images.sees_itself:
        return ""
    return (
        f"the tokens of an image see each other in a {model_config.model_type} model, and the native engine "
        "computes prompts in pieces; set rollout.engine=transformers"
    )


def refuse_what_attention_hides(model_config: Any, max_context: int) -> None:
    """Raises ConfigError for a model that keeps states out of the attention call, or whose cached keys are
    others once a sequence is long: no error there would tell of them, but its config does.
    """
    config = model_config.get_text_config()
    other, short = layers_beside_attention(config), rope_changes_at(config)
    if short is not None and short < max_context:
        raise ConfigError(
            f"this {config.model_type} model has other rotary embeddings (longrope) for sequences of more "
            f"than {short} tokens, in which the native engine's cached keys would be wrong (max_context is "
            f"{max_context}); lower data.max_prompt_tokens + rollout.max_tokens, or set rollout.engine=vllm"
        )
    if other:
        raise ConfigError(
            f"the native engine cannot decode {config.model_type} models "
            f"(layers: {', '.join(other)}); set rollout.engine=transformers"
        )
