"""How weights get from the trainer to the generation engines: one route per run, chosen by placement.
Those on which something moves are in `moving_routes`.

same process, same dtype, one rank       shared       nothing moves
same host processes                      gathered     all-gather in buckets, then each rank's engines
other host processes                     collective   point to point, along a transfer plan
rollout.weight_transport=disk            disk         safetensors in the run folder
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Protocol

from rondo.config import Config
from rondo.controller import WorkerGroup
from rondo.core.errors import ConfigError
from rondo.trainers.loop.moving_routes import CollectiveRoute, DiskRoute, GatheredRoute
from rondo.trainers.program import Roles, shares_weights
from rondo.weights import SyncReport, remove_weights
from rondo.workers import RolloutWorker

FOLDER = "weights"  # in the run folder


class Route(Protocol):
    """moves: False where both sides use one storage."""

    moves: bool

    async def load(self, version: int) -> SyncReport:
        """Makes every engine serve `version`, and confirm it; the engines are paused. Raises
        WeightSyncError (or the WorkerError around it).
        """
        ...

    def describe(self) -> str:
        """Returns one line for the log."""
        ...


def make_route(config: Config, roles: Roles, folder: Path) -> Route:
    """folder: of the run. Raises ConfigError where the two groups share some of their devices but not all."""
    actor, rollout, chosen = roles.actor, roles.engines, config.rollout.weight_transport
    if chosen == "disk":
        return DiskRoute(actor, rollout, folder / FOLDER, config)
    mine, theirs = set(actor.devices), set(rollout.devices)
    if mine.isdisjoint(theirs):
        return CollectiveRoute(actor, rollout, config)
    if not theirs <= mine:
        raise ConfigError(
            f"the actor is on devices {sorted(mine)} and the rollout engines on {sorted(theirs)}: give both "
            "one pool, or two that have no device in common; or use rollout.weight_transport=disk"
        )
    if shares_weights(config) and actor.size == 1:
        return SharedRoute(rollout)
    return GatheredRoute(actor, rollout, config)


def remove_files(folder: Path) -> None:
    """Removes what a disk route left in a run's folder: it is not read after the run."""
    remove_weights(folder / FOLDER)
    with contextlib.suppress(OSError):  # it is not there, or something else is in it
        (folder / FOLDER).rmdir()


class SharedRoute:
    """One storage for trainer and sampler: asserts that it is, and says the version."""

    moves = False

    def __init__(self, rollout: WorkerGroup) -> None:
        self._rollout = rollout

    async def load(self, version: int) -> SyncReport:
        return await self._rollout.call(RolloutWorker.load_weights, version)  # type: ignore[no-any-return]

    def describe(self) -> str:
        return "weights: trainer and sampler use the same storage"
