"""The feeder: turns the buffer's credits into prompt groups in flight, and holds them when weights must
change.

    buffer ──ticket──▶ run ──▶ a task per group, on the rank with the fewest ──put──▶ buffer
                                 │ lost with its rank, cancelled: given back, started again before others
    publisher ──hold──▶ finish: all complete │ resume: engines pause │ abort: give back, pause ──release──▶
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from rondo.agents.replay import ended_of
from rondo.batch import BatchRef
from rondo.columns import ENDED, GREEDY_REWARD
from rondo.data.rows import is_scored
from rondo.errors import RolloutError, WorkerError
from rondo.planning.admission import OnUpdate
from rondo.trainers.loop.buffer import Buffer, Group, failures
from rondo.trainers.loop.mender import cancel


class Episodes(Protocol):
    """Runs prompt groups on one of its ranks. `benchmarks/simulation.py` has one without engines."""

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


class EpisodeFeeder:
    """on_update: what `hold` does with the groups in flight. max_aborts: of one group, then it goes on as
    with resume. n: trajectories per group. warn: is told of a lost rank. All methods run on the controller's
    event loop.
    """

    def __init__(
        self,
        buffer: Buffer,
        episodes: Episodes,
        *,
        n: int,
        on_update: OnUpdate = "finish",
        max_aborts: int = 0,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._buffer, self._episodes, self._n = buffer, episodes, n
        self.on_update, self._max_aborts, self._warn = on_update, max_aborts, warn
        self._running = False
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._load = np.zeros(episodes.size, np.int64)  # groups in flight per rank
        self._seen_alive = set(range(episodes.size))

    async def run(self) -> None:
        """Starts a group for every credit, until cancelled."""
        self._running = True
        while True:
            self._start(await self._buffer.ticket())

    def _start(self, seq: int) -> None:
        task = asyncio.create_task(self._group(seq), name=f"group-{seq}")
        self._tasks[seq] = task
        task.add_done_callback(functools.partial(self._forget, seq))

    def _forget(self, seq: int, task: asyncio.Task[None]) -> None:
        if self._tasks.get(seq) is task:
            del self._tasks[seq]

    async def hold(self, stranded: Callable[[], Coroutine[Any, Any, str]]) -> None:
        """When this returns nothing decodes. stranded: `Mender.stranded`.

        finish: drain what is in flight, scoring and refills included. resume: stop at a token boundary; what
        is in flight goes on after `release` under whatever weights are there then. abort: what is in flight
        is cancelled and given back, unless it was aborted max_aborts times.
        """
        if self.on_update == "finish" and self._running:  # else nobody uses the credits that it waits for
            await self._drain(stranded)
        else:
            await self._buffer.admit(False)
        self._buffer.in_flight = len(self._tasks)
        if self.on_update == "abort":
            aborts = self._buffer.ledger.aborts
            await self._give_back(
                [seq for seq in self._tasks if aborts.get(seq, 0) < self._max_aborts], aborted=True
            )
        await self._episodes.pause()

    async def _drain(self, stranded: Callable[[], Coroutine[Any, Any, str]]) -> None:
        """Until nothing is in flight; or until an engine was started again, whose requests wait for weights
        that only the publish after this brings: then what is left is given back.
        """
        settled = asyncio.create_task(self._buffer.settled())
        restarted = asyncio.create_task(stranded())
        try:
            await asyncio.wait({settled, restarted}, return_when=asyncio.FIRST_COMPLETED)
            if settled.done():
                settled.result()
                return
            self._warn(f"{restarted.result()}; its prompts are generated again under the new weights")
        finally:
            await cancel(settled, restarted)
        await self._buffer.admit(False)
        await self._give_back(self._tasks)

    async def release(self) -> None:
        await self._episodes.resume()
        await self._buffer.admit(True)

    def partial(self) -> dict[int, BatchRef]:
        """What a checkpoint holds of groups in flight: nothing, they start again (but see `replay/`)."""
        return {}

    def restore_partial(self, partial: Mapping[int, BatchRef]) -> None:
        """Goes on from a checkpoint with its `partial`; called before `run`."""
        assert not partial

    async def close(self) -> None:
        """Cancel what is in flight; those prompts go back to the ledger."""
        await self._give_back(self._tasks, ending=True)

    async def _give_back(self, seqs: Iterable[int], *, aborted: bool = False, ending: bool = False) -> None:
        """Cancel these groups. Not each task for itself: one that never ran cannot give anything back."""
        tasks = {seq: self._tasks[seq] for seq in seqs}
        await cancel(*tasks.values())
        await self._buffer.give_back(tasks, aborted=aborted, ending=ending)

    async def _group(self, seq: int) -> None:
        version = self._buffer.ledger.open[seq]
        ranks = self._alive()
        if not ranks:
            await self._buffer.fail(RolloutError("no rollout rank is left: all their host processes died"))
            return
        rank = min(ranks, key=lambda rank: int(self._load[rank]))
        self._load[rank] += 1
        try:
            await self._put(seq, version, await self._run_group(rank, seq))
        except WorkerError as error:
            alive = self._alive(error.message)
            if rank in alive or not alive:
                await self._buffer.fail(error)
            else:
                await self._lost(seq)
        except (
            Exception
        ) as error:  # the boundary: an episode's error becomes the trainer's, which waits in take()
            await self._buffer.fail(error)
        finally:
            self._load[rank] -= 1

    async def _run_group(self, rank: int, seq: int) -> BatchRef:
        return await self._episodes.run_group(rank, seq)

    async def _lost(self, seq: int) -> None:
        """The rank that made this group is gone; another one will."""
        await self._buffer.give_back([seq])

    def _alive(self, why: str = "") -> Sequence[int]:
        """The ranks that groups may go to. Says once of each that it is lost, whoever noticed it."""
        alive = self._episodes.alive()
        lost = sorted(self._seen_alive.difference(alive))
        if alive and lost:
            why = why or f"the host process of {', '.join(f'rollout[{rank}]' for rank in lost)} is gone"
            self._warn(f"{why}; its prompts go to the other {len(alive)} of {self._episodes.size}")
        self._seen_alive.difference_update(lost)
        return alive

    async def _put(self, seq: int, version: int, ref: BatchRef) -> None:
        ended: Mapping[str, Any] = {}
        if ENDED in ref.index.columns:  # for the journal alone
            ended = ended_of(list(ref.index.scalars(ENDED)))
            ref = replace(ref, index=ref.index.without(ENDED))
        scored = is_scored(ref.index)
        num_scored = int(scored.sum())
        has_baseline = GREEDY_REWARD in ref.index.columns
        if has_baseline and not np.isfinite(ref.index.scalars(GREEDY_REWARD)).all():
            # Nothing of such a group is trained on: it costs as much as if all of its answers had failed.
            failed = [*failures(ref), *["without a greedy baseline"] * num_scored]
            await self._buffer.drop(seq, "the greedy baseline was not scored", failed, ended)
        elif num_scored < min(2, self._n):
            reason = f"only {num_scored} of {self._n} trajectories were scored"
            await self._buffer.drop(seq, reason, failures(ref), ended)
        else:
            oldest = int(ref.index.scalars("oldest_version")[scored].min())
            await self._buffer.put(Group(seq, version, oldest, ref, ended))
