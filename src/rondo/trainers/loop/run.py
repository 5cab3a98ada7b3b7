"""One RL run around its steps: episodes, weights, evaluation, checkpoints, reports. What a step computes is
`RLTrainer`'s (`rl.py`), or a program of the user's (`sessions/`).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from rondo.algorithms import explained_variance
from rondo.batch import BatchRef
from rondo.checkpoint import ControllerState
from rondo.config.schema import Config
from rondo.controller import Cluster, WorkerGroup
from rondo.data.rows import is_scored
from rondo.errors import TrainError
from rondo.rewards import check_dropped_share
from rondo.trainers.loop.buffer import Group, Journal, group_filter
from rondo.trainers.loop.checkpoints import Checkpoints
from rondo.trainers.loop.coefficients import Coefficients
from rondo.trainers.loop.engine_side import RolloutSide
from rondo.trainers.loop.evaluation import EvaluationResult
from rondo.trainers.loop.ledger import Ledger
from rondo.trainers.loop.mender import cancel
from rondo.trainers.loop.publish import WeightPublisher
from rondo.trainers.loop.report import Reporter, describe_rows, describe_staleness
from rondo.trainers.program.plan import Schedule
from rondo.trainers.program.roles import Roles
from rondo.trainers.program.stages import Step
from rondo.types import StepStats
from rondo.workers.models import ActorWorker, ModelWorker
from rondo.workers.rollout import PIECE_INDEX


class RLRun:
    """`await start()`, then `async with serving():` and in it `async with feeding():` around the steps."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        roles: Roles,
        schedule: Schedule,
        side: RolloutSide,
        reporter: Reporter,
        checkpoints: Checkpoints,
        *,
        learners: Sequence[str],
        journal: Journal | None = None,
    ) -> None:
        """learners: the roles beside the actor that are trained, known when the first step begins. journal:
        of what time decides.
        """
        self.config = config
        self.cluster = cluster
        self.roles = roles
        self.schedule = schedule
        self.side = side
        self.reporter = reporter
        self.checkpoints = checkpoints
        self.journal = journal
        self.step = 0
        self.coefficients = Coefficients(config.algorithm)
        self.clock = reporter.watch(cluster, self._gauges)
        self._learners = learners
        self.buffer = side.buffer(
            batch_size=config.data.batch_size,
            total_steps=schedule.total_steps,
            total_groups=schedule.total_groups,
            order=config.trainer.order,
            keep=group_filter(config.algorithm.filter) if config.algorithm.filter else None,
            max_refills=config.algorithm.max_refills,
            check_failures=functools.partial(
                check_dropped_share,
                step_size=config.data.batch_size * config.rollout.n,
                max_share=config.reward.max_dropped_share,
            ),
            journal=journal,
        )
        self.feeder = side.feeder(
            self.buffer, n=config.rollout.n, max_aborts=config.trainer.max_aborts, warn=reporter.warn
        )
        self._feeding: asyncio.Task[None] | None = None
        reporter.note(side.describe())
        self.weights = WeightPublisher(
            side.route,
            side.episodes,
            self.feeder,
            self.buffer,
            shared=not side.route.moves,
            enter=side.enter,
            canary=side.canary if side.route.moves else None,
            warn=reporter.warn,
        )
        self._evaluating: asyncio.Task[EvaluationResult] | None = None  # beside episodes, of this step
        self._evaluated: list[EvaluationResult] = []  # in this step, while the trainer waited
        self._stop = asyncio.Event()
        self._driver_bytes = 0

    @property
    def total_steps(self) -> int:
        return self.schedule.total_steps

    def _gauges(self) -> Mapping[str, float]:
        """Prompt groups, for the timeline."""
        return {"in flight": len(self.buffer.ledger.open), "ready": len(self.buffer.ready)}

    def request_stop(self) -> None:
        """Stops at the next step boundary (at once while waiting for episodes); the state is saved and
        resumable.
        """
        self._stop.set()

    # ---- from the start to the end ----

    async def start(self) -> None:
        """Resumes if there is something to resume, serves the weights, proves that they are the trainer's."""
        self.clock.count_cpu(await self.cluster.cpu_seconds())  # from here on: not what loading took
        await self.checkpoints.restore(self)
        await self.weights.start(self.step)
        if self.side.canary is None:
            return
        async with self.weights.mender as mender:
            gap = await mender.served(self.side.canary(self.step))
        self.reporter.note(f"canary: largest log-prob gap between sampler and trainer {gap:.1e}")

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """The console's stage; inside, engines that are started again get weights."""
        parameters = await self.roles.actor.call(ActorWorker.num_parameters)
        with self.reporter.running(self.total_steps, self.step, parameters):
            async with self.weights.mender:
                await self._first_evaluation()
                await self.side.start_counting()  # the tokens of canary and evaluation are no step's
                self.clock.count_cpu(await self.cluster.cpu_seconds())
                self.clock.start_step()
                yield
                self.clock.count_cpu(await self.cluster.cpu_seconds())

    @asynccontextmanager
    async def feeding(self) -> AsyncIterator[None]:
        """Episodes run inside; afterwards what is in flight is in the ledger, to be issued again."""
        self._feeding = asyncio.create_task(self.feeder.run(), name="feeder")
        try:
            yield
            if not self._stop.is_set():
                await self.finish_evaluation()
        finally:
            await cancel(self._feeding)
            await self.feeder.close()
            if self._evaluating is not None:  # the run that goes on from here evaluates again
                await cancel(self._evaluating)

    async def ended(self) -> bool:
        """Comes after the last step. Returns False when the run was stopped on request before its end; then
        its state is saved.
        """
        stopped = self._stop.is_set() and self.step < self.total_steps
        if stopped:
            await self.checkpoints.save_now(self)
        elif self.step < self.total_steps:
            await self._ran_out_of_prompts()
        self.reporter.stopped = stopped
        return not stopped

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
            self.reporter.evaluation(self.step, await self.evaluate())
        if self.config.checkpoint.every is not None:
            await self.checkpoints.save_now(self)

    # ---- a step ----

    async def take(self) -> list[Group]:
        """Groups for one step; an empty list at the end or when a stop is asked for."""
        if self._stop.is_set():
            return []
        assert self._feeding is not None, "episodes run inside `feeding()` only"
        feeding, stopping = self._feeding, asyncio.create_task(self._stop.wait())
        taking = asyncio.create_task(self.buffer.take())
        first = asyncio.wait({taking, stopping, feeding}, return_when=asyncio.FIRST_COMPLETED)
        try:
            with self.clock.phase("generate"):
                await self.weights.mender.served(first)
            if taking.done():
                return taking.result()
            if feeding.done():
                feeding.result()  # the feeder's own error
            return []
        finally:
            await cancel(stopping, taking)

    def new_step(self) -> Step:
        """What the stages of the next step share."""
        return Step(
            number=self.step,
            seed=self.config.trainer.seed,
            cluster=self.cluster,
            roles=self.roles,
            kl_coef=self.coefficients.kl_coef,
            multiplier=self.coefficients.multiplier,
        )

    def begin_step(self, groups: Sequence[Group]) -> tuple[BatchRef, Step]:
        """All rows of the groups, failures included, and what the stages of the step share."""
        step = self.new_step()
        taken = [self.side.taken_at(group.seq, self.buffer.version) for group in groups]
        staleness = [at - group.oldest_version for at, group in zip(taken, groups, strict=True)]
        describe_staleness(staleness, self.config.trainer.max_staleness, step.stats)
        return BatchRef.concat([group.ref for group in groups]), step

    def scored(self, everything: BatchRef, stats: StepStats) -> BatchRef:
        """Rows with a reward. Failures are in no baseline; too many of them stop the run (in the buffer)."""
        scored = is_scored(everything.index)
        failed = self.buffer.num_failed  # those of dropped groups too
        stats.add_mean("reward/failed_share", failed, failed + int(scored.sum()))
        stats.add_sum("rollout/generated_tokens", float(everything.index.scalars("response_length").sum()))
        return everything.take(np.flatnonzero(scored))

    async def let_engines_rest(self) -> None:
        """With rollout.sleep, while the trainer computes: until the next version is released."""
        if self.side.enter is not None:
            await self.finish_evaluation()
            await self.weights.rest()

    async def publish(self, stats: StepStats) -> None:
        """Ends a step: its weights are held for, loaded, confirmed; then what is due while held; release."""
        self.step += 1
        await self._refresh_reference()
        with self.clock.phase("publish"):
            await self.finish_evaluation()
            await self.weights.publish(self.step, stats)
            await self._while_held(stats)
            await self.weights.release(self.step, stats)
        self.clock.mark("publish", version=self.step)
        if self._evaluates_beside():
            self._evaluating = asyncio.create_task(self.side.evaluate(), name=f"evaluation-{self.step}")

    async def _refresh_reference(self) -> None:
        """The reference becomes the policy, every reference.refresh_every steps (SPPO, SPIN)."""
        every = self.config.reference.refresh_every
        if every is not None and self.step % every == 0:
            await self.roles.group("reference").call(ModelWorker.copy_parameters_from, "actor")

    async def _while_held(self, stats: StepStats) -> None:
        """Nothing decodes: counters are read, an evaluation that is due and has nothing in flight beside it
        runs alone, and the snapshot of a due checkpoint is cut.
        """
        stats.merge(await self.side.end_step())
        for name, value in self.buffer.statistics().items():
            stats.add_sum(name, value)
        self.buffer.end_step()
        if self._evaluation_due() and not self._evaluates_beside():
            async with self.weights.running():
                self._evaluated.append(await self.evaluate())
            await self.side.start_counting()  # evaluation's tokens are no step's
        await self.checkpoints.snapshot_if_due(self)

    async def report(self, scored: BatchRef, stats: StepStats) -> None:
        """A step's metrics, everywhere. scored: its rows with a reward."""
        self.clock.count_cpu(await self.cluster.cpu_seconds())
        for group in self.roles.trained():
            for peak in await group.call(ModelWorker.peak_memory_bytes):
                stats.add_max("perf/peak_memory_bytes", float(peak))
        describe_rows(scored, stats)
        extra: dict[str, Any] = {}
        values = stats.values()
        if "critic/return" in values:
            explained = explained_variance(values)
            if explained is not None:
                extra["critic/explained_variance"] = explained
        evaluated, self._evaluated = self._evaluated, []
        for result in evaluated:
            extra |= result.metrics
        extra["perf/driver_bytes"] = float(self.cluster.driver_bytes() - self._driver_bytes)
        self._driver_bytes = self.cluster.driver_bytes()
        self.reporter.step(self.step, stats, extra, evaluated)

    # ---- evaluation ----

    async def _first_evaluation(self) -> None:
        """Before the first step; and, of a run that was stopped while an evaluation ran beside episodes, that
        one again.
        """
        first = self.step == 0 and self.config.trainer.evaluation.before and bool(self.side.eval)
        cut_short = self.step > 0 and self._evaluates_beside() and not self.reporter.has_evaluation(self.step)
        if first or cut_short:
            self.reporter.evaluation(self.step, await self.evaluate())

    def _evaluation_due(self) -> bool:
        evaluation = self.config.trainer.evaluation
        last = self.step == self.total_steps
        due = (last and evaluation.after) or bool(
            evaluation.every and self.step % evaluation.every == 0 and not last
        )
        return bool(due and self.side.eval)

    def _evaluates_beside(self) -> bool:
        """Evaluation of this step is due while episodes are in flight, and so runs beside them."""
        in_flight = self.side.on_update != "finish" and self.step < self.total_steps
        return in_flight and self._evaluation_due()

    async def finish_evaluation(self) -> None:
        """Waits for the evaluation that runs beside episodes; it measures the weights of the step before."""
        if self._evaluating is None:
            return
        step, evaluating = self.buffer.version, self._evaluating
        stranded = asyncio.create_task(self.weights.mender.stranded())
        try:
            with self.clock.phase("evaluate"):
                await asyncio.wait({evaluating, stranded}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel(stranded)
        if evaluating.done():
            self.reporter.evaluation(step, evaluating.result())
        else:  # its requests may wait for weights that are gone
            await cancel(evaluating)
            self.reporter.warn(f"the evaluation of step {step} was given up: an engine was started again")
        self._evaluating = None

    async def evaluate(self) -> EvaluationResult:
        """While the trainer waits, and so holds the weights that are measured."""
        with self.clock.phase("evaluate"):
            return await self.weights.mender.served(self.side.evaluate())

    # ---- checkpoints ----

    def saved_roles(self) -> Mapping[str, WorkerGroup]:
        """Roles whose state is part of a checkpoint (others are frozen, the rollout engine has none)."""
        roles = ["actor", *self._learners]
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
            timers=self.clock.state(),
            extra={
                **self.coefficients.state(),
                "groups": [[g.seq, g.admitted_version, g.oldest_version] for g in ready.values()],
                "rules": self.buffer.rules,
                "journal": self.journal.mark if self.journal is not None else None,
                "partial": sorted(partial),  # of a replay; other groups in flight start again
            },
            ledger=self.buffer.ledger.records(),
            groups={seq: await ref.fetch() for seq, ref in rows.items()},
        )

    async def load_state(self, state: ControllerState) -> None:
        """Goes on where `state` was cut."""
        self.step = state.step
        self.coefficients.load_state(dict(state.extra))
        self.clock.load_state(state.timers)
        groups = [
            Group(seq, admitted, oldest, self.cluster.put(state.groups[seq], self.side.index_columns))
            for seq, admitted, oldest in state.extra["groups"]
        ]
        if self.journal is not None:
            self.journal.restore(state.extra.get("journal"))
            partial = state.extra.get("partial", ())
            self.feeder.restore_partial(
                {seq: self.cluster.put(state.groups[seq], PIECE_INDEX) for seq in partial}
            )
        ledger = Ledger.from_records([dict(record) for record in state.ledger])
        self.buffer.restore(ledger, groups, self.step, state.extra.get("rules", {}))
