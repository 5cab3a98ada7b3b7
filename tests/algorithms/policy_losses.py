"""Calling a policy loss on flat columns, for the tests of its values and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rondo.algorithms import columns_read, lookup
from rondo.algorithms.trial import example_columns

D = functools.partial(torch.tensor, dtype=torch.float64)


def bound(name: str, **options: Any) -> Callable[..., Any]:
    return functools.partial(lookup("policy_loss", name), **options)


def call(function: Callable[..., Any], log_probs: Tensor, **columns: Tensor) -> tuple[Tensor, dict]:
    """What a loss returns for `columns`; by default one response at ratio 1, advantage 1, nothing masked."""
    ones = torch.ones_like(log_probs, requires_grad=False)
    table = example_columns(ones, fill=functools.partial(torch.zeros, dtype=log_probs.dtype)) | {
        "log_probs": log_probs,
        "cu_seqlens": torch.tensor([0, len(log_probs)], dtype=torch.int32),
        "old_log_probs": log_probs.detach(),
        "advantages": ones,
        "topk_log_probs": log_probs[:, None].expand(-1, 2),
        "teacher_topk_log_probs": -ones[:, None].expand(-1, 2),
    }
    table |= columns
    if "ref_log_probs" not in columns:
        table["ref_log_probs"] = table["old_log_probs"]
    # What only its own `prepare` makes is in no table: 0.
    return function(**{name: table.get(name, 0 * ones) for name in columns_read(function)})


def value_and_gradient(
    function: Callable[..., Any], ratio: list[float], advantage: list[float], **columns: Tensor
) -> Any:
    """(loss, gradient of its sum, metrics) at these ratios π/π_old and advantages, float64."""
    old = D([-1.0] * len(ratio))
    leaf = (old + D(ratio).log()).requires_grad_()
    loss, metrics = call(function, leaf, old_log_probs=old, advantages=D(advantage), **columns)
    return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0], metrics


def evaluate(name: str, log_probs: Tensor, options: dict[str, Any] | None = None, **columns: Tensor) -> Any:
    """(loss, gradient of its sum, metrics) at these log-probs."""
    leaf = log_probs.clone().requires_grad_()
    loss, metrics = call(bound(name, **(options or {})), leaf, **columns)
    return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0], metrics


def random_columns(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    mask = torch.tensor([1, 1, 0, 1, 1, 0, 0, 1, 1, 1], dtype=dtype)
    old = -torch.rand(10, generator=generator, dtype=dtype) - 0.1
    return {
        "log_probs": (old + 0.3 * torch.randn(10, generator=generator, dtype=dtype)) * mask,
        "old_log_probs": old * mask,
        "advantages": torch.randn(10, generator=generator, dtype=dtype) * mask,
        "response_mask": mask,
        "cu_seqlens": torch.tensor([0, 4, 4, 7, 10], dtype=torch.int32),
    }
