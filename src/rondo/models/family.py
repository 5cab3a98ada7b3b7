"""Everything that differs between model families, in one small record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedConfig

from rondo.errors import ConfigError

_FULL_ATTENTION = {"full_attention", "sliding_attention"}
# Settings that change what the output head computes; the chunked log-prob head multiplies by the matrix only.
_HEAD_SETTINGS = {
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
    "output_multiplier_scale": 1.0,
}


def packed_positions(lengths: np.ndarray, offsets: np.ndarray) -> torch.Tensor:
    """Position ids of packed documents: int64 [N], rising from each document's offset (where it continues a
    prefix).

    Recomputed where needed, never stored.
    """
    starts = np.repeat(np.cumsum(lengths) - lengths - offsets, lengths)
    return torch.from_numpy(np.arange(len(starts), dtype=np.int64) - starts)


def same_name(name: str) -> str:
    return name


@dataclass(frozen=True)
class ModelFamily:
    """positions: (document lengths, first positions) -> position ids [N]; always passed to the model.

    packable: documents may share a forward pass, kept apart by the variable-length attention function. If
    not, each pass holds one document and transformers' own eager attention. checkpoint_name: parameter name
    -> name in a Hugging Face checkpoint.
    """

    model_type: str
    packable: bool
    why_not_packable: str = ""
    positions: Callable[[np.ndarray, np.ndarray], torch.Tensor] = packed_positions
    checkpoint_name: Callable[[str], str] = same_name


def family_of(config: PreTrainedConfig) -> ModelFamily:
    """The family of a causal language model. Raises ConfigError for a head whose log-probs would be silently
    wrong.
    """
    model_type = str(config.model_type)
    for name, neutral in _HEAD_SETTINGS.items():
        value = getattr(config, name, None)
        if value is not None and value != neutral:
            raise ConfigError(
                f"a {model_type} model with {name}={value} changes its logits after the output head, which "
                "the trainer's log-prob head does not do yet; choose another model"
            )
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{model_type} is an encoder-decoder model; rondo trains causal (decoder-only) models"
        )
    reason = _not_packable(config)
    return ModelFamily(model_type, packable=not reason, why_not_packable=reason)


def _not_packable(config: PreTrainedConfig) -> str:
    """Why documents must not share a pass ("" if they may)."""
    other = sorted(set(getattr(config, "layer_types", None) or ()) - _FULL_ATTENTION)
    if other:
        return f"it has layers of type {', '.join(other)}"
    if getattr(config, "attn_logit_softcapping", None):
        return "its attention scores have a soft-cap"
    if config.model_type in ("gpt_oss",):
        return "its attention has sinks"
    if config.model_type in ("gpt2", "bloom", "mpt", "falcon", "mamba", "mamba2", "rwkv", "jamba", "bamba"):
        return "its state or positions do not go through the attention interface"
    return ""
