"""A parameter set as logical tensors, and who holds which boxes of them. Pure data; no tensors here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch


@dataclass(frozen=True, order=True)
class Box:
    """A rectangular part of a tensor."""

    offset: tuple[int, ...]
    """Where it begins in each dimension; () of a scalar."""
    shape: tuple[int, ...]
    """Its own shape; () of a scalar."""

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Returns the box of a whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        """Returns the number of elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """Returns one past the last place, per dimension."""
        return tuple(at + size for at, size in zip(self.offset, self.shape, strict=True))

    def intersection(self, other: Box) -> Box | None:
        """Returns the part that both have; None when that is empty."""
        low = tuple(max(pair) for pair in zip(self.offset, other.offset, strict=True))
        high = tuple(min(pair) for pair in zip(self.end, other.end, strict=True))
        shape = tuple(b - a for a, b in zip(low, high, strict=True))
        return None if any(size <= 0 for size in shape) else Box(low, shape)

    def slices(self, base: Box) -> tuple[slice, ...]:
        """Returns where this box lies in a tensor that holds `base`."""
        return tuple(
            slice(at - base_at, at - base_at + size)
            for at, base_at, size in zip(self.offset, base.offset, self.shape, strict=True)
        )

    def split(self, max_size: int) -> list[Box]:
        """Cuts it into boxes of at most max_size ≥ 1 elements, cut along the first dimensions, in order."""
        if self.size <= max_size:
            return [self]
        dim = next(d for d, size in enumerate(self.shape) if size > 1)
        per_row = self.size // self.shape[dim]
        step = max(1, max_size // per_row)
        parts = []
        for start in range(0, self.shape[dim], step):
            offset, shape = list(self.offset), list(self.shape)
            offset[dim] += start
            shape[dim] = min(step, self.shape[dim] - start)
            parts += Box(tuple(offset), tuple(shape)).split(max_size)
        return parts


@dataclass(frozen=True)
class Parameter:
    """A logical tensor."""

    name: str
    """The name in the Hugging Face checkpoint; tied tensors have one."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    dtype: str
    """The dtype on the wire, as torch names it ("bfloat16")."""

    @property
    def item_bytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the whole tensor."""
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True)
class Spec:
    """How a tensor is spread over a grid of ranks; each holds one box of it.

    The last axis cuts first, and the others what that has left (FSDP what tensor parallel has), into pieces
    of ceil(size / ranks) but for the last ones, which have fewer elements or none.
    """

    ranks: tuple[int, ...]
    """The ranks of the world, row by row, as many as the axes' sizes say."""
    sizes: tuple[int, ...]
    """The sizes of the grid's axes, outermost first."""
    cuts: tuple[int | None, ...]
    """Of each axis, along which dimension it cuts; None: the ranks along this axis hold the same."""

    @classmethod
    def rows(cls, ranks: Iterable[int]) -> Spec:
        """Cuts rows, as FSDP2 does: rank i of n holds those of [i·c, (i+1)·c), c = ceil(rows / n)."""
        ranks = tuple(ranks)
        return cls(ranks, (len(ranks),), (0,))

    @classmethod
    def whole(cls, ranks: Iterable[int]) -> Spec:
        """Cuts nothing: every rank holds all of it."""
        ranks = tuple(ranks)
        return cls(ranks, (len(ranks),), (None,))

    def box(self, shape: tuple[int, ...], rank: int) -> Box:
        """Returns what a rank of the grid holds of a tensor; it may have no element."""
        return _box(self.sizes, self.cuts, shape, self._places[rank])

    def has(self, rank: int) -> bool:
        """Says whether a rank is one of the grid."""
        return rank in self._numbers

    def number(self, rank: int) -> int:
        """Returns which of the ranks it is, from 0."""
        return self._numbers[rank]

    def first(self, rank: int) -> bool:
        """Says whether a rank is the first of those that hold what it holds."""
        return rank in self._firsts

    def largest(self, shape: tuple[int, ...]) -> int:
        """Returns the most elements that a rank has: the first never has fewer than another."""
        return self.box(shape, self.ranks[0]).size

    @property
    def is_cut(self) -> bool:
        """Says whether ranks hold different parts."""
        return any(cut is not None and size > 1 for size, cut in zip(self.sizes, self.cuts, strict=True))

    @property
    def num_copies(self) -> int:
        """Returns how many ranks hold each box."""
        return math.prod(size for size, cut in zip(self.sizes, self.cuts, strict=True) if cut is None)

    def holders(self, shape: tuple[int, ...]) -> Mapping[Box, tuple[int, ...]]:
        """Returns the boxes that the tensor is cut into, which do not overlap, and who holds each of them."""
        return _holders(self, shape)

    @cached_property
    def _places(self) -> Mapping[int, tuple[int, ...]]:
        """Returns the place of each rank on each axis that cuts; 0 on the others."""
        grid = itertools.product(*map(range, self.sizes))
        return {
            rank: tuple(0 if cut is None else at for at, cut in zip(place, self.cuts, strict=True))
            for rank, place in zip(self.ranks, grid, strict=True)
        }

    @cached_property
    def _numbers(self) -> Mapping[int, int]:
        return {rank: number for number, rank in enumerate(self.ranks)}

    @cached_property
    def _firsts(self) -> frozenset[int]:
        first: dict[tuple[int, ...], int] = {}
        for rank, place in self._places.items():
            first.setdefault(place, rank)
        return frozenset(first.values())

    def __hash__(self) -> int:  # it is looked up for every tensor, and has as many ranks as there are
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.ranks, self.sizes, self.cuts))

    def __reduce__(self) -> tuple[type[Spec], tuple[object, ...]]:  # without what is worked out from it
        return Spec, (self.ranks, self.sizes, self.cuts)


@lru_cache(maxsize=1 << 16)
def _box(
    sizes: tuple[int, ...], cuts: tuple[int | None, ...], shape: tuple[int, ...], place: tuple[int, ...]
) -> Box:
    """Returns what is held at a place of the grid."""
    offset, left = [0] * len(shape), list(shape)
    for size, cut, at in reversed(list(zip(sizes, cuts, place, strict=True))):
        if cut is not None:
            chunk = -(-left[cut] // size)
            start = min(at * chunk, left[cut])
            offset[cut] += start
            left[cut] = min(chunk, left[cut] - start)
    return Box(tuple(offset), tuple(left))


@lru_cache(maxsize=1 << 12)
def _holders(spec: Spec, shape: tuple[int, ...]) -> Mapping[Box, tuple[int, ...]]:
    held: dict[Box, list[int]] = {}
    for rank in spec.ranks:
        box = spec.box(shape, rank)
        if box.size:
            held.setdefault(box, []).append(rank)
    return {box: tuple(ranks) for box, ranks in held.items()}


@dataclass(frozen=True)
class Layout:
    """Which rank (of the world of processes) holds which boxes of which parameter."""

    parameters: tuple[Parameter, ...]
    """All of the model, each once, in the order in which they are moved."""
    specs: Mapping[str, Spec]
    """How each parameter is spread, by name."""
    whole_tensors: bool = False
    """The ranks put a tensor together before they pass it on, so it must be there as a whole."""

    @classmethod
    def replicated(
        cls, parameters: Sequence[Parameter], ranks: Sequence[int], *, whole_tensors: bool = True
    ) -> Layout:
        """Puts every parameter whole on every rank: what an engine needs that takes whole tensors."""
        return cls._alike(parameters, Spec.whole(ranks), whole_tensors)

    @classmethod
    def sharded(cls, parameters: Sequence[Parameter], ranks: Sequence[int]) -> Layout:
        """Spreads the rows of every parameter, as FSDP2 does."""
        return cls._alike(parameters, Spec.rows(ranks), False)

    @classmethod
    def _alike(cls, parameters: Sequence[Parameter], spec: Spec, whole_tensors: bool) -> Layout:
        return cls(tuple(parameters), {one.name: spec for one in parameters}, whole_tensors)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Returns the ranks, ascending."""
        return tuple(sorted({rank for spec in set(self.specs.values()) for rank in spec.ranks}))

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the shape of each parameter, by name."""
        return {parameter.name: parameter.shape for parameter in self.parameters}

    def held(self, rank: int, name: str) -> Box | None:
        """Returns what a rank holds of a parameter; None for nothing."""
        spec = self.specs[name]
        box = spec.box(self.shapes[name], rank) if spec.has(rank) else None
        return box if box is not None and box.size else None

    def boxes(self, name: str) -> Mapping[int, Box]:
        """Returns what each rank holds of a parameter; nothing of one that is not there."""
        if name not in self.specs:
            return {}
        spec = self.specs[name]
        return {rank: spec.box(self.shapes[name], rank) for rank in spec.ranks}

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of one copy of all parameters."""
        return sum(parameter.num_bytes for parameter in self.parameters)
