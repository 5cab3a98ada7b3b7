"""The mesh of a worker group: named axes over ranks, and what follows from them for splitting and collecting.
Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from rondo.errors import ConfigError

AXES = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class Mesh:
    """axes: (name, size), outermost first; a rank counts its coordinates in that order, the last axis
    fastest.

    Names are pipeline (`pp`), data (`dp`), context (`cp`) and tensor (`tp`) parallel; an axis that is not
    named has size 1. Raises ConfigError for other names, repeated names, and sizes below 1.
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = self.names
        unknown = [name for name in names if name not in AXES]
        if unknown or len(set(names)) != len(names) or not names:
            raise ConfigError(f"mesh {self.axes}: name each of its axes once, by one of {', '.join(AXES)}")
        if any(size < 1 for _, size in self.axes):
            raise ConfigError(f"mesh {self.axes}: every axis has at least one rank")

    @classmethod
    def data_parallel(cls, size: int) -> Mesh:
        """Returns the mesh with all ranks on one `dp` axis."""
        return cls((("dp", size),))

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the axis names, outermost first."""
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the axis sizes, outermost first."""
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        return math.prod(self.shape)

    def axis_size(self, name: str) -> int:
        """Returns the number of ranks along an axis; 1 if the mesh does not have it."""
        return dict(self.axes).get(name, 1)

    def coords(self, rank: int) -> dict[str, int]:
        """Returns axis name → position of this rank on it."""
        if not 0 <= rank < self.size:
            raise ConfigError(f"rank {rank} is not on the mesh {self.axes} of {self.size} ranks")
        out: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, out[name] = divmod(rank, size)
        return {name: out[name] for name in self.names}

    @cached_property
    def dp_shards(self) -> tuple[int, ...]:
        """Returns for each rank the index of the shard that it works on; ranks with one index form a
        data-parallel group."""
        return tuple(self.coords(rank).get("dp", 0) for rank in range(self.size))

    @cached_property
    def collect_ranks(self) -> tuple[int, ...]:
        """Returns for each shard the rank whose result counts: of the last pipeline stage, first in its cp
        and tp groups."""
        wanted = {"pp": self.axis_size("pp") - 1, "cp": 0, "tp": 0}
        chosen = (
            rank
            for rank in range(self.size)
            if all(at == wanted[name] for name, at in self.coords(rank).items() if name != "dp")
        )
        return tuple(sorted(chosen, key=lambda rank: self.dp_shards[rank]))
