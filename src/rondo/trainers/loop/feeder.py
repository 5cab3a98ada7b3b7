"""The feeder: turns the buffer's credits into prompt groups in flight, and holds them when weights must
change.

    buffer ──ticket──▶ run ──▶ a task per group, on the rank with the fewest ──put──▶ buffer
                                 │ lost with its rank, cancelled: given back, started again before others
    publisher ──hold──▶ finish: all complete │ resume: engines pause │ abort: give back, pause

What a program asks itself (`ask`) takes no credit. `hold` treats it as it does the groups in flight; what is
cancelled there is asked again under the new weights.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from rondo.core.batch import BatchRef
from rondo.core.columns import GREEDY_REWARD
from rondo.core.errors import RolloutError, WorkerError, outage
from rondo.core.types import Ended
from rondo.data import firsts, is_scored
from rondo.planning import OnUpdate
from rondo.trainers.loop.buffer import Buffer, Group, failures

T = TypeVar("T")


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancels tasks and waits until all have ended, with an error or without."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Episodes(Protocol):
    """Runs prompt groups on one of its ranks. `benchmarks/simulation.py` has one without engines."""

    size: int
    """Number of ranks, lost ones included."""

    def alive(self) -> Sequence[int]:
        """Returns the ranks that groups may go to. Where the loss of one ends the run, it stays in the
        list.
        """
        ...

    async def run_group(self, rank: int, seq: int) -> tuple[BatchRef, Ended]:
        """Returns all rows of a prompt group, failures included, and how its trajectories ended, for the
        journal (empty where there is none). Cancelling the task frees what it holds.
        """
        ...

    async def pause(self) -> None:
        """Stops the engines at a token boundary; requests keep their place, new ones wait."""
        ...

    async def resume(self) -> None: ...

    async def restarted(self) -> str:
        """Returns when an engine was started again and has no weights: which, and why. Mostly never."""
        ...


@dataclass(eq=False)
class _Try:
    """Something that a program asks."""

    task: asyncio.Future[Any] | None = None
    """Its latest try; None before the first."""
    aborts: int = 0
    """Tries that ended because weights changed."""
    again: bool = False
    """Whether its try was cancelled, and another one follows."""


class EpisodeFeeder:
    """Starts episodes for the buffer's credits, and puts what they end with into the buffer. on_update: what
    `hold` does with the groups in flight. max_aborts: of one group, then it goes on as with resume. warn:
    gets a sentence for each lost rank. All methods run on the controller's event loop.
    """

    def __init__(
        self,
        buffer: Buffer,
        episodes: Episodes,
        *,
        on_update: OnUpdate = "finish",
        max_aborts: int = 0,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._buffer = buffer
        self._episodes = episodes
        self._make: Callable[[int, int], Awaitable[tuple[BatchRef, Ended]]] = episodes.run_group
        self.on_update = on_update
        self._max_aborts = max_aborts
        self._warn = warn
        self._running = False
        self._tasks: dict[asyncio.Task[None], int] = {}  # of groups in flight → their sequence numbers
        self._questions: set[_Try] = set()
        self._load = np.zeros(episodes.size, np.int64)  # groups in flight per rank
        self._places: dict[int, int] = {}  # who answered a prompt (seq) under these weights: a rank
        self._seen_alive = set(range(episodes.size))

    async def run(self) -> None:
        """Starts a group for every credit, until cancelled."""
        self._running = True
        try:
            while True:
                self._start(await self._buffer.ticket())
        except Exception as error:  # as in `_group`: it is raised where the trainer waits
            self._buffer.fail(error)

    def _start(self, seq: int) -> None:
        task = asyncio.create_task(self._group(seq), name=f"group-{seq}")
        self._tasks[task] = seq
        task.add_done_callback(self._tasks.pop)

    async def _group(self, seq: int) -> None:
        version = self._buffer.ledger.open[seq]
        ranks = self._alive()
        if not ranks:
            lost = RolloutError("no rollout rank is left: all their host processes died")
            self._buffer.fail(outage(lost))
            return
        rank = min(ranks, key=lambda rank: int(self._load[rank]))
        self._load[rank] += 1
        try:
            self._put(seq, version, *await self._make(rank, seq))
            self._places[seq] = rank
        except WorkerError as error:
            alive = self._alive(error.message)
            if rank in alive or not alive:
                self._buffer.fail(error)
            else:
                self._lost(seq)
        except (
            Exception
        ) as error:  # the boundary: an episode's error becomes the trainer's, which waits in take()
            self._buffer.fail(error)
        finally:
            self._load[rank] -= 1

    async def ask(self, make: Callable[[int], Awaitable[T]], seq: int) -> T:
        """Returns what `make(rank)` does on the rank that answered this prompt under these weights, and has
        its keys and values, or else on the one with the fewest groups; anew where that is lost, or `hold` has
        cancelled it.
        """
        question = _Try()
        self._questions.add(question)
        try:
            while True:
                # What `hold` has cancelled begins again when the new weights are there.
                await self._buffer.until(lambda: self._buffer.admitting)
                ranks = self._alive()
                if not ranks:
                    raise outage(RolloutError("no rollout rank is left: all their host processes died"))
                rank = self._places.get(seq, -1)
                if rank not in ranks:
                    rank = min(ranks, key=lambda rank: int(self._load[rank]))
                self._load[rank] += 1
                self._places[seq] = rank
                question.again = False
                question.task = asyncio.ensure_future(make(rank))
                try:
                    return await question.task
                except asyncio.CancelledError:
                    asking = asyncio.current_task()
                    if not question.again or asking is None or asking.cancelling():
                        raise
                except WorkerError as error:
                    if rank in self._alive(error.message):
                        raise
                finally:
                    self._load[rank] -= 1
        finally:
            self._questions.remove(question)

    def _alive(self, why: str = "") -> Sequence[int]:
        """Returns the ranks that groups may go to. Says once of each that it is lost."""
        alive = self._episodes.alive()
        lost = sorted(self._seen_alive.difference(alive))
        if alive and lost:
            why = why or f"the host process of {', '.join(f'rollout[{rank}]' for rank in lost)} is gone"
            self._warn(f"{why}; its prompts go to the other {len(alive)} of {self._episodes.size}")
        self._seen_alive.difference_update(lost)
        return alive

    def _lost(self, seq: int) -> None:
        """Gives back a group whose rank is gone; another rank will make it."""
        self._buffer.give_back([seq])

    def _put(self, seq: int, version: int, ref: BatchRef, ended: Ended) -> None:
        scored = is_scored(ref.index)
        num_scored = int(scored[firsts(ref.index)].sum())  # trajectories
        has_baseline = GREEDY_REWARD in ref.index.columns
        if has_baseline and not np.isfinite(ref.index.scalars(GREEDY_REWARD)).all():
            # Nothing of such a group is trained on: it costs as much as if all of its answers had failed.
            failed = [*failures(ref), *["without a greedy baseline"] * num_scored]
            self._buffer.drop(seq, "the greedy baseline was not scored", failed, ref, ended)
        elif num_scored < min(2, n := self._buffer.samples(seq)):
            reason = f"only {num_scored} of {n} trajectories were scored"
            self._buffer.drop(seq, reason, failures(ref), ref, ended)
        else:
            oldest = int(ref.index.scalars("oldest_version")[scored].min())
            self._buffer.put(Group(seq, version, oldest, ref, ended))

    async def hold(self, unless_stranded: Callable[[Awaitable[object]], Awaitable[str]]) -> None:
        """Stops the episodes: when this returns nothing decodes, until the engines resume and
        `Buffer.advance` lets prompts start again. unless_stranded: of the `Mender`.

        finish: drain what is in flight, scoring and refills included; or until an engine was started again,
        whose requests wait for weights that only the publish after this brings: then what is left is given
        back (of a program's own: asked again). resume: stop at a token boundary; what is in flight goes on
        under whatever weights are there then. abort: what is in flight is cancelled and given back, unless it
        was aborted max_aborts times.
        """
        if self.on_update != "finish":
            self._buffer.admitting = False
        elif news := await unless_stranded(self._settled()):
            self._warn(f"{news}; its prompts are generated again under the new weights")
            self._buffer.admitting = False
            await self._give_back(list(self._tasks.values()))
            await self._ask_again()
        self._buffer.in_flight = len(self._tasks) + len(self._questions)
        if self.on_update == "abort":
            aborts = self._buffer.ledger.aborts
            again = [seq for seq in self._tasks.values() if aborts.get(seq, 0) < self._max_aborts]
            await self._give_back(again, aborted=True)
            await self._ask_again(self._max_aborts)
        await self._episodes.pause()
        self._places.clear()

    async def _settled(self) -> None:
        """Waits until nothing is in flight and nothing can start; what failed is raised where it is waited
        for.
        """
        if self._running:
            await self._buffer.settled()
        while trying := [task for _, task in self._trying()]:
            await asyncio.wait(trying)
        self._buffer.admitting = self._running

    def _trying(self) -> list[tuple[_Try, asyncio.Future[Any]]]:
        return [(one, one.task) for one in self._questions if one.task is not None and not one.task.done()]

    async def _ask_again(self, max_aborts: float = math.inf) -> None:
        trying = [(one, task) for one, task in self._trying() if one.aborts < max_aborts]
        for question, _ in trying:
            question.again = True
            question.aborts += 1
        await cancel(*(task for _, task in trying))

    def partial(self) -> dict[int, BatchRef]:
        """Returns what a checkpoint holds of groups in flight: nothing, they start again (but see
        `replay/`).
        """
        return {}

    def restore_partial(self, partial: Mapping[int, BatchRef]) -> None:
        """Goes on from a checkpoint with its `partial`; called before `run`."""
        assert not partial

    async def close(self) -> None:
        """Cancels what is in flight; those prompts go back to the ledger."""
        await self._give_back(list(self._tasks.values()), ending=True)

    async def _give_back(self, seqs: Sequence[int], *, aborted: bool = False, ending: bool = False) -> None:
        """Cancels these groups. Not each task for itself: one that never ran cannot give anything back."""
        wanted = set(seqs)
        await cancel(*(task for task, seq in self._tasks.items() if seq in wanted))
        self._buffer.give_back(seqs, aborted=aborted, ending=ending)
