"""The order of a publish: hold, (update,) load, confirm, snapshot if due, advance the buffer, release."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from rondo.controller import WorkerGroup
from rondo.data.buffer import Buffer
from rondo.trainers.feeder import EpisodeFeeder
from rondo.types import StepStats
from rondo.weights.sync import SyncReport
from rondo.workers.rollout import RolloutWorker

BeforeRelease = Callable[[int], Awaitable[None]]


class WeightPublisher:
    """shared: trainer and sampler use one storage, so episodes must be held before the first optimizer
    step.
    """

    def __init__(self, rollout: WorkerGroup, feeder: EpisodeFeeder, buffer: Buffer, *, shared: bool) -> None:
        self._rollout, self._feeder, self._buffer, self._shared = rollout, feeder, buffer, shared

    @asynccontextmanager
    async def publishing(self, version: int, before_release: BeforeRelease) -> AsyncIterator[StepStats]:
        """The update runs inside. before_release(version) runs while nothing decodes: evaluation, snapshot.

        An error inside leaves the episodes held and the version old. Yields statistics that are full
        afterwards.
        """
        stats = StepStats()
        if self._shared:
            await self._feeder.hold()
        yield stats
        if not self._shared:
            await self._feeder.hold()
        report = await self.load(version)
        stats.add_sum("weights/bytes_moved", float(report.bytes_moved))
        await before_release(version)
        await self._buffer.advance(version)
        await self._feeder.release()

    async def load(self, version: int) -> SyncReport:
        """Every engine serves `version`; raises WeightSyncError when one cannot confirm it."""
        report: SyncReport = await self._rollout.call(RolloutWorker.load_weights, version)
        return report
