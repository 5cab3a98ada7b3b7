"""Weights on their way to the engines: hold, load, confirm, release (`WeightPublisher`). And the one place
where an engine that was started again gets weights (`Mender`).

An engine process that dies is started again by its host, without weights, and those who wait for its answers
would wait without end. While the trainer holds the version that is served, the mender loads it. While the
trainer's weights change (`changing` is held) it cannot: the publish at the end brings new ones to every
engine, and who must not wait that long (a drain, an evaluation, a replay) waits `unless_stranded`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from rondo.core.types import StepStats
from rondo.planning import Phase
from rondo.trainers.loop.buffer import Buffer
from rondo.trainers.loop.feeder import EpisodeFeeder, Episodes, cancel
from rondo.trainers.loop.routes import Route
from rondo.weights import SyncReport

T = TypeVar("T")


class WeightPublisher:
    """Publishes the trainer's weights to the engines. All engines serve the same version.

    shared: trainer and sampler use one storage, so episodes are held before the first optimizer step. enter:
    tells the engines which phase begins (rollout.sleep); None: they never rest. canary: compares engines and
    trainer after each sync, and returns the gap (`Canary.check`).
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
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._route = route
        self._episodes = episodes
        self._feeder = feeder
        self._buffer = buffer
        self._shared = shared
        self._enter = enter
        self._canary = canary
        self._version = -1  # that the engines serve; -1: none yet
        self._held = False  # the episodes
        self._changes = False  # the weights: `mender.changing` is ours
        self.mender = Mender(episodes.restarted, self._reload, check=self._check, warn=warn)

    @property
    def changing(self) -> bool:
        """Whether the trainer's weights are no version that is served: from `hold` to `release`."""
        return self._changes

    async def start(self, version: int) -> None:
        """Serves the first weights, before the first episode."""
        await self._episodes.pause()
        await self._load(version)
        await self._episodes.resume()
        self._buffer.advance(version)  # last: it gives credits, and prompts start on these at once

    async def rest(self) -> None:
        """Holds engines that rest while the trainer computes (rollout.sleep), from here to `release`."""
        assert self._enter is not None
        await self.hold()
        await self._enter("train")

    async def hold(self, *, if_shared: bool = False) -> None:
        """Comes before the first optimizer step: from here to `release` the trainer's weights are no version
        that anybody is served. Episodes are held, once; if_shared: only where their engines have the
        trainer's storage.
        """
        # The lock first: while it is held, a hold does not wait for an engine that was started again.
        if not self._changes:
            await self.mender.changing.acquire()
            self._changes = True
        if not self._held and (self._shared or not if_shared):
            await self._feeder.hold(self.mender.unless_stranded)
            self._held = True

    async def publish(self, version: int, stats: StepStats) -> SyncReport:
        """Holds the episodes, if nobody has; every engine loads `version` and confirms it."""
        await self.hold()
        clock = asyncio.get_running_loop().time
        started = clock()
        report = await self._load(version)
        stats.add_sum("timing/weight_sync_s", clock() - started)
        stats.add_sum("weights/bytes_moved", float(report.bytes_moved))
        stats.add_sum("weights/bytes_needed", float(report.bytes_needed))
        stats.add_max("weights/peak_bytes", float(report.peak_bytes))
        stats.add_sum("weights/rounds", float(report.rounds))
        if self._enter is not None:
            await self._enter("generate")
        stats.add_sum("buffer/in_flight", float(self._buffer.in_flight))
        return report

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Lets the engines run inside, for an evaluation between `publish` and `release`."""
        await self._episodes.resume()
        self.mender.changing.release()  # only now: the mender pauses and resumes engines that run
        yield
        await self.mender.changing.acquire()  # before the pause: the mender would resume what it has mended
        await self._episodes.pause()

    async def release(self, version: int, stats: StepStats) -> None:
        """Lets episodes go on under the weights of `version`, and prompts start on its credits."""
        await self._episodes.resume()
        self._buffer.advance(version)
        self._held = False
        self._changes = False
        self.mender.changing.release()  # after `resume`: the mender pauses and resumes engines that run
        if self._canary is not None:  # the engines run, and the trainer holds what they serve
            gap = await self.mender.served(self._canary(version))
            stats.add_max("weights/canary_gap", gap)

    async def _load(self, version: int) -> SyncReport:
        report = await self._route.load(version)
        self._version = version
        return report

    async def _reload(self) -> None:
        """Loads the weights once more, for an engine that has none. What is in flight keeps its place."""
        await self._episodes.pause()
        await self._load(self._version)
        await self._episodes.resume()

    async def _check(self) -> None:
        if self._canary is not None:
            await self._canary(self._version)


async def _nothing() -> None: ...


class Mender:
    """Gives weights to engines that are started again, inside `async with Mender(…) as mender:`."""

    def __init__(
        self,
        restarted: Callable[[], Coroutine[Any, Any, str]],
        reload: Callable[[], Awaitable[None]],
        *,
        check: Callable[[], Coroutine[Any, Any, object]] = _nothing,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        """restarted: returns a sentence when there is an engine without weights. reload: gives all engines
        the version that is served; they go on where they were. check: run after that (the canary). warn: told
        each sentence.
        """
        self.changing = asyncio.Lock()
        self._restarted = restarted
        self._reload = reload
        self._check = check
        self._warn = warn
        self._news = ""
        self._stranded = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="mender")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            await cancel(self._task)
            self._task = None

    async def served(self, work: Awaitable[T]) -> T:
        """Returns the result of `work`, which waits for engines; raises what mending them raised meanwhile.
        Outside of `async with` nothing is mended.
        """
        if self._task is None:
            return await work
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait({working, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                self._task.result()  # the mender ends by an error only
            return working.result()
        finally:
            await cancel(working)

    async def unless_stranded(self, work: Awaitable[object]) -> str:
        """Waits for `work`, and returns "". Where an engine is started again while weights change, `work`
        would wait for the next version: then it is cancelled, and this returns which engine it was.
        """
        working = asyncio.ensure_future(work)
        stranded = asyncio.create_task(self._stranded.wait())
        try:
            await asyncio.wait({working, stranded}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                return self._news
            working.result()
            return ""
        finally:
            await cancel(working, stranded)

    async def _run(self) -> None:
        while True:
            news = await self._restarted()
            if self.changing.locked():
                self._news = news
                self._stranded.set()
                async with self.changing:  # the one who changed the weights has given new ones to all engines
                    self._stranded.clear()
                continue
            async with self.changing:
                await self.give_weights(news)
                await self._checked()

    async def give_weights(self, news: str) -> None:
        """Gives all engines weights once, because of `news`."""
        self._warn(news)
        await self._reload()

    async def _checked(self) -> None:
        """Runs the check, which asks engines, too; one that is started again meanwhile gets weights."""
        checking = asyncio.create_task(self._check())
        waiting = asyncio.create_task(self._restarted())
        try:
            while not checking.done():
                await asyncio.wait({checking, waiting}, return_when=asyncio.FIRST_COMPLETED)
                if waiting.done() and not checking.done():
                    await self.give_weights(waiting.result())
                    waiting = asyncio.create_task(self._restarted())
            checking.result()
        finally:
            await cancel(checking, waiting)
