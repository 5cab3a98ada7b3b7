"""The `process` backend: the devices of one machine, each with a host process of its own, without Ray.

    RemoteHandle ── run_on(ticket, call, blocks) ─▶ ProcessHost
                 ◀── reply, kept block ────────────

A block is a `SharedObject`: memory without a name, of which the controller holds a descriptor and no mapping.
Workers of any host map it; its bytes pass through nobody, and it outlives the host that made it.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from rondo.config.schema import ClusterConfig
from rondo.controller.remote import (
    HostProgram,
    RemoteCluster,
    RemoteHandle,
    log_everything,
    worker_environment,
)
from rondo.core.batch import Batch
from rondo.core.errors import ConfigError
from rondo.core.roles import WORKER_MODULES
from rondo.platform import Platform, planned
from rondo.system.actor import spawn
from rondo.system.forkserver import fork_server
from rondo.system.frames import SharedObject


class ProcessHost(HostProgram):
    """The process of one device."""

    def __init__(self) -> None:
        super().__init__()
        log_everything()
        # Forks of one process begin with the same state of every generator.
        random.seed()
        np.random.seed(int.from_bytes(os.urandom(4), "little"))
        torch.seed()

    async def run_on(
        self, ticket: int | None, payload: bytes, *blocks: SharedObject
    ) -> tuple[bytes, SharedObject | None]:
        """Runs one packed call on blocks that it maps."""
        reply, kept = await self.run(ticket, payload, [block.load() for block in blocks])
        return reply, None if kept is None else SharedObject.of(kept)


class ProcessCluster(RemoteCluster):
    """One process per device, forked from one that has imported what workers need."""

    def __init__(self, config: ClusterConfig, platform: Platform, threads: int, logs: Path | None) -> None:
        super().__init__(config.devices, platform.kind, threads, config.timeout_seconds, logs)
        self._platform = platform
        self._environment = {**os.environ, **worker_environment(config, threads)}
        self._forkserver = fork_server([ProcessHost.__module__, *WORKER_MODULES], self._environment)

    async def start_hosts(self) -> None:
        """Starts one process per device, and lets them join one torch.distributed world."""
        for device in range(self.num_devices):
            environment = dict(self._environment)
            if variable := self._platform.visible:
                environment[variable] = self._platform.visible_ids()[device]
            log = None if self._logs is None else self._logs / f"host-{device}.log"
            process = spawn(
                ProcessHost, f"host process {device}", environment, forkserver=self._forkserver, log=log
            )
            process.begin()
            self._handles.append(RemoteHandle(device, process, log=log))
        await self.join_world("127.0.0.1")

    def accelerators(self, role: str, devices: Sequence[int]) -> tuple[str, ...]:
        """See Cluster.accelerators."""
        if not self._platform.visible or len(devices) < 2:
            return ()
        return tuple(self._platform.visible_ids()[device] for device in devices)

    def store(self, data: Batch) -> SharedObject:
        """See RemoteCluster.store."""
        return SharedObject.of(data)

    async def load(self, places: Sequence[SharedObject]) -> list[Batch]:
        """See RemoteCluster.load; maps the blocks here."""
        return [place.load() for place in places]

    async def end_hosts(self) -> None:
        """See RemoteCluster.end_hosts."""
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(None, handle.process.kill) for handle in self._handles))
        await loop.run_in_executor(None, self._forkserver.give_back)


async def start_process_cluster(config: ClusterConfig, threads: int, logs: Path | None) -> ProcessCluster:
    """Starts one host per device. logs: a folder for their log files. Raises ConfigError where the machine
    has fewer devices.
    """
    platform = planned(config.device)
    if platform.visible and len(platform.visible_ids()) < config.devices:
        raise ConfigError(
            f"cluster.devices={config.devices}, but this machine has {len(platform.visible_ids())} "
            f"{platform.title}s ({platform.visible}={os.environ.get(platform.visible, 'not set')}): lower "
            "cluster.devices, or set cluster.device=cpu"
        )
    # Each block is a descriptor here, and the soft limit is often 1,024.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    cluster = ProcessCluster(config, platform, threads, logs)
    try:
        await cluster.start_hosts()
    except BaseException:
        await cluster.shutdown()
        raise
    return cluster
