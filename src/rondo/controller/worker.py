"""What a worker is handed: its place in the group, its device, its mesh, and the other workers of its
process. And dispatch: how a method's arguments are spread over the ranks, and who reads and writes which
columns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rondo.config.schema import BalanceConfig, TokenBalanceConfig
from rondo.controller.distributed import device_mesh_of
from rondo.controller.mesh import DATA, Mesh
from rondo.core.batch import ROW_ID, Batch
from rondo.core.columns import UNIT, column, declared
from rondo.planning.batches import attention_work, balance
from rondo.platform import ProfileTurn

# ---- dispatch ----


How = Literal["broadcast", "split", "per_rank"]
COST_COLUMNS = declared("prompt_length", "response_length")
GROUP_COLUMN = column("mini_batch").name

BY_TOKENS: BalanceConfig = TokenBalanceConfig()

MARK = "__rondo_dispatch__"  # the attribute of a marked method that holds its Dispatch
Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Dispatch:
    """The mark of a method that the controller may call."""

    how: How
    """Which arguments each rank gets; see `dispatch`."""
    reads: tuple[str, ...] = ()
    """Columns shipped with a BatchRef."""
    takes: tuple[str, ...] = ()
    """Columns that are shipped, too, of a batch that has them."""
    writes: tuple[str, ...] = ()
    """Columns that it may return; () is not checked."""
    replaces: tuple[str, ...] = ()
    """Columns that it may return although the batch has them; the batch's are then those returned."""


def dispatch(
    how: How,
    *,
    reads: tuple[str, ...] = (),
    takes: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
    replaces: tuple[str, ...] = (),
) -> Callable[[Method], Method]:
    """Marks a worker method that the controller may `call`.

    broadcast: the same arguments to every rank, the result of rank 0. split: the first argument is a BatchRef
    whose rows are cut over the data-parallel axis; each rank gets a Batch of `reads`, and of what there is of
    `takes`. per_rank: every argument is a list with one entry per rank, and so is the result.
    """

    def mark(method: Method) -> Method:
        setattr(method, MARK, Dispatch(how, reads, takes, writes, replaces))
        return method

    return mark


class Placer:
    """Places the rows of a step on data-parallel ranks: once for all calls that read the same rows in the
    same mini-batches, and so on the same ranks. by: what the ranks are to be even in.

    It knows rows again by the very columns that decide (those of a batch are never written, and pass from one
    stage's batch to the next's), and remembers the latest few: those of a step, and of the part of its rows
    that an update computes apart (`trainers/program/update.py`).
    """

    _REMEMBERED = 4

    def __init__(self, by: BalanceConfig = BY_TOKENS) -> None:
        self.by = by
        self._placed: list[tuple[int, dict[str, Any], list[np.ndarray]]] = []  # the latest last

    def place(self, index: Batch, parts: int) -> list[np.ndarray]:
        """Returns what `cut` does."""
        names = (ROW_ID, *COST_COLUMNS, GROUP_COLUMN, UNIT)
        deciding = {name: index.array(name) for name in names if name in index.columns}
        for number, known, rows in self._placed:
            same = number == parts and known.keys() == deciding.keys()
            if same and all(known[name] is array for name, array in deciding.items()):
                return rows
        rows = cut(index, parts, self.by)
        self._placed = [*self._placed[1 - self._REMEMBERED :], (parts, deciding, rows)]
        return rows


def cut(index: Batch, parts: int, by: BalanceConfig = BY_TOKENS) -> list[np.ndarray]:
    """Returns the row positions of each data-parallel shard: balanced by work within every mini-batch, and a
    function of the index.

    The work of a row follows from its prompt_length + response_length (1 per row where the index has
    neither), groups are the column `mini_batch` if there is one; rows of equal `unit`, if the index has that,
    stay on one shard. Shards may be uneven and empty.
    """
    present = [name for name in COST_COLUMNS if name in index.columns]
    costs = np.zeros(len(index)) if present else np.ones(len(index))
    for name in present:
        costs += index.scalars(name)
    if by.name == "attention":
        costs = attention_work(costs, by.linear)
    groups, units = (index.scalars(name) if name in index.columns else None for name in (GROUP_COLUMN, UNIT))
    return balance(costs, parts, groups, units, equal_sizes=by.equal_sizes)


class Worker:
    """One rank of a role. Methods marked with `dispatch` are called by the controller.

    Sync methods run on the host process's one training thread, in the order in which the controller called
    them; async ones on its event loop, at once.
    """

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    @dispatch("per_rank")
    def process_id(self) -> int:
        """Returns the process id of the host; tests kill it."""
        return os.getpid()

    def stacks(self) -> str:
        """Returns the stacks of the processes that it has started, for the report of a hang; empty: there are
        none that answer. On a thread of its own, while anything else goes on.
        """
        return ""

    def turn_profile(self, change: ProfileTurn) -> None:
        """Ends and begins the profiles of the processes that it has started and that compute with torch."""

    def close(self) -> None:
        """Releases threads and files. It is called again at shutdown; a second call must do no harm."""


@dataclass
class WorkerContext:
    """Where a worker stands, and with whom."""

    role: str
    """The worker group's name."""
    rank: int
    """This worker's rank in its group."""
    world_size: int
    """How many workers the group has."""
    device: str
    """As torch calls it: "cpu", "cuda:0"."""
    threads: int
    """Torch threads of this host."""
    peers: Mapping[str, Worker]
    """The workers of other roles in this process, by role; a live view."""
    mesh: Mesh
    """The grid of the group's ranks."""
    ranks: tuple[int, ...]
    """The group's ranks in the world of hosts."""
    groups: Mapping[str, tuple[ProcessGroup, ...]]
    """By the name of each of the mesh's grids, one process group per axis."""
    accelerators: tuple[str, ...] = ()
    """The ids (`Platform.visible_ids`) of all devices of this rank, for a child process that computes on
    them; () on a CPU, and where they are one's own already."""
    _device_meshes: dict[str, DeviceMesh] = field(default_factory=dict, repr=False)

    def device_mesh(self, grid: str = DATA) -> DeviceMesh:
        """Returns a torch DeviceMesh over the group's ranks with the axis names of one of the mesh's grids,
        on process groups that roles on the same ranks share. Raises KeyError where the mesh has no such grid.
        """
        if grid not in self._device_meshes:
            device_type, axes = self.device.partition(":")[0], self.mesh.grids[grid]
            self._device_meshes[grid] = device_mesh_of(axes, self.ranks, self.groups[grid], device_type)
        return self._device_meshes[grid]
