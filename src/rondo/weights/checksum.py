"""Checksums that prove transport: a tensor's raw words, each weighted by its place, summed modulo 2^64.

    checksum = Σ word(p) · (2p + 1)   mod 2^64        p: place of the word in the whole tensor, row by row

A word is an element's raw bits at wire dtype (8-byte elements are two words of 4). Partial sums of any
slicing add up (`combine`), so that a rank that holds a part of a tensor needs nobody else's bytes. A change
of one word is always seen (2p + 1 is odd), and so is an exchange of two words in a tensor of up to 2^31.

Words of rows that begin at places s(r) need no place each: a row's sum times 2 s(r), over all rows, and a
column's times (2c + 1), over all columns. Integers wrap around as the checksum does, in any order. So a sum
is a few kernels on any device, and stays there until somebody reads it, together with all others (`read`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from rondo.platform import platform_of
from rondo.system.usage import counted_checks

MODULUS = 1 << 64
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_COLUMNS = 1 << 10  # of a tensor that is one run; places of rows and of columns are then few


def checksum(tensor: torch.Tensor) -> int:
    """Returns the checksum of a contiguous tensor, an int in [0, 2^64). Any dtype, any device."""
    return checksums({"": tensor})[""]


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Returns the checksums of whole tensors of one device, by name, for one look at it."""
    return read({name: whole_sum(tensor) for name, tensor in tensors.items()})


def read(sums: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Returns sums of one device as checksums, by name, for one look at it."""
    values = torch.stack(list(sums.values())).tolist() if sums else []
    return {name: combine([value]) for name, value in zip(sums, values, strict=True)}


def whole_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the `box_sum` of a whole tensor."""
    return box_sum(tensor, (0,) * tensor.dim(), tuple(tensor.shape))


@counted_checks()
def box_sum(tensor: torch.Tensor, offset: Sequence[int], whole: Sequence[int]) -> torch.Tensor:
    """Returns the part of a checksum that a box of a tensor of shape `whole` has: `tensor` begins at `offset`
    of it. int64 [] (`signed`), on the tensor's device, which is not waited for.
    """
    shape, device = tuple(tensor.shape), tensor.device
    words = _words(tensor)
    if not words.numel():
        return torch.zeros((), dtype=torch.int64, device=device)
    per_element = 2 if tensor.element_size() == 8 else 1
    strides = [math.prod(whole[dim + 1 :]) * per_element for dim in range(len(whole))]
    first = sum(at * stride for at, stride in zip(offset, strides, strict=True))
    dim = max(len(shape) - 1, 0)  # the last dimension that is cut: from here on everything is one run
    while dim > 0 and shape[dim] == whole[dim]:
        dim -= 1
    if math.prod(shape[:dim]) == 1:
        return _sum_of_run(words, first)
    twice = torch.zeros(1, dtype=torch.int64, device=device)  # the place of each row
    for size, stride in zip(shape[:dim], strides[:dim], strict=True):
        twice = (twice[:, None] + _steps(size, 2 * stride, device)).flatten()
    return _sum_of_rows(words.view(len(twice), -1), twice, first)


def combine(parts: Iterable[int]) -> int:
    """Returns the checksum of a tensor from those of its pieces (each element in one piece)."""
    return sum(parts) % MODULUS


def signed(value: int) -> int:
    """Returns it as torch's int64 holds it; sums of those wrap around as the checksum does."""
    return value - MODULUS if value >= MODULUS // 2 else value


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the words [N] of a contiguous tensor: views of it."""
    flat = tensor.detach().reshape(-1)
    if flat.stride() != (1,):  # one element of a wider tensor, which torch takes for contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.int8 if flat.dtype == torch.bool else _WORDS[flat.element_size()])


def _sum_of_run(words: torch.Tensor, first: int) -> torch.Tensor:
    """Sums words [N], N at least 1, of which the first has this place."""
    high = len(words) // _COLUMNS
    if high < 2:
        return _sum_of_rows(words[None], None, first)
    rows, rest = words[: high * _COLUMNS].view(high, _COLUMNS), words[high * _COLUMNS :]
    total = _sum_of_rows(rows, _steps(high, 2 * _COLUMNS, words.device), first)
    return total + _sum_of_rows(rest[None], None, first + high * _COLUMNS) if len(rest) else total


def _sum_of_rows(rows: torch.Tensor, twice: torch.Tensor | None, first: int) -> torch.Tensor:
    """Sums words [R, C]. Row r begins at twice[r] / 2 + first; twice: int64 [R]; None: of one row, 0."""
    slab = platform_of(rows.device).numbers.checksum_words
    height, width = max(1, slab // rows.shape[1]), min(slab, rows.shape[1])
    parts = []
    for left in range(0, rows.shape[1], width):
        for top in range(0, len(rows), height):
            part = rows[top : top + height, left : left + width].to(torch.int64)
            odd = _steps(part.shape[1], 2, rows.device, 2 * (first + left) + 1)
            parts.append((part.sum(0) * odd).sum())
            if twice is not None:
                parts.append((part.sum(1) * twice[top : top + height]).sum())
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def _steps(count: int, step: int, device: torch.device, first: int = 0) -> torch.Tensor:
    """Returns first, first + step, …, int64 [count], made on the device."""
    return torch.arange(first, first + count * step, step, dtype=torch.int64, device=device)
