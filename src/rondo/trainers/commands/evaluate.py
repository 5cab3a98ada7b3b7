"""Answers of a model that is not trained: scored ones to the prompts of a recipe, or to any prompts."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any

import numpy as np

from rondo.chat import stop_token_ids
from rondo.config import Config, DataConfig, LoadedConfig, load
from rondo.config.schema import ENGINES
from rondo.controller import WorkerGroup, start_cluster
from rondo.core.errors import ConfigError
from rondo.core.types import Prompt, SamplingParams
from rondo.data import index_columns
from rondo.models import check_positions, load_model_config
from rondo.trainers.commands.check import check_rl
from rondo.trainers.commands.check_machine import check_model
from rondo.trainers.commands.event_loop import read_beside, run_loop
from rondo.trainers.commands.recipe import in_folder, settled_recipe
from rondo.trainers.loop import Canary, EvaluationResult, Mender, evaluate, restarted, what_to_send
from rondo.trainers.program import (
    complete_model,
    create_model,
    create_rollout,
    load_prompts,
    model_source,
    on_one_pool,
    open_tokenizer,
    prompts_that_show,
    settled,
)
from rondo.workers import RolloutWorker


def evaluate_model(loaded: LoadedConfig) -> EvaluationResult:
    """Returns scored answers of model.path to data.eval, as trainer.evaluation says, generated on all devices
    whatever cluster.pools says. Raises ConfigError when there are no prompts.
    """
    if loaded.config.rollout.recorded is not None:
        raise ConfigError("rollout.recorded is for `rondo train`; an evaluation generates: set it to null")
    loaded = settled_recipe(loaded)
    with ExitStack() as tools:
        check_rl(loaded, tools)
        config = on_one_pool(complete_model(loaded.config))
        if not config.data.eval:
            raise ConfigError("data.eval is empty: there are no prompts to evaluate on; add a source to it")
        return run_loop(_evaluate(config), config.cluster.hang_seconds)


async def _evaluate(config: Config) -> EvaluationResult:
    with tempfile.TemporaryDirectory(prefix="rondo-") as folder:  # no run is begun, or gone on with
        config = in_folder(config, folder)
        prompts = await read_beside(partial(load_prompts, config))
        async with _serving(config, prompts.eval[0], prompts.sampling) as (rollout, mender):
            work = evaluate(rollout, prompts.eval, config.trainer.evaluation, prompts.sampling)
            return await mender.served(work)


@asynccontextmanager
async def _serving(
    config: Config, prompt: Prompt, sampling: SamplingParams
) -> AsyncIterator[tuple[WorkerGroup, Mender]]:
    """Engines that serve the model's weights, also once they had to be started again, and compute what the
    trainer does behind `prompt`.
    """
    async with await start_cluster(config.cluster) as cluster:
        actor = await create_model(cluster, "actor", config)
        rollout = await create_rollout(cluster, config, actor.devices, trains=False)

        async def load() -> None:
            await rollout.call(RolloutWorker.pause)
            await rollout.call(RolloutWorker.load_weights, 0, await what_to_send(rollout, config))
            await rollout.call(RolloutWorker.resume)

        await load()
        async with Mender(lambda: restarted(rollout), load) as mender:
            canary = Canary(actor, rollout, config, prompt, lambda version: sampling, long=False)
            await mender.served(canary.check(0))
            yield rollout, mender


def check_answers(config: Config) -> None:
    """Raises WeightSyncError where an engine of a (settled) configuration computes another model than
    training does: a family that it gets wrong, say. Engines and model are there for a moment only.
    """
    sampling = SamplingParams(8, temperature=config.rollout.temperature)
    model = load_model_config(model_source(config))
    stand_in = {getattr(model, f"{kind}_token_id", None) for kind in ("image", "video")}  # for nothing here
    tokens = np.array([token for token in range(18) if token not in stand_in][:16], np.int32)
    prompt = Prompt(0, "check/0/0", "check", tokens)
    data = DataConfig(max_prompt_tokens=len(prompt.token_ids))
    rollout = dataclasses.replace(config.rollout, max_tokens=sampling.max_tokens)
    config = dataclasses.replace(config, data=data, rollout=rollout)

    async def compare() -> None:
        async with _serving(config, prompt, sampling):
            pass

    run_loop(compare(), config.cluster.hang_seconds)


def generate(
    model: str,
    prompts: Sequence[str],
    *,
    n: int = 1,
    max_tokens: int = 256,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    system: str | None = None,
    chat_template_options: Mapping[str, Any] = {},
    engine: str = "native",
    images: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Returns completions: mappings with prompt, text, token_ids, log_probs, finish_reason. engine: as
    rollout.engine has it. images: files or URLs, of each prompt, as rows have them.
    """
    if not prompts:
        raise ConfigError("no prompt was given: pass one as an argument or on standard input")
    if engine not in ENGINES:
        raise ConfigError(f"--engine {engine}: there is no such engine; choose {', '.join(ENGINES)}")
    settings = {
        "model.path": json.dumps(model),
        "rollout.engine": engine,
        "rollout.n": n,
        "rollout.max_tokens": max_tokens,
        "rollout.temperature": temperature or 1.0,  # 0: greedy, which each request says
        "rollout.top_p": top_p,
        "trainer.seed": seed,
        "trainer.total_steps": 1,
    }
    config = load([], [f"{key}={value}" for key, value in settings.items()]).config
    with_options = dataclasses.replace(config.model, chat_template_options=chat_template_options)
    config = dataclasses.replace(config, model=with_options)
    check_model(config)
    tokenizer = open_tokenizer(config)
    rows = prompts_that_show(config, tokenizer, prompts, system, images)
    longest = max(len(row.token_ids) for row in rows)
    _check_room(config, longest)
    config = dataclasses.replace(config, data=DataConfig(max_prompt_tokens=longest))
    sampling = SamplingParams(
        max_tokens, temperature=temperature, top_p=top_p, stop_token_ids=stop_token_ids(tokenizer)
    )
    tables = run_loop(_generate(settled(config), rows, sampling), config.cluster.hang_seconds)
    return [
        {
            "prompt": text,
            "text": row["text"],
            "token_ids": row["response_ids"],
            "log_probs": row["rollout_log_probs"],
            "finish_reason": row["finish_reason"],
        }
        for text, table in zip(prompts, tables, strict=True)
        for row in table
    ]


def _check_room(config: Config, prompt: int) -> None:
    """Raises ConfigError where the model has no positions for the longest prompt and an answer to it."""
    answer = config.rollout.max_tokens
    asked = f"a prompt of {prompt} tokens + max_tokens={answer} is {prompt + answer} tokens"
    model = load_model_config(model_source(config))
    check_positions(model, prompt + answer, asked, "lower --max-tokens or shorten the prompt")


async def _generate(
    config: Config, prompts: Sequence[Prompt], sampling: SamplingParams
) -> list[list[dict[str, Any]]]:
    """Returns a table for each prompt, a row of it for each completion."""
    async with _serving(config, prompts[0], sampling) as (rollout, mender):
        calls = (
            rollout.call_rank(
                0,
                RolloutWorker.run_unscored,
                prompt,
                sampling,
                config.rollout.n,
                "generate",
                keep=index_columns(),
            )
            for prompt in prompts
        )
        refs = await mender.served(asyncio.gather(*calls))
        return [(await ref.fetch()).table.to_pylist() for ref in refs]
