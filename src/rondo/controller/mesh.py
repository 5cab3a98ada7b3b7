"""The mesh of a worker group: named axes over ranks, and what follows from them for splitting and collecting.
Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from rondo.config.schema import ParallelConfig
from rondo.core.errors import ConfigError

AXES = ("pp", "dp", "cp", "tp")
Axes = tuple[tuple[str, int], ...]
DATA = "data"


@dataclass(frozen=True)
class Mesh:
    """The grid of a worker group's ranks.

    Names of axes are pipeline (`pp`), data (`dp`), context (`cp`) and tensor (`tp`) parallel; an axis that is
    not named has size 1. Raises ConfigError for other names, repeated names, and sizes below 1.
    """

    axes: Axes
    """(name, size), outermost first; a rank counts its coordinates in that order, the last axis fastest."""
    views: tuple[tuple[str, Axes], ...] = ()
    """Further grids of the same ranks, by name, for what is spread over them otherwise than rows."""

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

    @classmethod
    def parallel(cls, size: int, sizes: ParallelConfig) -> Mesh:
        """Returns the mesh of a model that is spread over `size` ranks; they shard what the axes leave.

        Rows go to replicate · shard / context places. Views: `dense` (pipeline, replicate, shard, tensor), of
        all parameters but those of experts; `expert` (pipeline, replicate, expert_shard, expert), of these,
        where that differs; `single` (everyone, alone). Axes of one rank are left out, but for those that
        shard and `expert`. Raises ConfigError for sizes that do not divide the ranks.
        """
        tensor, context, expert, replicate = sizes.tensor, sizes.context, sizes.expert, sizes.replicate
        shard, rest = divmod(size, sizes.pipeline * replicate * tensor)
        if rest:
            stages = f"pipeline={sizes.pipeline} · " if sizes.pipeline > 1 else ""
            raise ConfigError(
                f"parallel: {stages}replicate={replicate} · tensor={tensor} does not divide the {size} ranks",
                key="parallel",
            )
        for name, axis, of, what in (
            ("context", context, shard, "that shard"),
            ("expert", expert, shard * tensor, "of one copy of the model"),
        ):
            if of % axis:
                key = f"parallel.{name}"
                raise ConfigError(f"{key}={axis} does not divide the {of} ranks {what}", key=key)
        views = {
            "dense": _without_ones(
                (
                    ("pipeline", sizes.pipeline),
                    ("replicate", replicate),
                    ("shard", shard),
                    ("tensor", tensor),
                ),
                "shard",
            ),
            "single": (("everyone", size), ("alone", 1)),
        }
        if tensor > 1 or expert > 1:
            experts = (
                ("pipeline", sizes.pipeline),
                ("replicate", replicate),
                ("expert_shard", shard * tensor // expert),
                ("expert", expert),
            )
            views["expert"] = _without_ones(experts, "expert_shard", "expert")
        rows = (
            ("pp", sizes.pipeline),
            ("dp", replicate * shard // context),
            ("cp", context),
            ("tp", tensor),
        )
        return cls(_without_ones(rows, "dp"), tuple(views.items()))

    @property
    def grids(self) -> dict[str, Axes]:
        """Returns the axes of every grid, by its name; `data` is that of rows."""
        return {DATA: self.axes, **dict(self.views)}

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


def _without_ones(axes: Axes, *keep: str) -> Axes:
    return tuple((name, size) for name, size in axes if size > 1 or name in keep)
