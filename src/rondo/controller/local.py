"""The `local` backend: the controller's own process is the one host. A debugger works, nothing is pickled."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from rondo.config.schema import ClusterConfig
from rondo.controller.calls import Ended, HostHandle, Ran, RankCall
from rondo.controller.cluster import Cluster
from rondo.controller.host import Host
from rondo.core.batch import Batch, BatchRef
from rondo.core.errors import ConfigError
from rondo.platform import planned
from rondo.system.activity import Pulse
from rondo.system.usage import CpuSeconds, children_cpu_seconds


class LocalHandle(HostHandle):
    """Calls the host directly."""

    def __init__(self, host: Host) -> None:
        super().__init__(host.rank)
        self._host = host

    async def send(self, packed: RankCall, ticket: int | None) -> Ended:
        """Runs the call; nothing travels, and the index and the positions of rows are counted as if they
        did."""
        shard = packed.shard
        if shard is not None:
            self.num_bytes += shard.index.num_bytes
            self.num_bytes += sum(part.block.nbytes + part.row.nbytes for part in shard.parts)
        ended = await self._host.run(packed, () if shard is None else shard.handles, ticket)
        if isinstance(ended[0], Ran) and ended[0].kept is not None:
            self.num_bytes += ended[0].kept.index.num_bytes
        return ended

    def pulse(self, stacks: bool) -> Future[Pulse]:
        """See HostHandle.pulse."""
        answer: Future[Pulse] = Future()
        answer.set_result(self._host.pulse(stacks))
        return answer


_loops: list[asyncio.AbstractEventLoop] = []  # of the local clusters that are open, each as often
_claiming = threading.Lock()


def _claim() -> asyncio.AbstractEventLoop:
    """Notes that a cluster opens on this event loop, and returns it. Raises ConfigError where one is open on
    another that runs: torch's process groups are the process's, and the first to end would take them from
    the other. A loop that has ended, whatever it left open, is in nobody's way.
    """
    loop = asyncio.get_running_loop()
    with _claiming:
        _loops[:] = [one for one in _loops if one.is_running()]
        if any(one is not loop for one in _loops):
            raise ConfigError(
                "another thread of this process is in a run with cluster.backend=local, and torch has one "
                "set of process groups for all threads: wait for its end, start this one in a process of its "
                "own, or set cluster.backend=process here",
                key="cluster.backend",
            )
        _loops.append(loop)
    return loop


def _give_back(loop: asyncio.AbstractEventLoop) -> None:
    with _claiming:
        if loop in _loops:
            _loops.remove(loop)


class LocalCluster(Cluster):
    """One device, one process. A block's handle is the Batch itself."""

    def __init__(self, host: Host, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(1, host.device.partition(":")[0], host.threads)
        self._host = host
        self._loop = loop
        self._handles = [LocalHandle(host)]
        self._put_bytes = 0
        self._closed = False

    async def resolve(self, handles: Sequence[Any]) -> list[Batch]:
        """See Cluster.resolve."""
        return list(handles)

    def put(self, batch: Batch, index_columns: Sequence[str] = ()) -> BatchRef:
        """See Cluster.put."""
        ref = BatchRef.of(batch, index_columns, self.resolve)
        self._put_bytes += ref.index.num_bytes
        return ref

    def driver_bytes(self) -> int:
        """See Cluster.driver_bytes: index bytes only, token data is in this very process."""
        return self._put_bytes + self._handles[0].num_bytes

    async def cpu_seconds(self) -> dict[int, CpuSeconds]:
        """See Cluster.cpu_seconds: the host is this process, so only what it has started."""
        return {0: CpuSeconds(children_cpu_seconds(), 0.0)}

    async def shutdown(self) -> None:
        """See Cluster.shutdown; waits for the sync call that is running."""
        if not self._closed:
            self._closed = True
            self.end_watch()
            try:
                await self._host.close()
                # Workers are in circles. Until these are found a model keeps its memory, and each group of
                # gloo's a thread that looks a hundred times a second whether there is something to do.
                gc.collect()
            finally:
                _give_back(self._loop)


async def start_local(config: ClusterConfig, threads: int) -> LocalCluster:
    """Makes this process the host."""
    if config.devices != 1:
        raise ConfigError(
            f"cluster.devices={config.devices} with cluster.backend=local, which has one device: "
            "set cluster.backend=process (this machine), ray, or cluster.devices=1"
        )
    platform = planned(config.device)
    platform.check_here()
    loop = _claim()
    host = Host(0, 1, platform.device(), threads, config.timeout_seconds, inline=config.inline)
    try:
        await host.start()
    except BaseException:
        await host.close()
        _give_back(loop)
        raise
    return LocalCluster(host, loop)
