"""CPU time of a run's processes beside the controller's own: hosts, engines, scorers."""

from __future__ import annotations

from collections.abc import Iterable

from rondo.config.schema import ClusterConfig
from rondo.controller import Worker, WorkerGroup
from rondo.tracking import Timers
from rondo.usage import children_cpu_seconds

HERE = -1  # in the place of a device: what this process has started


class HostClock:
    """Adds what has been used since the last call to the run's timers, which count this process themselves.

    In the local backend these are the processes that this one has started; with Ray, the hosts with theirs
    (Ray's own processes count nowhere).
    """

    def __init__(self, config: ClusterConfig) -> None:
        self._remote = config.backend == "ray"
        self._seconds: dict[int, float] = {}  # the most that was seen, by device
        if not self._remote:
            self._seconds[HERE] = children_cpu_seconds()

    async def start(self, groups: Iterable[WorkerGroup], timers: Timers) -> None:
        """What was used until now counts for no step: of the hosts it counts nowhere (imports, loading
        models), of this process's children since this clock was made for the run.
        """
        if self._remote:
            self._seconds = await self._used(groups)
        else:
            await self.count(groups, timers)

    async def count(self, groups: Iterable[WorkerGroup], timers: Timers) -> None:
        """groups: together with a worker on every host. A host that died adds nothing more."""
        now = await self._used(groups) if self._remote else {HERE: children_cpu_seconds()}
        for at, seconds in now.items():  # less than before: a process has just ended, see `Usage`
            before = self._seconds.get(at, 0.0)
            timers.cpu_seconds += max(0.0, seconds - before)
            self._seconds[at] = max(seconds, before)

    @staticmethod
    async def _used(groups: Iterable[WorkerGroup]) -> dict[int, float]:
        now: dict[int, float] = {}
        for group in groups:
            if group.alive and not now.keys() >= set(group.devices):
                found = await group.call_each(Worker.cpu_seconds)
                now |= {group.devices[rank]: seconds for rank, seconds in found.items()}
        return now
