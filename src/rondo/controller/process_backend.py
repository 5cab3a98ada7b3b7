"""The `process` backend: the devices of one machine, each with a host process of its own, without Ray.

    ProcessHandle ── run(ticket, call, blocks) ─▶ rondo.controller.process_host: HostProgram
                  ◀── reply, kept block ────────

A block is a `SharedObject`: memory without a name, of which the controller holds a descriptor and no mapping.
Workers of any host map it; its bytes pass through nobody, and it outlives the host that made it.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from rondo.config.schema import ClusterConfig
from rondo.controller.calls import Failure
from rondo.controller.cluster import planned_device
from rondo.controller.remote import RemoteCluster, RemoteHandle, worker_environment
from rondo.core.batch import Batch
from rondo.core.errors import ConfigError, WorkerError, outage
from rondo.core.roles import WORKER_MODULES
from rondo.system.activity import Pulse
from rondo.system.child import Child, ProcessLostError
from rondo.system.forkserver import fork_server
from rondo.system.frames import SharedObject


class ProcessHandle(RemoteHandle):
    """Sends calls to one host process."""

    gone = ProcessLostError

    def __init__(self, device: int, child: Child) -> None:
        super().__init__(device)
        self.child = child
        self.log = child.process.log

    def pulse(self, stacks: bool) -> Future[Pulse]:
        """See HostHandle.pulse."""
        return self.child.call("pulse", stacks)

    async def ask(self, operation: str, *args: Any) -> Any:
        """See RemoteHandle.ask."""
        return await asyncio.wrap_future(self.child.call(operation, *args))

    async def run(self, ticket: int | None, payload: bytes, places: Sequence[Any]) -> tuple[bytes, Any]:
        """See RemoteHandle.run."""
        answer = self.child.call("run", ticket, payload, places)
        try:
            reply: tuple[bytes, Any] = await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            if ticket is None:
                self.child.drop(answer)
            raise
        return reply

    def died(self, error: Exception) -> Failure:
        """See RemoteHandle.died."""
        assert isinstance(error, ProcessLostError)
        return Failure(f"{error}{self.last_words(error.tail)}", at=time.time(), died=True, outage=True)


class ProcessCluster(RemoteCluster):
    """One process per device, forked from one that has imported what workers need."""

    def __init__(self, config: ClusterConfig, device: str, threads: int, logs: Path | None) -> None:
        super().__init__(config.devices, device, threads, config.timeout_seconds, logs)
        self._environment = {**os.environ, **worker_environment(config, threads)}
        self._forkserver = fork_server(["rondo.controller.remote", *WORKER_MODULES], self._environment)
        self._children: list[Child] = []

    async def start_hosts(self) -> None:
        """Starts one process per device, and lets them join one torch.distributed world."""
        for device in range(self.num_devices):
            environment = dict(self._environment)
            if self.device == "cuda":
                environment["CUDA_VISIBLE_DEVICES"] = _visible_gpus()[device]
            command = ["rondo.controller.process_host"]
            child = Child(
                f"host process {device}",
                command,
                environment,
                forkserver=self._forkserver,
                log=None if self._logs is None else self._logs / f"host-{device}.log",
            )
            self._children.append(child)
            self._handles.append(ProcessHandle(device, child))
        await self.join_world("127.0.0.1")

    def accelerators(self, role: str, devices: Sequence[int]) -> tuple[str, ...]:
        """See Cluster.accelerators."""
        if self.device != "cuda" or len(devices) < 2:
            return ()
        return tuple(_visible_gpus()[device] for device in devices)

    def store(self, data: Batch) -> SharedObject:
        """See RemoteCluster.store."""
        return SharedObject.of(data)

    async def load(self, places: Sequence[SharedObject]) -> list[Batch]:
        """See RemoteCluster.load; maps the blocks here."""
        return [place.load() for place in places]

    async def end_hosts(self) -> None:
        """See RemoteCluster.end_hosts."""
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(None, child.kill) for child in self._children))
        await loop.run_in_executor(None, self._forkserver.give_back)


def _visible_gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(i) for i in range(torch.cuda.device_count())]
    return [gpu.strip() for gpu in visible.split(",") if gpu.strip()]


async def start_process_cluster(config: ClusterConfig, threads: int, logs: Path | None) -> ProcessCluster:
    """Starts one host per device. logs: a folder for their log files. Raises ConfigError where the machine
    has fewer GPUs.
    """
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
    cluster = ProcessCluster(config, device, threads, logs)
    try:
        await cluster.start_hosts()
    except BaseException as error:
        await cluster.shutdown()
        if isinstance(error, ProcessLostError):
            message = f"{error}; its last lines:\n{error.tail}"
            raise outage(WorkerError("hosts", 0, "start", message)) from error
        raise
    return cluster
