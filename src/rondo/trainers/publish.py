"""The order of a publish: hold, (update,) load, confirm, snapshot if due, advance the buffer, release."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any, Protocol, TypeVar

from rondo.data.buffer import Buffer
from rondo.planning.residency import Phase
from rondo.trainers.episodes import Episodes, attended
from rondo.trainers.feeder import EpisodeFeeder
from rondo.types import StepStats
from rondo.weights.sync import SyncReport

T = TypeVar("T")


class Route(Protocol):
    """How weights get from the trainer to the engines (`trainers/routes.py`)."""

    async def load(self, version: int) -> SyncReport:
        """Every engine serves `version`, and has confirmed it; the engines are paused. Raises
        WeightSyncError.
        """
        ...


async def _nothing(version: int) -> None: ...


class WeightPublisher:
    """shared: trainer and sampler use one storage, so episodes must be held before the first optimizer
    step. enter: tells the engines which phase begins (rollout.sleep); None: they never rest. phase: counts
    the time inside to a name (`Timers.phase`). canary: compares engines and trainer after each sync, and
    returns the gap (`Canary.check`).
    """

    def __init__(
        self,
        route: Route,
        episodes: Episodes,
        feeder: EpisodeFeeder,
        buffer: Buffer,
        *,
        shared: bool,
        enter: Callable[[Phase], Awaitable[None]] | None = None,
        canary: Callable[[int], Coroutine[Any, Any, float]] | None = None,
        phase: Callable[[str], AbstractContextManager[Any]] = nullcontext,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._route, self._episodes, self._feeder = route, episodes, feeder
        self._buffer, self._shared, self._enter = buffer, shared, enter
        self._phase, self._canary, self._warn = phase, canary, warn

    async def train_phase(
        self, version: int, *, before_hold: Callable[[int], Awaitable[None]] = _nothing
    ) -> None:
        """The trainer begins to compute on the way to `version`. Engines that rest meanwhile are held from
        here until `publishing` has loaded it.
        """
        if self._enter is not None:
            await before_hold(version)
            await self._feeder.hold()
            await self._enter("train")

    @asynccontextmanager
    async def publishing(
        self,
        version: int,
        *,
        before_hold: Callable[[int], Awaitable[None]] = _nothing,
        before_release: Callable[[int], Awaitable[None]] = _nothing,
    ) -> AsyncIterator[StepStats]:
        """The update runs inside. before_hold(version) waits for what must end under the old weights.
        before_release(version) runs while nothing decodes: the snapshot, and an evaluation of its own.

        An error inside leaves the episodes held and the version old. Yields statistics that are full
        afterwards.
        """
        stats = StepStats()
        if self._shared:
            await before_hold(version)
            await self._feeder.hold()
        yield stats
        with self._phase("publish"):
            if not self._shared:
                await before_hold(version)
                await self._feeder.hold()
            report = await self._route.load(version)
            if self._enter is not None:
                await self._enter("generate")
            report.count(stats)
            stats.add_sum("buffer/in_flight", float(self._buffer.in_flight))
            await before_release(version)
            await self._buffer.advance(version)
            await self._feeder.release()
            if self._canary is not None:  # the engines run, and the trainer holds what they serve
                gap = await self.served(self._canary(version), version)
                stats.add_max("weights/canary_gap", gap)

    async def start(self, version: int) -> None:
        """The first weights, before the first episode."""
        await self._episodes.pause()
        await self._route.load(version)
        await self._buffer.advance(version)
        await self._feeder.release()

    async def served(self, work: Coroutine[Any, Any, T], version: int) -> T:
        """The result of `work`, which waits for engines. One that is started again meanwhile has no weights,
        and whoever waits for it would wait for ever: it gets `version`. Only while the trainer holds that.
        """

        async def mend(news: str) -> None:
            self._warn(news)
            await self.republish(version)

        return await attended(work, self._episodes.restarted, mend)

    async def republish(self, version: int) -> None:
        """The weights once more, for an engine that has none. What is in flight keeps its place."""
        await self._episodes.pause()
        await self._route.load(version)
        await self._episodes.resume()
        if self._canary is not None:
            await self.served(self._canary(version), version)
