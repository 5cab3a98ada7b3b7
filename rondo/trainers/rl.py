"""The RL loop.

    prompts ──ticket──▶ feeder: episodes on the rollout workers, scored ──put──▶ buffer ──take──▶ this loop
       ▲ credits                                                                                    │
       └──────── advance ◀── publish: hold, update, load, evaluate, snapshot, release ◀─────────────┘

The feeder waits for credit (buffer.ticket), this loop waits for complete groups (buffer.take), a publish
waits for the feeder to hold. The trainer owns the policy version, the engine stamps every token with it, the
buffer learns it last. A step's metrics and rollouts are on disk before its checkpoint is renamed into place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rondo.algorithms import explained_variance, update_kl_coef
from rondo.batch import BatchRef
from rondo.checkpoint import ControllerState
from rondo.config.schema import Config
from rondo.controller import Cluster, WorkerGroup
from rondo.data.buffer import Buffer, Group, Ledger
from rondo.data.rows import SCORE_PREFIX, is_scored
from rondo.errors import TrainError
from rondo.planning.update import loss_weights, mini_batch_order, plan_mini_batches
from rondo.tracking import Timers
from rondo.trainers.canary import check_canary
from rondo.trainers.checkpoints import Checkpoints
from rondo.trainers.evaluation import EvaluationResult, evaluate
from rondo.trainers.feeder import EpisodeFeeder
from rondo.trainers.publish import WeightPublisher
from rondo.trainers.reporting import Reporter
from rondo.trainers.setup import Program, Prompts, Roles, Schedule, shares_weights
from rondo.types import StepStats
from rondo.workers.models import ActorWorker, CriticWorker
from rondo.workers.rollout import RolloutWorker


class RLTrainer:
    """One run. Built by `trainers/run.py`; `await start()`, then `await run()` to the end or to a requested
    stop.
    """

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        roles: Roles,
        program: Program,
        schedule: Schedule,
        prompts: Prompts,
        reporter: Reporter,
        checkpoints: Checkpoints,
        score_names: tuple[str, ...],
    ) -> None:
        self.config, self.cluster, self.roles, self.program = config, cluster, roles, program
        self.schedule, self.prompts, self.reporter, self.checkpoints = (
            schedule,
            prompts,
            reporter,
            checkpoints,
        )
        self.step = 0
        self.kl_coef = config.algorithm.kl.coef if config.algorithm.kl else 0.0
        self.timers = Timers()
        self.buffer = Buffer(
            batch_size=config.data.batch_size,
            max_staleness=config.trainer.max_staleness,
            total_steps=schedule.total_steps,
            total_groups=schedule.total_groups,
        )
        self.feeder = EpisodeFeeder(
            self.buffer,
            roles.rollout,
            prompts.train.prompt,
            sampling=prompts.sampling,
            n=config.rollout.n,
            score_names=score_names,
            deadline_seconds=config.rollout.deadline_seconds,
            max_dropped_share=config.reward.max_dropped_share,
        )
        self.weights = WeightPublisher(roles.rollout, self.feeder, self.buffer, shared=shares_weights(config))
        self._stop = asyncio.Event()
        self._driver_bytes = 0
        self._hosts_cpu_seconds = 0.0

    def request_stop(self) -> None:
        """Stop at the next step boundary (at once while waiting for episodes); the state is saved and
        resumable.
        """
        self._stop.set()

    async def run(self) -> bool:
        """Train. Returns False when stopped on request before the end."""
        with self.reporter.running(
            self.total_steps, self.step, await self.roles.actor.call(ActorWorker.num_parameters)
        ):
            await self._first_evaluation()
            self.timers.start_step()
            finished = await self._loop()
            self.reporter.stopped = not finished
            return finished

    async def _loop(self) -> bool:
        feeding = asyncio.create_task(self.feeder.run(), name="feeder")
        try:
            while not self._stop.is_set():
                groups = await self._take(feeding)
                if not groups:
                    break
                await self._train_step(groups)
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
            await self.feeder.close()
        if self.step >= self.total_steps:
            return True
        if self._stop.is_set():
            await self.checkpoints.save_now(self)
            return False
        await self._ran_out_of_prompts()
        return True

    async def _ran_out_of_prompts(self) -> None:
        """So many groups were dropped that the epochs ended early: the end is an end all the same."""
        if self.step == 0:
            raise TrainError("no prompt group could be trained: all were dropped; the log says why")
        self.reporter.warn(
            f"the prompts ended after step {self.step} of {self.total_steps}: "
            f"{len(self.buffer.ledger.dropped)} groups were dropped"
        )
        if self.config.trainer.evaluation.after and self.prompts.eval:
            await self.feeder.release()
            self.reporter.evaluation(self.step, await self._evaluate())
        if self.config.checkpoint.every is not None:
            await self.checkpoints.save_now(self)

    async def start(self) -> None:
        """Resume if there is something to resume, serve the weights, prove that they are the trainer's."""
        await self.checkpoints.restore(self)
        await self.roles.rollout.call(RolloutWorker.pause)
        await self.weights.load(self.step)
        await self.buffer.advance(self.step)
        await self.feeder.release()
        gap = await check_canary(self.roles, self.prompts, self.config)
        await self.roles.rollout.call(RolloutWorker.statistics)  # the canary's tokens are no step's
        self.reporter.note(f"canary: largest log-prob gap between sampler and trainer {gap:.1e}")

    async def _first_evaluation(self) -> None:
        if self.step == 0 and self.config.trainer.evaluation.before and self.prompts.eval:
            with self.timers.phase("evaluate"):
                result = await self._evaluate()
            await self.roles.rollout.call(RolloutWorker.statistics)
            self.reporter.evaluation(0, result)

    async def _take(self, feeding: asyncio.Task[None]) -> list[Group]:
        """Groups for one step; an empty list at the end or when a stop is asked for."""
        taking = asyncio.create_task(self.buffer.take())
        stopping = asyncio.create_task(self._stop.wait())
        with self.timers.phase("generate"):
            await asyncio.wait({taking, stopping, feeding}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if taking.done():
            return taking.result()
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        if feeding.done():
            feeding.result()  # the feeder's own error
        return []

    async def _train_step(self, groups: Sequence[Group]) -> None:
        stats = StepStats()
        everything = BatchRef.concat([group.ref for group in groups])
        with self.timers.phase("write_rollouts"):
            await self.reporter.rollouts(self.step + 1, everything)
        batch = self._scored(everything, stats)
        for group in groups:
            stats.add_mean("buffer/staleness", float(self.buffer.version - group.oldest_version))
        batch = self._plan_mini_batches(batch)
        with self.timers.phase("prepare"):
            for producer in self.program.before_advantages:
                batch = await self._group(producer.role).call(producer.method, batch)
        with self.timers.phase("advantages"):
            batch, advantage_stats = await self.program.advantage(batch, self.cluster, self.kl_coef)
        stats.merge(advantage_stats)
        batch = self._plan_weights(batch)
        if self.roles.critic is not None:
            with self.timers.phase("update_critic"):
                stats.merge(await self._update_critic(batch))
        warm = self.step >= self.config.critic.warmup_steps or self.roles.critic is None
        evaluation: list[EvaluationResult] = []
        async with self.weights.publishing(
            self.step + 1, lambda version: self._before_release(stats, evaluation)
        ) as published:
            if warm:
                with self.timers.phase("update_actor"):
                    stats.merge(await self._update_actor(batch))
            self._adapt_kl(stats, len(batch))
            self.step += 1
        stats.merge(published)
        await self._report(stats, batch, evaluation)
        with self.timers.phase("checkpoint"):
            await self.checkpoints.write_if_due(self)

    def _scored(self, everything: BatchRef, stats: StepStats) -> BatchRef:
        """Rows with a reward. Failures are in no baseline; too many of them stop the run (in the feeder)."""
        scored = is_scored(everything.index)
        failed = max(self.feeder.next_step(), int((~scored).sum()))  # those of dropped groups too
        stats.add_mean("reward/failed_share", failed, failed + int(scored.sum()))
        stats.add_sum("rollout/generated_tokens", float(everything.index.scalars("response_length").sum()))
        return everything.take(np.flatnonzero(scored))

    def _plan_mini_batches(self, batch: BatchRef) -> BatchRef:
        """Which mini-batch each row is in: by prompt groups, right after take, so that shards are fixed for
        the step.
        """
        config, group_ids = self.config, batch.index.scalars("group_id")
        full = config.data.batch_size
        columns = {
            "mini_batch": plan_mini_batches(
                group_ids, config.actor.mini_batch_size or full, seed=config.trainer.seed, step=self.step
            )
        }
        if self.roles.critic is not None:
            columns["critic_mini_batch"] = plan_mini_batches(
                group_ids, config.critic.mini_batch_size or full, seed=config.trainer.seed, step=self.step
            )
        return batch.with_index(columns)

    def _plan_weights(self, batch: BatchRef) -> BatchRef:
        """The weight of each row's tokens in the loss: computed once, globally, over its mini-batch."""
        aggregation = self.config.algorithm.aggregation
        tokens = batch.index.scalars("num_trained_tokens")
        columns = {
            "loss_weight": loss_weights(aggregation, tokens, batch.index.scalars("mini_batch")),
        }
        if self.config.algorithm.kl is not None:
            columns["kl_coef"] = np.full(
                len(batch), self.kl_coef, np.float32
            )  # read where it is adaptive and in the loss
        if self.roles.critic is not None:
            columns["critic_loss_weight"] = loss_weights(
                aggregation, tokens, batch.index.scalars("critic_mini_batch")
            )
        return batch.with_index(columns)

    async def _update_actor(self, batch: BatchRef) -> StepStats:
        orders = self._orders(batch, "mini_batch", self.config.actor.epochs)
        if self.program.skip_zero_advantages and "advantages" in batch.index.columns:
            batch = batch.take(np.flatnonzero(batch.index.scalars("advantages") != 0))
        stats = StepStats()
        stats.add_sum("perf/trained_tokens", float(batch.index.scalars("num_trained_tokens").sum()))
        result: StepStats = await self.roles.actor.call(
            ActorWorker.update_actor, batch, orders, reads=self.program.actor_columns
        )
        return stats.merge(result)

    async def _update_critic(self, batch: BatchRef) -> StepStats:
        assert self.roles.critic is not None
        orders = self._orders(batch, "critic_mini_batch", self.config.critic.epochs)
        result: StepStats = await self.roles.critic.call(
            CriticWorker.update_critic, batch, orders, reads=self.program.critic_columns
        )
        return result

    def _orders(self, batch: BatchRef, column: str, epochs: int) -> list[list[int]]:
        number = int(batch.index.scalars(column).max(initial=-1)) + 1
        return [
            mini_batch_order(number, seed=self.config.trainer.seed, step=self.step, epoch=e)
            for e in range(epochs)
        ]

    async def _before_release(self, stats: StepStats, evaluation: list[EvaluationResult]) -> None:
        """While no episode runs: read the engines' counters, evaluate if due, cut the snapshot if due."""
        for part in await self.roles.rollout.call(RolloutWorker.statistics):
            stats.merge(part)
        for name, value in self.buffer.statistics().items():
            stats.add_sum(name, value)
        if self._evaluation_due():
            await self.feeder.release()
            with self.timers.phase("evaluate"):
                evaluation.append(await self._evaluate())
            await self.roles.rollout.call(RolloutWorker.pause)
            await self.roles.rollout.call(RolloutWorker.statistics)  # evaluation's tokens are no step's
        await self.checkpoints.snapshot_if_due(self)

    def _evaluation_due(self) -> bool:
        evaluation = self.config.trainer.evaluation
        last = self.step == self.schedule.total_steps
        due = (last and evaluation.after) or bool(
            evaluation.every and self.step % evaluation.every == 0 and not last
        )
        return bool(due and self.prompts.eval)

    async def _evaluate(self) -> EvaluationResult:
        return await evaluate(
            self.roles.rollout, self.prompts.eval, self.config.trainer.evaluation, self.prompts.sampling
        )

    def _adapt_kl(self, stats: StepStats, num_responses: int) -> None:
        """Adaptive coefficient: updated after its use in this step."""
        kl = self.config.algorithm.kl
        if kl is not None:
            stats.add_max("actor/kl_coef", self.kl_coef)
            if kl.controller == "adaptive":
                measured = stats.values().get(f"actor/kl_{kl.where}", kl.target)
                self.kl_coef = update_kl_coef(self.kl_coef, measured, kl.target, kl.horizon, num_responses)

    async def _report(
        self, stats: StepStats, batch: BatchRef, evaluation: Sequence[EvaluationResult]
    ) -> None:
        await self._count_cpu()
        for group in (self.roles.actor, self.roles.critic, self.roles.reference):
            for peak in await group.call(ActorWorker.peak_memory_bytes) if group else ():
                stats.add_max("perf/peak_memory_bytes", float(peak))
        describe_rows(batch, stats)
        extra: dict[str, Any] = {}
        explained = explained_variance(stats.values())
        if explained is not None:
            extra["critic/explained_variance"] = explained
        for result in evaluation:
            extra |= result.metrics
        extra["perf/driver_bytes"] = float(self.cluster.driver_bytes() - self._driver_bytes)
        self._driver_bytes = self.cluster.driver_bytes()
        self.reporter.step(self.step, stats, extra, self.timers, evaluation)

    async def _count_cpu(self) -> None:
        """CPU time of host processes that are not this one."""
        if self.config.cluster.backend == "ray":
            seconds = sum(await self.roles.actor.call(ActorWorker.cpu_seconds))
            self.timers.cpu_seconds += seconds - self._hosts_cpu_seconds
            self._hosts_cpu_seconds = seconds

    @property
    def _adapts_kl(self) -> bool:
        kl = self.config.algorithm.kl
        return kl is not None and kl.controller == "adaptive"

    @property
    def total_steps(self) -> int:
        return self.schedule.total_steps

    def saved_roles(self) -> Mapping[str, WorkerGroup]:
        """Roles whose state is part of a checkpoint (the reference is frozen, the rollout engine has
        none).
        """
        return {"actor": self.roles.actor} | ({"critic": self.roles.critic} if self.roles.critic else {})

    async def state(self) -> ControllerState:
        """The controller's part of a checkpoint; groups in flight are listed to be issued again."""
        return ControllerState(
            step=self.step,
            version=self.step,
            timers=self.timers.state(),
            extra={
                "kl_coef": self.kl_coef if self._adapts_kl else None,
                "groups": [[g.seq, g.admitted_version, g.oldest_version] for g in self.buffer.ready.values()],
            },
            ledger=self.buffer.ledger.records(),
            groups={seq: await group.ref.fetch() for seq, group in self.buffer.ready.items()},
        )

    async def load_state(self, state: ControllerState) -> None:
        """Go on where `state` was cut."""
        self.step = state.step
        if self._adapts_kl and state.extra["kl_coef"] is not None:
            self.kl_coef = float(state.extra["kl_coef"])
        self.timers.load_state(state.timers)
        self.buffer.ledger = Ledger.from_records([dict(record) for record in state.ledger])
        for seq, admitted, oldest in state.extra["groups"]:
            if self.step - oldest > self.config.trainer.max_staleness:  # the bound is tighter than it was
                self.buffer.ledger.reissue = sorted([*self.buffer.ledger.reissue, seq])
                continue
            ref = self.cluster.put(state.groups[seq], self.feeder.index_columns)
            self.buffer.ready[seq] = Group(seq, admitted, oldest, ref)

    def _group(self, role: str) -> WorkerGroup:
        group = {"actor": self.roles.actor, "critic": self.roles.critic, "reference": self.roles.reference}[
            role
        ]
        assert group is not None, role
        return group


def describe_rows(batch: BatchRef, stats: StepStats) -> None:
    """Reward and length metrics of a step's scored rows."""
    index = batch.index
    reward = index.scalars("reward").astype(np.float64)
    lengths = index.scalars("response_length")
    stats.add_mean("reward/mean", float(reward.sum()), len(reward))
    stats.add_max("reward/max", float(reward.max(initial=-np.inf)))
    stats.add_min("reward/min", float(reward.min(initial=np.inf)))
    for name in index.columns:
        if name.startswith(SCORE_PREFIX):
            scores = index.scalars(name)
            known = np.isfinite(scores)
            stats.add_mean("reward/" + name, float(scores[known].sum()), int(known.sum()))
    sources = index.scalars("source").astype(str)
    for source in np.unique(sources) if len(np.unique(sources)) > 1 else ():
        stats.add_mean(
            f"reward/mean/{source}", float(reward[sources == source].sum()), int((sources == source).sum())
        )
    stats.add_mean("rollout/response_length", float(lengths.sum()), len(lengths))
    stats.add_max("rollout/response_length_max", float(lengths.max(initial=0)))
    truncated = index.scalars("finish_reason") == "length"
    stats.add_mean("rollout/truncated_share", float(truncated.sum()), len(truncated))
    groups, counts = np.unique(index.scalars("group_id"), return_counts=True)
    means = np.array([reward[index.scalars("group_id") == group].std() for group in groups])
    stats.add_mean("reward/constant_group_share", float((means == 0).sum()), len(counts))
