"""The roles of a hand-written program, with the paper's verbs. Each handle wraps a worker group; what a call
needs besides the batch (mini-batches, loss weights, seeds) is planned by the stages of the built-in loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from rondo.algorithms import ActorLoss
from rondo.config import Config, FunctionConfig, RewardModelConfig
from rondo.controller import WorkerGroup
from rondo.core.batch import BatchRef
from rondo.core.columns import SCORE
from rondo.core.errors import ConfigError, DataError, TrainError
from rondo.core.types import Prompt, StepStats
from rondo.data import firsts, is_scored
from rondo.rewards import check_dropped_share
from rondo.trainers.loop import RLRun, failures
from rondo.trainers.program import (
    ActorWeights,
    Learner,
    LearnerUpdate,
    MiniBatches,
    PreparationStage,
    Pretraining,
    Prompts,
    RewardModelScores,
    Step,
    model_scores,
    update_actor,
)
from rondo.workers import ActorWorker, CriticWorker, ModelWorker, ReferenceWorker, RolloutWorker

Function = str | Callable[..., Any]
POLICY, ON_POLICY = "policy", "on_policy"


class SessionState(Protocol):
    """What handles ask of the session that made them: see `Session`, where each is explained."""

    config: Config
    data: Prompts
    corrected: bool

    @property
    def run(self) -> RLRun: ...

    @property
    def step(self) -> int: ...

    @property
    def step_state(self) -> Step: ...

    def generated(self, prompts: Sequence[Prompt]) -> BatchRef | None: ...

    def check_asked_once(self, prompts: Sequence[Prompt]) -> None: ...

    def check_published(self, verb: str) -> None: ...

    async def updated(self) -> None: ...


def actor_losses(config: Config) -> dict[str, ActorLoss]:
    """Returns the loss that reads `old_log_probs`, and the one that takes them from the update's forward."""
    needs_all = config.actor.router.balances
    return {
        name: ActorLoss(config.algorithm, on_policy=name == ON_POLICY, needs_all=needs_all)
        for name in (POLICY, ON_POLICY)
    }


class Actor:
    """The policy: a training engine and the generation engines that serve its weights."""

    def __init__(
        self, session: SessionState, config: Config, model: WorkerGroup, rollout: WorkerGroup
    ) -> None:
        """config: that of the run, with the program's policy loss and what rollout_correction became."""
        self.model = model
        self.rollout = rollout
        self._session = session
        self._config = config
        self._losses = actor_losses(config)
        self._preparation = PreparationStage.of(config.algorithm)

    async def generate_sequences(
        self, prompts: Sequence[Prompt], *, n: int | None = None, do_sample: bool = True
    ) -> BatchRef:
        """Returns n responses (default rollout.n) to each prompt, scored by reward.functions; or its one
        greedy response with do_sample=False. Rows whose episode or score failed are gone (see
        reward.on_error); RewardError when they are more than reward.max_dropped_share.

        Rows are in the order of `prompts`, the samples of a prompt next to each other. The noise of a sample
        depends on seed, prompt and sample index alone, so a prompt that was sampled under these weights
        before is a TrainError. What `session.prompts()` yields was generated while the program was busy
        (trainer.max_staleness); other prompts, or another n, are generated here and now.
        """
        session, run = self._session, self._session.run
        if do_sample:
            session.check_asked_once(prompts)
        ready = session.generated(prompts) if do_sample and n in (None, self._config.rollout.n) else None
        if ready is not None:
            return run.scored(ready, session.step_state.stats)
        session.check_published("generate_sequences")
        sampling = session.data.sampling
        if not do_sample:
            sampling = replace(sampling, temperature=0.0)
        number = (n or self._config.rollout.n) if do_sample else 1
        purpose = "train" if do_sample else "greedy"
        calls = asyncio.gather(
            *(
                self.rollout.call_rank(
                    i % self.rollout.size,
                    RolloutWorker.run_group,
                    prompt.lent(),
                    sampling,
                    number,
                    purpose=purpose,
                    keep=run.side.index_columns,
                )
                for i, prompt in enumerate(prompts)
            )
        )
        with run.clock.phase("generate"):
            rows = BatchRef.concat([group for group, _ in await run.weights.mender.served(calls)])
        failed, stats = failures(rows), session.step_state.stats
        trajectories = len(firsts(rows.index))
        check_dropped_share(failed, trajectories, self._config.reward.max_dropped_share)
        stats.add_mean("reward/failed_share", len(failed), trajectories)
        stats.add_sum("rollout/generated_tokens", float(rows.index.scalars("response_length").sum()))
        return rows.take(np.flatnonzero(is_scored(rows.index)))

    async def compute_log_prob(self, batch: BatchRef, *, also: tuple[str, ...] = ()) -> BatchRef:
        """Adds old_log_probs, of the response tokens under the policy as it is now. also: entropy,
        sum_p_squared, under their own names.
        """
        with self._session.run.clock.phase("log_prob"):
            return await self.model.call(ActorWorker.compute_log_prob, batch, also=also)  # type: ignore[no-any-return]

    async def update_actor(self, batch: BatchRef, *, pretrain: Pretraining | None = None) -> StepStats:
        """Takes all optimizer steps of one trainer step (actor.epochs × mini-batches). The new weights are
        served as the next version when the step ends; outside of `session.prompts()`, at once. pretrain:
        conversations whose language-model loss joins every mini-batch.

        Reads advantages and what the policy loss names. Without old_log_probs they are the current ones,
        detached; that is exact, and allowed, where one optimizer step follows on rows of the current version.
        """
        session, run, config = self._session, self._session.run, self._config
        if (pretrain is None) != (config.algorithm.pretrain_coef == 0):
            raise ConfigError(
                "algorithm.pretrain_coef and update_actor(…, pretrain=…) belong together: set both, or none"
            )
        self._check_corrected(batch)
        which = self._which_loss(batch)
        step = replace(session.step_state, stats=StepStats())
        batch = await MiniBatches(config, ())(batch, step)
        batch = await ActorWeights(config)(batch, step)
        preparation = self._preparation
        if preparation is not None and not preparation.at_every_step:
            batch, preparation = await preparation(batch, step), None
        await run.let_engines_rest()
        await run.weights.hold(if_shared=True)
        with run.clock.phase("update_actor"):
            stats = await update_actor(
                self.model,
                batch,
                self._losses[which],
                config.actor.epochs,
                step,
                pretraining=pretrain,
                preparation=preparation,
                name=which,
            )
        await session.updated()
        return stats

    def _check_corrected(self, batch: BatchRef) -> None:
        correction = self._config.algorithm.rollout_correction
        if correction is None or not (correction.importance or correction.reject):
            return
        if correction.importance:
            corrected = "rollout_weights" in batch.columns
        else:
            corrected = self._session.corrected
        if not corrected:
            raise TrainError(
                "update_actor: the samples are another policy's (algorithm.rollout_correction), and nothing "
                "has corrected for that; call session.compute_correction(batch) before the first update "
                "(session.compute_advantages does it by itself), or set algorithm.rollout_correction=null"
            )

    def _which_loss(self, batch: BatchRef) -> str:
        if "old_log_probs" in batch.columns:
            return POLICY
        actor = self._config.actor
        groups = len(np.unique(batch.index.scalars("group_id")))
        of_a_step = actor.mini_batch_size or self._config.data.batch_size
        versions = batch.index.scalars("oldest_version")
        if (versions[versions >= 0] != self._session.step).any():
            why = "an older policy sampled it"
        elif actor.epochs > 1:
            why = f"each row is trained on {actor.epochs} times (actor.epochs)"
        elif groups > of_a_step:
            of = "actor.mini_batch_size" if actor.mini_batch_size else "data.batch_size"
            why = f"its {groups} prompt groups make several optimizer steps ({of}={of_a_step} groups each)"
        else:
            return ON_POLICY
        raise TrainError(
            f"update_actor: the batch has no old_log_probs, and {why}; call actor.compute_log_prob(batch) "
            "before the first update"
        )


@dataclass(frozen=True)
class Critic:
    """A value function, of the reward (role critic) or of the cost (cost_critic)."""

    session: SessionState
    """What all handles share."""
    learner: Learner
    """How it is trained."""
    model: WorkerGroup
    """Its worker group."""

    async def compute_values(self, batch: BatchRef) -> BatchRef:
        """Adds values (cost_values): of the state before each response token."""
        with self.session.run.clock.phase("values"):
            return await self.model.call(CriticWorker.compute_values, batch)  # type: ignore[no-any-return]

    async def update_critic(self, batch: BatchRef) -> StepStats:
        """Takes all optimizer steps of one trainer step (critic.epochs × mini-batches) on values and returns
        (cost_values, cost_returns).
        """
        session, config = self.session, self.session.config
        step = replace(session.step_state, stats=StepStats())
        update = LearnerUpdate(self.learner, config)
        with session.run.clock.phase(update.phase):
            await update(await MiniBatches(config, (self.learner,))(batch, step), step)
        return step.stats


@dataclass(frozen=True)
class Reference:
    """The frozen policy that a KL term measures against."""

    session: SessionState
    """What all handles share."""
    model: WorkerGroup
    """Its worker group."""

    async def compute_log_prob(self, batch: BatchRef) -> BatchRef:
        """Adds ref_log_probs, of the response tokens."""
        with self.session.run.clock.phase("ref_log_prob"):
            return await self.model.call(ReferenceWorker.compute_ref_log_prob, batch)  # type: ignore[no-any-return]

    async def follow(self, actor: Actor) -> None:
        """Becomes the policy as it is now (SPPO, SPIN). Both must be on the same devices."""
        await self.model.call(ModelWorker.copy_parameters_from, actor.model.role)


@dataclass(frozen=True)
class Reward:
    """What is trained for: reward functions, which score where rows are generated, and reward models."""

    session: SessionState
    """What all handles share."""
    models: Sequence[RewardModelConfig]
    """reward.models."""

    async def compute_reward(self, batch: BatchRef) -> BatchRef:
        """Adds the scores of reward.models to `reward`, and as score/<name>. What reward.functions say of a
        row is in it from the start.
        """
        with self.session.run.clock.phase("reward"):
            for model in self.models:
                batch = await RewardModelScores(model)(batch, self.session.step_state)
        return batch


@dataclass(frozen=True)
class Cost:
    """What a constraint bounds: the score of a reward function, or of a reward model."""

    session: SessionState
    """What all handles share."""
    name: str
    """The name of the reward function or model."""
    judge: WorkerGroup | None
    """That reward model; None: the score is a reward function's, there from the start."""

    async def compute_cost(self, batch: BatchRef) -> BatchRef:
        """Adds score/<name>, the cost of each response. The reward stays as it is."""
        if self.judge is None:
            return batch
        with self.session.run.clock.phase("cost"):
            scores = await model_scores(self.judge, batch)
        return batch.with_index({SCORE(self.name): scores}, replace=True)


def per_group(batch: BatchRef, other: BatchRef, column: str) -> np.ndarray:
    """Returns for each row of `batch` the value of `column` in the row of `other` with the same group_id (one
    row per group, such as greedy answers): float32 [B]. Raises DataError for a group without that row.
    """
    values = dict(zip(other.index.scalars("group_id"), other.index.scalars(column), strict=True))
    groups = batch.index.scalars("group_id")
    missing = sorted(set(groups.tolist()) - set(values))
    if missing:
        raise DataError(f"prompt group {missing[0]} has no row to take {column!r} from")
    return np.array([values[group] for group in groups], np.float32)


def chosen_function(
    default: FunctionConfig, function: Function | None, options: Mapping[str, Any]
) -> FunctionConfig:
    """Returns a function that a program names, with its options; without one, the recipe's with further
    options.
    """
    if function is None:
        return FunctionConfig(default.name, {**default.options, **options})
    return FunctionConfig(function, options)  # type: ignore[arg-type]
