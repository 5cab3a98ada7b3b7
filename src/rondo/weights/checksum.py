"""Checksums that prove transport: a tensor's raw words, each weighted by its place, summed modulo 2^64.

    checksum = Σ word(p) · (2p + 1)   mod 2^64        p: place of the word in the whole tensor, row by row

A word is an element's raw bits at wire dtype (8-byte elements are two words of 4). Partial sums of any
slicing add up (`combine`), so that a rank that holds a part of a tensor needs nobody else's bytes. A change
of one word is always seen (2p + 1 is odd), and so is an exchange of two words in a tensor of up to 2^31.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from rondo.platform import on_host, platform_of
from rondo.system.usage import counted_checks

MODULUS = 1 << 64
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_RUN = 1 << 10  # words per inner sum: below 2^31 · 2^11 · 2^10 = 2^52 every one of them is exact in float64
_ZERO = torch.zeros(1, dtype=torch.int64)
_FEW = 1 << 20  # words of one run on the host that are summed here: torch's calls cost more than their work
_ODD = np.arange(1, 1 << 17, 2, dtype=np.int64)


@counted_checks()
def checksum(tensor: torch.Tensor, start: int = 0) -> int:
    """Returns the checksum of a contiguous piece whose first element has place `start` (in elements) in the
    whole tensor.

    An int in [0, 2^64). Any dtype, any device; the whole tensor has start=0.
    """
    return combine([int(_sum(tensor.reshape(1, -1), torch.tensor([start])))])


@counted_checks()
def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Returns the checksums of whole tensors of one device, by name, for one look at it."""
    sums: dict[str, int | torch.Tensor] = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().reshape(-1)
        if on_host(tensor.device) and 0 < len(flat) <= _FEW and flat.stride() == (1,):
            sums[name] = _of_few(_words(flat).numpy(), 0)
        else:
            sums[name] = _sum(tensor.reshape(1, -1), _ZERO)
    waiting = [value for value in sums.values() if isinstance(value, torch.Tensor)]
    read = iter(torch.stack(waiting).tolist() if waiting else [])
    return {
        name: combine([next(read) if isinstance(value, torch.Tensor) else value])
        for name, value in sums.items()
    }


def box_checksum(tensor: torch.Tensor, offset: Sequence[int], whole: Sequence[int]) -> int:
    """Returns the checksum of a box of a tensor of shape `whole`: `tensor` begins at `offset` of it."""
    return combine([int(box_sum(tensor, offset, whole))])


@counted_checks()
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
    words = _words(flat)
    per_element = 2 if runs.element_size() == 8 else 1
    device, slab = runs.device, platform_of(runs.device).numbers.checksum_words
    total = torch.zeros((), dtype=torch.int64, device=device)
    if not words.numel():
        return total
    host = on_host(device)
    if host and len(starts) == 1 and words.numel() <= _FEW:
        return torch.tensor(_of_few(words.numpy(), int(starts.numpy()[0]) * per_element))
    rows = words.view(len(starts), -1)
    # On the host as long as a tensor is one run: to move a number costs a device more than to sum with it.
    first = starts * per_element if len(starts) == 1 else starts.to(device) * per_element
    high = max(1, slab // rows.shape[1])
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


def _words(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.int8 if flat.dtype == torch.bool else _WORDS[flat.element_size()])


def _of_few(words: np.ndarray, place: int) -> int:
    """Sums words [N], of which the first has this place; returns it as torch holds it. numpy's products of
    integers wrap around, too.
    """
    total = 0
    for first in range(0, len(words), len(_ODD)):
        part = words[first : first + len(_ODD)]
        total += int((part * _ODD[: len(part)]).sum())
        if place + first:
            total += 2 * (place + first) * int(part.sum(dtype=np.int64))
    return signed(total % MODULUS)


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
