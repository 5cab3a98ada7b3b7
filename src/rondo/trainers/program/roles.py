"""How the worker groups of a run (`Roles`) are made: here, and only here, from the table of roles and the
configuration."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rondo.algorithms import ActorLoss, try_functions
from rondo.config import (
    Config,
    OptimizerConfig,
    ParallelConfig,
    RewardModelConfig,
)
from rondo.config.functions import called_with
from rondo.config.schema import EngineConfig
from rondo.controller import Cluster, Mesh, Worker, WorkerGroup
from rondo.core.errors import ConfigError, DataError, within
from rondo.core.roles import REWARD_MODEL, ROLES, ROLLOUT, Role
from rondo.models import (
    ModelSource,
    TokenizerSource,
    is_function,
    load_model_config,
    longest_context,
)
from rondo.models.lora import adapter_set
from rondo.models.value_head import FILE as VALUE_HEAD_FILE
from rondo.models.value_head import stored_head
from rondo.planning import (
    WeightPlan,
    adapters_of,
    carried,
    engine_of,
    like_of,
    parallel_of,
    placement_of,
    plan_hop,
    plan_weights,
    reference_in_actor,
    rollout_dtype,
    runs_in_own_process,
)
from rondo.platform import planned, platform_of
from rondo.rollout import EngineSpec
from rondo.system.hub import copy_of, local_folder
from rondo.training import Head, Loss, ModelSpec, check_axes, waits_per_tile

EXPORT_OF_ONE = "name the export folder of `rondo reward-model`"


def model_source(config: Config, section: str = "model") -> ModelSource:
    """Returns where a model comes from. section: the one with its path (`critic`, `reward.models.0`)."""
    model, own = config.model, config.at(section)
    return ModelSource(
        path=None if own.path is None else _on_this_machine(config, own.path),
        hub=model.hub,
        config=model.config if section == "model" else None,
        override=own.override,
        section=section,
        trust_remote_code=model.trust_remote_code,
        attention=model.attention,
        seed=config.trainer.seed,
        min_pixels=model.images.min_pixels,
        max_pixels=model.images.max_pixels,
    )


def models_beside(config: Config) -> Iterator[str]:
    """Yields the sections with a path of their own that name a model which reads all of the policy's rows."""
    yield from (name for name in ("critic", "reference", "teacher") if getattr(config, name).path is not None)
    models = enumerate(config.reward.models)
    yield from (f"reward.models.{index}" for index, model in models if model.path is not None)


def tokenizer_source(config: Config) -> TokenizerSource:
    """Returns where the tokenizer comes from. Raises ConfigError when nothing says so."""
    model = config.model
    name = model.tokenizer or model.path
    if name is None:
        raise ConfigError(
            "model.tokenizer is not set and there is no model.path to take it from; set model.tokenizer"
        )
    folder = None if model.path is None else _on_this_machine(config, model.path)
    if not is_function(name):
        own = folder if name == model.path else None
        name = own or _on_this_machine(config, name, weights=False)
    return TokenizerSource(
        name,
        model.hub,
        model.chat_template,
        model.chat_template_options,
        model.tool_format,
        model.trust_remote_code,
        folder,
    )


def _on_this_machine(config: Config, name: str, *, weights: bool = True) -> str:
    """Returns the folder of a model or tokenizer, which all processes are then told instead of its name. On
    other machines (cluster.backend.address) each of them looks it up by itself.
    """
    if config.cluster.backend.address is not None:
        return name
    return local_folder(name, config.model.hub, weights=weights)


def on_one_pool(config: Config) -> Config:
    """Returns the configuration with all devices in one pool: for commands that have an actor and engines
    only.
    """
    cluster = replace(config.cluster, pools={}, placement={})
    return replace(config, cluster=cluster)


def worker_class(role: Role) -> type[Worker]:
    """Returns the class that the table of roles names."""
    module, _, name = role.worker.partition(":")
    found: type[Worker] = getattr(importlib.import_module(module), name)
    return found


def as_policy(name: str, config: Config) -> Config:
    """Returns the configuration as one of `models` that learns would have it if it were the run's policy: its
    weights, and engines in its pool.
    """
    own, cluster, model = config.models[name], config.cluster, config.model
    if own.path is not None:
        tokenizer = model.tokenizer or model.path
        model = replace(model, path=own.path, override=own.override, config=None, tokenizer=tokenizer)
    placement, optimizer = dict(cluster.placement), config.actor.optimizer
    for role in ("actor", ROLLOUT) if name in placement else ():
        placement[role] = placement[name]
    actor = replace(config.actor, optimizer=optimizer if own.lr is None else replace(optimizer, lr=own.lr))
    if own.path is not None and actor.lora is not None:
        actor = replace(actor, lora=replace(actor.lora, path=None))  # which is the policy's
    return replace(config, model=model, actor=actor, cluster=replace(cluster, placement=placement), models={})


def mesh_of(role: str, config: Config, devices: Sequence[int]) -> Mesh:
    """Returns how the ranks of a role with a training engine, one per device, are laid out. Raises
    ConfigError for sizes that do not divide them.
    """
    with _of_parallel(role, config):
        return Mesh.parallel(len(devices), parallel_of(role, config)[1])


def _of_parallel(role: str, config: Config) -> AbstractContextManager[None]:
    """Has errors say whose layout it is, and where that comes from."""
    own, (section, _) = engine_of(role, config)[0], parallel_of(role, config)
    whose = "" if role == section else f" (of the {role})"
    if own != section:
        whose = f" (of the {role}, which has the {section}'s: set {own}.parallel for its own)"
    return within(section, whose)


def check_parallel(role: str, config: Config) -> None:
    """Raises ConfigError where the model of a role with an engine cannot be spread over its devices."""
    mesh_of(role, config, placement_of(config).devices(role))
    sizes = parallel_of(role, config)[1]
    backend = config.actor.backend
    plain = sizes == ParallelConfig() and backend.name == "torch"
    if plain or config.cluster.backend.address is not None:
        return  # nothing to ask of the model; or it is on other machines, which check it
    if config.model.path is None and config.model.config is None:
        return  # a warm start has yet to make it
    try:
        model = load_model_config(source_of(role, config))
    except DataError:
        return  # a folder that is not there, which is told where folders are looked at
    with _of_parallel(role, config):
        check_axes(model, sizes, backend)
    if waits_per_tile(model, sizes, backend):
        raise ConfigError(
            f"actor.backend.mlp_chunk: the {role}'s experts get tokens of other ranks (parallel.expert, "
            "parallel.tensor), which would wait for each other once per tile; leave it out",
            key="actor.backend.mlp_chunk",
        )


def source_of(role: str, config: Config) -> ModelSource:
    """Returns the weights that a role with a training engine starts from. Raises ConfigError where none are
    named.
    """
    section, engine = engine_of(role, config)
    if role in config.models:
        return model_source(config, f"models.{role}")
    if isinstance(engine, RewardModelConfig):
        if engine.path is None:
            raise ConfigError(f"{section}: {role} has no path; {EXPORT_OF_ONE}", key=section)
        source = model_source(config, section)
        if not (copy_of(str(source.path)) / VALUE_HEAD_FILE).is_file():
            raise ConfigError(
                f"{section}.path: there is no {VALUE_HEAD_FILE} in {engine.path}, without which it scores "
                f"every response 0; {EXPORT_OF_ONE}",
                key=f"{section}.path",
            )
        return source
    if path_of(role, config) is not None:
        return model_source(config, str(ROLES[role].weights))
    return model_source(config)


def positions_of(role: str, config: Config) -> int | None:
    """Returns the tokens of the longest sequence that a role's model has positions for; None: no limit, or
    the model is on other machines only.
    """
    if config.cluster.backend.address is not None:
        return None
    return longest_context(load_model_config(source_of(role, config)))


def path_of(role: str, config: Config) -> str | None:
    """Returns the weights of its own that a role of the table starts from; None: the policy's initial model,
    which a warm start may have yet to make. Raises ConfigError where it must have its own, and where that
    model has an adapter already.
    """
    row = ROLES[role]
    path: str | None = getattr(config, row.weights).path if row.weights is not None else None
    if row.needs_path and path is None:
        raise ConfigError(
            f"{row.weights}.path is not set, but the configured algorithm reads {row.read_by}; name the "
            f"{role}'s folder or hub id"
        )
    lora = config.actor.lora
    if row.weights is not None and path is None and lora is not None and lora.path is not None:
        raise ConfigError(
            f"the {role} starts as the policy does, which starts with the adapter of actor.lora.path: set "
            f"{row.weights}.path, to model.path for the model without it, or to an export with it merged",
            key="actor.lora.path",
        )
    if role == "reference" and path is None and lora is not None and lora.base_dtype is not None:
        if not reference_in_actor(config):
            raise ConfigError(
                "the reference would start as the model in the files, and the policy as what is left of it "
                f"in {lora.base_dtype} (actor.lora.base_dtype): set reference.path, to model.path if that is "
                "meant, or remove reference.refresh_every: the actor without adapters is the reference then",
                key="actor.lora.base_dtype",
            )
    return path


def head_notes(config: Config, roles: Sequence[str]) -> list[str]:
    """Says of each of the roles that has a value head and weights of its own where its head is from."""
    notes = []
    for role in roles:
        row = ROLES.get(role)
        if row is None or not row.value_head or config.cluster.backend.address is not None:
            continue
        path = path_of(role, config)
        if path is not None:
            stored = stored_head(copy_of(str(source_of(role, config).path)))
            if stored:
                where = sorted({one.file.name for one in stored.values()})
                names = [one.name for one in stored.values()]
                notes.append(
                    f"{role}: the value head is {' and '.join(names)} of {', '.join(where)} in {path}"
                )
            else:
                notes.append(f"{role}: there is no value head in {path}: a new one, whose values are 0")
    return notes


def role_spec(
    role: str,
    config: Config,
    losses: Mapping[str, Loss] | None = None,
    total_optimizer_steps: int | None = None,
    value_head: bool = False,
) -> tuple[type[Worker], dict[str, Any]]:
    """Returns the worker class of a role with a training engine and the keyword arguments that build it.

    losses: by name, for a role that is trained; None: its model is only used, without an optimizer.
    value_head: in place of the model's own head, also where the role has that otherwise. Raises ConfigError
    for a role that the configuration does not describe.
    """
    row = ROLES.get(like_of(role, config), REWARD_MODEL)
    source, engine = source_of(role, config), engine_of(role, config)[1]
    if row.section != row.engine and isinstance(engine, EngineConfig) and engine.lora is not None:
        # On the actor's engine, and not from its adapter.
        engine = replace(engine, lora=replace(engine.lora, path=None))
    kwargs: dict[str, Any] = {name: config.at(key) for name, key in row.options.items()}
    optimizer = None
    if row.learns_from is not None and losses is not None:
        optimizer = _optimizer_of(row, config)
        kwargs["losses"] = dict(losses)
    kwargs["model"] = ModelSpec(
        source,
        engine,
        optimizer,
        config.actor.backend,
        head="value" if value_head else head_of(row),
        temperature=config.rollout.temperature,
        total_optimizer_steps=total_optimizer_steps,
        yields_memory=config.rollout.sleep,
    )
    return worker_class(row), kwargs


def head_of(role: Role) -> Head:
    """Says what is behind the last block of a role's model."""
    return "value" if role.value_head else "lm"


def _optimizer_of(role: Role, config: Config) -> OptimizerConfig:
    """Returns the optimizer of its engine's section; a role on another's engine has a learning rate of its
    own.
    """
    assert role.engine is not None
    optimizer: OptimizerConfig = getattr(config, role.engine).optimizer
    if role.section == role.engine:
        return optimizer
    return replace(optimizer, lr=getattr(config, role.section).lr)


async def create_model(
    cluster: Cluster,
    role: str,
    config: Config,
    losses: Mapping[str, Loss] | None = None,
    total_optimizer_steps: int | None = None,
    devices: Sequence[int] | None = None,
    value_head: bool = False,
    name: str | None = None,
) -> WorkerGroup:
    """Starts the worker group of a role with a training engine; see `role_spec`. devices: default those of
    its pool (cluster.placement). name: of the group, where it is not the role's (`as_policy`). Before a
    policy that learns, the user's functions of its algorithm are tried.
    """
    policy = next((loss for loss in (losses or {}).values() if isinstance(loss, ActorLoss)), None)
    if policy is not None:
        try_functions(policy.algorithm, cluster.device)
    worker, kwargs = role_spec(role, config, losses, total_optimizer_steps, value_head=value_head)
    devices = placement_of(config).devices(role) if devices is None else devices
    mesh = mesh_of(role, config, devices)
    return await cluster.create_group(name or role, worker, mesh=mesh, kwargs=kwargs, devices=devices)


async def create_rollout(
    cluster: Cluster,
    config: Config,
    actor: Sequence[int],
    *,
    devices: Sequence[int] | None = None,
    trains: bool = True,
    trainer: str = "actor",
) -> WorkerGroup:
    """Starts the generation engines. actor: the devices of the policy; trainer: the name of its group.
    devices: of all engines together (default: those of the rollout's pool); with
    rollout.engine.tensor_parallel > 1 each engine takes that many, with consecutive numbers: ConfigError
    where they are not. trains: see `plan_weights`.
    """
    size = config.rollout.engine.tensor_parallel
    if devices is not None and [at + i for at in devices[::size] for i in range(size)] != list(devices):
        raise ConfigError(
            f"rollout.engine.tensor_parallel={size} on the devices {tuple(devices)}: each engine takes "
            f"{size} with consecutive numbers; name others, or lower it"
        )
    devices = placement_of(config).devices("rollout") if devices is None else tuple(devices)[::size]
    weights = plan_weights(config, actor, devices, trains=trains)
    return await cluster.create_group(
        ROLLOUT if trainer == "actor" else f"{trainer}.{ROLLOUT}",
        worker_class(ROLES[ROLLOUT]),
        devices=devices,
        devices_per_rank=size,
        kwargs={
            "spec": rollout_spec(config, cluster.device, cluster.threads),
            "rollout": config.rollout,
            "reward": config.reward,
            "share": weights.shares_storage,
            "hop": plan_hop(config, ipc=platform_of(cluster.device).ipc, trains=trains),
            "trainer": trainer,
            "image_folder": image_folder(config),
            "images_per_prompt": config.model.images.per_prompt,
        },
    )


def image_folder(config: Config) -> Path | None:
    """Returns the folder of images that are no files; None: the run has no folder."""
    run = config.trainer.run_dir
    return None if run is None else Path(run).absolute() / "images"


def rollout_spec(config: Config, device: str, threads: int) -> EngineSpec:
    """Says how to build the generation engines of a run, as `engine_spec` does, with what comes beside the
    weights.
    """
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    spec = engine_spec(config, device, threads, longest)
    lora = config.actor.lora
    if lora is not None and adapters_of(config) == "alone":
        chosen = replace(lora, path=None)  # which modules have one, not their numbers
        # One for each version that an answer in flight may have begun with.
        versions = config.trainer.max_staleness + 1
        spec = replace(spec, adapters=adapter_set(spec.source, chosen, versions))
    return replace(spec, routes=config.actor.router.replay == "sampler")


def planned_weights(config: Config) -> WeightPlan:
    """Returns how the weights will reach the engines, before there are any groups."""
    placement = placement_of(config)
    return plan_weights(config, placement.devices("actor"), placement.devices("rollout"))


def engine_spec(config: Config, device: str, threads: int, max_context: int) -> EngineSpec:
    """Says how to build the generation engines of a settled configuration, whose weights come merged. device:
    of the first, as each worker knows better. max_context: prompt and response tokens of a request.
    """
    rollout, engine = config.rollout, config.rollout.engine
    return EngineSpec(
        engine=engine.name,
        source=model_source(config),
        tokenizer=tokenizer_source(config),
        dtype=rollout_dtype(config),
        device=device,
        max_context=max_context,
        max_concurrent=rollout.max_concurrent,
        threads=threads,
        tensor_parallel=engine.tensor_parallel,
        seed=config.trainer.seed,
        options=called_with(engine.options, "rollout.engine"),
        python=engine.python,
    )


def describe_planned(config: Config) -> str:
    """Writes engines and route in a few words for `rondo check`, before there are any groups."""
    rollout = config.rollout
    own = runs_in_own_process(rollout)
    number = f"{rollout.replicas} per rank, each in its" if rollout.replicas > 1 else "in its"
    where = f"{number} own process" if own else "in the host's process"
    route = {
        "shared": "in place: one storage for both",
        "gathered": "gathered in buckets, next to the engines",
        "collective": "point to point, from pool to pool",
        "disk": "by way of files in the run folder",
    }[planned_weights(config).route] + carried(config)
    if plan_hop(config, ipc=planned(config.cluster.device).ipc) != "host":
        route += ", and from there on the device, where engines can open its memory"
    sleep = "; key/value cache given back from `take` to here" if rollout.sleep else ""
    return f"({rollout.engine.name}, {where}), {route}{sleep}"


def check_profile(config: Config, steps: int | None) -> None:
    """Raises ConfigError where trainer.profile asks for what a run of so many steps does not have. None: how
    many is not known yet.
    """
    profile = config.trainer.profile
    if profile is None:
        return
    if steps is not None and (last := max(profile.steps)) > steps:
        key = "trainer.profile.steps"
        raise ConfigError(f"{key} has {last}, and the run has {steps} steps: name some of these", key=key)
    here = planned(config.cluster.device)
    if profile.memory and not here.remembers:
        key = "trainer.profile.memory"
        raise ConfigError(
            f"{key}=true needs a GPU, and this run is on the {here.title}: leave it out", key=key
        )
