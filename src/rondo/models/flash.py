"""Variable-length attention kernels for half precision on CUDA: which one there is, and how it is called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rondo.platform import platform_of

WIDEST = 256  # of a head, in every kernel here


class ScoreRule(NamedTuple):
    """What a layer does with its scores before the softmax."""

    scale: float
    """Multiplies the products of queries and keys."""
    window: int | None = None
    """How many positions a query sees, its own included; None where no document is longer."""
    softcap: float | None = None
    """Scores s become softcap · tanh(s / softcap)."""

    @property
    def plain(self) -> bool:
        return self.window is None and self.softcap is None


# q [N, H, D], k and v [N, K, D], cu_seqlens, longest document, rule -> [N, H, D]; causal within documents.
Flash = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, ScoreRule], torch.Tensor]


@dataclass(frozen=True)
class FlashKernel:
    """A FlashAttention that is installed."""

    package: str
    """The one that has it."""
    call: Flash
    """Its function for documents of several lengths."""
    takes_softcap: bool
    """It can cap scores softly."""


@functools.cache
def flash_kernel(kind: str) -> FlashKernel | None:
    """Returns flash-attn 2 where it runs and can be imported, else torch's own where that runs, else None.
    kind: of the device.
    """
    runs = platform_of(kind).flash()
    if "flash-attn" in runs:
        try:
            return _flash_attn()
        except ImportError:  # also where flash-attn 4 is alone: it has the package, and not this function
            pass
    return _torch() if "torch" in runs else None


def why_not_flash(query_width: int, value_width: int) -> str:
    """Returns why no kernel takes heads of these widths; "" if they all do."""
    if query_width != value_width:
        return f"queries of width {query_width} and values of width {value_width}"
    if query_width > WIDEST or query_width % 8:
        return f"heads of width {query_width} (a multiple of 8 up to {WIDEST} is needed)"
    return ""


def _flash_attn() -> FlashKernel:
    from flash_attn import flash_attn_varlen_func

    takes_softcap = "softcap" in inspect.signature(flash_attn_varlen_func).parameters  # from 2.6 on

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, longest: int, rule: ScoreRule
    ) -> torch.Tensor:
        options = dict[str, Any]()
        if rule.softcap is not None:
            options["softcap"] = rule.softcap
        if rule.window is not None:
            options["window_size"] = (rule.window - 1, 0)  # how many are seen before a query's own position
        out: torch.Tensor = flash_attn_varlen_func(
            q, k, v, cu, cu, longest, longest, softmax_scale=rule.scale, causal=True, **options
        )
        return out

    return FlashKernel("flash-attn", call, takes_softcap)


def _torch() -> FlashKernel:
    from torch.nn.attention.varlen import varlen_attn

    # From torch 2.12 on. The kernel of 2.11 may take fewer heads of keys and values than of queries, too: no
    # card has said so.
    takes_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, longest: int, rule: ScoreRule
    ) -> torch.Tensor:
        assert rule.softcap is None
        group, options = q.shape[1] // k.shape[1], dict[str, Any]()
        if group > 1 and takes_groups:
            options["enable_gqa"] = True
        elif group > 1:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        seen_before = -1 if rule.window is None else rule.window - 1
        out: torch.Tensor = varlen_attn(
            q, k, v, cu, cu, longest, longest, scale=rule.scale, window_size=(seen_before, 0), **options
        )
        return out

    return FlashKernel("torch", call, takes_softcap=False)
