"""The RL loop.

    prompts ──ticket──▶ feeder: episodes on the rollout workers, scored ──put──▶ buffer ──take──▶ this loop
       ▲ credits                                                                                    │
       └──────── advance ◀── publish: update, hold, load, snapshot, release ◀───────────────────────┘

The feeder waits for credit (buffer.ticket), this loop waits for complete groups (buffer.take), a publish
waits for the feeder to hold: until what is in flight is done (finish), or at a token boundary (resume,
abort). Evaluation runs while episodes are held after a drain; otherwise beside them from the release on, and
the next publish waits for it. The trainer owns the policy version, the engine stamps every token with it, the
buffer learns it last. A step's metrics and rollouts are on disk before its checkpoint is renamed into place.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rondo.algorithms import explained_variance, update_kl_coef
from rondo.batch import BatchRef
from rondo.checkpoint import ControllerState
from rondo.config.schema import Config
from rondo.controller import Cluster, WorkerGroup
from rondo.data.rows import is_scored
from rondo.errors import TrainError
from rondo.rewards import check_dropped_share
from rondo.tracking import Timers
from rondo.trainers.loop.buffer import Group, Journal
from rondo.trainers.loop.checkpoints import Checkpoints
from rondo.trainers.loop.constraint import ConstraintController
from rondo.trainers.loop.engine_side import RolloutSide
from rondo.trainers.loop.evaluation import EvaluationResult
from rondo.trainers.loop.filtering import GroupFilter
from rondo.trainers.loop.ledger import Ledger
from rondo.trainers.loop.publish import WeightPublisher
from rondo.trainers.loop.report import HostClock, Reporter, describe_rows, describe_staleness
from rondo.trainers.loop.waiting import cancel
from rondo.trainers.program.plan import Learner, Program, Schedule
from rondo.trainers.program.roles import Roles
from rondo.trainers.program.stages import with_model_reward, with_scores_of
from rondo.trainers.program.update import (
    Pretraining,
    resampled,
    update_actor,
    update_learner,
    with_actor_weights,
    with_mini_batches,
)
from rondo.types import StepStats, request_seed
from rondo.workers.models import ActorWorker, ModelWorker
from rondo.workers.rollout import PIECE_INDEX


class RLTrainer:
    """One run. Built by `commands/train.py`; `await start()`, then `await run()` to the end or to a requested
    stop.
    """

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        roles: Roles,
        program: Program,
        schedule: Schedule,
        side: RolloutSide,
        reporter: Reporter,
        checkpoints: Checkpoints,
        journal: Journal | None = None,
    ) -> None:
        self.config, self.cluster, self.roles, self.program = config, cluster, roles, program
        self.schedule, self.side, self.reporter, self.checkpoints = schedule, side, reporter, checkpoints
        self.step = 0
        self.kl_coef = config.algorithm.kl.coef if config.algorithm.kl else 0.0
        self.constraint = ConstraintController(config.algorithm.constraint)
        self._pretraining = Pretraining(config) if config.algorithm.pretrain_coef else None
        self.timers = Timers()
        self.journal = journal
        self.buffer = side.buffer(
            batch_size=config.data.batch_size,
            total_steps=schedule.total_steps,
            total_groups=schedule.total_groups,
            order=config.trainer.order,
            keep=GroupFilter(config.algorithm.filter) if config.algorithm.filter else None,
            max_refills=config.algorithm.max_refills,
            check_failures=functools.partial(
                check_dropped_share,
                step_size=config.data.batch_size * config.rollout.n,
                max_share=config.reward.max_dropped_share,
            ),
            journal=journal,
        )
        self.feeder = side.feeder(
            self.buffer,
            n=config.rollout.n,
            max_aborts=config.trainer.max_aborts,
            warn=reporter.warn,
        )
        reporter.note(side.describe())
        self.weights = WeightPublisher(
            side.route,
            side.episodes,
            self.feeder,
            self.buffer,
            shared=not side.route.moves,
            enter=side.enter,
            canary=side.canary if side.route.moves else None,
            phase=self.timers.phase,
            warn=reporter.warn,
        )
        self._evaluating: asyncio.Task[EvaluationResult] | None = None  # beside episodes, of this step
        reporter.watch(cluster, self.timers, self._gauges)
        self._stop = asyncio.Event()
        self._driver_bytes = 0
        self._hosts = HostClock(config.cluster)

    def _gauges(self) -> Mapping[str, float]:
        """Prompt groups, for the timeline."""
        return {"in flight": len(self.buffer.ledger.open), "ready": len(self.buffer.ready)}

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
            await self._hosts.start(self.roles.all(), self.timers)
            self.timers.start_step()
            finished = await self._loop()
            await self._hosts.count(self.roles.all(), self.timers)
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
            if not self._stop.is_set():
                await self._finish_evaluation()
        finally:
            await cancel(feeding)
            await self.feeder.close()
            if self._evaluating is not None:  # the run that goes on from here evaluates again
                await cancel(self._evaluating)
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
        evaluated = self.reporter.has_evaluation(self.step)
        if self.config.trainer.evaluation.after and self.side.eval and not evaluated:
            await self.feeder.release()
            self.reporter.evaluation(self.step, await self._evaluate_now())
        if self.config.checkpoint.every is not None:
            await self.checkpoints.save_now(self)

    async def start(self) -> None:
        """Resume if there is something to resume, serve the weights, prove that they are the trainer's."""
        await self.checkpoints.restore(self)
        await self.weights.start(self.step)
        if self.side.canary is None:
            return
        gap = await self.weights.served(self.side.canary(self.step), self.step)
        await self.side.statistics()  # the canary's tokens are no step's
        self.reporter.note(f"canary: largest log-prob gap between sampler and trainer {gap:.1e}")

    async def _first_evaluation(self) -> None:
        """Before the first step; and, of a run that was stopped while an evaluation ran beside episodes, that
        one again.
        """
        first = self.step == 0 and self.config.trainer.evaluation.before and bool(self.side.eval)
        cut_short = self.step > 0 and self._evaluates_beside() and not self.reporter.has_evaluation(self.step)
        if first or cut_short:
            result = await self._evaluate_now()
            await self.side.statistics()
            self.reporter.evaluation(self.step, result)

    async def _take(self, feeding: asyncio.Task[None]) -> list[Group]:
        """Groups for one step; an empty list at the end or when a stop is asked for. An engine that was
        started again meanwhile gets its weights: no update runs, so the trainer's are the current version.
        """
        taking = asyncio.create_task(self.buffer.take())
        stopping = asyncio.create_task(self._stop.wait())
        first = asyncio.wait({taking, stopping, feeding}, return_when=asyncio.FIRST_COMPLETED)
        try:
            with self.timers.phase("generate"):
                await self.weights.served(first, self.step)
            if taking.done():
                return taking.result()
            if feeding.done():
                feeding.result()  # the feeder's own error
            return []
        finally:
            await cancel(stopping, taking)

    async def _train_step(self, groups: Sequence[Group]) -> None:
        stats = StepStats()
        await self.weights.train_phase(self.step + 1, before_hold=lambda version: self._finish_evaluation())
        everything = BatchRef.concat([group.ref for group in groups])
        batch = self._scored(everything, stats)
        taken = [self.side.taken_at(group.seq, self.buffer.version) for group in groups]
        staleness = [at - group.oldest_version for at, group in zip(taken, groups, strict=True)]
        describe_staleness(staleness, self.config.trainer.max_staleness, stats)
        batch = with_mini_batches(batch, self.config, self.program, self.step)
        with self.timers.phase("prepare"):
            scored = await self._score_by_models(batch)
        with self.timers.phase("write_rollouts"):
            await self.reporter.rollouts(self.step + 1, with_scores_of(everything, scored))
        with self.timers.phase("prepare"):
            batch = await self._prepare(resampled(scored, self.config, self.step), stats)
        with self.timers.phase("advantages"):
            batch = await self._advantages(batch, stats)
        batch = with_actor_weights(batch, self.config, self.kl_coef)
        for learner in self.program.learners:
            if not learner.first:
                await self._update_learner(learner, batch, stats)
        warm = self.step >= self.config.critic.warmup_steps or self.program.learner("critic") is None
        evaluation: list[EvaluationResult] = []
        async with self.weights.publishing(
            self.step + 1,
            before_hold=lambda version: self._finish_evaluation(),
            before_release=lambda version: self._before_release(stats, evaluation),
        ) as published:
            if warm:
                with self.timers.phase("update_actor"):
                    await self._update_actor(batch, stats)
                self._adapt(stats, scored)
            self.step += 1
            await self._refresh_reference()
        self.reporter.timeline.mark("publish", version=self.step)
        if self._evaluates_beside():
            self._evaluating = asyncio.create_task(self.side.evaluate(), name=f"evaluation-{self.step}")
        stats.merge(published)
        await self._report(stats, scored, evaluation)
        with self.timers.phase("checkpoint"):
            await self.checkpoints.write_if_due(self)

    async def _score_by_models(self, batch: BatchRef) -> BatchRef:
        """The scores of reward models, and the reward with them in it."""
        for model in self.config.reward.models:
            if model.name in self.program.reward_models:
                batch = await with_model_reward(self.roles.group(model.name), model, batch)
        return batch

    async def _prepare(self, batch: BatchRef, stats: StepStats) -> BatchRef:
        """The columns that the chosen functions read. A learner that goes first is trained as soon as what it
        reads is there, before its own columns are computed.
        """
        waiting = [learner for learner in self.program.learners if learner.first]
        for producer in self.program.producers:
            for learner in [x for x in waiting if x.role == producer.role]:
                waiting.remove(learner)
                await self._update_learner(learner, batch, stats)
            group = self.roles.group(producer.role)
            batch = await group.call(producer.method, batch, **producer.options)
        return batch

    async def _advantages(self, batch: BatchRef, stats: StepStats) -> BatchRef:
        """Advantages, then the correction, which may reject rows or tokens, then what the policy loss wants
        to know of each mini-batch: that, and the loss weights, count what is left.
        """
        program, seed = self.program, self.config.trainer.seed
        batch, part = await program.advantage(
            batch, self.cluster, self.kl_coef, multiplier=self.constraint.multiplier
        )
        stats.merge(part)
        if program.correction is not None:
            batch, part = await program.correction(batch, self.cluster)
            stats.merge(part)
        if program.preparation is not None:
            batch = await program.preparation(batch, self.cluster, request_seed(seed, "prepare", self.step))
        return batch

    def _scored(self, everything: BatchRef, stats: StepStats) -> BatchRef:
        """Rows with a reward. Failures are in no baseline; too many of them stop the run (in the buffer)."""
        scored = is_scored(everything.index)
        failed = self.buffer.num_failed  # those of dropped groups too
        stats.add_mean("reward/failed_share", failed, failed + int(scored.sum()))
        stats.add_sum("rollout/generated_tokens", float(everything.index.scalars("response_length").sum()))
        return everything.take(np.flatnonzero(scored))

    async def _update_actor(self, batch: BatchRef, stats: StepStats) -> None:
        roles, loss = self.roles, self.program.actor_loss
        stats.merge(
            await update_actor(
                roles.actor, batch, loss, self.config, self.step, self.cluster, self._pretraining
            )
        )

    async def _update_learner(self, learner: Learner, batch: BatchRef, stats: StepStats) -> None:
        group = self.roles.group(learner.role)
        with self.timers.phase(f"update_{learner.role}"):
            stats.merge(await update_learner(group, learner, batch, self.config, self.step))

    async def _refresh_reference(self) -> None:
        """The reference becomes the policy, every reference.refresh_every steps (SPPO, SPIN)."""
        every = self.config.reference.refresh_every
        if every is not None and self.step % every == 0:
            await self.roles.group("reference").call(ModelWorker.copy_parameters_from, "actor")

    async def _before_release(self, stats: StepStats, evaluation: list[EvaluationResult]) -> None:
        """While nothing decodes: read the engines' counters, evaluate if due and nothing is in flight, cut
        the snapshot if due.
        """
        stats.merge(await self.side.statistics())
        for name, value in self.buffer.statistics().items():
            stats.add_sum(name, value)
        if self._evaluation_due() and not self._evaluates_beside():
            await self.side.episodes.resume()
            evaluation.append(await self._evaluate_now())
            await self.side.episodes.pause()
            await self.side.statistics()  # evaluation's tokens are no step's
        await self.checkpoints.snapshot_if_due(self)

    def _evaluation_due(self) -> bool:
        evaluation = self.config.trainer.evaluation
        last = self.step == self.schedule.total_steps
        due = (last and evaluation.after) or bool(
            evaluation.every and self.step % evaluation.every == 0 and not last
        )
        return bool(due and self.side.eval)

    def _evaluates_beside(self) -> bool:
        """Evaluation of this step is due while episodes are in flight, and so runs beside them."""
        in_flight = self.feeder.on_update != "finish" and self.step < self.schedule.total_steps
        return in_flight and self._evaluation_due()

    async def _finish_evaluation(self) -> None:
        """Wait for the evaluation that runs beside episodes; it measures the weights of the step before."""
        if self._evaluating is None:
            return
        step, evaluating = self.buffer.version, self._evaluating
        restarted = asyncio.create_task(self.side.episodes.restarted())
        try:
            with self.timers.phase("evaluate"):
                await asyncio.wait({evaluating, restarted}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel(restarted)
        if evaluating.done():
            self.reporter.evaluation(step, evaluating.result())
        else:  # its requests may wait for weights that are gone
            await cancel(evaluating)
            self.reporter.warn(f"the evaluation of step {step} was given up: an engine was started again")
        self._evaluating = None

    async def _evaluate_now(self) -> EvaluationResult:
        """While the trainer waits, and so holds the weights that are measured."""
        with self.timers.phase("evaluate"):
            return await self.weights.served(self.side.evaluate(), self.step)

    def _adapt(self, stats: StepStats, batch: BatchRef) -> None:
        """Adaptive coefficients: updated after their use in this step."""
        kl = self.config.algorithm.kl
        if kl is not None:
            stats.add_max("actor/kl_coef", self.kl_coef)
            if kl.controller == "adaptive":
                measured = stats.values().get(f"actor/kl_{kl.where}", kl.target)
                self.kl_coef = update_kl_coef(self.kl_coef, measured, kl.target, kl.horizon, len(batch))
        self.constraint.update(batch, stats)

    async def _report(
        self, stats: StepStats, batch: BatchRef, evaluation: Sequence[EvaluationResult]
    ) -> None:
        await self._hosts.count(self.roles.all(), self.timers)
        for group in self.roles.trained():
            for peak in await group.call(ModelWorker.peak_memory_bytes):
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

    @property
    def _adapts_kl(self) -> bool:
        kl = self.config.algorithm.kl
        return kl is not None and kl.controller == "adaptive"

    @property
    def total_steps(self) -> int:
        return self.schedule.total_steps

    def saved_roles(self) -> Mapping[str, WorkerGroup]:
        """Roles whose state is part of a checkpoint (others are frozen, the rollout engine has none)."""
        roles = ["actor", *(learner.role for learner in self.program.learners)]
        if self.config.reference.refresh_every is not None:
            roles.append("reference")
        return {role: self.roles.group(role) for role in roles}

    async def state(self) -> ControllerState:
        """The controller's part of a checkpoint; groups in flight are listed to be issued again, whatever
        becomes complete while the others are fetched.
        """
        ready, partial = dict(self.buffer.ready), self.feeder.partial()
        rows = partial | {seq: group.ref for seq, group in ready.items()}
        return ControllerState(
            step=self.step,
            version=self.step,
            timers=self.timers.state(),
            extra={
                "kl_coef": self.kl_coef if self._adapts_kl else None,
                "constraint": self.constraint.state(),
                "groups": [[g.seq, g.admitted_version, g.oldest_version] for g in ready.values()],
                "rules": self.buffer.rules,
                "journal": self.journal.mark if self.journal is not None else None,
                "partial": sorted(partial),  # of a replay; other groups in flight start again
            },
            ledger=self.buffer.ledger.records(),
            groups={seq: await ref.fetch() for seq, ref in rows.items()},
        )

    async def load_state(self, state: ControllerState) -> None:
        """Go on where `state` was cut."""
        self.step = state.step
        if self._adapts_kl and state.extra["kl_coef"] is not None:
            self.kl_coef = float(state.extra["kl_coef"])
        self.constraint.load_state(state.extra["constraint"])
        self.timers.load_state(state.timers)
        groups = [
            Group(seq, admitted, oldest, self.cluster.put(state.groups[seq], self.side.index_columns))
            for seq, admitted, oldest in state.extra["groups"]
        ]
        if self.journal is not None:
            self.journal.restore(state.extra.get("journal"))
            self.feeder.restore_partial(
                {
                    seq: self.cluster.put(state.groups[seq], PIECE_INDEX)
                    for seq in state.extra.get("partial", ())
                }
            )
        ledger = Ledger.from_records([dict(record) for record in state.ledger])
        self.buffer.restore(ledger, groups, self.step, state.extra.get("rules", {}))
