"""Experts that give a token the same bits whichever other tokens go to them.

A product of few rows rounds differently from one of many (`generic.MIN_ROWS`), and how many tokens an expert
gets depends on who else is in the batch: each expert's are filled up.
"""

from __future__ import annotations

import functools

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from rondo.models.routers import routers_of
from rondo.rollout.native.generic import MIN_ROWS, MIN_ROWS_THREADED

_NAMES = {MIN_ROWS: "rondo_decode", MIN_ROWS_THREADED: "rondo_decode_threaded"}


def use_even_experts(module: PreTrainedModel, device: torch.device, threads: int) -> None:
    """Has the experts of a mixture computed so, in place; on a CPU, whose rounding is known."""
    if not routers_of(module) or device.type != "cpu":
        return
    rows = MIN_ROWS if threads == 1 else MIN_ROWS_THREADED
    ALL_EXPERTS_FUNCTIONS.register(_NAMES[rows], functools.partial(_forward, rows=rows))
    module.set_experts_implementation(_NAMES[rows])


def _forward(
    experts: torch.nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *, rows: int
) -> torch.Tensor:
    """hidden [N, H], chosen int64 [N, k], weights [N, k] -> [N, H]."""
    flat = chosen.flatten()
    counts = torch.bincount(flat, minlength=experts.num_experts)
    filled = torch.where(counts > 0, ((counts + 7) // 8 * 8).clamp_min(rows), 0)
    padding = torch.repeat_interleave(filled - counts)
    # Each pair of a token and an expert is a row of its own; padding is of the first token.
    tokens = torch.arange(len(hidden), device=hidden.device).repeat_interleave(chosen.shape[1])
    tokens = torch.cat([tokens, torch.zeros_like(padding)])
    pairs = torch.cat([flat, padding])[:, None]
    out = grouped_mm_experts_forward(
        experts, hidden[tokens], pairs, torch.ones_like(pairs, dtype=hidden.dtype)
    )
    return (out[: len(flat)].view(*chosen.shape, -1) * weights[..., None]).sum(1).to(hidden.dtype)
