"""What a worker is handed: its place in the group, its device, its mesh, and the other workers of its
process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rondo.controller.dispatch import dispatch
from rondo.controller.distributed import device_mesh_of
from rondo.controller.mesh import DATA, Mesh


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

    def close(self) -> None:
        """Releases threads and files. It is called again at shutdown; a second call must do no harm."""


@dataclass
class WorkerContext:
    """Where a worker stands, and with whom."""

    role: str
    rank: int
    world_size: int
    # "cpu" or "cuda:i".
    device: str
    # Torch threads of this host.
    threads: int
    # The workers of other roles in this process, by role; a live view.
    peers: Mapping[str, Worker]
    mesh: Mesh
    # The group's ranks in the world of hosts.
    ranks: tuple[int, ...]
    # By the name of each of the mesh's grids, one process group per axis.
    groups: Mapping[str, tuple[ProcessGroup, ...]]
    # What CUDA_VISIBLE_DEVICES must name for a child process that computes on all devices of this rank; () on
    # a CPU, and where they are one's own already.
    accelerators: tuple[str, ...] = ()
    _device_meshes: dict[str, DeviceMesh] = field(default_factory=dict, repr=False)

    def device_mesh(self, grid: str = DATA) -> DeviceMesh:
        """Returns a torch DeviceMesh over the group's ranks with the axis names of one of the mesh's grids,
        on process groups that roles on the same ranks share. Raises KeyError where the mesh has no such grid.
        """
        if grid not in self._device_meshes:
            device_type, axes = self.device.partition(":")[0], self.mesh.grids[grid]
            self._device_meshes[grid] = device_mesh_of(axes, self.ranks, self.groups[grid], device_type)
        return self._device_meshes[grid]
