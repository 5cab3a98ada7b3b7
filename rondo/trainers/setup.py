"""From a configuration to running worker groups: the one place where parts are wired together."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from rondo.algorithms import actor_loss, critic_loss
from rondo.chat import stop_token_ids
from rondo.config.schema import Config
from rondo.controller import Cluster, WorkerGroup
from rondo.data import PromptStream, eval_prompts
from rondo.errors import ConfigError
from rondo.models import load_tokenizer
from rondo.models.source import ModelSource
from rondo.trainers.advantages import AdvantageStage
from rondo.trainers.producers import Producer, stages
from rondo.types import Prompt, SamplingParams
from rondo.workers.models import ActorWorker, CriticWorker, ReferenceWorker
from rondo.workers.rollout import RolloutWorker


@dataclass(frozen=True)
class Schedule:
    """How long a run is. Batches straddle epochs; the last step may be short."""

    total_steps: int
    total_groups: int
    actor_optimizer_steps: int
    critic_optimizer_steps: int


@dataclass(frozen=True)
class Program:
    """What a configuration asks for, as pure decisions: which stages, which columns each update reads."""

    advantage: AdvantageStage
    before_advantages: tuple[Producer, ...]
    actor_columns: tuple[str, ...]
    critic_columns: tuple[str, ...]
    needs_critic: bool
    needs_reference: bool
    skip_zero_advantages: bool

    def describe(self) -> list[str]:
        """The dataflow of one step, for `config show` and the log."""
        lines = ["take complete prompt groups from the buffer"]
        lines += [f"{p.column} <- {p.role}.{p.method.__name__}" for p in self.before_advantages]
        lines.append("advantages <- controller")
        if self.needs_critic:
            lines.append("critic.update_critic reads " + ", ".join(self.critic_columns))
        lines.append("actor.update_actor reads " + ", ".join(self.actor_columns))
        lines.append("publish weights to the rollout engines")
        return lines


@dataclass
class Roles:
    """The worker groups of a run; critic and reference only where something reads their columns."""

    actor: WorkerGroup
    rollout: WorkerGroup
    critic: WorkerGroup | None = None
    reference: WorkerGroup | None = None


@dataclass(frozen=True)
class Prompts:
    """Data of a run. max_context: prompt and response tokens together."""

    train: PromptStream
    eval: list[Prompt]
    sampling: SamplingParams
    max_context: int


def model_source(config: Config, path: str | None = None) -> ModelSource:
    """path: overrides model.path (a critic's or reference's own)."""
    model = config.model
    return ModelSource(
        path=path or model.path,
        config=None if path else model.config,
        trust_remote_code=model.trust_remote_code,
        attention=model.attention,
        seed=config.trainer.seed,
    )


def tokenizer_name(config: Config) -> str:
    """Where the tokenizer comes from. Raises ConfigError when nothing says so."""
    name = config.model.tokenizer or config.model.path
    if name is None:
        raise ConfigError(
            "model.tokenizer is not set and there is no model.path to take it from; set model.tokenizer"
        )
    return name


def open_tokenizer(config: Config) -> Any:
    """The run's tokenizer, with the configured chat template."""
    model = config.model
    name = tokenizer_name(config)
    return load_tokenizer(name, model.chat_template, trust_remote_code=model.trust_remote_code)


def complete_model(config: Config) -> Config:
    """A model built from scratch fits its tokenizer: vocab_size and special token ids, where model.config
    has none.
    """
    model = config.model
    if model.config is None:
        return config
    tokenizer = open_tokenizer(config)
    found = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    size = model.config.get("vocab_size", len(tokenizer))
    if size < len(tokenizer):
        raise ConfigError(
            f"model.config.vocab_size={size}, but the tokenizer has {len(tokenizer)} tokens; raise it"
        )
    full = {**{key: value for key, value in found.items() if value is not None}, **model.config}
    return dataclasses.replace(config, model=dataclasses.replace(model, config=full))


def plan_program(config: Config) -> Program:
    """Derive the stages of a step from the functions chosen in the config."""
    algorithm = config.algorithm
    advantage = AdvantageStage(algorithm)
    mini = config.actor.mini_batch_size or config.data.batch_size
    one_update = mini == config.data.batch_size and config.actor.epochs == 1
    loss = actor_loss(algorithm, on_policy=one_update)
    loss_columns = tuple(c for c in loss.columns)
    read = {*advantage.columns, *loss_columns} - {"advantages", "returns", "loss_weight"}
    needs_critic = "values" in read
    if needs_critic and not advantage.writes_returns:
        raise ConfigError(
            f"algorithm.advantage.name={algorithm.advantage.name} reads no values, yet a loss does"
        )
    critic_columns = (
        ("prompt_ids", "response_ids", *critic_loss(algorithm).columns, "critic_mini_batch")
        if needs_critic
        else ()
    )
    return Program(
        advantage=advantage,
        before_advantages=stages(read, "the configured algorithm"),
        actor_columns=("prompt_ids", "response_ids", *loss_columns, "mini_batch"),
        critic_columns=critic_columns,
        needs_critic=needs_critic,
        needs_reference="ref_log_probs" in read,
        skip_zero_advantages=loss.zero_where_advantage_is_zero,
    )


def plan_schedule(config: Config, prompts_per_epoch: int) -> Schedule:
    """Steps, prompts and optimizer steps of the whole run."""
    batch = config.data.batch_size
    if config.trainer.total_steps is not None:
        steps, groups = config.trainer.total_steps, 1 << 62
    else:
        groups = math.ceil((config.trainer.epochs or 0) * prompts_per_epoch)
        steps = math.ceil(groups / batch)
    if steps < 1:
        raise ConfigError(
            "trainer.total_steps (or trainer.epochs) gives a run of 0 steps; ask for at least one"
        )
    per_step = math.ceil(batch / (config.actor.mini_batch_size or batch)) * config.actor.epochs
    critic_per_step = math.ceil(batch / (config.critic.mini_batch_size or batch)) * config.critic.epochs
    warmup = config.critic.warmup_steps if plan_program(config).needs_critic else 0
    return Schedule(steps, groups, max(1, steps - warmup) * per_step, steps * critic_per_step)


def load_prompts(config: Config) -> Prompts:
    """Read and tokenise the sources. Raises DataError or ConfigError naming file, row and column."""
    tokenizer = open_tokenizer(config)
    data, rollout = config.data, config.rollout
    train = PromptStream(
        data.train,
        tokenizer,
        max_prompt_tokens=data.max_prompt_tokens,
        overlong=data.overlong_prompts,
        shuffle=data.shuffle,
        seed=config.trainer.seed,
    )
    held_out = eval_prompts(
        data.eval,
        tokenizer,
        max_prompt_tokens=data.max_prompt_tokens,
        overlong=data.overlong_prompts,
        limit=config.trainer.evaluation.limit,
    )
    return Prompts(
        train, held_out, sampling_params(config, tokenizer), data.max_prompt_tokens + rollout.max_tokens
    )


def sampling_params(config: Config, tokenizer: object) -> SamplingParams:
    rollout = config.rollout
    return SamplingParams(
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop_token_ids=stop_token_ids(tokenizer, rollout.stop),
    )


def one_storage(config: Config) -> bool:
    """Trainer and sampler can use the same tensors: one rank, the same dtype, parameters that stay where
    they are.
    """
    same_dtype = (config.rollout.dtype or config.actor.compute_dtype) == config.actor.param_dtype
    return config.cluster.devices == 1 and same_dtype and not config.actor.offload_params


def shares_weights(config: Config) -> bool:
    """As `one_storage`, and synchronous: otherwise the sampler goes on with the old weights during an
    update.
    """
    return one_storage(config) and config.trainer.max_staleness == 0


async def create_rollout(
    cluster: Cluster, config: Config, max_context: int, *, share: bool, threads: int
) -> WorkerGroup:
    """The generation engines, next to the role `actor` whose weights they serve."""
    return await cluster.create_group(
        "rollout",
        RolloutWorker,
        kwargs={
            "source": model_source(config),
            "tokenizer": tokenizer_name(config),
            "chat_template": config.model.chat_template,
            "rollout": config.rollout,
            "reward": config.reward,
            "dtype": config.rollout.dtype or config.actor.compute_dtype,
            "max_context": max_context,
            "run_seed": config.trainer.seed,
            "threads": threads,
            "share": share,
        },
    )


async def create_roles(
    cluster: Cluster, config: Config, program: Program, schedule: Schedule, max_context: int
) -> Roles:
    """Start the worker groups; the order is actor, critic, reference, rollout (which shares or gathers the
    actor's).
    """
    mini = config.actor.mini_batch_size or config.data.batch_size
    one_update = mini == config.data.batch_size and config.actor.epochs == 1
    source = model_source(config)
    temperature = config.rollout.temperature
    actor = await cluster.create_group(
        "actor",
        ActorWorker,
        kwargs={
            "source": source,
            "engine": config.actor,
            "optimizer": config.actor.optimizer,
            "temperature": temperature,
            "total_optimizer_steps": schedule.actor_optimizer_steps,
            "losses": {"policy": actor_loss(config.algorithm, on_policy=one_update)},
        },
    )
    critic = reference = None
    if program.needs_critic:
        critic = await cluster.create_group(
            "critic",
            CriticWorker,
            kwargs={
                "source": model_source(config, config.critic.path),
                "engine": config.critic,
                "optimizer": config.critic.optimizer,
                "head": "value",
                "total_optimizer_steps": schedule.critic_optimizer_steps,
                "losses": {"critic": critic_loss(config.algorithm)},
            },
        )
    if program.needs_reference:
        reference = await cluster.create_group(
            "reference",
            ReferenceWorker,
            kwargs={
                "source": model_source(config, config.reference.path),
                "engine": config.reference,
                "temperature": temperature,
            },
        )
    share = shares_weights(config)
    rollout = await create_rollout(cluster, config, max_context, share=share, threads=cluster.threads)
    return Roles(actor, rollout, critic, reference)
