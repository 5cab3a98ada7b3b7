"""Checksums that prove transport: a tensor's raw words, each weighted by its place, summed modulo 2^64.

    checksum = Σ word(p) · (2p + 1)   mod 2^64        p: place of the word in the whole tensor, row by row

A word is an element's raw bits at wire dtype (8-byte elements are two words of 4). Partial sums of any
slicing add up (`combine`), so that a rank that holds a part of a tensor needs nobody else's bytes. A change
of one word is always seen (2p + 1 is odd), and so is an exchange of two words in a tensor of up to 2^31.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from rondo.platform import on_host, platform_of

MODULUS = 1 << 64
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_RUN = 1 << 10  # words per inner sum: below 2^31 · 2^11 · 2^10 = 2^52 every one of them is exact in float64
_ZERO = torch.zeros(1, dtype=torch.int64)


def checksum(tensor: torch.Tensor, start: int = 0) -> int:
    """Returns the checksum of a contiguous piece whose first element has place `start` (in elements) in the
    whole tensor.

    An int in [0, 2^64). Any dtype, any device; the whole tensor has start=0.
    """
    return combine([int(_sum(tensor.reshape(1, -1), torch.tensor([start])))])


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Returns the checksums of whole tensors of one device, by name, for one look at it."""
    if not tensors:
        return {}
    sums = torch.stack([_sum(tensor.reshape(1, -1), _ZERO) for tensor in tensors.values()])
    return {name: combine([value]) for name, value in zip(tensors, sums.tolist(), strict=True)}


def box_checksum(tensor: torch.Tensor, offset: Sequence[int], whole: Sequence[int]) -> int:
    """Returns the checksum of a box of a tensor of shape `whole`: `tensor` begins at `offset` of it."""
    return combine([int(box_sum(tensor, offset, whole))])


def box_sum(tensor: torch.Tensor, offset: Sequence[int], whole: Sequence[int]) -> torch.Tensor:
    """Returns the `box_checksum` as torch holds it (`signed`), int64 [], on the tensor's device, which is not
    waited for.
    """
    shape = tuple(tensor.shape)
    if not shape or tensor.numel() == 0:
        return _sum(tensor.reshape(1, -1), _ZERO)
    strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    dim = len(shape) - 1  # the last dimension that is cut: from here on everything is one run
    while dim > 0 and shape[dim] == whole[dim]:
        dim -= 1
    starts = torch.tensor([sum(at * stride for at, stride in zip(offset, strides, strict=True))])
    for size, stride in zip(shape[:dim], strides[:dim], strict=True):
        starts = (starts[:, None] + torch.arange(size) * stride).flatten()
    return _sum(tensor.reshape(len(starts), -1), starts)


def combine(parts: Iterable[int]) -> int:
    """Returns the checksum of a tensor from those of its pieces (each element in one piece)."""
    return sum(parts) % MODULUS


def signed(value: int) -> int:
    """Returns it as torch's int64 holds it; sums of those wrap around as the checksum does."""
    return value - MODULUS if value >= MODULUS // 2 else value


def _sum(runs: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Sums elements [R, C], of which each row begins at its place in `starts` (int64 [R]); int64 []."""
    flat = runs.detach().reshape(-1)
    if flat.stride() != (1,):  # one element of a wider tensor, which torch takes for contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    words = flat.view(torch.int8 if runs.dtype == torch.bool else _WORDS[runs.element_size()])
    per_element = 2 if runs.element_size() == 8 else 1
    device, slab = runs.device, platform_of(runs.device).numbers.checksum_words
    total = torch.zeros((), dtype=torch.int64, device=device)
    if not words.numel():
        return total
    rows = words.view(len(starts), -1)
    # On the host as long as a tensor is one run: to move a number costs a device more than to sum with it.
    first = starts * per_element if len(starts) == 1 else starts.to(device) * per_element
    high, host = max(1, slab // rows.shape[1]), on_host(device)
    for top in range(0, len(rows), high):
        for left in range(0, rows.shape[1], slab):
            part, places = rows[top : top + high, left : left + slab], first[top : top + high] + left
            if not host:
                total += _weighted_by_integers(part, places)
                continue
            whole = part.shape[1] // _RUN * _RUN
            if whole:
                inner = (places[:, None] + torch.arange(0, whole, _RUN, device=device)).flatten()
                total += _weighted(part[:, :whole].reshape(-1, _RUN), inner)
            if whole < part.shape[1]:
                total += _weighted(part[:, whole:], places + whole)
    return total


def _weighted_by_integers(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Sums rows [R, C] of words, each of which begins at its place [R]. Integers wrap around as the checksum
    does, in any order; a CPU multiplies them slowly, and takes `_weighted`.
    """
    if len(places) == 1:
        first = 2 * int(places) + 1
        odd = torch.arange(first, first + 2 * rows.shape[1], 2, dtype=torch.int64, device=rows.device)
    else:
        odd = torch.arange(1, 1 + 2 * rows.shape[1], 2, dtype=torch.int64, device=rows.device)
        odd = odd + 2 * places[:, None]
    return (rows * odd).sum()


def _weighted(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Sums rows [R, C] of words, C at most _RUN, each of which begins at its place [R]."""
    # Σ word and Σ word · (2j + 1) over each row, as a product of matrices.
    odd = torch.arange(1, 2 * rows.shape[1], 2, dtype=torch.float64, device=rows.device)
    columns = torch.stack([torch.ones_like(odd), odd], 1)
    plain, weighted = (rows.to(torch.float64) @ columns).to(torch.int64).unbind(1)
    return (plain * (2 * places) + weighted).sum()
