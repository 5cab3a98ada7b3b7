"""Checks of what a configuration needs from this machine: files, model folders, packages, an engine.

On a cluster elsewhere (cluster.backend.address) other machines have the model folders and the engines: their
own processes find out what is missing there.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import stat
from collections.abc import Sequence
from dataclasses import replace

from rondo.algorithms import Kind, registered_by_user
from rondo.config import (
    Config,
    FunctionConfig,
    KlConfig,
    LoadedConfig,
    ModelConfig,
    beside_recipe,
    collected,
    starting_model,
)
from rondo.core.errors import ConfigError, about, named_by, within
from rondo.core.roles import ENGINE_SECTIONS, ROLES
from rondo.data import check_source
from rondo.models import STRETCH, check_model_folder, check_positions, load_model_config
from rondo.planning import placement_of
from rondo.platform import planned
from rondo.rollout import check_engine, check_engine_spec
from rondo.trainers.commands.plan_run import device_of
from rondo.trainers.commands.recipe import run_dir
from rondo.trainers.program import head_of, model_source, open_tokenizer, rollout_spec, settled, source_of
from rondo.training import ModelSpec, check_model_spec, check_settings


def check_backend(config: Config) -> None:
    """Raises ConfigError for a backend or compiler that is not here."""
    if config.cluster.backend.name == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError(
            'cluster.backend=ray, but Ray is not installed: pip install "rondo-rl[ray]"',
            key="cluster.backend.name",
        )
    if config.cluster.card is not None:
        device_of(config)
    check_names(config)
    _check_settings(config)
    rollout = config.rollout
    compiled = rollout.engine.options.get("decode") == "compiled"
    if compiled and rollout.recorded is None and shutil.which("cc") is None:
        raise ConfigError(
            "rollout.engine.decode=compiled needs a C compiler (cc); install one, or set "
            "rollout.engine.decode=auto",
            key="rollout.engine.decode",
        )


def _check_settings(config: Config) -> None:
    """Raises ConfigError for settings of training engines that no model could be trained with here."""
    if config.cluster.backend.address is not None:
        return
    config, device, placement = settled(config), engine_device(config), placement_of(config)
    for section in ENGINE_SECTIONS:
        ranks = len(placement.devices(section))
        with within(section):
            engine, head = getattr(config, section), head_of(ROLES[section])
            check_settings(engine, config.actor.backend, head, ranks, device)


def check_names(config: Config) -> None:
    """Raises ConfigError for a short name, registered by the user's code in this process, of a function that
    runs in workers that are other processes.
    """
    if config.cluster.backend.name == "local":
        return
    algorithm = config.algorithm
    in_workers: tuple[tuple[str, Kind, FunctionConfig | KlConfig | None], ...] = (
        ("policy_loss", "policy_loss", algorithm.policy_loss),
        ("value_loss", "value_loss", algorithm.value_loss),
        ("kl", "kl", algorithm.kl),
        ("preference_loss", "pair_loss", algorithm.preference_loss),
        ("reward_model_loss", "pair_loss", algorithm.reward_model_loss),
    )
    for name, kind, chosen in in_workers:
        place = registered_by_user(kind, chosen.name) if chosen is not None else None
        if chosen is not None and place is not None:
            key = f"algorithm.{name}"
            raise ConfigError(
                f"{key}: the name {chosen.name!r} is registered in this process only, and the workers of "
                f"cluster.backend={config.cluster.backend.name} are other processes; name the function with "
                f"its file, {place} (a program can also pass the function itself)",
                key=key,
            )


def engine_device(config: Config) -> str:
    """Returns what engines of this configuration are built for, as torch names it."""
    return planned(config.cluster.device).device()


def check_rollout_engine(config: Config) -> None:
    """Raises ConfigError for an engine that is not installed, or cannot do what it will be asked for."""
    rollout = config.rollout
    if config.cluster.backend.address is not None:
        return
    try:
        check_engine(
            rollout.engine.name,
            rollout.engine.options,
            device=engine_device(config),
            sleep=rollout.sleep,
            python=rollout.engine.python,
        )
    except ConfigError as error:
        error.key = error.key or "rollout.engine"
        raise


def check_files(loaded: LoadedConfig, *, context: bool) -> None:
    """Raises ConfigError for all files and models that a key names and that are not there. context: prompts
    are answered, so every model must have positions for both together.
    """
    config, problems = loaded.config, list[ConfigError]()
    for section in ("model", "critic", "reference", "teacher"):
        if getattr(config, section).path is not None or (
            section == "model" and config.model.config is not None
        ):
            with collected(problems):
                check_model(config, section, context=context)
    for name, named in config.models.items():
        if named.path is not None:
            with collected(problems):
                check_model(config, f"models.{name}", context=context)
    parts = {"pretrain": config.data.pretrain}
    if config.rollout.recorded is None:  # else the prompts, too, are those that were recorded
        parts |= {"train": config.data.train, "eval": config.data.eval}
    for part, sources in parts.items():
        for index, source in enumerate(sources):
            with collected(problems), about(f"data.{part}.{index}"):
                check_source(source)
    first = config.model
    if config.trainer.warm_start is not None:
        with collected(problems):
            first = starting_model(loaded)
            check_model(replace(config, model=first), context=context, key="trainer.warm_start")
    if not problems:
        with collected(problems):
            _check_engines(config, first, context=context)
    with collected(problems):
        _check_template(loaded, first)
    if problems:
        raise ConfigError.of(problems)


def _check_engines(config: Config, first: ModelConfig, *, context: bool) -> None:
    """Raises ConfigError for what the models of actor and critic cannot do, where they are on this machine.
    first: see `starting_model`. context: see `check_files`.
    """
    if config.cluster.backend.address is not None:
        return
    start = settled(replace(config, model=first))
    for section in ("actor", "critic"):
        own = section == "critic" and config.critic.path is not None
        source = model_source(start, section if own else "model")
        with within(section):
            check_model_spec(ModelSpec(source, getattr(config, section), backend=config.actor.backend))
    if context:
        check_engine_spec(rollout_spec(start, engine_device(config), threads=1))


def check_run_dir(loaded: LoadedConfig) -> None:
    """Raises ConfigError for a run folder that cannot be: a file, below a file, or a link to itself."""
    folder = run_dir(loaded)
    try:
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except FileNotFoundError:
        return  # it will be made
    except OSError as error:
        raise ConfigError(
            f"trainer.run_dir={folder} cannot be a folder: {error.strerror}; choose another",
            key="trainer.run_dir",
        ) from error


def check_reward_models(config: Config, names: Sequence[str]) -> None:
    """Raises ConfigError for those of reward.models called `names` that are not there."""
    problems: list[ConfigError] = []
    for index, model in enumerate(config.reward.models):
        if model.name in names and config.cluster.backend.address is None:
            with collected(problems), about(f"reward.models.{index}"):
                if model.path is not None:
                    context = config.rollout.recorded is None
                    check_model(config, f"reward.models.{index}", context=context)
                source_of(model.name, config)  # is there a value head?
    if problems:
        raise ConfigError.of(problems)


def _check_template(loaded: LoadedConfig, first: ModelConfig) -> None:
    """Raises ConfigError for a template that is not there, or options that it does not have. first: see
    `starting_model`.
    """
    model = loaded.config.model
    if model.chat_template is not None:
        beside_recipe(loaded, "model.chat_template", model.chat_template)
    if not model.chat_template_options or not (first.tokenizer or first.path):
        return
    with named_by("model.tokenizer"):
        open_tokenizer(replace(loaded.config, model=first))


def check_model(
    config: Config, section: str = "model", *, context: bool = False, key: str | None = None
) -> None:
    """Raises ConfigError for a model that is not there, or cannot be what is asked of it. section: the one
    with its path. context: see `check_files`. key: which says so, if not that section.
    """
    if config.cluster.backend.address is not None:
        return
    named = key or section
    key = key or ("model.config" if config.at(section).path is None else f"{section}.path")
    with named_by(key), about(named):
        source = model_source(config, section)
        if source.path is not None:
            check_model_folder(source.path)
        model = load_model_config(source)
    if context:
        prompt, response = config.data.max_prompt_tokens, config.rollout.max_tokens
        asked = (
            f"data.max_prompt_tokens={prompt} + rollout.max_tokens={response} is {prompt + response} tokens"
        )
        with about("data.max_prompt_tokens" if prompt > response else "rollout.max_tokens"):
            remedy = f"lower one of the two, {STRETCH}"
            check_positions(model, prompt + response, asked, remedy, model=f"{key}'s model")
