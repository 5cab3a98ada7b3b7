"""The side of a run where prompts become groups of rows, as the loop sees it (`RolloutSide`): generation
engines that get every version of the policy (`EngineSide`), or a recording (`trainers/replay/offline.py`).

Feeder and publisher reach the worker group behind it by `WorkerEpisodes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rondo.agents.replay import Entry
from rondo.batch import BatchRef
from rondo.columns import ENDED
from rondo.config.schema import Config
from rondo.controller import WorkerGroup
from rondo.data.rows import index_columns
from rondo.errors import WorkerError
from rondo.planning.admission import OnUpdate, effective_on_update
from rondo.planning.placement import Phase
from rondo.rollout.protocol import WASTED_TOKENS
from rondo.trainers.loop.buffer import Buffer
from rondo.trainers.loop.evaluation import EvaluationResult, evaluate
from rondo.trainers.loop.feeder import EpisodeFeeder, Episodes
from rondo.trainers.loop.mender import cancel
from rondo.trainers.loop.publish import Canary
from rondo.trainers.loop.routes import Route, make_route
from rondo.trainers.program.inputs import Prompts
from rondo.trainers.program.roles import Roles
from rondo.types import Prompt, SamplingParams, StepStats
from rondo.workers.rollout import PIECE, PIECE_INDEX, RolloutWorker, runs_in_own_process


class RolloutSide(Protocol):
    """episodes: what the feeder asks for groups. route: how weights get there. index_columns: of the groups'
    rows. on_update: see `EpisodeFeeder`. enter: see `WeightPublisher`. canary: compares engines and trainer;
    None: there is nothing to compare. eval: held-out prompts; none where nothing can answer them.
    """

    episodes: Episodes
    route: Route
    index_columns: tuple[str, ...]
    on_update: OnUpdate
    enter: Callable[[Phase], Awaitable[None]] | None
    canary: Callable[[int], Coroutine[Any, Any, float]] | None
    eval: Sequence[Prompt]

    def describe(self) -> str:
        """One line for the log."""
        ...

    def buffer(self, **options: Any) -> Buffer:
        """The buffer of the run. options: those of `Buffer` but `max_staleness`."""
        ...

    def feeder(self, buffer: Buffer, **options: Any) -> EpisodeFeeder:
        """What fills that buffer. options: those of `EpisodeFeeder` but `on_update`."""
        ...

    def taken_at(self, seq: int, version: int) -> int:
        """The policy version at which the group is trained that is taken now, at `version`, as far as its
        staleness is concerned.
        """
        ...

    async def end_step(self) -> StepStats:
        """Counters of all engines for the step that ends here; those of the next begin at 0."""
        ...

    async def start_counting(self) -> None:
        """A step begins here: what the engines counted until now belongs to none."""
        ...

    async def evaluate(self) -> EvaluationResult:
        """Answers to `eval`, scored."""
        ...


class EngineSide:
    """`RolloutSide` with the rollout worker group of `roles`. folder: of the run."""

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
        self._config, self._prompts, self._rollout = config, prompts, roles.engines
        workers = WorkerEpisodes(
            roles.engines,
            prompts.train.prompt,
            sampling=prompts.sampling,
            n=config.rollout.n,
            score_names=score_names,
            deadline_seconds=config.rollout.deadline_seconds,
            greedy_baseline=greedy_baseline,
            may_lose=roles.rollout_stands_alone(),
            own_processes=runs_in_own_process(config.rollout),
        )
        self.episodes: Episodes = workers
        self.index_columns: tuple[str, ...] = workers.index_columns
        self.enter: Callable[[Phase], Awaitable[None]] | None = (
            workers.enter if config.rollout.sleep else None
        )
        self.on_update: OnUpdate = effective_on_update(config.trainer.on_update, config.trainer.max_staleness)
        self.route: Route = make_route(config, roles, folder)
        self.canary: Callable[[int], Coroutine[Any, Any, float]] | None
        self.canary = Canary(roles, prompts, config).check
        self.eval: Sequence[Prompt] = prompts.eval

    def describe(self) -> str:
        return self.route.describe()

    def buffer(self, **options: Any) -> Buffer:
        return Buffer(max_staleness=self._config.trainer.max_staleness, **options)

    def feeder(self, buffer: Buffer, **options: Any) -> EpisodeFeeder:
        return EpisodeFeeder(buffer, self.episodes, on_update=self.on_update, **options)

    def taken_at(self, seq: int, version: int) -> int:
        return version

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
                if not (isinstance(error, WorkerError) and error.died):  # whoever waits for it will say so
                    return f"rollout[{rank}]: {poll.result()}"
    finally:
        await cancel(*polls)
    await asyncio.Event().wait()
    raise AssertionError


class WorkerEpisodes:
    """`Episodes` on the ranks of the rollout group.

    prompt_at: the stream, a function of the sequence number. greedy_baseline: with each group one greedy
    answer, for the column greedy_reward. may_lose: the rollout ranks have devices of their own, so that the
    run can go on without one of them. own_processes: of the engines, which are started again when they die.
    """

    def __init__(
        self,
        rollout: WorkerGroup,
        prompt_at: Callable[[int], Prompt],
        *,
        sampling: SamplingParams,
        n: int,
        score_names: Sequence[str] = (),
        deadline_seconds: float | None = None,
        greedy_baseline: bool = False,
        may_lose: bool = False,
        own_processes: bool = False,
    ) -> None:
        self._rollout, self._prompt_at = rollout, prompt_at
        self._sampling, self._n, self._deadline = sampling, n, deadline_seconds
        self._greedy_baseline, self._may_lose = greedy_baseline, may_lose
        self._own_processes = own_processes
        self.index_columns = index_columns(score_names, greedy_baseline=greedy_baseline)

    @property
    def size(self) -> int:
        return self._rollout.size

    def alive(self) -> Sequence[int]:
        return self._rollout.alive if self._may_lose else range(self.size)

    async def run_group(self, rank: int, seq: int) -> BatchRef:
        return await self._rollout.call_rank(
            rank,
            RolloutWorker.run_group,
            self._prompt_at(seq),
            self._sampling,
            self._n,
            self._deadline,
            keep=(*self.index_columns, ENDED),
            greedy_baseline=self._greedy_baseline,
            ended=True,
        )

    async def continue_group(
        self, rank: int, seq: int, lengths: Sequence[int], before: BatchRef | None
    ) -> BatchRef:
        return await self._rollout.call_rank(
            rank,
            RolloutWorker.continue_group,
            before,
            self._prompt_at(seq),
            self._sampling,
            lengths,
            greedy_baseline=self._greedy_baseline,
            keep=PIECE_INDEX,
            reads=PIECE,
        )

    async def finish_group(self, rank: int, seq: int, made: BatchRef, entries: Sequence[Entry]) -> BatchRef:
        return await self._rollout.call_rank(
            rank,
            RolloutWorker.finish_group,
            made,
            self._prompt_at(seq),
            self._sampling,
            entries,
            greedy_baseline=self._greedy_baseline,
            keep=(*self.index_columns, ENDED),
            reads=PIECE,
        )

    async def pause(self) -> None:
        await self._rollout.call_each(RolloutWorker.pause)

    async def restarted(self) -> str:
        if not self._own_processes:
            await asyncio.Event().wait()
        return await restarted(self._rollout)

    async def resume(self) -> None:
        await self._rollout.call_each(RolloutWorker.resume)

    async def enter(self, phase: Phase) -> None:
        """The engines rest or wake as the phase asks (rollout.sleep); they are paused."""
        await self._rollout.call_each(RolloutWorker.enter, phase)
