"""Checksums that prove transport: a tensor's raw words, each weighted by its place, summed modulo 2^64.

    checksum = Σ word(p) · (2p + 1)   mod 2^64        p: place of the word in the whole tensor, row by row

A word is an element's raw bits at wire dtype (8-byte elements are two words of 4). Partial sums of any
slicing add up (`combine`), so that a rank that holds a part of a tensor needs nobody else's bytes. A change
of one word is always seen (2p + 1 is odd), and so is an exchange of two words in a tensor of up to 2^31.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

MODULUS = 1 << 64
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_RUN = 1 << 10  # words per inner sum: below 2^31 · 2^11 · 2^10 = 2^52 every one of them is exact in float64
_SLAB = 1 << 9  # inner sums at a time: 4 MiB as float64


def checksum(tensor: torch.Tensor, start: int = 0) -> int:
    """Returns the checksum of a contiguous piece whose first element has place `start` (in elements) in the
    whole tensor.

    An int in [0, 2^64). Any dtype, any device; the whole tensor has start=0.
    """
    words = _words(tensor)
    first = start * _words_per_element(tensor)
    columns = _columns(tensor.device)
    total, slab = 0, _RUN * _SLAB
    for begin in range(0, words.numel(), slab):
        part = words[begin : begin + slab]
        whole = part.numel() // _RUN * _RUN
        total += _sum(part[:whole].view(-1, _RUN), first + begin, columns)
        total += _sum(part[whole:].view(1, -1), first + begin + whole, columns)
    return total % MODULUS


def box_checksum(tensor: torch.Tensor, offset: Sequence[int], whole: Sequence[int]) -> int:
    """Returns the checksum of a box of a tensor of shape `whole`: `tensor` begins at `offset` of it.

    Rows that follow each other in the whole tensor are one run, so that a shard along the first dimension
    costs as much as `checksum`.
    """
    shape = tuple(tensor.shape)
    if not shape or tensor.numel() == 0:
        return checksum(tensor)
    strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    dim = len(shape) - 1  # the last dimension that is cut: from here on everything is one run
    while dim > 0 and shape[dim] == whole[dim]:
        dim -= 1
    base = sum(at * stride for at, stride in zip(offset, strides, strict=True))
    starts = torch.full((1,), base, dtype=torch.int64)
    for size, stride in zip(shape[:dim], strides[:dim], strict=True):
        starts = (starts[:, None] + torch.arange(size) * stride).flatten()
    runs = tensor.reshape(len(starts), -1)
    return combine(checksum(run, start) for run, start in zip(runs, starts.tolist(), strict=True))


def combine(parts: Iterable[int]) -> int:
    """Returns the checksum of a tensor from those of its pieces (each element in one piece)."""
    return sum(parts) % MODULUS


def signed(value: int) -> int:
    """Returns it as torch's int64 holds it; sums of those wrap around as the checksum does."""
    return value - MODULUS if value >= MODULUS // 2 else value


def _words(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat.view(_WORDS[tensor.element_size()]) if tensor.dtype != torch.bool else flat.view(torch.int8)


def _words_per_element(tensor: torch.Tensor) -> int:
    return 2 if tensor.element_size() == 8 else 1


def _columns(device: torch.device) -> torch.Tensor:
    """Returns [_RUN, 2], which gives Σ word and Σ word · (2j + 1) over a run, as a product of matrices."""
    odd = torch.arange(1, 2 * _RUN, 2, dtype=torch.float64, device=device)
    return torch.stack([torch.ones_like(odd), odd], 1)


def _sum(rows: torch.Tensor, first: int, columns: torch.Tensor) -> int:
    """Sums rows [R, C] of words that follow each other, C at most _RUN, the first one at place `first`."""
    num, width = rows.shape
    if rows.numel() == 0:
        return 0
    plain, weighted = (rows.to(torch.float64) @ columns[:width]).to(torch.int64).unbind(1)
    base = torch.arange(num, device=rows.device) * width + first
    return int((plain * (2 * base) + weighted).sum())
