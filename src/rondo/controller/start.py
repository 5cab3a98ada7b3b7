"""Starts a cluster with the backend that its config names."""

from __future__ import annotations

import os
from pathlib import Path

from rondo.config.schema import ClusterConfig
from rondo.controller.cluster import Cluster
from rondo.controller.local import start_local
from rondo.controller.process_backend import start_process_cluster
from rondo.controller.worker import Placer
from rondo.system.storage import make_folder


async def start_cluster(config: ClusterConfig, logs: Path | None = None) -> Cluster:
    """Starts the hosts. logs: a folder for the log files of their processes. Raises ConfigError when there
    are not enough devices or the backend is not installed.
    """
    logs = None if logs is None else logs.absolute()
    threads = config.threads or max(1, (os.cpu_count() or 1) // config.devices)
    cluster = await _start(config, threads, logs)
    cluster.placer = Placer(config.balance)
    if config.hang_seconds is not None and not config.inline:  # inline: a debugger waits for its user
        log = None if logs is None else logs / "controller.log"
        cluster.watch(config.hang_seconds, config.timeout_seconds, log)
    return cluster


async def _start(config: ClusterConfig, threads: int, logs: Path | None) -> Cluster:
    if config.backend.name == "local":
        return await start_local(config, threads)
    if logs is not None:
        make_folder(logs)
    if config.backend.name == "process":
        return await start_process_cluster(config, threads, logs)
    from rondo.controller.ray_backend import start_ray_cluster  # Ray takes a second to import

    return await start_ray_cluster(config, threads, logs)
