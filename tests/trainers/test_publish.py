"""Who waits for engines while one of them is started again: the mender, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from rondo.core.errors import WeightSyncError
from rondo.trainers.loop.buffer import Buffer
from rondo.trainers.loop.feeder import EpisodeFeeder, cancel
from rondo.trainers.loop.publish import WeightPublisher
from rondo.weights.sync import SyncReport
from simulation import SimulatedEngines, run_virtual


class Restarts(SimulatedEngines):
    """An engine that is started again at the times `at`, without weights; `ask` waits for them, and then for
    a second.
    """

    def __init__(self, *at: float, broken: bool = False) -> None:
        super().__init__(n=1, length=lambda seq, sample: 1000)
        self._at, self._broken = list(at), broken
        self.served, self.loads = asyncio.Event(), list[int]()
        self.polls = 0

    def die(self) -> None:
        self.served.clear()

    async def restarted(self) -> str:
        self.polls += 1
        try:
            if not self._at:
                await asyncio.Event().wait()
            await asyncio.sleep(max(0.0, self._at[0] - asyncio.get_running_loop().time()))
            if self._broken:
                raise RuntimeError("the poll broke")
            self._at.pop(0)
            self.die()
            return "an engine was started again"
        finally:
            self.polls -= 1

    async def load(self, version: int) -> SyncReport:
        self.loads.append(version)
        report = await super().load(version)
        self.served.set()
        return report

    async def ask(self, answer: str = "answer") -> str:
        for _ in range(10):
            await self.served.wait()
            await asyncio.sleep(0.1)
        return answer


def publisher(engines: Restarts, told: list[str], **options: Any) -> WeightPublisher:
    """Of engines that serve version 3."""
    buffer = Buffer(batch_size=1, max_staleness=0, total_steps=9, total_groups=9)
    feeder = EpisodeFeeder(buffer, engines)
    weights = WeightPublisher(engines, engines, feeder, buffer, shared=False, warn=told.append, **options)
    weights._version = 3
    return weights


async def served(engines: Restarts, work: Coroutine[Any, Any, Any], told: list[str], **options: Any) -> Any:
    weights = publisher(engines, told, **options)
    async with weights.mender as mender:
        working = asyncio.create_task(work)
        try:
            return await mender.served(_result(working))
        finally:
            await cancel(working)


async def _result(working: asyncio.Task[Any]) -> Any:
    return await working


async def left_over() -> set[asyncio.Task[Any]]:
    await asyncio.sleep(0)
    return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]


def test_every_restart_is_answered_with_the_current_weights() -> None:
    """Twice; the second time the canary of the first is what waits."""

    async def main() -> None:
        told: list[str] = []
        engines = Restarts(0.25, 0.6)
        engines.served.set()

        async def canary(version: int) -> float:
            return 0.0 if await engines.ask() else 1.0

        assert await served(engines, engines.ask(), told, canary=canary) == "answer"
        assert engines.loads == [3, 3]
        assert told == ["an engine was started again"] * 2
        assert not await left_over()
        assert engines.polls == 0

    run_virtual(main())


@pytest.mark.parametrize("moment", ["work", "poll", "load"])
def test_an_error_of_anybody_is_raised_and_nobody_goes_on(moment: str) -> None:
    async def main() -> None:
        engines = Restarts(0.25, broken=moment == "poll")
        engines.served.set()

        async def fail() -> str:
            await asyncio.sleep(0.2)
            raise RuntimeError("the work broke")

        async def load(version: int) -> SyncReport:
            raise WeightSyncError("the load broke")

        if moment == "load":
            engines.load = load  # type: ignore[method-assign]
        work = fail() if moment == "work" else engines.ask()
        with pytest.raises((RuntimeError, WeightSyncError), match=f"the {moment} broke"):
            await served(engines, work, [])
        assert not await left_over()

    run_virtual(main())


@pytest.mark.parametrize("when", [0.0, 0.2, 0.26])
def test_cancelled_at_any_time_it_leaves_nothing_behind(when: float) -> None:
    """Before it began, while the work runs, while it republishes (which takes its time)."""

    async def main() -> None:
        engines = Restarts(0.25)
        engines._load_seconds = 1.0
        engines.served.set()
        task = asyncio.create_task(served(engines, engines.ask(), []))
        await asyncio.sleep(when)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not await left_over()

    run_virtual(main())
