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
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from rondo.algorithms import Kind, registered_by_user
from rondo.config import (
    Config,
    FunctionConfig,
    KlConfig,
    LoadedConfig,
    ModelConfig,
    collected,
    load,
)
from rondo.config.auto import engine_for
from rondo.config.schema import ActorLoraConfig, EngineConfig
from rondo.controller import planned_device
from rondo.core.errors import ConfigError, DataError, about
from rondo.data import check_source
from rondo.models import STRETCH, check_model_folder, check_positions, load_model_config
from rondo.models.loading import model_on_meta
from rondo.models.lora import adapter_set, config_for_peft, quantise_base
from rondo.models.nf4 import check_nf4
from rondo.models.source import ModelSource
from rondo.rollout import check_engine, check_engine_adapters, check_engine_model
from rondo.trainers.commands.recipe import beside_recipe, run_dir
from rondo.trainers.program import model_source, open_tokenizer, placement_of, section_at, source_of
from rondo.training.torch_backend.head import check_fused
from rondo.training.torch_backend.routing import check_router


def check_backend(config: Config) -> None:
    """Raises ConfigError for a backend or compiler that is not here."""
    if config.cluster.backend.name == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError(
            'cluster.backend=ray, but Ray is not installed: pip install "rondo-rl[ray]"',
            key="cluster.backend.name",
        )
    check_names(config)
    check_logits(config)
    rollout = config.rollout
    compiled = rollout.engine.options.get("decode") == "compiled"
    if compiled and rollout.recorded is None and shutil.which("cc") is None:
        raise ConfigError(
            "rollout.engine.decode=compiled needs a C compiler (cc); install one, or set "
            "rollout.engine.decode=auto",
            key="rollout.engine.decode",
        )


def check_logits(config: Config) -> None:
    """Raises ConfigError where log-probs without logits in memory are asked for and cannot be computed."""
    device = planned_device(config.cluster)
    for section in ("actor", "reference", "teacher"):
        engine = engine_for(getattr(config, section), device)
        if engine.logits_bytes is None:
            try:
                check_fused(torch.device(device), getattr(torch, engine.compute_dtype))
            except ConfigError as error:
                raise ConfigError(f"{section}.{error}", key=f"{section}.logits_bytes") from error


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
    return "cuda:0" if planned_device(config.cluster) == "cuda" else "cpu"


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
            recipe = beside_recipe(loaded, "trainer.warm_start", config.trainer.warm_start)
            first = load([str(recipe)]).config.model
            # What it exports has the positions of the model that it starts from, unless they are overridden.
            exported = replace(first, override={**first.override, **config.model.override})
            check_model(replace(config, model=exported), context=context, key="trainer.warm_start")
    if not problems:
        with collected(problems):
            _check_adapters(config, first)
            _check_routers(config, first)
    with collected(problems):
        _check_template(loaded, first)
    if problems:
        raise ConfigError.of(problems)


def _that_learn(config: Config, first: ModelConfig) -> Iterator[tuple[str, EngineConfig, ModelSource]]:
    """Yields the section, settings and model of actor and critic; nothing where their models are on other
    machines, which look at them. first: as of `_check_template`.
    """
    if config.cluster.backend.address is not None:
        return
    for section in ("actor", "critic"):
        own = section == "critic" and config.critic.path is not None
        source = model_source(replace(config, model=first), section if own else "model")
        yield section, getattr(config, section), source


def _check_adapters(config: Config, first: ModelConfig) -> None:
    """Raises ConfigError for adapters that a model cannot have. first: as of `_check_template`."""
    for section, engine, source in _that_learn(config, first):
        lora = engine.lora
        if lora is None:
            continue
        try:
            if lora.base_dtype is not None:
                settled = engine_for(engine, planned_device(config.cluster))
                ranks = len(placement_of(config).devices(section))
                check_nf4(settled.param_dtype, settled.compute_dtype, ranks)
                quantise_base(model_on_meta(source), lora, torch.device("cpu"))
            adapters = adapter_set(source, lora)
            weights = {name: tuple(one.shape) for name, one in model_on_meta(source).named_parameters()}
            config_for_peft(source, lora, adapters.shapes(weights))  # as an export will need it
        except DataError as error:
            raise ConfigError(f"{section}.{error}", key=f"{section}.lora.path") from error
        except ConfigError as error:
            raise ConfigError(f"{section}.{error}", key=f"{section}.{error.key}") from error
        if isinstance(lora, ActorLoraConfig) and lora.send == "adapters" and config.rollout.recorded is None:
            check_engine_adapters(config.rollout.engine.name, adapters, load_model_config(source))


def _check_routers(config: Config, first: ModelConfig) -> None:
    """Raises ConfigError for what a model's routers cannot do. first: as of `_check_template`."""
    for section, engine, source in _that_learn(config, first):
        if engine.router == type(engine.router)():
            continue
        try:
            check_router(
                model_on_meta(source),
                engine.router,
                lora=engine.lora is not None,
                tiles=config.actor.backend.mlp_chunk is not None,
            )
        except ConfigError as error:
            raise ConfigError(f"{section}.{error}", key=f"{section}.{error.key}") from error


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
    """Raises ConfigError for a template that is not there, or options that it does not have. first: the model
    that the run starts from, with its tokenizer: a warm start's is not exported yet.
    """
    model = loaded.config.model
    template = model.chat_template or first.chat_template
    if model.chat_template is not None:
        beside_recipe(loaded, "model.chat_template", model.chat_template)
    if not model.chat_template_options or not (first.tokenizer or first.path):
        return
    first = replace(first, chat_template=template, chat_template_options=model.chat_template_options)
    try:
        open_tokenizer(replace(loaded.config, model=first))
    except DataError as error:
        raise ConfigError(f"model.tokenizer: {error}", key="model.tokenizer") from error


def check_model(
    config: Config, section: str = "model", *, context: bool = False, key: str | None = None
) -> None:
    """Raises ConfigError for a model that is not there, or cannot be what is asked of it. section: the one
    with its path. context: see `check_files`. key: which says so, if not that section.
    """
    if config.cluster.backend.address is not None:
        return
    named = key or section
    key = key or ("model.config" if section_at(config, section).path is None else f"{section}.path")
    try:
        with about(named):
            source = model_source(config, section)
            if source.path is not None:
                check_model_folder(source.path)
            model = load_model_config(source)
    except DataError as error:
        raise ConfigError(f"{key}: {error}", key=key) from error
    if context and section == "model":
        with about("rollout.engine"):
            check_engine_model(config.rollout.engine.name, model, engine_device(config))
    if context:
        prompt, response = config.data.max_prompt_tokens, config.rollout.max_tokens
        asked = (
            f"data.max_prompt_tokens={prompt} + rollout.max_tokens={response} is {prompt + response} tokens"
        )
        with about("data.max_prompt_tokens" if prompt > response else "rollout.max_tokens"):
            remedy = f"lower one of the two, {STRETCH}"
            check_positions(model, prompt + response, asked, remedy, model=f"{key}'s model")
