"""The dtype of a model: parameters are cast, what must stay precise is not."""

from __future__ import annotations

import re

import torch
from transformers import PreTrainedModel


def cast_model(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Casts the parameters to `dtype`, in place, but for those that `kept_in_float32` names.

    Buffers are never made narrower: rotary frequencies in bfloat16 are wrong by whole turns at a position of
    some thousands. (`model.to(dtype=…)` casts them.) For float64 they are made wider.
    """
    kept = kept_in_float32(model, dtype)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if name in kept else dtype)
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            # A constant may be narrow (Gemma's scale of embeddings, which transformers rounds itself).
            assert buffer.numel() == 1 or buffer.dtype.itemsize >= 4, f"buffer {name} is {buffer.dtype}"
            buffer.data = buffer.data.to(torch.promote_types(buffer.dtype, dtype))


LARGEST_GAP = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
"""The largest believable difference of one log-prob between two correct computations of it, by dtype."""


def kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> frozenset[str]:
    """The parameters that stay in float32 where the others are in `dtype`, by transformers' declarations: for
    float16 and bfloat16 `_keep_in_fp32_modules_strict` (routers of mixtures), for float16 also
    `_keep_in_fp32_modules`.
    """
    patterns: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        patterns.update(model._keep_in_fp32_modules_strict or ())
    if dtype is torch.float16:
        patterns.update(model._keep_in_fp32_modules or ())
    if not patterns:
        return frozenset()
    declared = re.compile("|".join(pattern.replace("*", ".*") for pattern in patterns))
    return frozenset(name for name, _ in model.named_parameters() if declared.search(name))
