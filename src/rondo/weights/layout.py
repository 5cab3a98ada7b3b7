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
    """A rectangular part of a tensor: where it begins, and its shape. A scalar has () for both."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

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
    """A logical tensor. name: in the Hugging Face checkpoint (tied tensors have one); dtype: of the wire, as
    torch names it ("bfloat16").
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def item_bytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the whole tensor."""
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True)
class Cut:
    """A dimension of a tensor cut into as many pieces as an axis has places, each of ceil(size / places) but
    for the last ones, which have fewer elements or none.

    blocks: the dimension is that many equal blocks one after another, and each is cut so: a place holds a
    piece of each of them.
    """

    dim: int
    blocks: int = 1


@dataclass(frozen=True)
class Span:
    """A box of a tensor that a rank holds, and where that lies in what the rank has."""

    box: Box
    local: Box


@dataclass(frozen=True)
class Spec:
    """How a tensor is spread over a grid of ranks.

    ranks: of the world, row by row, as many as the axes' sizes say. cuts: of each axis what it cuts, of what
    the axes before it have left; None: the ranks along this axis hold the same.
    """

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    cuts: tuple[Cut | None, ...]

    @classmethod
    def rows(cls, ranks: Iterable[int]) -> Spec:
        """Cuts rows, as FSDP2 does: rank i of n holds those of [i·c, (i+1)·c), c = ceil(rows / n)."""
        ranks = tuple(ranks)
        return cls(ranks, (len(ranks),), (Cut(0),))

    @classmethod
    def whole(cls, ranks: Iterable[int]) -> Spec:
        """Cuts nothing: every rank holds all of it."""
        ranks = tuple(ranks)
        return cls(ranks, (len(ranks),), (None,))

    def spans(self, shape: tuple[int, ...], rank: int) -> tuple[Span, ...]:
        """Returns what a rank holds of a tensor; () for nothing. One span, but where blocks are cut."""
        place = self._places.get(rank)
        return () if place is None else _spans(self.sizes, self.cuts, shape, place)

    def local_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Returns the shape of what a rank has, that holds its spans."""
        pieces = _pieces(self.sizes, self.cuts, shape, self._places[rank])
        return tuple(sum(length for _, length in along) for along in pieces)

    def largest(self, shape: tuple[int, ...]) -> int:
        """Returns the most elements that a rank has."""
        return math.prod(self.local_shape(shape, self.ranks[0]))

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

    def number(self, rank: int) -> int:
        """Returns which of the ranks it is, from 0."""
        return self._numbers[rank]

    def first(self, rank: int) -> bool:
        """Says whether a rank is the first of those that hold what it holds."""
        return rank in self._firsts

    @cached_property
    def _places(self) -> Mapping[int, tuple[int, ...]]:
        """The place of each rank on each axis that cuts; 0 on the others."""
        grid = itertools.product(*map(range, self.sizes))
        cut = tuple(cut is not None for cut in self.cuts)
        return {
            rank: tuple(at if cuts else 0 for at, cuts in zip(place, cut, strict=True))
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


Pieces = tuple[tuple[int, int], ...]  # (start, length) of what is held along a dimension, ascending


@lru_cache(maxsize=1 << 16)
def _pieces(
    sizes: tuple[int, ...], cuts: tuple[Cut | None, ...], shape: tuple[int, ...], place: tuple[int, ...]
) -> tuple[Pieces, ...]:
    """Returns of each dimension what is held at a place of the grid."""
    held: list[Pieces] = [((0, size),) for size in shape]
    for size, cut, at in zip(sizes, cuts, place, strict=True):
        if cut is not None:
            held[cut.dim] = _taken(held[cut.dim], size, at, cut.blocks)
    return tuple(held)


def _taken(pieces: Pieces, count: int, index: int, blocks: int) -> Pieces:
    """Cuts what is held along a dimension, as one after another, and returns the piece (or one of each block)
    of one of `count` places.
    """
    total = sum(length for _, length in pieces)
    block, rest = divmod(total, blocks)
    if rest:
        raise ValueError(f"a dimension of {total} is not {blocks} equal blocks")
    chunk = -(-block // count)
    low, high = min(index * chunk, block), min((index + 1) * chunk, block)
    taken: list[tuple[int, int]] = []
    for number in range(blocks):
        wanted_low, wanted_high, before = number * block + low, number * block + high, 0
        for start, length in pieces:
            begin, end = max(wanted_low - before, 0), min(wanted_high - before, length)
            before += length
            if begin >= end:
                continue
            if taken and taken[-1][0] + taken[-1][1] == start + begin:
                taken[-1] = taken[-1][0], taken[-1][1] + end - begin
            else:
                taken.append((start + begin, end - begin))
    return tuple(taken)


@lru_cache(maxsize=1 << 16)
def _spans(
    sizes: tuple[int, ...], cuts: tuple[Cut | None, ...], shape: tuple[int, ...], place: tuple[int, ...]
) -> tuple[Span, ...]:
    along = []
    for pieces in _pieces(sizes, cuts, shape, place):
        local = itertools.accumulate((length for _, length in pieces), initial=0)
        along.append([(start, at, length) for (start, length), at in zip(pieces, local, strict=False)])
    return tuple(
        Span(
            Box(tuple(start for start, _, _ in cell), tuple(length for _, _, length in cell)),
            Box(tuple(at for _, at, _ in cell), tuple(length for _, _, length in cell)),
        )
        for cell in itertools.product(*along)
    )


@lru_cache(maxsize=1 << 12)
def _holders(spec: Spec, shape: tuple[int, ...]) -> Mapping[Box, tuple[int, ...]]:
    held: dict[Box, list[int]] = {}
    for rank in spec.ranks:
        for span in spec.spans(shape, rank):
            if span.box.size:
                held.setdefault(span.box, []).append(rank)
    return {box: tuple(ranks) for box, ranks in held.items()}


@dataclass(frozen=True)
class Layout:
    """Which rank (of the world of processes) holds which boxes of which parameter.

    specs: of each parameter, by name. whole_tensors: the ranks put a tensor together before they pass it on,
    so it must be there as a whole.
    """

    parameters: tuple[Parameter, ...]
    specs: Mapping[str, Spec]
    whole_tensors: bool = False

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

    def spans(self, rank: int, name: str) -> tuple[Span, ...]:
        """Returns what a rank holds of a parameter, and where in its own tensor."""
        return self.specs[name].spans(self.shapes[name], rank)

    def held(self, rank: int, name: str) -> tuple[Box, ...]:
        """Returns what a rank holds of a parameter; () for nothing."""
        return tuple(span.box for span in self.spans(rank, name) if span.box.size)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of one copy of all parameters."""
        return sum(parameter.num_bytes for parameter in self.parameters)
