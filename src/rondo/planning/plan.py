"""From a configuration to what its devices and its machine will hold in each phase of a step. Pure; the
formulas are those of `planning.memory`.

    phase      of a pool of devices
    generate   models at rest, and the engine with its cache
    score      the model with the largest forward pass; the others at rest
    update     the model with the largest update; the others at rest
    sync       the actor's weights, the buckets, the engine's weights
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rondo.config.schema import (
    Config,
    EngineConfig,
    FrozenEngineConfig,
)
from rondo.core.errors import ConfigError
from rondo.core.roles import ROLES, ROLLOUT
from rondo.planning import memory
from rondo.planning.memory import NOTHING, Bytes, EngineRun, ModelRun, Spread, exactly, probably
from rondo.planning.placement import Placement
from rondo.planning.roles import engine_of, parallel_of, placement_of
from rondo.planning.shapes import ModelShape, find_shape
from rondo.planning.weights import adapters_of, plan_weights, rollout_dtype, runs_in_own_process

ITEMSIZE: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
Step = Literal["generate", "score", "update", "sync"]
Held = Mapping[str, Bytes]
_KEEPS_BASE = ("native", "transformers")  # engines that merge adapters, and keep the base beside
_SHARES = ("gpu_memory_utilization", "mem_fraction_static")  # vLLM's and SGLang's names for it
_PER_MACHINE = 8  # devices of a machine, where there are more than that


@dataclass(frozen=True)
class Lengths:
    """How long rows are taken to be."""

    prompt: int
    """Tokens of a prompt."""
    response: int
    """Tokens of a response."""
    said: str
    """Where that is from, for the reader of a plan."""

    @property
    def row(self) -> int:
        """Returns the tokens of a row."""
        return self.prompt + self.response


def lengths_of(config: Config, given: str | None, *, rows_of_pairs: bool = False) -> Lengths:
    """Returns the lengths that a plan is for. given: `PROMPT,RESPONSE`; None: the most that a recipe allows.
    rows_of_pairs: of SFT and preference, where data.max_tokens bounds both together. Raises ConfigError.
    """
    if given is not None:
        numbers = given.split(",")
        if len(numbers) != 2 or not all(one.strip().isdigit() and int(one) for one in numbers):
            raise ConfigError(f"--lengths {given}: give two numbers of tokens, PROMPT,RESPONSE (512,2048)")
        prompt, response = map(int, numbers)
        return Lengths(prompt, response, f"--lengths: each row has {prompt} + {response} tokens")
    if rows_of_pairs:
        most = config.data.max_tokens or config.actor.token_budget
        key = "data.max_tokens" if config.data.max_tokens else "actor.token_budget"
        return Lengths(1, most - 1, f"nobody said how long rows are: each has {most} tokens ({key})")
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_tokens
    return Lengths(
        prompt,
        response,
        f"nobody said how long rows are: each has the most that the recipe allows, {prompt} + {response} "
        "tokens (data.max_prompt_tokens, rollout.max_tokens); --lengths PROMPT,RESPONSE says others",
    )


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
    lengths: Lengths
    """What was assumed of rows."""
    on_host: bool
    """Whether the devices are the machine itself."""

    def of_machine(self, step_of: Callable[[PoolPlan], Step]) -> Held:
        """Returns what the machine's memory holds, with all devices in it where they are the machine itself.
        step_of: the phase of each pool.
        """
        found = dict(self.host)
        for pool in self.pools if self.on_host else ():
            for owner, size in pool.phases[step_of(pool)].items():
                more = Bytes(size.least * pool.devices, size.expected * pool.devices)
                found[owner] = found.get(owner, NOTHING).plus(more)
        return found


def shapes_of(config: Config) -> Callable[[str], ModelShape]:
    """Returns what finds a role's sizes: in the folder, the config or by the name that its section has."""

    def find(role: str) -> ModelShape:
        section = config.model
        if role in config.models:
            section = config.models[role]  # type: ignore[assignment]
        elif role in ROLES:
            weights = ROLES[role].weights
            own = getattr(config, weights) if weights is not None else None
            section = section if own is None or own.path is None else own
        elif role != ROLLOUT:
            section = next(model for model in config.reward.models if model.name == role)  # type: ignore[assignment]
        if section.path is None and getattr(section, "config", None) is None:
            raise ConfigError(
                f"the {role} has no model yet, so that its sizes are not known: set model.path to a folder, "
                "a config.json or a name of `rondo plan --shapes`",
                key="model.path",
            )
        return find_shape(section.path, getattr(section, "config", None), section.override)

    return find


def plan_memory(
    config: Config,
    roles: Sequence[str],
    trained: Collection[str],
    shape: Callable[[str], ModelShape],
    lengths: Lengths,
    *,
    card: int | None = None,
    on_host: bool = False,
) -> MemoryPlan:
    """Plans the memory of a run. config: without `auto` (`config_for`). trained: those of the roles that
    learn. card: bytes of a device; None: not known. on_host: the devices are the machine itself.
    """
    placement = placement_of(config)
    models = {
        role: model_run(config, role, shape(role), placement, trains=role in trained, on_host=on_host)
        for role in roles
        if role != ROLLOUT
    }
    budgets = {role: _tokens(config, role, models[role], lengths) for role in models}
    engine = engine_run(config, shape("actor"), lengths, placement) if ROLLOUT in roles else None
    pools = []
    for name, devices in placement.pools.items():
        here = {role: run for role, run in models.items() if placement.pool(role) == name}
        mine = engine if engine is not None and placement.pool(ROLLOUT) == name else None
        phases = dict(_phases(config, here, budgets, mine, card, on_host=on_host))
        pools.append(PoolPlan(name, len(devices), phases))
    host = dict(_in_host(config, roles, models, budgets, engine, placement))
    return MemoryPlan(tuple(pools), host, lengths, on_host)


def model_run(
    config: Config,
    role: str,
    shape: ModelShape,
    placement: Placement,
    *,
    trains: bool,
    on_host: bool = False,
) -> ModelRun:
    """Returns a role's model as the formulas take it."""
    section, engine = engine_of(role, config)
    sizes, backend = parallel_of(role, config)[1], config.actor.backend
    lora = engine.lora if isinstance(engine, EngineConfig) else None
    row, moments = ROLES.get(role), "full"
    if trains:
        moments = config.at(section).optimizer.moments
    recompute: Any = engine.gradient_checkpointing if isinstance(engine, EngineConfig) else False
    ranks = len(placement.devices(role))
    return ModelRun(
        shape,
        Spread(ranks, sizes.replicate, sizes.tensor, sizes.context, sizes.expert),
        ITEMSIZE[engine.param_dtype],
        ITEMSIZE[engine.compute_dtype],
        "value" if row is None or row.value_head else "lm",
        trains,
        None if lora is None else lora.rank,
        lora is not None and lora.base_dtype is not None,
        moments,  # type: ignore[arg-type]
        # What rests in host memory is there already where the device is the host.
        engine.offload_params and not on_host,
        getattr(engine, "offload_optimizer", False) and not on_host,
        backend.offload == "streamed",
        recompute,
        backend.reshard,
        backend.mlp_chunk,
        engine.logits_bytes,
        fused=backend.kernels == "liger" or (on_host and ranks == 1 and backend.kernels == "auto"),
    )


def engine_run(config: Config, shape: ModelShape, lengths: Lengths, placement: Placement) -> EngineRun:
    """Returns a generation engine as the formulas take it."""
    rollout, engine = config.rollout, config.rollout.engine
    weights = plan_weights(config, placement.devices("actor"), placement.devices(ROLLOUT))
    keeps_base = adapters_of(config) == "alone" and not weights.shares_base and engine.name in _KEEPS_BASE
    options = engine.options
    share = next((float(options[name]) for name in _SHARES if name in options), None)
    cache = options.get("cache_bytes", options.get("kv_cache_memory_bytes"))
    return EngineRun(
        shape,
        engine.name,  # type: ignore[arg-type]
        ITEMSIZE[rollout_dtype(config)],
        engine.tensor_parallel,
        rollout.max_concurrent * lengths.row,
        cache,
        share,
        lengths.row,
        weights.route == "shared",
        2 if keeps_base else 1,
        runs_in_own_process(rollout),
    )


def _tokens(config: Config, role: str, run: ModelRun, lengths: Lengths) -> int:
    """Returns the tokens of a pass of one group of ranks with the same rows: whole rows, as many as the
    budget has room for and a rank gets.
    """
    engine: FrozenEngineConfig = engine_of(role, config)[1]
    layout = run.layout
    groups = config.data.batch_size
    if isinstance(engine, EngineConfig) and engine.mini_batch_size is not None:
        groups = engine.mini_batch_size
    sharing = layout.tensor * layout.context
    rows = -(-groups * config.rollout.n * sharing // layout.ranks)
    fitting = max(1, engine.token_budget // lengths.row)
    return min(max(1, rows), fitting) * lengths.row


def _phases(
    config: Config,
    models: Mapping[str, ModelRun],
    tokens: Mapping[str, int],
    engine: EngineRun | None,
    card: int | None,
    *,
    on_host: bool,
) -> Iterator[tuple[Step, Held]]:
    """Yields the phases of a pool, each with what one of its devices holds."""
    rest = {role: memory.on_device(run, "rest", 0) for role, run in models.items()}
    context = {} if on_host else {"host process: context": probably(memory.CONTEXT_BYTES)}
    held = sum(memory.total_of(one).expected for one in rest.values())
    sleeps = config.rollout.sleep

    def beside(*, asleep: bool, caches: bool = True) -> Held:
        if engine is None:
            return context
        one = memory.engine_on_device(engine, card, held, asleep=asleep)
        copies = config.rollout.replicas
        return context | {
            f"rollout {owner}": Bytes(size.least * copies, size.expected * copies)
            for owner, size in one.items()
            if caches or owner != "cache"
        }

    def during(role: str, phase: memory.Phase) -> Held:
        own = memory.on_device(models[role], phase, tokens[role])
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


def _in_host(
    config: Config,
    roles: Sequence[str],
    models: Mapping[str, ModelRun],
    tokens: Mapping[str, int],
    engine: EngineRun | None,
    placement: Placement,
) -> Iterator[tuple[str, Bytes]]:
    """Yields what lies in the memory of a machine whatever computes: that of its own devices, and on the
    first one the controller's rows.
    """
    cluster, rollout = config.cluster, config.rollout
    share = min(1.0, _PER_MACHINE / cluster.devices) if cluster.backend.name == "ray" else 1.0
    if cluster.backend.name != "local":
        yield "host processes", exactly(cluster.devices * share * memory.PROCESS_BYTES)
    if ROLLOUT in roles:
        yield "the rows of a batch", exactly(config.data.batch_size * rollout.n * memory.ROW_BYTES)
    if engine is not None and engine.own_process:
        engines = len(placement.devices(ROLLOUT)) * rollout.replicas
        yield "engine processes", exactly(engines * share * memory.PROCESS_BYTES)
    for role, run in models.items():
        for owner, size in memory.in_host(run, tokens[role]).items():
            here = len(placement.devices(role)) * share
            yield f"{role} {owner}", Bytes(int(size.least * here), int(size.expected * here))


# ---- what would help ----

# Keys that need less of a device's memory, each with the value that is tried, and what it costs.
_TRIED: tuple[tuple[str, Any, str], ...] = (
    ("actor.gradient_checkpointing", True, "a third more computing in the update"),
    ("actor.gradient_checkpointing", "offload", "copies of each block's input to host memory and back"),
    ("actor.offload_optimizer", True, "moments cross to the device and back once per update"),
    ("actor.offload_params", True, "weights cross to the device once per phase"),
    ("critic.offload_optimizer", True, "moments cross to the device and back once per update"),
    ("reference.offload_params", True, "weights cross to the device once per step"),
    ("actor.optimizer.moments", "8bit", "a little of the optimizer's precision"),
    ("actor.param_dtype", "bfloat16", "updates are rounded to bfloat16"),
    ("actor.backend.mlp_chunk", 4096, "MLPs are computed once more"),
    ("rollout.sleep", True, "the cache is built again each step"),
    ("rollout.bucket_bytes", 64 << 20, "more and smaller messages in a sync"),
)
# Keys that are halved.
_HALVED: tuple[tuple[str, str], ...] = (
    ("actor.token_budget", "more and smaller passes"),
    ("critic.token_budget", "more and smaller passes"),
    ("actor.logits_bytes", "more and smaller products"),
    ("rollout.max_concurrent", "fewer sequences at a time"),
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


def remedies(config: Config, plan: Callable[[Config], MemoryPlan]) -> list[Remedy]:
    """Returns keys that need less of the fullest device, the largest saving first: each is planned by itself.
    plan: of a configuration.
    """

    def peak(one: Config) -> int:
        return max(pool.total(pool.highest).expected for pool in plan(one).pools)

    now, found = peak(config), []
    for key, value, cost in _tried(config):
        try:
            saved = now - peak(_with(config, key, value))
        except ConfigError:  # it does not go together with the rest
            continue
        if saved > now // 200:
            found.append(Remedy(key, value, saved, cost))
    return sorted(found, key=lambda one: -one.saves)


def _tried(config: Config) -> Iterator[tuple[str, Any, str]]:
    for key, value, cost in _TRIED:
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


def _with(section: Any, key: str, value: Any) -> Any:
    """Returns a configuration with another value for a key."""
    first, _, below = key.partition(".")
    new = _with(getattr(section, first), below, value) if below else value
    return dataclasses.replace(section, **{first: new})
