"""Which row of which source stands at a sequence number: pure, so that the number is the stream's only
state.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rondo.core.types import request_seed

# Shares are whole parts of this many; a source with less gets one part.
_PARTS = 10_000


@dataclass(frozen=True)
class StreamRow:
    """A row of the stream."""

    source: int
    """The index of the source."""
    epoch: int
    """Passes over this source that are complete."""
    position: int
    """The index among the source's rows."""


class Mixture:
    """An endless stream over several sources, interleaved by weight, each shuffled anew in every pass over
    it.

    In any stretch of the stream a source's count is within one of its share of each cycle of the pattern;
    weights are rounded to 1/10,000 of the whole. An epoch of the stream is as long as all sources together;
    with weights that are not in proportion to the sizes, some rows come more than once in it and others not
    at all. A weight of None is the source's size; where all are, the proportion is exact.
    """

    def __init__(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        weights: Sequence[float | None],
        *,
        shuffle: bool,
        seed: int,
    ) -> None:
        self.names = tuple(names)
        self.sizes = tuple(sizes)
        self.shuffle = shuffle
        self.seed = seed
        self.epoch_length = sum(sizes)
        parts = _parts(sizes, weights)
        shared = math.gcd(*parts)
        self._parts = np.array(parts, np.int64) // shared
        pattern, rank = _pattern(self._parts)
        self._pattern = pattern
        self._rank = rank
        self._order = functools.lru_cache(maxsize=2 * len(self.names))(self._permutation)

    def place(self, seq: int) -> StreamRow:
        """Returns the row at sequence number `seq` >= 0, from it and the constructor's arguments alone."""
        cycle, at = divmod(seq, len(self._pattern))
        source = int(self._pattern[at])
        nth = cycle * int(self._parts[source]) + int(self._rank[at])
        epoch, row = divmod(nth, self.sizes[source])
        return StreamRow(source, epoch, int(self._order(source, epoch)[row]) if self.shuffle else row)

    def _permutation(self, source: int, epoch: int) -> np.ndarray:
        seed = request_seed(self.seed, "shuffle", self.names[source], epoch)
        return np.random.Generator(np.random.PCG64(seed)).permutation(self.sizes[source])


def _parts(sizes: Sequence[int], weights: Sequence[float | None]) -> list[int]:
    """Returns how often each source comes in a cycle."""
    if all(weight is None for weight in weights):
        return list(sizes)
    known = [size if weight is None else weight for size, weight in zip(sizes, weights, strict=True)]
    return [max(1, round(_PARTS * weight / sum(known))) for weight in known]


def _pattern(parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the source of each position of one cycle, and how many rows of that source came before it.

    The k-th row of a source with p parts is due at (k + 1/2) / p; positions are in order of being due.
    """
    source = np.repeat(np.arange(len(parts)), parts)
    rank = np.concatenate([np.arange(count) for count in parts])
    due = (2 * rank + 1) / (2 * parts[source])
    order = np.lexsort((source, due))
    return source[order], rank[order]
