"""The side of a run where prompts become groups of rows, as the loop sees it (`RolloutSide`): generation
engines that get every version of the policy (`EngineSide`), or a recording (`trainers/replay/offline.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from rondo.config import SAMPLED, Config, stages_of
from rondo.controller import WorkerGroup
from rondo.core.batch import BatchRef
from rondo.core.errors import WorkerError
from rondo.core.types import Ended, Prompt, SamplingParams, StepStats
from rondo.data import index_columns
from rondo.planning import OnUpdate, Phase, effective_on_update, runs_in_own_process
from rondo.rollout import WASTED_TOKENS
from rondo.trainers.loop.branches import ValuesOfSteps
from rondo.trainers.loop.buffer import Buffer
from rondo.trainers.loop.canary import Canary
from rondo.trainers.loop.evaluation import EvaluationResult, evaluate
from rondo.trainers.loop.feeder import EpisodeFeeder, Episodes, cancel
from rondo.trainers.loop.routes import Route, make_route
from rondo.trainers.program import Prompts, Roles
from rondo.workers import RolloutWorker


class RolloutSide(Episodes, Protocol):
    """What makes a run's prompt groups and serves its weights. route: how weights get there. index_columns:
    of the groups' rows. on_update: see `EpisodeFeeder`. enter: see `WeightPublisher`. canary: compares
    engines and trainer; None: there is nothing to compare. eval: held-out prompts; none where nothing can
    answer them. values: of the steps of responses; None: nobody asks for them. prompts: all of the run's;
    None where they were recorded.
    """

    route: Route
    index_columns: tuple[str, ...]
    on_update: OnUpdate
    enter: Callable[[Phase], Awaitable[None]] | None
    canary: Callable[[int], Coroutine[Any, Any, float]] | None
    eval: Sequence[Prompt]
    values: ValuesOfSteps | None
    prompts: Prompts | None

    def describe(self) -> str:
        """Writes one line for the log."""
        ...

    def buffer(self, **options: Any) -> Buffer:
        """Makes the buffer of the run. options: those of `Buffer` but `max_staleness`."""
        ...

    def feeder(self, buffer: Buffer, **options: Any) -> EpisodeFeeder:
        """Makes what fills that buffer. options: those of `EpisodeFeeder` but `on_update`."""
        ...

    async def end_step(self) -> StepStats:
        """Returns the counters of all engines for the step that ends here; those of the next begin at 0."""
        ...

    async def start_counting(self) -> None:
        """Begins a step: what the engines counted until now belongs to no step."""
        ...

    async def evaluate(self) -> EvaluationResult:
        """Returns scored answers to `eval`."""
        ...


class EngineSide:
    """`RolloutSide` with the rollout worker group of `roles`. folder: of the run. greedy_baseline: with each
    group one greedy answer, for the column greedy_reward.
    """

    def __init__(
        self,
        config: Config,
        roles: Roles,
        prompts: Prompts,
        score_names: Sequence[str],
        folder: Path,
        *,
        greedy_baseline: bool = False,
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._sampling: list[tuple[int, SamplingParams]] = []
        for stage in stages_of(config):
            said = {name: getattr(stage.config.rollout, name) for name in SAMPLED}
            self._sampling.append((stage.step, replace(prompts.sampling, **said)))
        self.prompts: Prompts | None = prompts
        self._rollout = roles.engines
        self._greedy_baseline = greedy_baseline
        self._may_lose = roles.rollout_stands_alone()  # the run can go on without one of the ranks
        self.size = roles.engines.size
        self.index_columns: tuple[str, ...] = index_columns(score_names, greedy_baseline=greedy_baseline)
        self.enter: Callable[[Phase], Awaitable[None]] | None
        self.enter = self._enter if config.rollout.sleep else None
        self.on_update: OnUpdate = effective_on_update(
            config.trainer.on_update.name, config.trainer.max_staleness
        )
        self.route: Route = make_route(config, roles, folder)
        self.canary: Callable[[int], Coroutine[Any, Any, float]] | None
        self.canary = Canary(
            roles.actor, roles.engines, config, prompts.train.in_order(0), self._sampled_at
        ).check
        self.eval: Sequence[Prompt] = prompts.eval
        chosen = config.algorithm.branches
        self.values = None if chosen is None else ValuesOfSteps(chosen, prompts, self._sampled_at)

    def describe(self) -> str:
        return self.route.describe()

    def buffer(self, **options: Any) -> Buffer:
        return Buffer(**self._options(options))

    def _sampled_at(self, version: int) -> SamplingParams:
        """Returns how prompts are sampled that are admitted under this version: as the stage says in which
        the next step is.
        """
        following = min(version + 1, self._buffer.total_steps)  # behind the last one none follows
        return next(sampling for step, sampling in reversed(self._sampling) if step <= following)

    def sampling(self, seq: int) -> SamplingParams:
        """Returns how a prompt group in flight is sampled: so from its admission to its end."""
        return self._sampled_at(self._buffer.ledger.open[seq])

    def _options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns all options of a buffer of this run."""
        max_staleness, chosen = self._config.trainer.max_staleness, self._prompts.train.chosen
        return {"chosen": chosen, **options, "max_staleness": max_staleness}

    def feeder(self, buffer: Buffer, **options: Any) -> EpisodeFeeder:
        self._buffer = buffer
        return EpisodeFeeder(buffer, self, on_update=self.on_update, **options)

    def alive(self) -> Sequence[int]:
        return self._rollout.alive if self._may_lose else range(self.size)

    async def run_group(self, rank: int, seq: int) -> tuple[BatchRef, Ended]:
        chosen = self._prompts.train.chosen
        return await self._rollout.call_rank(
            rank,
            RolloutWorker.run_group,
            self._prompts.train.prompt(seq),
            self.sampling(seq),
            self._config.rollout.n if chosen is None else chosen[seq].n,
            self._config.rollout.deadline_seconds,
            keep=self.index_columns,
            greedy_baseline=self._greedy_baseline,
        )

    async def pause(self) -> None:
        await self._rollout.call_each(RolloutWorker.pause)

    async def resume(self) -> None:
        await self._rollout.call_each(RolloutWorker.resume)

    async def restarted(self) -> str:
        if not runs_in_own_process(self._config.rollout):  # else engines die with their hosts
            await asyncio.Event().wait()
        return await restarted(self._rollout)

    async def _enter(self, phase: Phase) -> None:
        """Lets the engines rest or wake as the phase asks (rollout.sleep); they are paused."""
        await self._rollout.call_each(RolloutWorker.enter, phase)

    async def end_step(self) -> StepStats:
        stats = StepStats()
        parts: Mapping[int, StepStats] = await self._rollout.call_each(RolloutWorker.end_step)
        for part in parts.values():
            stats.merge(part)
        stats.add_sum("buffer/wasted_tokens", stats.sums.pop(WASTED_TOKENS, 0.0))
        return stats

    async def start_counting(self) -> None:
        await self._rollout.call_each(RolloutWorker.start_counting)

    async def evaluate(self) -> EvaluationResult:
        evaluation, sampling = self._config.trainer.evaluation, self._prompts.sampling
        return await evaluate(self._rollout, self.eval, evaluation, sampling)


async def restarted(rollout: WorkerGroup) -> str:
    """Returns when an engine of any rank that lives was started again and wants weights. Mostly never."""
    polls: dict[asyncio.Task[str], int] = {}
    for rank in rollout.alive:
        polls[asyncio.create_task(rollout.call_rank(rank, RolloutWorker.restarted))] = rank
    try:
        while polls:
            done, _ = await asyncio.wait(polls, return_when=asyncio.FIRST_COMPLETED)
            for poll in done:
                rank, error = polls.pop(poll), poll.exception()
                if not (isinstance(error, WorkerError) and error.died):  # those who wait for it will say so
                    return f"rollout[{rank}]: {poll.result()}"
    finally:
        await cancel(*polls)
    await asyncio.Event().wait()
    raise AssertionError
