"""`rondo serve` and `rondo.serve`: a model behind the OpenAI-compatible endpoint, until told to stop."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rondo.config import Config, LoadedConfig
from rondo.core.errors import ConfigError
from rondo.models import STRETCH, build_model, check_positions, load_model_config, longest_context
from rondo.models.names import persistent_buffers
from rondo.models.pixels import image_reader
from rondo.planning import runs_in_own_process
from rondo.platform import platform_of
from rondo.rollout import EngineSpec, check_engine, check_engine_spec
from rondo.serving import Endpoint, Sessions
from rondo.serving.http import HttpServer, check_installed
from rondo.serving.pictures import MOST_IMAGES, ClientImages
from rondo.system.access import check_chosen
from rondo.system.signals import caught
from rondo.trainers.commands.check_machine import check_model, engine_device
from rondo.trainers.commands.evaluate import check_answers
from rondo.trainers.commands.event_loop import run_loop
from rondo.trainers.commands.recipe import changed_keys, located
from rondo.trainers.loop import Mender
from rondo.trainers.program import (
    complete_model,
    engine_spec,
    model_source,
    open_tokenizer,
    sampling_params,
    settled,
)
from rondo.workers import Replicas

MAX_SESSIONS = 1024  # that are remembered
MAX_WAITING = 1024  # sequences in the queue

# What is read here; model.* and rollout.* besides, but for what has no meaning without a trainer.
READ = (
    "data.max_prompt_tokens",
    "actor.compute_dtype",
    "cluster.device",
    "cluster.devices",
    "cluster.threads",
    "trainer.seed",
    "trainer.total_steps",  # a configuration needs it
)
WITHOUT_MEANING: Mapping[str, str] = {
    "rollout.agent": "clients bring their own",
    "rollout.tools": "clients bring their own",
    "rollout.environments": "clients act in their own",
    "rollout.episode_workers": "clients have their own processes",
    "rollout.sleep": "there is no trainer to make room for",
    "rollout.n": "a request says how many answers it wants",
    "rollout.weight_transport": "the weights are loaded once",
    "rollout.recorded": "an engine generates",
}


@dataclass(frozen=True)
class Asked:
    """What a server is asked for besides its recipe."""

    host: str
    """The address to listen on."""
    port: int
    """0: a free one."""
    keys: tuple[str, ...]
    """Of which every request must bear one; empty: a random one is made. Each has sessions of its own."""
    keys_from: str
    """What the user gives them with."""
    name: str | None
    """Of the model, for clients; None: that of its folder."""
    max_context: int | None
    """Prompt and answer tokens of a request; see `_context` for the default."""
    check: bool
    """Whether a few tokens of an engine are compared with what training computes, before it serves."""
    fetch_images: bool
    """Whether images that clients name by their URLs are fetched."""
    spelled: Callable[[str, object], str]
    """Writes an option and its value as the user has them: `--max-context 80`, `max_context=80`."""


@dataclass(frozen=True)
class Serving:
    """What a client needs."""

    base_url: str
    """What clients call, with `/v1`."""
    model: str
    """The name that requests give."""
    api_key: str
    """A key that is accepted."""
    engine: str
    """What generates, as its engines describe themselves."""


# As `caught`: inside, what it was given may be called, on the event loop, to end the server.
Stopping = Callable[[Callable[[], object]], AbstractContextManager[None]]


def serve(
    loaded: LoadedConfig,
    asked: Asked,
    *,
    ready: Callable[[Serving], None],
    note: Callable[[str], None],
    stopping: Stopping = caught,
) -> None:
    """Serves the recipe's model until it is told to stop (default: by SIGINT or SIGTERM); every process that
    was started has ended then.

    ready: called once. note: called with each line of `_unread` and of the template's faults. Raises
    ConfigError, DataError; WeightSyncError where `check` finds another model; RolloutError also when the last
    engine has died for good.
    """
    for line in _unread(loaded):
        note(line)
    check_installed()
    _check(loaded.config, asked)
    if asked.max_context is not None and asked.max_context < 2:
        said = asked.spelled("max_context", asked.max_context)
        raise ConfigError(f"{said} leaves no room for a prompt and an answer; at least 2")
    config = complete_model(settled(loaded.config))
    with located(loaded):
        spec = _spec(config, _context(loaded, asked))
    if asked.check:
        check_answers(config)
    run_loop(_serve(config, asked, spec, ready, note, stopping), config.cluster.hang_seconds)


def _context(loaded: LoadedConfig, asked: Asked) -> int:
    """Returns the prompt and answer tokens of a request: those asked for, else those that the recipe trains
    with. Where it does not say, the model may have fewer positions than our defaults add up to. Raises
    ConfigError for more than it has.
    """
    config, keys = loaded.config, ("data.max_prompt_tokens", "rollout.max_tokens")
    said = asked.max_context is None and any(key in loaded.origins for key in keys)
    check_model(config, context=said)
    model = load_model_config(model_source(config))
    if asked.max_context is not None:
        text = f"{asked.spelled('max_context', asked.max_context)} is asked for"
        check_positions(model, asked.max_context, text, f"lower it, {STRETCH}")
        return asked.max_context
    usual = config.data.max_prompt_tokens + config.rollout.max_tokens
    return min(usual, longest_context(model) or usual)


def _unread(loaded: LoadedConfig) -> list[str]:
    """Returns a line for each key of a recipe's rollout section that `rondo serve` does not read, with the
    reason. A recipe's other sections are a trainer's. Raises ConfigError for such a key that was set for this
    server: on the command line, or from Python.
    """
    if loaded.config.cluster.devices > 1:
        raise ConfigError(
            f"cluster.devices={loaded.config.cluster.devices}: `rondo serve` uses one device; set "
            "cluster.devices=1 (rollout.replicas are several engines on it, rollout.engine.tensor_parallel "
            "one engine on several)"
        )
    notes: dict[str, str] = {}
    for key, where in changed_keys(loaded):
        known = next((known for known in WITHOUT_MEANING if f"{key}.".startswith(f"{known}.")), None)
        reason = f": {WITHOUT_MEANING[known]}" if known else ""
        if known is not None:
            notes.setdefault(known, f"{where}: {known} has no meaning for `rondo serve`{reason}")
        is_set = where.startswith(("argument ", "setting "))
        if is_set and (known or not key.startswith(("model.", "rollout.", *READ))):
            raise ConfigError(f"{where}: {key} has no meaning for `rondo serve`{reason}; remove it")
    return list(notes.values())


def _check(config: Config, asked: Asked) -> None:
    check_chosen(asked.keys, asked.keys_from, asked.host, asked.spelled("host", asked.host))
    if config.trainer.warm_start is not None:
        raise ConfigError(
            "the recipe's model comes from trainer.warm_start and exists after training only: serve the "
            "folder that the run exports (runs/…/export), or set model.path and trainer.warm_start=null"
        )


def _spec(config: Config, max_context: int) -> EngineSpec:
    engine, device = config.rollout.engine, engine_device(config)
    platform_of(device).check_here()
    check_engine(engine.name, engine.options, device=device, python=engine.python)
    threads = config.cluster.threads or max(1, (os.cpu_count() or 1) // config.rollout.replicas)
    spec = engine_spec(config, device, threads, max_context)
    check_engine_spec(spec)
    return spec


async def _serve(
    config: Config,
    asked: Asked,
    spec: EngineSpec,
    ready: Callable[[Serving], None],
    note: Callable[[str], None],
    stopping: Stopping,
) -> None:
    rollout, tokenizer = config.rollout, open_tokenizer(config)
    model, keys = asked.name or _name(config), asked.keys or (secrets.token_urlsafe(24),)
    replicas = Replicas(
        spec,
        count=rollout.replicas,
        own_process=runs_in_own_process(rollout),
        bucket_bytes=rollout.bucket_bytes,
    )

    async def reload() -> None:
        await replicas.router.pause()
        await asyncio.to_thread(_load, replicas, spec)
        await replicas.router.resume()

    files = tempfile.TemporaryDirectory(prefix="rondo-serve-")
    try:
        _load(replicas, spec)
        kind = next(iter(replicas.router.engines().values())).capabilities()
        endpoint = Endpoint(
            tokenizer,
            model=model,
            max_context=spec.max_context,
            sessions=Sessions(MAX_SESSIONS),
            generate=replicas.router.generate,
            defaults=sampling_params(config, tokenizer),
            max_pending=rollout.replicas * rollout.max_concurrent + MAX_WAITING,
            deadline_seconds=rollout.deadline_seconds,
            vocab_size=load_model_config(spec.source).get_text_config().vocab_size,
            about={"engine": kind.engine, "engine_version": kind.engine_version},
            load=replicas.router.load,
            images=_client_images(spec, tokenizer, config.model.images.per_prompt, asked, files.name),
        )
        for line in endpoint.continuation.notes():
            note(line)
        server, stop = HttpServer(endpoint, *keys), asyncio.Event()
        base_url = await server.start(asked.host, asked.port)
        try:
            with stopping(stop.set):
                # An engine that died and was started again gets its weights.
                async with Mender(replicas.restarted, reload) as mender:
                    ready(Serving(base_url, model, keys[0], replicas.describe()))
                    await mender.served(stop.wait())
        finally:
            await server.close()
    finally:
        replicas.close()
        files.cleanup()


def _client_images(
    spec: EngineSpec, tokenizer: Any, most: int | None, asked: Asked, folder: str
) -> ClientImages | None:
    """Returns how images of requests are read, and tells the tokenizer what stands for one; None: the model
    reads none. Raises ConfigError where they should be fetched for such a model.
    """
    reader = image_reader(spec.source)
    if reader is not None:
        reader.tell(tokenizer)
        return ClientImages(reader, Path(folder), most or MOST_IMAGES, asked.fetch_images)
    if asked.fetch_images:
        said = asked.spelled("fetch_images", True)
        raise ConfigError(f"{said}: the model reads no images; leave it out")
    return None


def _name(config: Config) -> str:
    path = config.model.path
    return Path(path).resolve().name if path and Path(path).is_dir() else path or "policy"


def _load(replicas: Replicas, spec: EngineSpec) -> None:
    """Sends the model's weights, as version 0, to all engines; they must be idle or paused."""
    module = build_model(spec.source, getattr(torch, spec.dtype))
    sink = replicas.sink()
    sink.begin(0)
    for name, tensor in (*module.named_parameters(), *persistent_buffers(module)):  # tied ones once
        sink.receive(name, tensor.detach())
    sink.commit(0)
    replicas.loaded(0)
