"""A policy and the engines that serve it (`ServedPolicy`): what asks them, and what brings them its weights.
A run is one; a program may have others, one for each of `models` that learns.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rondo.config import Config
from rondo.core.types import StepStats
from rondo.trainers.loop.buffer import group_filter
from rondo.trainers.loop.engine_side import RolloutSide
from rondo.trainers.loop.journal import RunJournal
from rondo.trainers.loop.publish import WeightPublisher
from rondo.trainers.loop.report import Reporter
from rondo.trainers.program import Roles, Schedule


class ServedPolicy:
    """All policies of a run have the same versions: the trainer's steps.

    name: of its worker group, and what its metrics begin with.
    """

    def __init__(
        self,
        name: str,
        config: Config,
        roles: Roles,
        schedule: Schedule,
        side: RolloutSide,
        reporter: Reporter,
        *,
        journal: RunJournal | None = None,
        **of_buffer: Any,
    ) -> None:
        """config: as it is for this policy. journal: of what time decides. of_buffer: see
        `RolloutSide.buffer`.
        """
        self.name = name
        self.config = config
        self.roles = roles
        self.side = side
        self.reporter = reporter
        chosen = config.algorithm.filter
        self.buffer = side.buffer(
            batch_size=config.data.batch_size,
            total_steps=schedule.total_steps,
            total_groups=schedule.total_groups,
            order=config.trainer.order,
            keep=group_filter(chosen) if chosen else None,
            max_refills=chosen.max_refills if chosen else math.inf,
            n=config.rollout.n,
            max_dropped_share=config.reward.max_dropped_share,
            journal=journal,
            **of_buffer,
        )
        aborts = config.trainer.on_update.max_aborts
        self.feeder = side.feeder(self.buffer, max_aborts=aborts, warn=reporter.warn)
        reporter.note(self._said(side.describe()))
        self.weights = WeightPublisher(
            side.route,
            side,
            self.feeder,
            self.buffer,
            shared=not side.route.moves,
            enter=side.enter,
            canary=side.canary if side.route.moves else None,
            warn=reporter.warn,
        )

    def told(self, stats: StepStats) -> StepStats:
        """Returns metrics of this policy by the names that they have in the run's."""
        return stats if self.name == "actor" else stats.under(self.name)

    def _said(self, line: str) -> str:
        return line if self.name == "actor" else f"{self.name}: {line}"

    async def serve(self, version: int) -> None:
        """Serves the first weights, and proves that they are the trainer's."""
        await self.weights.start(version)
        if self.side.canary is None:
            return
        async with self.weights.mender as mender:
            gap = await mender.served(self.side.canary(version))
        self.reporter.note(self._said(f"canary: largest log-prob gap between sampler and trainer {gap:.1e}"))

    def request_stop(self) -> None:
        """Lets no further step begin."""
        self.buffer.stop()

    async def let_engines_rest(self) -> None:
        """Lets engines rest, with rollout.sleep, while the trainer computes: until the next version is
        released.
        """
        if self.side.enter is not None:
            await self.weights.rest()


class OtherPolicy(ServedPolicy):
    """A policy beside the run's, that its program asks and trains: it has no stream and no evaluation."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Inside, engines that are started again get weights, and what is asked is answered."""
        async with self.weights.mender:
            await self.side.start_counting()
            try:
                yield
            finally:
                await self.feeder.close()

    async def publish(self, version: int, stats: StepStats) -> None:
        """Ends a step, up to `release`. Its metrics have the policy's name before them."""
        own = StepStats()
        await self.weights.publish(version, own)
        own.merge(await self.side.end_step())
        stats.merge(self.told(own))
