"""The cluster: devices with a host process each, on which worker groups are placed. Three backends,
one behaviour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rondo.controller.calls import CallWatcher, HostHandle, RankCall, invoke
from rondo.controller.group import WorkerGroup
from rondo.controller.host import CREATE, JOIN, PROFILE, NewMesh, NewWorker, collect_less
from rondo.controller.mesh import Mesh
from rondo.controller.watch import HangWatch
from rondo.controller.worker import Placer, Worker
from rondo.core.batch import Batch, BatchRef
from rondo.core.errors import ConfigError
from rondo.platform import ProfileTurn
from rondo.system.usage import CpuSeconds


class Cluster:
    """Devices with a host process each, and the worker groups on them. A backend says how its hosts start and
    end, and where blocks are kept."""

    def __init__(self, num_devices: int, device: str, threads: int) -> None:
        # Number of host processes.
        self.num_devices = num_devices
        # Their kind, as torch calls it: "cpu", "cuda".
        self.device = device
        # Torch threads of each host.
        self.threads = threads
        # Spreads rows over the ranks of all groups.
        self.placer = Placer()
        # Are told of every worker call; add to it.
        self.call_watchers: list[CallWatcher] = []
        self._handles: Sequence[HostHandle] = ()  # by device number
        self._watch: HangWatch | None = None

    def watch(self, seconds: float, limit: float, log: Path | None) -> None:
        """Has a thread look whether anything moves; see HangWatch. Ends with the cluster."""
        self._watch = HangWatch(self._handles, self.device, seconds, limit, log)
        self.call_watchers.append(self._watch)
        self._watch.start()

    def end_watch(self) -> None:
        """Ends the watch: the cluster is closing, and nothing is a hang any more."""
        if self._watch is not None:
            self._watch.close()

    async def create_group(
        self,
        role: str,
        worker_class: type[Worker],
        *,
        mesh: Mesh | None = None,
        kwargs: Mapping[str, Any] = {},
        devices: Sequence[int] | None = None,
        devices_per_rank: int = 1,
    ) -> WorkerGroup:
        """Builds one worker of `worker_class(context, **kwargs)` per rank.

        mesh: default all devices on `dp`. devices: the resource pool, ascending device numbers, one per rank
        (default the first ones); groups may share devices, their workers then share host processes and see
        each other as peers. devices_per_rank: a rank also computes on the devices that follow its own, on
        the same node (`WorkerContext.accelerators`). Raises ConfigError if they do not fit, or for a role
        that one of the devices has already (the calls of both groups would go to one worker); WorkerError if
        a constructor raises.
        """
        mesh, firsts = _pool(self.num_devices, mesh, devices, devices_per_rank)
        given = [self.accelerators(role, range(at, at + devices_per_rank)) for at in firsts]
        chosen = [self._handles[device] for device in firsts]
        taken = [host.device for host in chosen if role in host.roles]
        if taken:
            raise ConfigError(
                f"there is a worker group {role!r} on device {taken[0]} already: use that one, or "
                "give the second one another name or other devices"
            )
        # All hosts of the world take part in making process groups.
        join = RankCall(role, JOIN, (NewMesh(mesh, firsts),))
        watchers = () if self._watch is None else (self._watch,)
        await invoke(dict.fromkeys(range(self.num_devices), join), self._handles, watchers)
        workers = [NewWorker(worker_class, rank, given[rank]) for rank in range(mesh.size)]
        create = {rank: RankCall(role, CREATE, (new,), kwargs) for rank, new in enumerate(workers)}
        await invoke(create, chosen, watchers)
        for host in chosen:
            host.roles.add(role)
        collect_less()  # as in the hosts
        return WorkerGroup(role, worker_class, mesh, chosen, self.resolve, self.call_watchers, self.placer)

    async def turn_profile(self, change: ProfileTurn) -> None:
        """Ends and begins the profiles of all hosts, and of the engines that they have started: what each
        computed between two turns, behind the calls before this one and before those after it.
        """
        call = RankCall("host", PROFILE, (change,))
        watchers = () if self._watch is None else (self._watch,)
        await invoke(dict.fromkeys(range(self.num_devices), call), self._handles, watchers)

    def accelerators(self, role: str, devices: Sequence[int]) -> tuple[str, ...]:
        """Returns the ids of the GPUs of one rank, where it has several; see WorkerContext."""
        return ()

    async def resolve(self, handles: Sequence[Any]) -> list[Batch]:
        """Returns what the handles of blocks stand for (the resolver of every BatchRef made here)."""
        raise NotImplementedError

    def put(self, batch: Batch, index_columns: Sequence[str] = ()) -> BatchRef:
        """Hands rows made by the controller to the workers: `index_columns` stay here, the rest becomes a
        block."""
        raise NotImplementedError

    def driver_bytes(self) -> int:
        """Returns the bytes that passed through the controller so far, both ways; see docs/controller.md for
        what is counted."""
        raise NotImplementedError

    async def cpu_seconds(self) -> dict[int, CpuSeconds]:
        """Returns, by device, the CPU time of the host and of the processes below it (engines, their workers,
        scorers) so far, ended ones included; without this very process, and without hosts that are dead or do
        not answer."""
        raise NotImplementedError

    async def shutdown(self) -> None:
        """Closes all workers and ends all processes. A second call does nothing."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()


def _pool(
    num_devices: int, mesh: Mesh | None, devices: Sequence[int] | None, devices_per_rank: int
) -> tuple[Mesh, tuple[int, ...]]:
    """Returns the mesh of a new group, and the first device of each of its ranks. Raises ConfigError when
    they do not fit each other or the cluster.
    """
    size = mesh.size if mesh else num_devices // devices_per_rank
    chosen = tuple(range(0, size * devices_per_rank, devices_per_rank)) if devices is None else tuple(devices)
    mesh = mesh or Mesh.data_parallel(len(chosen))
    if mesh.size != len(chosen):
        raise ConfigError(
            f"mesh {mesh.axes} has {mesh.size} ranks, the resource pool {chosen} {len(chosen)} devices"
        )
    every = [device + i for device in chosen for i in range(devices_per_rank)]
    if every != sorted(set(every)) or not every or every[0] < 0 or every[-1] >= num_devices:
        raise ConfigError(
            f"a group on devices {tuple(every)} (mesh {mesh.axes}), but the cluster has {num_devices}: raise "
            "cluster.devices, or name each device once, ascending"
        )
    return mesh, chosen
