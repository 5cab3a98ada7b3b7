"""CPU time of the host processes that are not the controller's."""

from __future__ import annotations

from collections.abc import Iterable

from rondo.config.schema import ClusterConfig
from rondo.controller import Worker, WorkerGroup
from rondo.tracking import Timers


class HostClock:
    """Adds what the hosts have used since the last call to the run's timers. In the local backend the one
    process counts itself.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self._remote = config.backend == "ray"
        self._seconds: dict[int, float] = {}  # by device

    async def start(self, groups: Iterable[WorkerGroup]) -> None:
        """What the hosts have used until now (imports, loading models) counts for no step."""
        if self._remote:
            self._seconds = await self._used(groups)

    async def count(self, groups: Iterable[WorkerGroup], timers: Timers) -> None:
        """groups: together with a worker on every host. A host that died adds nothing more."""
        if not self._remote:
            return
        now = await self._used(groups)
        timers.cpu_seconds += sum(seconds - self._seconds.get(at, 0.0) for at, seconds in now.items())
        self._seconds |= now

    @staticmethod
    async def _used(groups: Iterable[WorkerGroup]) -> dict[int, float]:
        now: dict[int, float] = {}
        for group in groups:
            if not now.keys() >= set(group.devices):
                found = await group.call_each(Worker.cpu_seconds)
                now |= {group.devices[rank]: seconds for rank, seconds in found.items()}
        return now
