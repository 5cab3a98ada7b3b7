"""The asynchronous loop without a model and without waiting: the real feeder, buffer and publisher on a
virtual clock, against engines that only sleep. Tests of the guarantees and `benchmarks/async.py` run on it.

    run_virtual(main())                a coroutine on a clock that jumps to whatever is scheduled next
    SimulatedEngines                   `Episodes` and `Route` in one: slots, lengths by seed, token versions
    simulate(buffer, engines, feeder)  a trainer that takes, sleeps and publishes
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from rondo.agents.ended import Entry, length_at, spans_in, spans_of
from rondo.core.batch import ROW_ID, Batch, BatchRef, ragged_rows
from rondo.core.errors import TrainError
from rondo.core.types import SCORED, Ended, StepStats
from rondo.data.rows import row_ids
from rondo.trainers.loop.buffer import Buffer, Group
from rondo.trainers.loop.feeder import EpisodeFeeder
from rondo.trainers.loop.publish import WeightPublisher
from rondo.weights.sync import SyncReport

T = TypeVar("T")

INDEX_COLUMNS = (
    *(ROW_ID, "seq", "group_id", "sample_index", "step_index"),
    *("response_length", "oldest_version", "outcome"),
)
ENTRY = {"finish": "stop", "reward": None, "digest": ""}  # of a journal, with spans and outcome


class _Selector(selectors.DefaultSelector):
    """Never waits: with nothing ready, the clock goes on to the next timer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise TrainError("nothing is ready and nothing is scheduled: everybody waits for somebody else")
        if not ready and timeout:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on which `asyncio.sleep(3600)` takes no time. No threads, no sockets."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, on virtual time. Raises TrainError where the coroutines wait for each other."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


@dataclass(frozen=True)
class Lengths:
    """Response lengths in tokens: log-normal of mean `mean`, cut to 1 … `longest`. A function of what a
    request is, so that an aborted one is as long again.
    """

    mean: float = 400.0
    sigma: float = 1.0
    longest: int = 4096
    seed: int = 0

    def __call__(self, seq: int, sample: int) -> int:
        draw = np.random.default_rng([self.seed, seq, sample]).lognormal(
            np.log(self.mean) - self.sigma**2 / 2, self.sigma
        )
        return int(min(max(draw, 1), self.longest))


class SimulatedEngines:
    """Ranks with `slots` places each; a token takes `token_seconds` whatever else runs (decoding waits for
    memory, not for arithmetic).

    length(seq, sample): tokens. fails(seq, sample): its scoring fails. score_seconds(seq, sample): how long
    that takes. load_seconds: of a weight load. Implements `Episodes` and `Route`.
    """

    moves = True

    def __init__(
        self,
        *,
        ranks: int = 1,
        slots: int = 256,
        n: int = 8,
        token_seconds: float = 1e-3,
        length: Callable[[int, int], int] = Lengths(),
        fails: Callable[[int, int], bool] = lambda seq, sample: False,
        score_seconds: Callable[[int, int], float] = lambda seq, sample: 0.0,
        load_seconds: float = 0.0,
    ) -> None:
        self.size, self.n, self._slots, self._token_seconds = ranks, n, slots, token_seconds
        self._length, self._fails, self._score_seconds = length, fails, score_seconds
        self._load_seconds = load_seconds
        self._places = [asyncio.Semaphore(slots) for _ in range(ranks)]
        self._running, self._paused = asyncio.Event(), asyncio.Event()
        self._running.set()
        self.version = 0
        self.decoded_tokens = self.wasted_tokens = 0  # wasted: of requests that were cancelled
        self.held_seconds = 0.0
        self._held_since = 0.0

    def describe(self) -> str:
        return "simulated"

    def alive(self) -> Sequence[int]:
        return range(self.size)

    async def pause(self) -> None:
        if self._running.is_set():
            self._held_since = asyncio.get_running_loop().time()
        self._running.clear()
        self._paused.set()
        await asyncio.sleep(0)  # whoever decodes stops here

    async def resume(self) -> None:
        if not self._running.is_set():
            self.held_seconds += asyncio.get_running_loop().time() - self._held_since
        self._paused.clear()
        self._running.set()

    async def restarted(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    async def load(self, version: int) -> SyncReport:
        if self._running.is_set():
            raise TrainError("weights were loaded while engines decode")
        await asyncio.sleep(self._load_seconds)
        self.version = version
        return SyncReport(version, 0, 0)

    def occupancy(self) -> float:
        """Share of slot-seconds in which a token was made, since the clock's zero."""
        seconds = asyncio.get_running_loop().time() * self.size * self._slots
        return self.decoded_tokens * self._token_seconds / seconds if seconds else 0.0

    async def run_group(self, rank: int, seq: int) -> tuple[BatchRef, Ended]:
        """Rows with the columns of INDEX_COLUMNS and `policy_versions`."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._trajectory(rank, seq, sample)) for sample in range(self.n)]
        return self._rows(seq, [task.result() for task in tasks])

    async def continue_group(
        self, rank: int, seq: int, entries: Sequence[Entry], version: int, before: BatchRef | None
    ) -> BatchRef:
        """As `EpisodesInPieces`. Rows with response_length and `policy_versions`."""
        made = [np.empty(0, np.int32)] * self.n if before is None else _versions(before)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._piece(rank, seq, sample, length_at(spans, version), made[sample]))
                for sample, spans in enumerate(spans_in(entries))
            ]
        versions = [task.result() for task in tasks]
        rows = {
            ROW_ID: row_ids(seq, np.arange(self.n)),
            "response_length": np.array([len(v) for v in versions], np.int32),
            "policy_versions": ragged_rows(versions, np.int32),
        }
        return BatchRef.of(Batch.of(rows), ["response_length"])

    async def finish_group(
        self, rank: int, seq: int, made: BatchRef, entries: Sequence[Entry]
    ) -> tuple[BatchRef, Ended]:
        """As `EpisodesInPieces`."""
        await asyncio.sleep(max(self._score_seconds(seq, sample) for sample in range(self.n)))
        return self._rows(seq, _versions(made))

    def _rows(self, seq: int, versions: Sequence[np.ndarray]) -> tuple[BatchRef, Ended]:
        outcomes = ["reward_error" if self._fails(seq, sample) else SCORED for sample in range(self.n)]
        rows = Batch.of(
            {
                ROW_ID: row_ids(seq, np.arange(self.n)),
                "seq": np.full(self.n, seq, np.int64),
                "group_id": np.full(self.n, seq, np.int64),
                "sample_index": np.arange(self.n, dtype=np.int32),
                "step_index": np.zeros(self.n, np.int32),
                "response_length": np.array([len(v) for v in versions], np.int32),
                "oldest_version": np.array([v.min() for v in versions], np.int32),
                "outcome": outcomes,
                "reward": np.array([float(sample % 2) for sample in range(self.n)], np.float32),
                "policy_versions": ragged_rows(versions, np.int32),
            }
        )
        entries = [
            {**ENTRY, "spans": spans_of(v), "outcome": outcome}
            for v, outcome in zip(versions, outcomes, strict=True)
        ]
        return BatchRef.of(rows, [*INDEX_COLUMNS, "reward"]), {"trajectories": entries}

    async def _trajectory(self, rank: int, seq: int, sample: int) -> np.ndarray:
        """policy_versions of one, decoded and scored."""
        versions = np.full(self._length(seq, sample), -1, np.int32)
        async with self._places[rank]:
            await self._decode(versions)
        await asyncio.sleep(self._score_seconds(seq, sample))
        return versions

    async def _piece(self, rank: int, seq: int, sample: int, length: int, before: np.ndarray) -> np.ndarray:
        """policy_versions of one, decoded up to `length`."""
        versions = np.full(max(min(length, self._length(seq, sample)), len(before)), -1, np.int32)
        versions[: len(before)] = before
        if len(versions) > len(before):
            async with self._places[rank]:
                await self._decode(versions, len(before))
        return versions

    async def _decode(self, versions: np.ndarray, done: int = 0) -> None:
        """Fill in the version of each token as it is made. Stops at a token boundary while paused."""
        loop = asyncio.get_running_loop()
        while done < len(versions):
            await self._running.wait()
            start, version = loop.time(), self.version
            try:
                async with asyncio.timeout((len(versions) - done) * self._token_seconds):
                    await self._paused.wait()
            except TimeoutError:
                made = len(versions) - done
            except asyncio.CancelledError:
                self.wasted_tokens += done + self._made(loop.time() - start)
                raise
            else:
                made = min(self._made(loop.time() - start), len(versions) - done)
            versions[done : done + made] = version
            self.decoded_tokens += made
            done += made

    def _made(self, seconds: float) -> int:
        return int(seconds / self._token_seconds + 1e-6)


def _versions(rows: BatchRef) -> list[np.ndarray]:
    (block,) = rows.blocks
    return list(block.handle.rows("policy_versions"))


@dataclass
class Simulation:
    """What a simulated run did: the groups of each step, their staleness, the clock at the end, statistics of
    the buffer by step.
    """

    steps: list[list[int]] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    statistics: list[dict[str, float]] = field(default_factory=list)
    trained_lengths: list[int] = field(default_factory=list)
    seconds: float = 0.0


async def simulate(
    buffer: Buffer,
    engines: SimulatedEngines,
    feeder: EpisodeFeeder,
    *,
    update_seconds: float = 0.45,
    shared: bool = False,
    on_step: Callable[[Sequence[Group]], Awaitable[None]] | None = None,
) -> Simulation:
    """A whole run: take, update (sleeps `update_seconds`), publish, to the end of the prompts or steps.
    on_step: sees the groups of each step.
    """
    done, publisher = Simulation(), WeightPublisher(engines, engines, feeder, buffer, shared=shared)
    await publisher.start(buffer.version)
    feeding = asyncio.create_task(feeder.run())
    try:
        async with publisher.mender:
            while groups := await buffer.take():
                done.steps.append([group.seq for group in groups])
                done.staleness += [buffer.version - group.oldest_version for group in groups]
                done.trained_lengths += [n for group in groups for n in group.lengths]
                if on_step is not None:
                    await on_step(groups)

                stats, version = StepStats(), buffer.version + 1
                await publisher.hold(if_shared=True)
                await asyncio.sleep(update_seconds)
                await publisher.publish(version, stats)
                done.statistics.append(buffer.end_step())
                await publisher.release(version, stats)
                done.statistics[-1] |= stats.values()
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
        await feeder.close()
        done.seconds = asyncio.get_running_loop().time()
    return done
