"""The `process` backend: the devices of one machine, each with a host process of its own, without Ray.

    ProcessHandle ── run(ticket, call, blocks) ─▶ rondo.controller.process_host: HostProgram
                  ◀── reply, kept block ────────

A block is a `SharedObject`: memory without a name, of which the controller holds a descriptor and no mapping.
Workers of any host map it; its bytes pass through nobody, and it outlives the host that made it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import torch

from rondo.batch import Batch
from rondo.config.schema import ClusterConfig
from rondo.controller.calls import Answer, Failure, Reply
from rondo.controller.cluster import planned_device
from rondo.controller.remote import (
    CLOSE_SECONDS,
    START_SECONDS,
    Packed,
    RemoteCluster,
    RemoteHandle,
    StoredBlock,
    unpack_reply,
    worker_environment,
)
from rondo.errors import ConfigError, WorkerError
from rondo.roles import WORKER_MODULES
from rondo.transport.child import Answer as Called
from rondo.transport.child import Child, ProcessLostError
from rondo.transport.forkserver import ForkServer
from rondo.transport.frames import SharedObject

_log = logging.getLogger(__name__)


class ProcessHandle(RemoteHandle):
    """Sends calls to one host process."""

    def __init__(self, device: int, child: Child) -> None:
        super().__init__(device)
        self.child = child

    def send(self, packed: Packed, ticket: int | None) -> Coroutine[Any, Any, Answer]:
        """Sends the call now; a dead process becomes a Failure."""
        self.num_bytes += len(packed.payload)
        blocks = tuple(handle.place for handle in packed.handles)
        try:
            answer = self.child.call("run", ticket, packed.payload, blocks)
        except ProcessLostError as error:
            return _lost(error)
        return self._answer(answer, is_async=ticket is None)

    async def _answer(self, answer: Called, *, is_async: bool) -> Answer:
        try:
            raw, kept = await asyncio.wrap_future(answer)
        except ProcessLostError as error:
            return await _lost(error)
        except asyncio.CancelledError:
            if is_async and self.broken is None:
                self.child.drop(answer)
            raise
        self.num_bytes += len(raw)
        reply = unpack_reply(raw)
        return reply, None if reply.kept is None else StoredBlock(kept, reply.kept.num_bytes)


async def _lost(error: ProcessLostError) -> Answer:
    tail = f"; its last lines:\n{error.tail}" if error.tail else ""
    return Reply(failure=Failure(f"{error}{tail}", at=time.time(), died=True)), None


class ProcessCluster(RemoteCluster):
    """One process per device, forked from one that has imported what workers need."""

    def __init__(self, num_devices: int, device: str, threads: int) -> None:
        super().__init__(num_devices, device, threads)
        self._environment = {**os.environ, **worker_environment(threads)}
        self._forkserver = ForkServer(["rondo.controller.remote", *WORKER_MODULES], self._environment)
        self._handles: list[ProcessHandle] = []

    async def start_hosts(self) -> None:
        """Start one process per device, and let them join one torch.distributed world."""
        for device in range(self.num_devices):
            environment = dict(self._environment)
            if self.device == "cuda":
                environment["CUDA_VISIBLE_DEVICES"] = _visible_gpus()[device]
            command = ["rondo.controller.process_host"]
            child = Child(f"host process {device}", command, environment, forkserver=self._forkserver)
            self._handles.append(ProcessHandle(device, child))
        port = await self._ask(0, "open_store", "127.0.0.1", self.num_devices)
        torch_device = "cuda:0" if self.device == "cuda" else "cpu"
        world = self.num_devices, torch_device, self.threads, "127.0.0.1", port
        await asyncio.gather(*(self._ask(rank, "join", rank, *world) for rank in range(self.num_devices)))

    async def _ask(self, rank: int, operation: str, *args: Any, seconds: float = START_SECONDS) -> Any:
        answer = asyncio.wrap_future(self._handles[rank].child.call(operation, *args))
        return await asyncio.wait_for(answer, seconds)

    def accelerators(self, role: str, devices: Sequence[int]) -> tuple[str, ...]:
        """See Cluster.accelerators."""
        if self.device != "cuda" or len(devices) < 2:
            return ()
        return tuple(_visible_gpus()[device] for device in devices)

    async def resolve(self, handles: Sequence[Any]) -> list[Batch]:
        """See Cluster.resolve. Whole blocks are mapped here, and counted."""
        self._moved_bytes += sum({id(handle): handle.num_bytes for handle in handles}.values())
        return [handle.place.load() for handle in handles]

    def store(self, data: Batch) -> SharedObject:
        """See RemoteCluster.store."""
        return SharedObject.of(data)

    async def cpu_seconds(self) -> dict[int, float]:
        """See Cluster.cpu_seconds; the fork server counts nowhere."""
        used: dict[int, float] = {}

        async def ask(device: int) -> None:
            with contextlib.suppress(ProcessLostError):  # dead since: it adds nothing more
                used[device] = await self._ask(device, "cpu_seconds")

        await asyncio.gather(*(ask(handle.device) for handle in self._handles if handle.broken is None))
        return dict(sorted(used.items()))

    async def shutdown(self) -> None:
        """See Cluster.shutdown. Hosts that are broken or do not close within CLOSE_SECONDS are killed."""
        if self._closed:
            return
        self._closed = True
        loop = asyncio.get_running_loop()
        try:
            closing = [
                self._ask(handle.device, "close", seconds=CLOSE_SECONDS)
                for handle in self._handles
                if handle.broken is None and handle.child.lost is None
            ]
            for outcome in await asyncio.gather(*closing, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    _log.warning("a host process did not close its workers, and is killed: %r", outcome)
        finally:
            # What still runs is killed: its workers are closed, or never will be.
            await asyncio.gather(*(loop.run_in_executor(None, handle.child.kill) for handle in self._handles))
            await loop.run_in_executor(None, self._forkserver.close)


def _visible_gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(i) for i in range(torch.cuda.device_count())]
    return [gpu.strip() for gpu in visible.split(",") if gpu.strip()]


async def start_process_cluster(config: ClusterConfig, threads: int) -> ProcessCluster:
    """Start one host per device. Raises ConfigError where the machine has fewer GPUs."""
    device = planned_device(config)
    if device == "cuda" and len(_visible_gpus()) < config.devices:
        raise ConfigError(
            f"cluster.devices={config.devices}, but this machine has {len(_visible_gpus())} GPUs "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}): lower "
            "cluster.devices, or set cluster.device=cpu"
        )
    # Each block is a descriptor here, and the soft limit is often 1,024.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    cluster = ProcessCluster(config.devices, device, threads)
    try:
        await cluster.start_hosts()
    except BaseException as error:
        await cluster.shutdown()
        if isinstance(error, ProcessLostError):
            raise WorkerError("hosts", 0, "start", f"{error}; its last lines:\n{error.tail}") from error
        raise
    return cluster
