"""The memory that a run will certainly take, predicted from shapes and settings before any of it is taken."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from rondo.config import Config
from rondo.models import count_parameters
from rondo.planning import adapters_of, rollout_dtype, runs_in_own_process
from rondo.planning.memory import PROCESS_BYTES, ROW_BYTES, Need, check_fits, model_bytes
from rondo.platform import planned
from rondo.rollout.build import OWN
from rondo.system.usage import reachable_bytes
from rondo.trainers.program import (
    engine_of,
    parallel_of,
    placement_of,
    planned_weights,
    source_of,
)


def check_memory(config: Config, roles: Sequence[str], trained: Collection[str]) -> None:
    """Raises ConfigError for a run that cannot fit this machine; other machines' memory is not known here.

    config: with a complete model. roles: all of the run. trained: those of them that learn.
    """
    free = reachable_bytes()  # rather too much than too little: nothing is refused that fits
    if config.cluster.backend.address is not None or not free:
        return
    host = list(_of_host(config, roles))
    models = list(_of_models(config, roles, trained))
    platform = planned(config.cluster.device)
    if platform.host:
        check_fits([*host, *models], free, "this machine's memory")
        return
    check_fits(host, free, "this machine's memory")
    if platform.available():
        devices = range(min(config.cluster.devices, platform.count()))
        if config.cluster.backend.name == "local":
            there = sum(platform.memory(platform.device(index))[0] for index in devices)
        else:  # to ask what is free takes memory there until this process ends, and others are to compute
            there = sum(map(platform.total, devices))
        check_fits(models, there, f"the memory of {len(devices)} {platform.title}s")


def _of_host(config: Config, roles: Sequence[str]) -> Iterator[Need]:
    """Yields what lies in the machine's memory whatever computes."""
    cluster, rollout = config.cluster, config.rollout
    if cluster.backend.name != "local":
        yield Need("host processes", cluster.devices * PROCESS_BYTES, ("cluster.devices",))
    if "rollout" in roles:
        rows = config.data.batch_size * rollout.n
        yield Need("the rows of a batch", rows * ROW_BYTES, ("data.batch_size", "rollout.n"))
        if runs_in_own_process(rollout):
            yield Need("engine processes", _engines(config) * PROCESS_BYTES, ("rollout.replicas",))


def _of_models(config: Config, roles: Sequence[str], trained: Collection[str]) -> Iterator[Need]:
    """Yields what lies on the devices, as far as nothing of it is offloaded."""
    parameters: dict[str, int] = {}

    def size(role: str) -> int:
        source = source_of(role, config)
        key = str((source.path, source.config, source.override, role == "actor"))
        if key not in parameters:
            parameters[key] = count_parameters(source, output_head=role == "actor")
        return parameters[key]

    for role in roles:
        if role == "rollout":
            continue
        section, engine = engine_of(role, config)
        if engine.offload_params or getattr(engine, "offload_optimizer", False):
            continue
        lora = getattr(engine, "lora", None)
        itemsize = getattr(torch, engine.param_dtype).itemsize
        if lora is not None and lora.base_dtype is not None:
            itemsize = 0.5  # of most weights; rather too little
        all_of_it = role in trained and lora is None  # adapters are few
        moments = getattr(config, section).optimizer.moments if all_of_it else None
        copies = parallel_of(role, config)[1].replicate
        held = copies * model_bytes(size(role), itemsize, moments)
        yield Need(role, held, (f"{section}.param_dtype",))
    if "rollout" not in roles:
        return
    weights = planned_weights(config)
    if weights.route != "shared":
        itemsize = getattr(torch, rollout_dtype(config)).itemsize
        copies = _engines(config)
        if adapters_of(config) == "alone" and not weights.shares_base and config.rollout.engine.name in OWN:
            copies *= 2  # they merge, and keep the base
        held = copies * model_bytes(size("actor"), itemsize)
        yield Need("rollout engines", held, ("rollout.replicas", "rollout.dtype"))


def _engines(config: Config) -> int:
    return len(placement_of(config).devices("rollout")) * config.rollout.replicas
