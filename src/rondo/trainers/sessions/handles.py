"""The roles of a hand-written program, with the paper's verbs. Each handle wraps a worker group and calls its
methods by name; what a call needs besides the batch (mini-batches, loss weights, publishing) is planned here.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from rondo.algorithms import actor_loss
from rondo.algorithms.objective import ActorLoss
from rondo.batch import ROW_ID, BatchRef
from rondo.config.schema import Config, RewardModelConfig
from rondo.controller import Cluster, WorkerGroup
from rondo.data.rows import INDEX_COLUMNS, SCORE_PREFIX, is_scored
from rondo.errors import ConfigError, DataError, TrainError
from rondo.planning.packing import UNIT_COLUMN
from rondo.rewards import check_dropped_share
from rondo.tracking import Timers
from rondo.trainers.loop.buffer import failures
from rondo.trainers.loop.engine_side import restarted
from rondo.trainers.loop.publish import Canary
from rondo.trainers.loop.routes import Route
from rondo.trainers.loop.waiting import attended
from rondo.trainers.program.inputs import Prompts
from rondo.trainers.program.plan import Learner
from rondo.trainers.program.stages import PreparationStage, model_scores, with_model_reward
from rondo.trainers.program.update import (
    Pretraining,
    mini_batches,
    update_actor,
    update_learner,
    with_actor_weights,
)
from rondo.types import Prompt, StepStats, request_seed
from rondo.workers.models import ActorWorker, CriticWorker, ModelWorker, ReferenceWorker
from rondo.workers.reward import RewardWorker
from rondo.workers.rollout import RolloutWorker, runs_in_own_process

T = TypeVar("T")
POLICY, ON_POLICY = "policy", "on_policy"
BATCHES_KEPT = 64  # of prompts, for the reward functions of rows that are scored later


@dataclass
class Run:
    """What the handles of one program share. step: trainer steps done; version: updates of the actor so far;
    prompts: the last ones, by id, for the reward functions; stats: metrics of the step so far; corrected: the
    program has made a rollout correction.
    """

    config: Config
    cluster: Cluster
    data: Prompts
    timers: Timers = field(default_factory=Timers)
    step: int = 0
    version: int = 0
    prompts: dict[str, Prompt] = field(default_factory=dict)
    stats: StepStats = field(default_factory=StepStats)
    corrected: bool = False

    def remember(self, prompts: Sequence[Prompt]) -> None:
        """Keep the last prompts that were generated from."""
        self.prompts |= {prompt.prompt_id: prompt for prompt in prompts}
        kept = max(len(prompts), BATCHES_KEPT * self.config.data.batch_size)
        self.prompts = dict(list(self.prompts.items())[-kept:])


def actor_losses(config: Config) -> dict[str, ActorLoss]:
    """The actor's loss with `old_log_probs` read, and with them taken from the update's own forward."""
    return {name: actor_loss(config.algorithm, on_policy=name == ON_POLICY) for name in (POLICY, ON_POLICY)}


class Actor:
    """The policy: a training engine and the generation engines that serve its weights."""

    def __init__(
        self,
        run: Run,
        config: Config,
        model: WorkerGroup,
        rollout: WorkerGroup,
        route: Route,
        canary: Canary,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        """config: the run's, with the program's policy loss and what algorithm.rollout_correction became.
        route, canary: how the weights get to the generation engines, and how that is checked. warn: told of
        an engine that was started again.
        """
        self.model, self.rollout = model, rollout
        self._run, self._config, self._route, self._canary = run, config, route, canary
        self._warn, self._changing = warn, asyncio.Lock()  # held while the engines' weights change
        self._losses = actor_losses(config)
        self._preparation = PreparationStage.of(config.algorithm)

    async def generate_sequences(
        self, prompts: Sequence[Prompt], *, n: int | None = None, do_sample: bool = True
    ) -> BatchRef:
        """n responses (default rollout.n) to each prompt, or its one greedy response with do_sample=False.

        Rows are in the order of `prompts`, the samples of a prompt next to each other. The noise of a sample
        depends on seed, prompt and sample index alone.
        """
        run, sampling = self._run, self._run.data.sampling
        if not do_sample:
            sampling = dataclasses.replace(sampling, temperature=0.0)
        n = (n or self._config.rollout.n) if do_sample else 1
        purpose = "train" if do_sample else "greedy"
        run.remember(prompts)
        with run.timers.phase("generate"):
            calls = asyncio.gather(
                *(
                    self.rollout.call_rank_for_ref(
                        i % self.rollout.size,
                        RolloutWorker.run_unscored,
                        prompt,
                        sampling,
                        n,
                        purpose,
                        index_columns=INDEX_COLUMNS,
                    )
                    for i, prompt in enumerate(prompts)
                )
            )
            groups = await self.served(calls)
        batch = BatchRef.concat(groups)
        run.stats.add_sum("rollout/generated_tokens", float(batch.index.scalars("response_length").sum()))
        return batch

    async def served(self, work: Awaitable[T]) -> T:
        """The result of `work`, which waits for engines. One whose process died and was started again
        meanwhile has no weights, and whoever waits for it would wait for ever: it gets the current ones.
        """
        if not runs_in_own_process(self._config.rollout):
            return await work
        return await attended(work, lambda: restarted(self.rollout), self._mend)

    async def _mend(self, news: str) -> None:
        self._warn(news)
        async with self._changing:  # not in the middle of an update, after which all engines get weights
            if sum(await self.rollout.call(RolloutWorker.wants_weights)):
                await self.rollout.call(RolloutWorker.pause)
                await self._route.load(self._run.version)
                await self.rollout.call(RolloutWorker.resume)

    async def compute_log_prob(self, batch: BatchRef, *, also: tuple[str, ...] = ()) -> BatchRef:
        """old_log_probs: of the response tokens under the policy as it is now. also: entropy, sum_p_squared,
        under their own names.
        """
        with self._run.timers.phase("log_prob"):
            return await self.model.call(ActorWorker.compute_log_prob, batch, also=also)  # type: ignore[no-any-return]

    async def update_actor(self, batch: BatchRef, *, pretrain: Pretraining | None = None) -> StepStats:
        """All optimizer steps of one trainer step (actor.epochs × mini-batches), then the new weights are
        served as the next version. pretrain: conversations whose language-model loss joins every mini-batch.

        Reads advantages and what the policy loss names. Without old_log_probs they are the current ones,
        detached; that is exact, and allowed, where one optimizer step follows on rows of the current version.
        """
        run, config = self._run, self._config
        if (pretrain is None) != (config.algorithm.pretrain_coef == 0):
            raise ConfigError(
                "algorithm.pretrain_coef and update_actor(…, pretrain=…) belong together: set both, or none"
            )
        self._check_corrected(batch)
        which = self._which_loss(batch)
        loss = self._losses[which]
        batch = batch.with_index(
            {"mini_batch": mini_batches(batch, config.actor.mini_batch_size, config, run.step)}
        )
        if self._preparation is not None:
            seed = request_seed(config.trainer.seed, "prepare", run.step)
            batch = await self._preparation(batch, run.cluster, seed)
        batch = with_actor_weights(batch, config, kl_coef=0.0)
        with run.timers.phase("update_actor"):
            async with self._changing, self._publishing():
                return await update_actor(
                    self.model, batch, loss, config, run.step, run.cluster, pretrain, name=which
                )

    def _check_corrected(self, batch: BatchRef) -> None:
        correction = self._config.algorithm.rollout_correction
        if correction is None or not (correction.importance or correction.reject):
            return
        if "rollout_weights" not in batch.columns if correction.importance else not self._run.corrected:
            raise TrainError(
                "update_actor: the samples are another policy's (algorithm.rollout_correction), and nothing "
                "has corrected for that; call session.compute_correction(batch) before the first update "
                "(session.compute_advantages does it by itself), or set algorithm.rollout_correction=null"
            )

    def _which_loss(self, batch: BatchRef) -> str:
        if "old_log_probs" in batch.columns:
            return POLICY
        actor, groups = self._config.actor, self._config.data.batch_size
        versions = batch.index.scalars("oldest_version")
        fresh = bool((versions[versions >= 0] == self._run.version).all())
        if fresh and actor.epochs == 1 and actor.mini_batch_size in (None, groups):
            return ON_POLICY
        raise TrainError(
            "update_actor: the batch has no old_log_probs, and several optimizer steps are taken on it, or "
            "an older policy sampled it; call actor.compute_log_prob(batch) before the first update"
        )

    @asynccontextmanager
    async def _publishing(self) -> AsyncIterator[None]:
        """The update runs inside; then every engine serves the next version. Engines that share the weights
        stand still meanwhile, and so do those that rest (rollout.sleep); the others go on, and change over
        between two tokens.
        """
        sleep = self._config.rollout.sleep
        if sleep or not self._route.moves:
            await self.rollout.call(RolloutWorker.pause)
        if sleep:
            await self.rollout.call(RolloutWorker.enter, "train")
        yield
        if self._route.moves:
            await self.rollout.call(RolloutWorker.pause)
        (await self._route.load(self._run.version + 1)).count(self._run.stats)
        self._run.version += 1
        if sleep:
            await self.rollout.call(RolloutWorker.enter, "generate")
        await self.rollout.call(RolloutWorker.resume)
        if self._route.moves:
            gap = await self._canary.check(self._run.version)
            self._run.stats.add_max("weights/canary_gap", gap)


class Critic:
    """A value function, of the reward (role critic) or of the cost (cost_critic)."""

    def __init__(self, run: Run, learner: Learner, model: WorkerGroup) -> None:
        self.model, self._run, self._learner = model, run, learner

    async def compute_values(self, batch: BatchRef) -> BatchRef:
        """values (cost_values): of the state before each response token."""
        with self._run.timers.phase("values"):
            return await self.model.call(CriticWorker.compute_values, batch)  # type: ignore[no-any-return]

    async def update_critic(self, batch: BatchRef) -> StepStats:
        """All optimizer steps of one trainer step (critic.epochs × mini-batches) on values and returns
        (cost_values, cost_returns).
        """
        learner, config, step = self._learner, self._run.config, self._run.step
        column = f"{learner.role}_mini_batch"
        batch = batch.with_index({column: mini_batches(batch, learner.section.mini_batch_size, config, step)})
        with self._run.timers.phase(f"update_{learner.role}"):
            return await update_learner(self.model, learner, batch, config, step)


class Reference:
    """The frozen policy that a KL term measures against."""

    def __init__(self, run: Run, model: WorkerGroup) -> None:
        self.model, self._run = model, run

    async def compute_log_prob(self, batch: BatchRef) -> BatchRef:
        """ref_log_probs: of the response tokens."""
        with self._run.timers.phase("ref_log_prob"):
            return await self.model.call(ReferenceWorker.compute_ref_log_prob, batch)  # type: ignore[no-any-return]

    async def follow(self, actor: Actor) -> None:
        """Become the policy as it is now (SPPO, SPIN). Both must be on the same devices."""
        await self.model.call(ModelWorker.copy_parameters_from, actor.model.role)


class Reward:
    """What is trained for: reward functions, and reward models beside them."""

    def __init__(
        self,
        run: Run,
        scorers: WorkerGroup | None,
        models: Sequence[tuple[RewardModelConfig, WorkerGroup]],
    ) -> None:
        self._run, self._scorers, self._models = run, scorers, models

    async def compute_reward(self, batch: BatchRef) -> BatchRef:
        """reward, and score/<name> of every function and model. Rows whose scoring failed are gone (see
        reward.on_error); RewardError when they are more than reward.max_dropped_share.
        """
        with self._run.timers.phase("reward"):
            if self._scorers is not None:
                batch = self._only_scored(
                    batch.with_index(await _score(self._run, self._scorers, batch), True)
                )
            for model, group in self._models:
                batch = await with_model_reward(group, model, batch)
        return batch

    def _only_scored(self, batch: BatchRef) -> BatchRef:
        failed = failures(batch)
        check_dropped_share(failed, len(batch), self._run.config.reward.max_dropped_share)
        self._run.stats.add_mean("reward/failed_share", len(failed), len(batch))
        return batch.take(np.flatnonzero(is_scored(batch.index))) if failed else batch


class Cost:
    """What a constraint bounds: one reward function, or one reward model, whose score is the cost."""

    def __init__(self, run: Run, name: str, judge: WorkerGroup) -> None:
        self._run, self._name, self._judge = run, name, judge

    async def compute_cost(self, batch: BatchRef) -> BatchRef:
        """score/<name>, the cost of each response. The reward stays as it is."""
        column = SCORE_PREFIX + self._name
        with self._run.timers.phase("cost"):
            if self._judge.worker_class is RewardWorker:
                scores = (await _score(self._run, self._judge, batch))[column]
            else:
                scores = await model_scores(self._judge, batch)
        return batch.with_index({column: scores}, replace=True)


def per_group(batch: BatchRef, other: BatchRef, column: str) -> np.ndarray:
    """For each row of `batch` the value of `column` in the row of `other` with the same group_id (one row per
    group, such as greedy answers): float32 [B]. Raises DataError for a group without that row.
    """
    values = dict(zip(other.index.scalars("group_id"), other.index.scalars(column), strict=True))
    groups = batch.index.scalars("group_id")
    missing = sorted(set(groups.tolist()) - set(values))
    if missing:
        raise DataError(f"prompt group {missing[0]} has no row to take {column!r} from")
    return np.array([values[group] for group in groups], np.float32)


async def _score(run: Run, group: WorkerGroup, batch: BatchRef) -> dict[str, np.ndarray]:
    """The columns that `RewardWorker.compute_reward` gives, in the order of the batch."""
    ids = batch.index.scalars("prompt_id")
    unknown = sorted(set(ids) - set(run.prompts))
    if unknown:
        raise DataError(f"the prompt {unknown[0]} is not among the last ones: score its rows earlier")
    prompts = {prompt_id: run.prompts[prompt_id] for prompt_id in dict.fromkeys(ids)}
    together = batch.with_index({UNIT_COLUMN: batch.index.scalars("group_id")}, replace=True)
    parts = await group.call(RewardWorker.compute_reward, together, prompts)
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    at = {row: i for i, row in enumerate(columns.pop(ROW_ID))}
    order = [at[row] for row in batch.row_ids]
    return {name: column[order] for name, column in columns.items()}
