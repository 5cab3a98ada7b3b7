"""Using a model without training it: evaluation, generation, export of a checkpoint."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rondo.chat import encode_prompt, stop_token_ids
from rondo.checkpoint import CheckpointStore
from rondo.config import (
    Config,
    DataConfig,
    LoadedConfig,
    LocalBackendConfig,
    ModelConfig,
    RolloutConfig,
    load,
)
from rondo.controller import Cluster, WorkerGroup, start_cluster
from rondo.data import index_columns
from rondo.errors import CheckpointError, ConfigError
from rondo.models import load_tokenizer
from rondo.trainers.commands.check import check_rl
from rondo.trainers.loop import EvaluationResult, Mender, evaluate, restarted
from rondo.trainers.program import (
    complete_model,
    create_model,
    create_rollout,
    load_prompts,
    on_one_pool,
    one_storage,
    open_tokenizer,
    settled,
)
from rondo.types import Prompt, SamplingParams
from rondo.workers import ActorWorker, RolloutWorker


def evaluate_model(loaded: LoadedConfig) -> EvaluationResult:
    """Answers of model.path to data.eval, as trainer.evaluation says, on all devices whatever cluster.pools
    says. Raises ConfigError when there are no prompts.
    """
    if loaded.config.rollout.recorded is not None:
        raise ConfigError("rollout.recorded is for `rondo train`; an evaluation generates: set it to null")
    loaded = dataclasses.replace(loaded, config=settled(loaded.config))
    check_rl(loaded)
    config = on_one_pool(complete_model(loaded.config))
    if not config.data.eval:
        raise ConfigError("data.eval is empty: there are no prompts to evaluate on; add a source to it")
    return asyncio.run(_evaluate(config))


async def _evaluate(config: Config) -> EvaluationResult:
    prompts = load_prompts(config)
    async with await start_cluster(config.cluster) as cluster:
        rollout = await _engines(cluster, config, prompts.max_context)

        async def load() -> None:
            """At the start, and for an engine that was started again."""
            await rollout.call(RolloutWorker.pause)
            await rollout.call(RolloutWorker.load_weights, 0)
            await rollout.call(RolloutWorker.resume)

        await load()
        async with Mender(lambda: restarted(rollout), load) as mender:
            work = evaluate(rollout, prompts.eval, config.trainer.evaluation, prompts.sampling)
            return await mender.served(work)


async def _engines(cluster: Cluster, config: Config, max_context: int) -> WorkerGroup:
    """The engines beside the actor whose weights they serve."""
    await create_model(cluster, "actor", config)
    share = one_storage(config)
    return await create_rollout(cluster, config, max_context, share=share, threads=cluster.threads)


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
) -> list[dict[str, Any]]:
    """Completions by the native engine: mappings with prompt, text, token_ids, log_probs, finish_reason."""
    if not prompts:
        raise ConfigError("no prompt was given: pass one as an argument or on standard input")
    tokenizer = load_tokenizer(model)
    encoded = [encode_prompt(tokenizer, prompt, system=system) for prompt in prompts]
    config = Config(
        model=ModelConfig(path=model),
        data=DataConfig(max_prompt_tokens=max(len(ids) for ids in encoded)),
        rollout=RolloutConfig(n=n, max_tokens=max_tokens),  # how to sample goes with each request
        trainer=dataclasses.replace(Config().trainer, seed=seed),
    )
    sampling = SamplingParams(
        max_tokens, temperature=temperature, top_p=top_p, stop_token_ids=stop_token_ids(tokenizer, ())
    )
    rows = [Prompt(i, f"prompt/0/{i}", "prompt", ids) for i, ids in enumerate(encoded)]
    return asyncio.run(_generate(settled(config), rows, prompts, sampling, n))


async def _generate(
    config: Config, rows: Sequence[Prompt], texts: Sequence[str], sampling: SamplingParams, n: int
) -> list[dict[str, Any]]:
    async with await start_cluster(config.cluster) as cluster:
        rollout = await _engines(cluster, config, config.data.max_prompt_tokens + sampling.max_tokens)
        await rollout.call(RolloutWorker.load_weights, 0)
        await rollout.call(RolloutWorker.resume)
        refs = await asyncio.gather(
            *(
                rollout.call_rank(
                    0, RolloutWorker.run_unscored, row, sampling, n, "generate", keep=index_columns()
                )
                for row in rows
            )
        )
        batches = [await ref.fetch() for ref in refs]
    tables = [batch.table.to_pylist() for batch in batches]
    return [
        {
            "prompt": text,
            "text": row["text"],
            "token_ids": row["response_ids"],
            "log_probs": row["rollout_log_probs"],
            "finish_reason": row["finish_reason"],
        }
        for text, table in zip(texts, tables, strict=True)
        for row in table
    ]


def export_checkpoint(run: str, output: str, step: int | None = None) -> int:
    """Write the actor of a checkpoint of `run` to `output` with its tokenizer; returns the step.

    Raises CheckpointError when the run has no such checkpoint, ConfigError when `output` is in use.
    """
    target = Path(output)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{output}: exists and is not an empty folder; choose another place to export to")
    if not (Path(run) / "config.yaml").is_file():
        raise CheckpointError(f"{run}: not a run folder (no config.yaml)")
    config = load([str(Path(run) / "config.yaml")]).config
    if config.trainer.warm_start is not None:
        warm = str(Path(run) / "warm_start" / "export")
        config = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, path=warm, tokenizer=warm),
            trainer=dataclasses.replace(config.trainer, warm_start=None),
        )
    config = on_one_pool(config)
    config = dataclasses.replace(
        config, cluster=dataclasses.replace(config.cluster, backend=LocalBackendConfig(), devices=1)
    )
    config = complete_model(config)
    store = CheckpointStore(Path(run) / "checkpoints", keep=config.checkpoint.keep)
    checkpoint = store.latest() if step is None else store.open(step)
    if checkpoint is None:
        raise CheckpointError(
            f"{run}: has no checkpoint; set checkpoint.every in the recipe, or use its export/ folder"
        )
    asyncio.run(_export(config, str(checkpoint.path / "actor"), output))
    return int(checkpoint.step)


async def _export(config: Config, checkpoint: str, output: str) -> None:
    async with await start_cluster(config.cluster) as cluster:
        actor = await create_model(cluster, "actor", config)
        await actor.call(ActorWorker.load, checkpoint)
        await actor.call(ActorWorker.export, output)
    open_tokenizer(config).save_pretrained(output)
