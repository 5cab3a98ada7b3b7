"""What a configuration says of its roles, and nothing else is needed for: which there are, where each stands,
whose settings it has, what `auto` means there, and how its model is spread. Pure: no function that a recipe
names is imported.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from rondo.config.schema import (
    BypassConfig,
    Config,
    EngineConfig,
    FrozenEngineConfig,
    ImportanceConfig,
    ParallelConfig,
    RolloutCorrectionConfig,
)
from rondo.core.errors import ConfigError, did_you_mean
from rondo.core.roles import ROLES, ROLLOUT
from rondo.planning.admission import effective_on_update
from rondo.planning.placement import Placement, SameDevices, plan_placement

Engine = TypeVar("Engine", bound=FrozenEngineConfig)


class Kind(Protocol):
    """What a kind of device says of it: a `platform.Platform`, or one of the two below."""

    @property
    def half(self) -> str:
        """Names the dtype of products."""
        ...

    @property
    def recomputes(self) -> bool:
        """Says whether blocks are computed again in the backward pass."""
        ...


class _KindAtHand(NamedTuple):
    half: str
    recomputes: bool


# What rondo's two platforms say, for a plan: to ask them takes torch.
ON_CARD, ON_HOST = _KindAtHand("bfloat16", True), _KindAtHand("float32", False)


def engine_for(engine: Engine, platform: Kind) -> Engine:
    """Returns the settings of one engine with every `auto` replaced."""
    found: dict[str, Any] = {}
    if engine.compute_dtype == "auto":
        found["compute_dtype"] = platform.half
    if isinstance(engine, EngineConfig) and engine.gradient_checkpointing == "auto":
        found["gradient_checkpointing"] = platform.recomputes
    return dataclasses.replace(engine, **found)


def config_for(config: Config, platform: Kind) -> Config:
    """Returns the configuration with every `auto` of its engines replaced."""
    models = tuple(engine_for(model, platform) for model in config.reward.models)
    return dataclasses.replace(
        config,
        actor=engine_for(config.actor, platform),
        critic=engine_for(config.critic, platform),
        reference=engine_for(config.reference, platform),
        teacher=engine_for(config.teacher, platform),
        reward=dataclasses.replace(config.reward, models=models),
    )


def placement_of(config: Config, roles: Sequence[str] | None = None) -> Placement:
    """Returns role → devices. roles: all of the run, to check the pools against; None: as far as they are
    known.

    Raises ConfigError for pools that do not fit the devices, the roles or each other.
    """
    together = []
    if config.reference.refresh_every is not None:
        together.append(SameDevices("reference", "actor", "reference.refresh_every"))
    recorded = config.rollout.recorded is not None
    if config.rollout.sleep and not recorded:
        together.append(SameDevices("rollout", "actor", "rollout.sleep"))
    size = 1 if recorded else config.rollout.engine.tensor_parallel
    return plan_placement(config.cluster, roles, tensor_parallel=size, together=together)


def engine_of(role: str, config: Config) -> tuple[str, FrozenEngineConfig]:
    """Returns the section with the settings of a role's training engine: its key, and what it says.

    role: of `ROLES`, or the name of one of `models` or reward.models. Raises ConfigError for any other.
    """
    row = ROLES.get(like_of(role, config))
    section = row.engine if row is not None else None
    if section is not None:
        return section, getattr(config, section)
    for index, model in enumerate(config.reward.models):
        if model.name == role:
            return f"reward.models.{index}", model
    raise ConfigError(
        f"there is no role {role!r} in this configuration{did_you_mean(role, [*ROLES, *config.models])}; a "
        f"model of one's own has a name in models={{{role}: {{like: …}}}}"
    )


def like_of(role: str, config: Config) -> str:
    """Returns which role of the table a role is like: itself, or what one of `models` says."""
    return config.models[role].like if role in config.models else role


def parallel_of(role: str, config: Config) -> tuple[str, ParallelConfig]:
    """Returns the section that says how a role's model is spread over its ranks, and what it says."""
    section, engine = engine_of(role, config)
    if engine.parallel is None and section in ("critic", "reference"):
        section, engine = "actor", config.actor
    return section, engine.parallel or ParallelConfig()


def reference_in_actor(config: Config) -> bool:
    """Says whether the reference is the actor without its adapters: with actor.lora, where both come from the
    same model and the reference stays as it is.
    """
    lora, model, reference = config.actor.lora, config.model, config.reference
    if lora is None or reference.refresh_every is not None:
        return False
    if reference.path is None:
        return lora.path is None
    return (reference.path, reference.override) == (model.path, model.override)


def columns_read(config: Config) -> frozenset[str]:
    """Returns the columns that an RL run's functions read, as far as their parameters say them."""
    algorithm = config.algorithm
    chosen = [("advantage", algorithm.advantage.name), ("policy_loss", algorithm.policy_loss.name)]
    chosen += [("term", term.name) for term in algorithm.terms]
    read = {column for kind, name in chosen for column in _columns(kind, str(name))}
    if algorithm.kl is not None or "process_rewards" in read:  # which are made of them
        read.add("ref_log_probs")
    return frozenset(read)


def roles_of(config: Config) -> tuple[str, ...]:
    """Returns the roles of an RL run, as far as its functions' parameters say them: these are read where they
    are written, and nothing is imported. (`trainers.program` imports them, and knows.)
    """
    read = columns_read(config)
    found = ["actor"]
    for role in ROLES.values():
        wanted = role.makes in read or (
            role.name == "teacher" and any(c.startswith("teacher_") for c in read)
        )
        if role.name in ("actor", ROLLOUT) or not wanted:
            continue
        if role.name != "reference" or not reference_in_actor(config):
            found.append(role.name)
    found += [model.name for model in config.reward.models]
    return (*found, *([ROLLOUT] if config.rollout.recorded is None else []))


def _columns(kind: str, name: str) -> tuple[str, ...]:
    """Returns the parameters before `*` of a function, built in or of a file; of what is not found none."""
    path, colon, function = name.rpartition(":")
    if colon:
        file = Path(path)
        named = _functions(file) if path.endswith(".py") and file.is_file() else ()
        return next((columns for _, _, own, columns in named if own == function), ())
    found = (row for file in _algorithms() for row in _functions(file))
    return next((columns for of, registered, _, columns in found if (of, registered) == (kind, name)), ())


@functools.cache
def _algorithms() -> tuple[Path, ...]:
    spec = find_spec("rondo")
    assert spec is not None
    return tuple(sorted((Path(str(spec.origin)).parent / "algorithms").rglob("*.py")))


@functools.cache
def _functions(file: Path) -> tuple[tuple[str, str, str, tuple[str, ...]], ...]:
    """Returns the functions of a file: decorator and its first argument, own name, parameters before `*`."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):  # told where the run imports it
        return ()
    return tuple(_registered(tree))


def _registered(tree: ast.Module) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        columns = tuple(one.arg for one in (*node.args.posonlyargs, *node.args.args))
        yield "", "", node.name, columns
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.args:
                first = decorator.args[0]
                if isinstance(first, ast.Constant):
                    yield decorator.func.id, str(first.value), node.name, columns


def effective_correction(
    config: Config, foreign: Sequence[str] = ()
) -> RolloutCorrectionConfig | BypassConfig | None:
    """Returns what algorithm.rollout_correction becomes: decoupled, bypass or None (off).

    auto: off where the samples are the trainer's own policy's (trainer.max_staleness=0, an engine of rondo's
    own), or else token-level truncated importance weights; with importance or reject set, those. foreign:
    why recorded samples are not the policy's that is trained (`Recorded.changed`).
    """
    chosen = config.algorithm.rollout_correction
    if chosen is None or chosen.mode != "auto":
        return chosen
    if chosen.importance is None and not chosen.reject:
        if not foreign and not _of_another_policy(config):
            return None
        chosen = dataclasses.replace(chosen, importance=ImportanceConfig(level="token", upper=2.0))
    return dataclasses.replace(chosen, mode="decoupled")


def _of_another_policy(config: Config) -> bool:
    return config.trainer.max_staleness > 0 or not config.rollout.engine.exact


def one_update(config: Config) -> bool:
    """Says whether the actor takes one optimizer step per batch: the old policy is then the current one."""
    mini = config.actor.mini_batch_size or config.data.batch_size
    return mini == config.data.batch_size and config.actor.epochs == 1


def in_flight(config: Config) -> str:
    """Says what becomes of episodes in flight when weights are published."""
    trainer = config.trainer
    if trainer.max_staleness == 0:
        return ""
    chosen = effective_on_update(trainer.on_update.name, trainer.max_staleness)
    return f"; episodes in flight: {chosen} (trainer.on_update), up to {trainer.max_staleness} versions old"
