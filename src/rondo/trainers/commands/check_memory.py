"""The memory that a run will certainly take, predicted from shapes and settings before any of it is taken."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from rondo.config import Config
from rondo.models import count_parameters
from rondo.planning import adapters_of, rollout_dtype, runs_in_own_process
from rondo.planning.memory import PROCESS_BYTES, ROW_BYTES, Need, check_fits, model_bytes
from rondo.platform import ResidencyPlan, planned
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
    platform, size = planned(config.cluster.device), _sizes(config)
    host, plans = list(_of_host(config, roles)), _plans(config, roles, trained, size)
    models = [*_on_devices(plans, offloads=not platform.host), *_of_engines(config, roles, size)]
    if platform.host:
        check_fits([*host, *models], free, "this machine's memory")
        return
    check_fits([*host, *_at_rest(plans)], free, "this machine's memory")
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


def _sizes(config: Config) -> Callable[[str], int]:
    """Returns what counts a role's parameters, once for all roles with the same model."""
    parameters: dict[str, int] = {}

    def size(role: str) -> int:
        source = source_of(role, config)
        key = str((source.path, source.config, source.override, role == "actor"))
        if key not in parameters:
            parameters[key] = count_parameters(source, output_head=role == "actor")
        return parameters[key]

    return size


def _plans(
    config: Config, roles: Sequence[str], trained: Collection[str], size: Callable[[str], int]
) -> dict[str, tuple[str, ResidencyPlan]]:
    """Returns, by role, the section of its engine, and what its models will have on all devices together."""
    plans = {}
    for role in roles:
        if role == "rollout":
            continue
        section, engine = engine_of(role, config)
        lora = getattr(engine, "lora", None)
        itemsize = getattr(torch, engine.param_dtype).itemsize
        if lora is not None and lora.base_dtype is not None:
            itemsize = 0.5  # of most weights; rather too little
        all_of_it = role in trained and lora is None  # adapters are few
        moments = getattr(config, section).optimizer.moments if all_of_it else None
        copies = parallel_of(role, config)[1].replicate
        weights, every = (copies * model_bytes(size(role), itemsize, one) for one in (None, moments))
        plans[role] = (
            section,
            ResidencyPlan(
                weights,
                gradients=0 if moments is None else weights,
                moments=0 if moments is None else every - 2 * weights,
                weights_rest=engine.offload_params,
                moments_pass=0 if getattr(engine, "offload_optimizer", False) else None,  # rather too little
            ),
        )
    return plans


def _on_devices(plans: Mapping[str, tuple[str, ResidencyPlan]], *, offloads: bool) -> Iterator[Need]:
    """Yields what models have on their devices. offloads: of those that rest in host memory what stays, and
    what the largest of them needs in its update: the others rest meanwhile. Else all of it is there.
    """
    resting = [role for role, (_, plan) in plans.items() if _rests(plan) and offloads]
    sizes = {role: sum(plan.of("update").values()) for role, (_, plan) in plans.items()}
    largest = max(resting, key=lambda role: sizes[role], default=None)
    for role, (section, plan) in plans.items():
        size = plan.weights + plan.gradients + plan.moments
        if role in resting:
            size = sizes[role] if role == largest else sum(plan.of("rest").values())
        yield Need(role, size, (f"{section}.param_dtype",))


def _at_rest(plans: Mapping[str, tuple[str, ResidencyPlan]]) -> Iterator[Need]:
    """Yields what rests in host memory."""
    for role, (section, plan) in plans.items():
        if _rests(plan):
            key = "offload_params" if plan.weights_rest else "offload_optimizer"
            yield Need(f"{role} at rest", _rests(plan), (f"{section}.{key}",))


def _rests(plan: ResidencyPlan) -> int:
    moments = 0 if plan.moments_pass is None else plan.moments
    return moments + (plan.weights if plan.weights_rest else 0)


def _of_engines(config: Config, roles: Sequence[str], size: Callable[[str], int]) -> Iterator[Need]:
    """Yields the sampler's own weights."""
    # vLLM's are given up with the cache: they are not there beside an update.
    if "rollout" not in roles or (config.rollout.sleep and config.rollout.engine.name == "vllm"):
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
