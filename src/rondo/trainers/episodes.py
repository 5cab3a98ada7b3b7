"""Where prompt groups become rows: what feeder and publisher see of the rollout side, and the worker group
behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from rondo.agents.replay import ENDED, Entry
from rondo.batch import BatchRef
from rondo.controller import WorkerGroup
from rondo.data.rows import GREEDY_REWARD, INDEX_COLUMNS, SCORE_PREFIX
from rondo.errors import WorkerError
from rondo.planning.residency import Phase
from rondo.types import Prompt, SamplingParams
from rondo.workers.rollout import PIECE, PIECE_INDEX, RolloutWorker

T = TypeVar("T")


class Episodes(Protocol):
    """Runs prompt groups on one of its ranks. `trainers/simulate.py` has one without engines."""

    @property
    def size(self) -> int:
        """Number of ranks, lost ones included."""
        ...

    def alive(self) -> Sequence[int]:
        """The ranks that groups may go to. Where the loss of one ends the run, it stays in the list."""
        ...

    async def run_group(self, rank: int, seq: int) -> BatchRef:
        """All rows of a prompt group, failures included; with the index column ENDED (`agents/replay.py`)
        where there is a journal. Cancelling the task frees what it holds.
        """
        ...

    async def pause(self) -> None:
        """Stop the engines at a token boundary; requests keep their place, new ones wait."""
        ...

    async def resume(self) -> None: ...

    async def restarted(self) -> str:
        """Returns when an engine was started again and has no weights: which, and why. Mostly never."""
        ...


class EpisodesInPieces(Episodes, Protocol):
    """What a replay needs."""

    async def continue_group(
        self, rank: int, seq: int, lengths: Sequence[int], before: BatchRef | None
    ) -> BatchRef:
        """The responses of a prompt group, the greedy one last, up to lengths[i] tokens. before: what an
        earlier call returned, to go on from.
        """
        ...

    async def finish_group(self, rank: int, seq: int, made: BatchRef, entries: Sequence[Entry]) -> BatchRef:
        """As `run_group`, of responses that are there, as they ended in the journal."""
        ...


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel and wait until they have ended, however."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def attended(
    work: Awaitable[T], news: Callable[[], Coroutine[Any, Any, str]], attend: Callable[[str], Awaitable[None]]
) -> T:
    """The result of `work`; meanwhile `attend(sentence)` for each sentence that a call of `news` returns."""
    working = asyncio.ensure_future(work)
    waiting = asyncio.create_task(news())
    try:
        while True:
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            await attend(waiting.result())
            waiting = asyncio.create_task(news())
    finally:
        await cancel(working, waiting)


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
        self.index_columns = (
            *INDEX_COLUMNS,
            *((GREEDY_REWARD,) if greedy_baseline else ()),
            *(SCORE_PREFIX + name for name in score_names),
        )

    @property
    def size(self) -> int:
        return self._rollout.size

    def alive(self) -> Sequence[int]:
        return self._rollout.alive if self._may_lose else range(self.size)

    async def run_group(self, rank: int, seq: int) -> BatchRef:
        return await self._rollout.call_rank_for_ref(
            rank,
            RolloutWorker.run_group,
            self._prompt_at(seq),
            self._sampling,
            self._n,
            self._deadline,
            index_columns=(*self.index_columns, ENDED),
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
