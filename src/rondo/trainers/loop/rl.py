"""The RL loop: a run around its steps (`RLRun`), and what a step does (`RLTrainer`; a program of the user's
is in `sessions/`).

    prompts ──ticket──▶ feeder: episodes on the rollout workers, scored ──put──▶ buffer ──take──▶ this loop
       ▲ credits                                                                                    │
       └──────── advance ◀── publish: update, hold, load, snapshot, release ◀───────────────────────┘

loop                   consumes              waits for                          is unblocked by
---------------------  --------------------  ---------------------------------  -----------------------------
feeder (feeder.py)     the prompts' order    credit for a group: buffer.ticket  advance, the end of a publish
episodes (there)       a prompt              engines that serve                 release
the steps (here)       scored groups         a step's groups: buffer.take       put, of the last of them
publish (publish.py)   the update's weights  episodes to be held: done          the feeder's hold
                                             (finish) or at a token boundary
                                             (resume, abort)
evaluation (here)      the held-out prompts  a drain; else it runs beside       publish; the next one waits
                                             episodes from the release on       for it
checkpoint             what a publish cut    a step's metrics and rollouts      the end of the step
                                             on disk

The trainer owns the policy version, the engine stamps every token with it, the buffer learns it last.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Literal, Protocol

import numpy as np

from rondo.agents.replay import PIECE_INDEX
from rondo.algorithms import explained_variance
from rondo.checkpoint import ControllerState
from rondo.config import Config, number_at, stages_of
from rondo.controller import Cluster, WorkerGroup
from rondo.core.batch import BatchRef
from rondo.core.columns import SCORE
from rondo.core.errors import RewardError, TrainError
from rondo.core.types import StepStats
from rondo.data import firsts, is_scored
from rondo.trainers.loop.buffer import Group, Ledger
from rondo.trainers.loop.checkpoints import Checkpoints
from rondo.trainers.loop.engine_side import RolloutSide
from rondo.trainers.loop.evaluation import EvaluationResult
from rondo.trainers.loop.feeder import cancel
from rondo.trainers.loop.journal import RunJournal
from rondo.trainers.loop.report import Reporter
from rondo.trainers.loop.served import OtherPolicy, ServedPolicy
from rondo.trainers.program import (
    Coefficients,
    Mixing,
    Pretraining,
    Program,
    Roles,
    Schedule,
    Stage,
    Step,
    plan_program,
    update_actor,
    with_scores_of,
)
from rondo.workers import ActorWorker, ModelWorker

# Of a run, with the groups of each and all their rows.
StepStream = AsyncGenerator[tuple[Step, Sequence[Group], BatchRef], None]


class Carried(Protocol):
    """What a checkpoint has of the program around a run."""

    def state(self) -> tuple[Any, Mapping[str, np.ndarray]]:
        """Returns it as JSON, and the arrays that this names."""
        ...

    def waiting(self) -> Mapping[int, BatchRef]:
        """Returns the rows that are part of it, by numbers below 0."""
        ...

    def load(self, state: Any, arrays: Mapping[str, np.ndarray], rows: Mapping[int, BatchRef]) -> None:
        """Goes on with it, before the weights are served."""
        ...


class RLRun(ServedPolicy):
    """`await start()`, then `steps()`: what each computes is their consumer's."""

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
        journal: RunJournal | None = None,
        carried: Carried | None = None,
    ) -> None:
        """learners: the roles beside the actor that are trained, known when the first step begins. journal:
        of what time decides. carried: goes into checkpoints, too.
        """
        super().__init__("actor", config, roles, schedule, side, reporter, journal=journal)
        self.cluster = cluster
        reporter.writers = roles.actor
        self.checkpoints = checkpoints
        self.journal = journal
        self._carried = carried
        self.step = 0
        self.total_steps = schedule.total_steps
        self.coefficients = Coefficients(config.algorithm)
        self.stages = stages_of(config)
        # A recipe without stages is its only one, and has it from the start.
        self.stage = 0 if config.trainer.stages else 1
        """The number of the stage that the next step is in; the first is 1, and 0 none yet."""
        self._learners = learners
        self.others: list[OtherPolicy] = []
        """The policies beside this one, known when the first step begins."""
        self._evaluating: asyncio.Task[EvaluationResult] | None = None  # beside episodes, of this step
        self._evaluated: list[EvaluationResult] = []  # in this step, while the trainer waited
        self.clock = reporter.watch(
            cluster, lambda: {"in flight": len(self.buffer.ledger.open), "ready": len(self.buffer.ready)}
        )
        self._driver_bytes = 0

    async def _begin_stage(self) -> None:
        """Has all that learns, and all that estimates, do as the stage of the next step says, where that is
        another one than the last step's.
        """
        number = number_at(self.stages, self.step + 1)
        if number == self.stage:
            return
        self.stage, stage = number, self.stages[number - 1]
        self.coefficients.begin_stage(stage.config.algorithm)
        config, losses = stage.config, self.losses_of_stage()
        rates = {"actor": config.actor.optimizer.lr, "critic": config.critic.optimizer.lr}
        rates["cost_critic"] = rates["critic"]
        for role, group in {"actor": self.roles.actor, **self.roles.models}.items():
            given = losses if role == "actor" else {}
            await group.call(ModelWorker.begin_stage, rates.get(role), config.rollout.temperature, given)
        self.reporter.note(f"stage {number}, {stage.describe()}")

    def losses_of_stage(self) -> Mapping[str, Any]:
        """Returns the actor's losses in this stage, as far as they are others than in the one before."""
        return {}

    def request_stop(self) -> None:
        """Stops at the next step boundary (at once while waiting for episodes); the state is saved and
        resumable.
        """
        super().request_stop()
        for policy in self.others:
            policy.request_stop()

    # ---- from the start to the end ----

    async def start(self) -> None:
        """Resumes if there is something to resume, serves the weights, proves that they are the trainer's."""
        self.clock.count_cpu(await self.cluster.cpu_seconds())  # from here on: not what loading took
        for policy in (self, *self.others):
            policy.buffer.admitting = False  # until weights are served: what is carried may ask at once
        await self.checkpoints.restore(self)  # first: it says at which step, and loads what is then served
        if self.checkpoints.best.enough:  # it was killed between that evaluation and its end
            self.reporter.is_enough = True
            self.request_stop()
        for number, stage in enumerate(self.stages, 1):
            if stage.step > self.total_steps:
                self.reporter.warn(
                    f"trainer.stages: stage {number} begins with step {stage.step}, and the run has "
                    f"{self.total_steps}: it never begins"
                )
        await self._begin_stage()
        for policy in (self, *self.others):
            await policy.serve(self.step)

    async def steps(self) -> StepStream:
        """Yields each step, its groups, and all their rows, failures included. When the next one is asked
        for, the step ends: weights are served, the metrics of `Step.rows` told, a due checkpoint written. A
        consumer that raises something has to say so: see `end`.
        """
        async with self._serving():
            async with self._feeding():
                while groups := await self.take():
                    step, rows = self._begin(groups)
                    yield step, groups, rows
                    await self._finish(step)
            await self._ended()

    async def unfed_steps(self) -> AsyncGenerator[Step, None]:
        """Yields each step of a consumer that brings its own rows: no prompt of the stream is read. All else
        is as with `steps`.
        """
        async with self._serving():
            async with self._feeding(fed=False):
                while self.step < self.total_steps and not self.buffer.stopped:
                    step = self.new_step()
                    yield step
                    await self._finish(step)
            await self._ended()

    async def end(self, steps: AsyncGenerator[Any, None], error: BaseException | None) -> None:
        """Ends what `steps` (`unfed_steps`) began, where its consumer stopped. error: what that one raised,
        raised again.
        """
        with suppress(StopAsyncIteration):
            await (steps.aclose() if error is None else steps.athrow(error))

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        """Opens the console's stage; inside, engines that are started again get weights."""
        parameters = await self.roles.actor.call(ActorWorker.num_parameters)
        with self.reporter.running(self.total_steps, self.step, parameters):
            async with self.weights.mender, AsyncExitStack() as others:
                for policy in self.others:
                    await others.enter_async_context(policy.serving())
                await self._first_evaluation()
                await self.side.start_counting()  # the tokens of canary and evaluation are no step's
                self.clock.count_cpu(await self.cluster.cpu_seconds())
                self.clock.start_step()
                await self.reporter.turn_profile(self.cluster, self.step)
                yield
                self.clock.count_cpu(await self.cluster.cpu_seconds())

    @asynccontextmanager
    async def _feeding(self, *, fed: bool = True) -> AsyncIterator[None]:
        """Lets episodes run inside; afterwards what is in flight is in the ledger, to be issued again. fed:
        whether prompts of the stream are.
        """
        feeding = [asyncio.create_task(self.feeder.run(), name="feeder")] if fed else []
        try:
            yield
            if not self.buffer.stopped:
                await self.finish_evaluation()
        except RewardError:
            await self._keep_failed()
            raise
        finally:
            await cancel(*feeding)  # before `close`: it would start what that gives back
            await self.feeder.close()
            if self._evaluating is not None:  # the run that goes on from here evaluates again
                await cancel(self._evaluating)

    async def _keep_failed(self) -> None:
        """Writes down, as the next step's, the groups whose failures stop the run before there is one."""
        if failed := self.buffer.failed_rows():
            await self.reporter.rollouts(self.step + 1, BatchRef.concat(failed))

    async def _ended(self) -> None:
        """Comes after the last step; the state of a run that was stopped before its end is saved."""
        self.reporter.stopped = self.buffer.stopped and self.step < self.total_steps
        if self.reporter.stopped:
            await self.checkpoints.save_now(self)
        elif self.step < self.total_steps:
            await self._ran_out_of_prompts()

    async def _ran_out_of_prompts(self) -> None:
        """Ends a run of which so many groups were dropped that the epochs ended early: the end is an end all
        the same.
        """
        if self.step == 0:
            raise TrainError("no prompt group could be trained: all were dropped; the log says why")
        self.reporter.warn(
            f"the prompts ended after step {self.step} of {self.total_steps}: "
            f"{self.buffer.ledger.num_dropped} groups were dropped"
        )
        evaluated = self.reporter.has_evaluation(self.step)
        if self.config.trainer.evaluation.after and self.side.eval and not evaluated:
            await self.side.resume()
            self.reporter.evaluation(self.step, await self.evaluate())
        if self.checkpoints.due(self.step, last=True, evaluated=evaluated):
            await self.checkpoints.save_now(self)

    # ---- a step ----

    async def take(self) -> list[Group]:
        """Returns the groups for one step; an empty list at the end or when a stop is asked for."""
        with self.clock.phase("generate"):
            return await self.weights.mender.served(self.buffer.take())

    def new_step(self) -> Step:
        """Returns what the stages of the next step share."""
        return Step(
            number=self.step,
            seed=self.config.trainer.seed,
            cluster=self.cluster,
            roles=self.roles,
            coefficients=dict(self.coefficients.read),
        )

    def _begin(self, groups: Sequence[Group]) -> tuple[Step, BatchRef]:
        """Returns what the stages of the step share, and all rows of the groups, failures included."""
        step = self.new_step()
        self.count_staleness(step.stats, self.buffer.staleness(groups))
        return step, BatchRef.concat([group.ref for group in groups])

    def count_staleness(self, stats: StepStats, ages: Sequence[int]) -> None:
        """Adds the staleness of prompt groups: its mean and maximum, and the share of the groups at each."""
        stats.add_mean("buffer/staleness_mean", float(sum(ages)), len(ages))
        stats.add_max("buffer/staleness_max", float(max(ages)))
        for age in range(self.config.trainer.max_staleness + 1):
            stats.add_mean(f"buffer/staleness_{age}", float(ages.count(age)), len(ages))

    async def _finish(self, step: Step) -> None:
        for policy in (self, *self.others):
            await policy.weights.hold(if_shared=True)  # as in a step that updates; else versions count on
        if step.rows is not None:  # first: numbers that adapt may follow these metrics, too
            self.reporter.rows(step.rows, step.stats)
        if step.updated:
            if step.rows is not None:  # for the next step: this one's rows have had theirs
                self.coefficients.adapt(step.rows, step.stats)
            elif self.coefficients.adapts:
                raise TrainError(
                    "an adaptive KL coefficient, a constraint or algorithm.coefficients follows what the "
                    "program logs, and this step logged nothing: call session.log(batch, metrics) in every "
                    "step that updates the actor"
                )
        await self.publish(step.stats)
        step.updated = False
        if step.rows is not None:
            await self.report(step.stats)
        # Last: a run that goes on from the checkpoint must find the metrics of its step on disk.
        with self.clock.phase("checkpoint"):
            if self.checkpoints.cut is not None:
                await self.checkpoints.write(self)

    def scored(self, everything: BatchRef, stats: StepStats) -> BatchRef:
        """Returns the rows with a reward. Failures are in no baseline; too many of them stop the run (in the
        buffer).
        """
        scored = is_scored(everything.index)
        failed = self.buffer.num_failed  # trajectories, those of dropped groups too
        stats.add_mean("reward/failed_share", failed, failed + int(scored[firsts(everything.index)].sum()))
        stats.add_sum("rollout/generated_tokens", float(everything.index.scalars("num_trained_tokens").sum()))
        return everything.take(np.flatnonzero(scored))

    async def let_engines_rest(self) -> None:
        if self.side.enter is not None:
            await self.finish_evaluation()
        await super().let_engines_rest()

    async def publish(self, stats: StepStats) -> None:
        """Ends a step: its weights are held for, loaded, confirmed; then what is due while nothing decodes;
        release.
        """
        if self.config.trainer.stages:
            stats.add_max("trainer/stage", float(self.stage))
        self.step += 1  # first: the weights below are this version, and what is due depends on it
        if self.step < self.total_steps:
            await self._begin_stage()
        refresh_every = self.config.reference.refresh_every
        if refresh_every is not None and self.step % refresh_every == 0:
            # The reference becomes the policy (SPPO, SPIN).
            await self.roles.group("reference").call(ModelWorker.copy_parameters_from, "actor")
        evaluation = self._evaluation_due()
        with self.clock.phase("publish"):
            await self.finish_evaluation()  # before engines get other weights than it measures
            report = await self.weights.publish(self.step, stats)
            for policy in self.others:
                await policy.publish(self.step, stats)
            learning = {role: self.roles.group(role) for role in ("actor", *self._learners)}
            stats.merge(await self.reporter.records.end_step(self.step, learning, report))
            # Counted while nothing decodes, and before this step's evaluation, whose tokens are no step's.
            stats.merge(await self.side.end_step())
            for name, value in self.buffer.end_step().items():
                stats.add_sum(name, value)
            if evaluation == "alone":
                async with self.weights.running():
                    self._evaluated.append(await self.evaluate())
                await self.side.start_counting()
            last = self.step == self.total_steps
            if self.checkpoints.due(self.step, last=last, evaluated=evaluation is not None):
                # Before the release: nothing trains or decodes, so all parts are of one moment.
                await self.checkpoints.snapshot(self)
            await self.reporter.turn_profile(self.cluster, self.step)  # engines rest here; trainers, too
            for policy in self.others:
                await policy.weights.release(self.step, StepStats())
            await self.weights.release(self.step, stats)
        self.clock.mark("publish", {"version": self.step})
        if evaluation == "beside":  # after the release: the engines run
            self._evaluating = asyncio.create_task(self.side.evaluate(), name=f"evaluation-{self.step}")

    async def report(self, stats: StepStats) -> None:
        """Tells a step's metrics, everywhere."""
        self.clock.count_cpu(await self.cluster.cpu_seconds())
        for group in self.roles.trained():
            for peak in await group.call(ModelWorker.peak_memory_bytes):
                stats.add_max("perf/peak_memory_bytes", float(peak))
        extra: dict[str, Any] = {}
        values = stats.values()
        if "critic/return" in values:
            explained = explained_variance(values)
            if explained is not None:
                extra["critic/explained_variance"] = explained
        evaluated = self._evaluated
        self._evaluated = []
        for result in evaluated:
            extra |= result.metrics
        extra["perf/driver_bytes"] = float(self.cluster.driver_bytes() - self._driver_bytes)
        self._driver_bytes = self.cluster.driver_bytes()
        self.reporter.step(self.step, stats, extra, evaluated)

    # ---- evaluation ----

    async def _first_evaluation(self) -> None:
        """Evaluates before the first step; and, of a run that was stopped while an evaluation ran beside
        episodes, that one again.
        """
        first = self.step == 0 and self.config.trainer.evaluation.before and bool(self.side.eval)
        beside = self.step > 0 and self._evaluation_due() == "beside"
        if first or (beside and not self.reporter.has_evaluation(self.step)):
            self.reporter.evaluation(self.step, await self.evaluate())

    def _evaluation_due(self) -> Literal["alone", "beside"] | None:
        """Says how this step's evaluation runs: alone after a drain, or beside the episodes in flight. None
        where there is none.
        """
        evaluation, last = self.config.trainer.evaluation, self.step == self.total_steps
        every = 0 if last else evaluation.every
        due = (last and evaluation.after) or (every and self.step % every == 0)
        if not due or not self.side.eval:
            return None
        return "alone" if last or self.side.on_update == "finish" else "beside"

    async def finish_evaluation(self) -> None:
        """Waits for the evaluation that runs beside episodes; it measures the weights of the step before."""
        if self._evaluating is None:
            return
        step = self.buffer.version
        with self.clock.phase("evaluate"):
            news = await self.weights.mender.unless_stranded(self._evaluating)
        if news:  # its requests may wait for weights that are gone
            self.reporter.warn(f"the evaluation of step {step} was given up: an engine was started again")
        else:
            self.reporter.evaluation(step, self._evaluating.result())
        self._evaluating = None

    async def evaluate(self) -> EvaluationResult:
        """Evaluates while the trainer waits, and so holds the weights that are measured."""
        with self.clock.phase("evaluate"):
            return await self.weights.mender.served(self.side.evaluate())

    # ---- checkpoints ----

    def saved_roles(self) -> Mapping[str, WorkerGroup]:
        """Returns the roles whose state is part of a checkpoint (others are frozen, the rollout engine has
        none).
        """
        roles = ["actor", *self._learners]
        if self.config.reference.refresh_every is not None:
            roles.append("reference")
        return {role: self.roles.group(role) for role in roles}

    def state(self) -> ControllerState:
        """Returns the controller's part of a checkpoint; groups in flight are listed to be issued again."""
        ready, chosen = self.buffer.ready.values(), self.buffer.chosen
        program, arrays = self._carried.state() if self._carried is not None else (None, {})
        return ControllerState(
            step=self.step,
            version=self.step,
            extra={
                **self.coefficients.state(),
                "groups": [[g.seq, g.admitted_version, g.oldest_version] for g in ready],
                "rules": self.buffer.rules,
                "journal": self.journal.mark if self.journal is not None else None,
                "partial": sorted(self.feeder.partial()),  # of a replay; other groups in flight start again
                **({} if chosen is None else {"sampler": chosen.state()}),
                "program": program,
            },
            ledger=self.buffer.ledger.records(),
            arrays=arrays,
        )

    def waiting(self) -> Mapping[int, BatchRef]:
        """Returns the complete groups, of those in flight what a checkpoint keeps, and a program's rows."""
        carried = self._carried.waiting() if self._carried is not None else {}
        ready = {seq: group.ref for seq, group in self.buffer.ready.items()}
        return {**carried, **self.feeder.partial(), **ready}

    async def load_state(self, state: ControllerState) -> None:
        """Goes on where `state` was cut."""
        self.step = state.step  # also the version: a publish ends every step
        self.coefficients.load_state(state.extra)
        self.clock.load_state(state.timers)
        groups = []
        for seq, admitted, oldest in state.extra["groups"]:
            rows, scores = state.groups[seq], filter(SCORE.member, self.side.index_columns)
            # An older rondo may have given fewer scores.
            unknown = {x: np.full(len(rows), np.nan, np.float32) for x in scores if x not in rows.columns}
            ref = self.cluster.put(rows.with_columns(unknown), self.side.index_columns)
            groups.append(Group(seq, admitted, oldest, ref))
        if self.journal is not None:
            self.journal.restore(state.extra.get("journal"))
            partial = state.extra.get("partial", ())
            self.feeder.restore_partial(
                {seq: self.cluster.put(state.groups[seq], PIECE_INDEX) for seq in partial}
            )
        if self.buffer.chosen is not None:
            self.buffer.chosen.load(state.extra["sampler"])
        if self._carried is not None:
            columns = self.side.index_columns
            brought = {n: self.cluster.put(one, columns) for n, one in state.groups.items() if n < 0}
            self._carried.load(state.extra.get("program"), state.arrays, brought)
        ledger = Ledger.from_records([dict(record) for record in state.ledger])
        self.buffer.restore(ledger, groups, self.step, state.extra.get("rules", {}))


class RLTrainer(RLRun):
    """The built-in loop over the stages of a planned program. Built by `commands/train.py`."""

    def __init__(self, program: Program, *arguments: Any, **options: Any) -> None:
        """arguments, options: of `RLRun`."""
        super().__init__(*arguments, learners=[x.role for x in program.learners], **options)
        self.program = program
        self._programs = [
            program if not stage.changes else plan_program(stage.config) for stage in self.stages
        ]
        config = self.config
        self._mixing = Mixing.of(config, self.side)
        self._models_score = bool(program.reward_models)
        self._pretraining = Pretraining(config) if config.algorithm.pretrain_coef else None
        has_critic = program.learner("critic") is not None
        self._warmup_steps = config.critic.warmup_steps if has_critic else 0

    def losses_of_stage(self) -> Mapping[str, Any]:
        self.program = self._programs[self.stage - 1]
        if self._mixing is not None:
            self._mixing.longest = self.stages[self.stage - 1].config.rollout.max_tokens
        return {"policy": self.program.actor_loss}

    async def run(self) -> bool:
        """Trains. Returns False when stopped on request before the end."""
        steps = self.steps()
        try:
            async for step, _, everything in steps:
                await self._compute(step, everything)
        except BaseException as error:
            await self.end(steps, error)
            raise
        return not self.reporter.stopped

    async def _compute(self, step: Step, everything: BatchRef) -> None:
        scored = self.scored(everything, step.stats)
        if self.side.values is not None:
            with self.clock.phase("generate"):
                scored = await self.side.values(self, self.cluster, scored, step.stats)
        await self.let_engines_rest()
        sampled = len(scored)
        if self._mixing is not None:
            with self.clock.phase(self._mixing.phase):
                scored, mixed = await self._mixing(scored, step)
            if mixed is not None:
                everything, scored = (BatchRef.concat([rows, mixed]) for rows in (everything, scored))
        scored = await self._through(self.program.scoring, scored, step)
        with self.clock.phase("write_rollouts"):
            rows = with_scores_of(everything, scored) if self._models_score else everything
            await self.reporter.rollouts(self.step + 1, rows)
        batch = await self._through(self.program.stages, scored, step)
        with self.clock.phase("write_rollouts"):
            await self.reporter.records.columns(self.step + 1, batch, self.roles.actor)
        await self.weights.hold(if_shared=True)  # samplers must not read what an optimizer step writes
        # Metrics tell of the policy's own.
        step.rows = scored if len(scored) == sampled else scored.take(np.arange(sampled))
        if self.step >= self._warmup_steps:
            with self.clock.phase("update_actor"):
                program, epochs = self.program, self.config.actor.epochs
                updated = update_actor(
                    self.roles.actor,
                    batch,
                    program.actor_loss,
                    epochs,
                    step,
                    pretraining=self._pretraining,
                    preparation=program.preparation,
                    old_is_current=not program.bypass,
                )
                step.stats.merge(await updated)
            step.updated = True

    def state(self) -> ControllerState:
        state = super().state()
        if self._mixing is None:
            return state
        arrays = dict(state.arrays)
        mix = self._mixing.packed(arrays)
        return dataclasses.replace(state, extra={**state.extra, "mix": mix}, arrays=arrays)

    async def load_state(self, state: ControllerState) -> None:
        await super().load_state(state)
        if self._mixing is not None and "mix" in state.extra:  # else the run had no mix then
            self._mixing.load(state.extra["mix"], state.arrays)

    async def _through(self, stages: Sequence[Stage], batch: BatchRef, step: Step) -> BatchRef:
        for stage in stages:
            with self.clock.phase(stage.phase):
                batch = await stage(batch, step)
        return batch
