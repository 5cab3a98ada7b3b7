"""Which decode path a model gets on a device, and why; and which models get none."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import numpy as np
import torch

from rondo.errors import ConfigError
from rondo.models.family import layers_beside_attention, window_of
from rondo.rollout.native.cache import capacity_of
from rondo.rollout.native.compiled import CompiledPath, why_not_compiled
from rondo.rollout.native.generic import GenericPath
from rondo.rollout.native.lean import LeanPath, why_not_lean
from rondo.rollout.native.scheduler import SlotTable

Decode = Literal["auto", "generic", "lean", "compiled"]


class DecodePath(Protocol):
    """The arithmetic behind the decoder; called from the decode thread only.

    dense: `decode` wants slots 0 .. R - 1. reads_prefixes: it makes use of the table's prefix columns;
    in_slot_order: rows then see what lower rows wrote in the same step. prefill: (slot, tokens) pairs, into
    an allocated cache. decode: one token for each slot of `rows` (int64 [R], ascending), from the table's
    token at the table's position; a log-prob that is not finite says that the logits were not. copy: the
    first `length` cache positions of one slot to another.
    """

    name: str
    dense: bool
    reads_prefixes: bool
    in_slot_order: bool

    def allocate(self) -> None: ...

    def free(self) -> None: ...

    @property
    def cache_nbytes(self) -> int: ...

    def weights_changed(self) -> None: ...

    def copy(self, source: int, target: int, length: int) -> None: ...

    def prefill(self, prompts: list[tuple[int, np.ndarray]]) -> None: ...

    def decode(self, rows: np.ndarray, table: SlotTable) -> tuple[np.ndarray, np.ndarray]: ...


def choose_path(
    decode: Decode,
    module: torch.nn.Module,
    *,
    num_slots: int,
    max_context: int,
    dtype: torch.dtype,
    device: torch.device,
    threads: int,
) -> tuple[DecodePath, str]:
    """The path and the reason for it. ConfigError when `decode` names one that cannot run the model here."""
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
    paths: dict[str, type[GenericPath] | type[CompiledPath]] = {
        "generic": GenericPath,
        "lean": LeanPath,
        "compiled": CompiledPath,
    }
    path: DecodePath = paths[name](
        module,
        num_slots=num_slots,
        capacity=capacity_of(max_context),
        max_context=max_context,
        dtype=dtype,
        device=device,
        threads=threads,
    )
    return path, reason


def refuse_what_masks_hide(model_config: Any, max_context: int) -> None:
    """Some models keep windows or states out of the attention call; their config gives them away."""
    config = model_config.get_text_config()
    other, window = layers_beside_attention(config), window_of(config)
    if other:
        raise ConfigError(
            f"the native engine cannot decode {config.model_type} models "
            f"(layers: {', '.join(other)}); set rollout.engine=vllm"
        )
    if window is not None and window < max_context:
        raise ConfigError(
            f"the native engine has no sliding-window attention: {config.model_type} has a window "
            f"of {window} < max_context {max_context}; lower max_context, or set rollout.engine=vllm"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{config.model_type} is an encoder-decoder model; the native engine decodes causal ones"
        )
