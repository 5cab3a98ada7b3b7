"""What the devices and the machine of a run will hold in each phase of a step, and what would help. Pure; the
formulas are those of `planning.memory`.

    phase      of a pool of devices
    generate   models at rest, and the engine with its cache
    score      the model with the largest forward pass; the others at rest
    update     the model with the largest update; the others at rest
    sync       the actor's weights, the buckets, the engine's weights
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rondo.config.schema import Config, ParallelConfig
from rondo.core.errors import ConfigError
from rondo.core.roles import ROLLOUT
from rondo.core.types import RouteShape
from rondo.planning import engine_memory, memory
from rondo.planning.memory import NOTHING, Bytes, exactly, probably
from rondo.planning.roles import placement_of
from rondo.planning.runs import Lengths, Runs

Step = Literal["generate", "score", "update", "sync"]
Held = Mapping[str, Bytes]
_PER_MACHINE = 8  # devices of a machine, where there are more than that


@dataclass(frozen=True)
class PoolPlan:
    """One pool of devices."""

    name: str
    """Of the pool."""
    devices: int
    """How many; each holds the same."""
    phases: Mapping[Step, Held]
    """Owner → bytes, by phase."""

    def total(self, step: Step) -> Bytes:
        """Adds up what a device holds in a phase."""
        return memory.total_of(self.phases[step])

    @property
    def highest(self) -> Step:
        """Names the phase that needs the most."""
        return max(self.phases, key=lambda step: self.total(step).expected)

    @property
    def least(self) -> Step:
        """Names the phase that certainly needs the most."""
        return max(self.phases, key=lambda step: self.total(step).least)


@dataclass(frozen=True)
class MemoryPlan:
    """What a run will hold."""

    pools: tuple[PoolPlan, ...]
    """By pool, on one device."""
    host: Held
    """In the memory of a machine, beside its devices' own."""
    copies: Held
    """There, too, from the first checkpoint on: what is written while the run goes on."""
    lengths: Lengths
    """What was assumed of rows."""
    on_host: bool
    """Whether the devices are the machine itself."""

    @property
    def peak(self) -> int:
        """Returns what is expected of the fullest device in its fullest phase."""
        each = [pool.total(pool.highest).expected for pool in self.pools if pool.phases]
        return max(each, default=0)

    def of_machine(self, step_of: Callable[[PoolPlan], Step], *, copies: bool = True) -> Held:
        """Returns what the machine's memory holds, with all devices in it where they are the machine itself.
        step_of: the phase of each pool. copies: with those of a checkpoint.
        """
        found = {**self.host, **(self.copies if copies else {})}
        for pool in self.pools if self.on_host else ():
            for owner, size in pool.phases[step_of(pool)].items():
                more = Bytes(size.least * pool.devices, size.expected * pool.devices)
                found[owner] = found.get(owner, NOTHING).plus(more)
        return found


def plan_memory(runs: Runs, *, card: int | None = None) -> MemoryPlan:
    """Plans the memory of a run. card: bytes of a device; None: not known."""
    pools = [
        PoolPlan(name, len(devices), dict(_phases(runs, name, card)))
        for name, devices in runs.placement.pools.items()
    ]
    return MemoryPlan(tuple(pools), dict(_in_host(runs)), dict(_copies(runs)), runs.lengths, runs.on_host)


def _phases(runs: Runs, pool: str, card: int | None) -> Iterator[tuple[Step, Held]]:
    """Yields the phases of a pool, each with what one of its devices holds."""
    config, placement = runs.config, runs.placement
    models = {role: run for role, run in runs.models.items() if placement.pool(role) == pool}
    engine = runs.engine if placement.pool(ROLLOUT) == pool else None
    rest = {role: memory.on_device(run, "rest", 0) for role, run in models.items()}
    context = {} if runs.on_host else {"host process: context": probably(memory.CONTEXT_BYTES)}
    held = sum(memory.total_of(one).expected for one in rest.values())
    sleeps = config.rollout.sleep

    def beside(*, asleep: bool, caches: bool = True) -> Held:
        if engine is None:
            return context
        one = engine_memory.engine_on_device(engine, card, held, asleep=asleep)
        copies = config.rollout.replicas
        return context | {
            f"rollout {owner}": Bytes(size.least * copies, size.expected * copies)
            for owner, size in one.items()
            if caches or owner != "cache"
        }

    def during(role: str, phase: memory.Phase) -> Held:
        own = memory.on_device(models[role], phase, runs.tokens[role])
        others = {name: held for name, held in rest.items() if name != role}
        return {**_named({**others, role: own}), **beside(asleep=sleeps)}

    if engine is not None:
        yield "generate", {**_named(rest), **beside(asleep=False)}
    if models:
        passes = [during(role, "forward") for role in models]
        yield "score", _largest(passes)
    if learners := [role for role, run in models.items() if run.trains]:
        yield "update", _largest([during(role, "update") for role in learners])
    if engine is not None and not engine.shares_weights:
        actor = {"actor": memory.on_device(models["actor"], "gather", 0)} if "actor" in models else {}
        # One that weights are gathered or received in, and one that an engine's own process opens.
        buckets = {"weights in transit": probably(2 * config.rollout.bucket_bytes)}
        # An engine that sleeps gets its weights before its cache.
        yield "sync", {**_named({**rest, **actor}), **beside(asleep=False, caches=not sleeps), **buckets}


def _named(held: Mapping[str, Held]) -> Held:
    return {f"{role} {owner}": size for role, own in held.items() for owner, size in own.items()}


def _largest(held: Sequence[Held]) -> Held:
    return max(held, key=lambda one: memory.total_of(one).expected)


def _in_host(runs: Runs) -> Iterator[tuple[str, Bytes]]:
    """Yields what lies in the memory of a machine whatever computes: that of its own devices, and on the
    first one the controller's rows.
    """
    config = runs.config
    cluster, share = config.cluster, _share_of_machine(config)
    if cluster.backend.name != "local":
        yield "host processes", exactly(cluster.devices * share * memory.PROCESS_BYTES)
    if ROLLOUT in runs.roles:
        yield "the rows of a batch", _rows_of_batch(runs)
    if runs.engine is not None and runs.engine.own_process:
        yield "engine processes", exactly(runs.engines * share * memory.PROCESS_BYTES)
    for role, run in runs.models.items():
        for owner, size in memory.in_host(run, runs.tokens[role]).items():
            here = len(runs.placement.devices(role)) * share
            yield f"{role} {owner}", Bytes(int(size.least * here), int(size.expected * here))


def _rows_of_batch(runs: Runs) -> Bytes:
    """Returns what a step's rows take on the controller: of each token some columns, and the choices of a
    mixture's layers where they are replayed.
    """
    config, lengths = runs.config, runs.lengths
    rows = config.data.batch_size * config.rollout.n
    of_row = 4 * lengths.prompt + memory.RESPONSE_TOKEN_BYTES * lengths.response
    actor = runs.models.get("actor")
    if actor is not None and actor.shape.experts and config.actor.router.replay is not None:
        shape = actor.shape
        routes = RouteShape((shape.layers - shape.dense_layers) * shape.active_experts, shape.experts)
        of_row += routes.width * routes.dtype.itemsize * lengths.row
    return Bytes(rows * memory.ROW_BYTES, rows * (memory.ROW_BYTES + of_row))


def _copies(runs: Runs) -> Iterator[tuple[str, Bytes]]:
    """Yields the copies of what learns that a machine has for a checkpoint."""
    if runs.config.checkpoint.every is None:
        return
    for role, run in runs.models.items():
        if run.trains:
            here = len(runs.placement.devices(role)) * _share_of_machine(runs.config)
            yield f"{role} checkpoint", probably(int(memory.snapshot_bytes(run) * here))


def _share_of_machine(config: Config) -> float:
    """Returns the share of all devices that one machine has."""
    cluster = config.cluster
    return min(1.0, _PER_MACHINE / cluster.devices) if cluster.backend.name == "ray" else 1.0


# ---- what would help ----

# Keys that need less of a device's memory, each with the value that is tried, and what it costs.
_TRIED: tuple[tuple[str, Any, str], ...] = (
    ("actor.gradient_checkpointing", True, "a third more computing in the update"),
    ("rollout.sleep", True, "the cache is built again each step"),
    ("rollout.bucket_bytes", 64 << 20, "more and smaller messages in a sync"),
    ("actor.offload_optimizer", True, "moments cross to the device and back once per update"),
    ("actor.offload_params", True, "weights cross to the device once per phase"),
    ("critic.offload_optimizer", True, "moments cross to the device and back once per update"),
    ("reference.offload_params", True, "weights cross to the device once per step"),
)
_TRIED_WITH_TORCH: tuple[tuple[str, Any, str], ...] = (  # Megatron has none of these
    ("actor.gradient_checkpointing", "offload", "copies of each block's input to host memory and back"),
    ("actor.optimizer.moments", "8bit", "a little of the optimizer's precision"),
    ("actor.param_dtype", "bfloat16", "updates are rounded to bfloat16"),
    ("actor.backend.mlp_chunk", 4096, "MLPs are computed once more"),
)
# Keys that are halved.
_HALVED: tuple[tuple[str, str], ...] = (
    ("actor.token_budget", "more and smaller passes"),
    ("critic.token_budget", "more and smaller passes"),
    ("actor.logits_bytes", "more and smaller products"),
    ("rollout.max_concurrent", "fewer sequences at a time"),
    ("model.images.max_pixels", "smaller images"),
)


@dataclass(frozen=True)
class Remedy:
    """One key that would help."""

    key: str
    """Its name."""
    value: Any
    """What it was planned with."""
    saves: int
    """Bytes of the fullest phase of a device that it saves."""
    cost: str
    """What it costs."""
    seconds: float
    """How much longer a step becomes; 0 where nobody knows the device."""


def remedies(config: Config, plan: Callable[[Config], tuple[int, float]]) -> list[Remedy]:
    """Returns keys that need less of the fullest device, the largest saving first: each is planned by itself.
    plan: the bytes of the fullest device and the seconds of a step, of a configuration.
    """
    (now, step), found = plan(config), []
    for key, value, cost in _tried(config):
        try:
            peak, seconds = plan(with_key(config, key, value))
        except ConfigError:  # it does not go together with the rest
            continue
        if now - peak > now // 200:
            found.append(Remedy(key, value, now - peak, cost, seconds - step))
    return sorted(found, key=lambda one: -one.saves)


def _tried(config: Config) -> Iterator[tuple[str, Any, str]]:
    with_torch = config.actor.backend.name == "torch"
    for key, value, cost in _TRIED + (_TRIED_WITH_TORCH if with_torch else ()):
        sleeps = key != "rollout.sleep" or _may_sleep(config)
        if config.at(key) != value and sleeps:
            yield key, value, cost
    for key, cost in _HALVED:
        value = config.at(key)
        if value is not None and value > 1:
            yield key, value // 2, cost


def _may_sleep(config: Config) -> bool:
    placement = placement_of(config)
    return config.trainer.max_staleness == 0 and placement.colocated("actor", ROLLOUT)


def with_key(section: Any, key: str, value: Any) -> Any:
    """Returns a configuration with another value for a key. What is right about a value is not asked again: a
    search makes very many of these.
    """
    first, _, below = key.partition(".")
    there = getattr(section, first)
    if below and there is None:  # `actor.parallel`, which nobody wrote
        there = ParallelConfig()
    new = copy.copy(section)
    object.__setattr__(new, first, with_key(there, below, value) if below else value)
    return new
