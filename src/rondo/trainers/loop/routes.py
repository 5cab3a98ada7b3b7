"""How weights get from the trainer to the generation engines: one route per run (`plan_weights`)."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from rondo.config import Config
from rondo.controller import WorkerGroup
from rondo.core.errors import RondoError, WeightSyncError, WorkerError, outage
from rondo.planning import adapters_of, carried, plan_weights, rollout_dtype
from rondo.trainers.loop.feeder import cancel
from rondo.trainers.program import Roles
from rondo.weights import Layout, SendReport, Sent, SyncReport, Transfer, remove_weights
from rondo.workers import ActorWorker, RolloutWorker

FOLDER = "weights"  # in the run folder
CAUSE_SECONDS = 5.0  # after one side's error: how long the other may take to report its own
DEATH_SECONDS = 60.0  # after a receiver went away: until its death is known (a whole node takes longest)
_log = logging.getLogger(__name__)


class Route(Protocol):
    """How weights get from the trainer to the engines. moves: False where both sides use one storage."""

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
    """Makes the route that `plan_weights` chooses. folder: of the run. Raises ConfigError where
    the two groups share some of their devices but not all.
    """
    actor, rollout = roles.actor, roles.engines
    match plan_weights(config, actor.devices, rollout.devices).route:
        case "shared":
            return SharedRoute(rollout)
        case "gathered":
            return GatheredRoute(actor, rollout, config)
        case "collective":
            return CollectiveRoute(actor, rollout, config)
        case "disk":
            own = "" if actor.role == "actor" else actor.role
            return DiskRoute(actor, rollout, folder / FOLDER / own, config)


def remove_files(folder: Path) -> None:
    """Removes what disk routes left in a run's folder: it is not read after the run."""
    for place in (*(folder / FOLDER).glob("*/"), folder / FOLDER):  # first of policies beside the run's
        remove_weights(place)
        with suppress(OSError):  # it is not there, or something else is in it
            place.rmdir()


async def what_to_send(rollout: WorkerGroup, config: Config) -> Sent:
    """Returns what the next sync brings: adapters by themselves only where every engine has the base."""
    if adapters_of(config) != "alone":
        return "merged"
    wanting = await rollout.call_each(RolloutWorker.wants_weights)
    return "all" if any(wanting.values()) else "adapters"


class SharedRoute:
    """Has trainer and sampler share one storage: asserts that they do, and sets the version."""

    moves = False

    def __init__(self, rollout: WorkerGroup) -> None:
        self._rollout = rollout

    async def load(self, version: int) -> SyncReport:
        return await self._rollout.call(RolloutWorker.load_weights, version)  # type: ignore[no-any-return]

    def describe(self) -> str:
        return "weights: trainer and sampler use the same storage"


class _MovingRoute:
    """Moves weights between two worker groups, in buckets."""

    moves = True

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup, config: Config) -> None:
        self._actor = actor
        self._rollout = rollout
        self._config = config
        self._dtype = rollout_dtype(config)
        self._bucket_bytes = config.rollout.bucket_bytes


class GatheredRoute(_MovingRoute):
    """Each rank gathers all parameters, bucket by bucket, for the engines beside it."""

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup, config: Config) -> None:
        super().__init__(actor, rollout, config)
        # of an engine on several devices, only the first has the worker: the others' shards are needed too
        devices = set(rollout.devices)
        self._others = [rank for rank, device in enumerate(actor.devices) if device not in devices]

    async def load(self, version: int) -> SyncReport:
        what = await what_to_send(self._rollout, self._config)
        loading = [self._rollout.call(RolloutWorker.load_weights, version, what)]
        if self._others:
            arguments = (self._bucket_bytes, self._dtype, what)
            loading.append(self._actor.call(ActorWorker.gather_along, *arguments, ranks=self._others))
        return (await asyncio.gather(*loading))[0]  # type: ignore[no-any-return]

    def describe(self) -> str:
        ranks = "one rank" if self._actor.size == 1 else f"{self._actor.size} ranks"
        return f"weights: gathered in buckets on {ranks}, next to the engines{carried(self._config)}"


class CollectiveRoute(_MovingRoute):
    """Sends weights from the trainer's ranks to other hosts, point to point. A rollout rank that is gone gets
    nothing; with NCCL it takes the connections of the others with it, and they are sent it once more.
    """

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup, config: Config) -> None:
        super().__init__(actor, rollout, config)
        self._layouts: dict[Sent, Layout] = {}
        self._prepared: tuple[Sent, tuple[int, ...]] | None = None
        self._may_break = False  # for all, where one is gone: with NCCL

    async def load(self, version: int) -> SyncReport:
        while True:
            alive = self._rollout.alive
            try:
                return await self._load(version)
            except RondoError as error:
                self._prepared = None  # what is broken is not used again
                left = self._rollout.alive
                if not self._may_break or not error.is_outage or not 0 < len(left) < len(alive):
                    raise
                _log.warning("version %d goes again to rollout ranks %s: %s", version, list(left), error)

    async def _load(self, version: int) -> SyncReport:
        what = await what_to_send(self._rollout, self._config)
        ranks = await self._prepare(what)
        sending = asyncio.create_task(self._actor.call(ActorWorker.send_weights, version=version, what=what))
        receiving = {rank: asyncio.create_task(self._receive(rank, version, what)) for rank in ranks}
        try:
            lost = await self._lost(version, sending, receiving)
        finally:
            await cancel(sending, *receiving.values())
        report = next(task.result() for rank, task in receiving.items() if rank not in lost)
        return dataclasses.replace(report, lost=lost or None)

    async def _prepare(self, what: Sent) -> tuple[int, ...]:
        """Returns the ranks to serve; both sides know the transfer to them."""
        ranks = self._rollout.alive
        if not ranks:
            raise outage(WeightSyncError("no rollout rank is left to send weights to"))
        if (what, ranks) != self._prepared:
            if what not in self._layouts:
                self._layouts[what] = await self._actor.call(ActorWorker.weight_layout, self._dtype, what)
            targets = tuple(self._rollout.devices[rank] for rank in ranks)
            transfer = Transfer(self._layouts[what], targets, self._bucket_bytes)
            self._may_break = await self._actor.call(ActorWorker.prepare_transfer, transfer)
            await self._rollout.call_each(RolloutWorker.prepare_transfer, transfer)
            self._prepared = what, ranks
        return ranks

    async def _lost(
        self,
        version: int,
        sending: asyncio.Task[list[SendReport]],
        receiving: Mapping[int, asyncio.Task[SyncReport]],
    ) -> dict[int, str]:
        """Returns rollout ranks that died meanwhile, when all others are done. Raises what is no death,
        without waiting for those who now wait without an end.
        """
        pending: set[asyncio.Task[Any]] = {sending, *receiving.values()}
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            broken = [task.exception() for task in done if _broke_off(task, task is sending)]
            if broken:
                # What did not arrive: the death that it comes from may be known later.
                echo = sending not in done and all(getattr(error, "is_outage", False) for error in broken)
                if echo:
                    await asyncio.wait({sending}, timeout=DEATH_SECONDS)
                if pending:
                    await asyncio.wait(pending, timeout=CAUSE_SECONDS)
                break
            if sending in done and (missed := self._missed(sending)):
                _, hung = await asyncio.wait({receiving[rank] for rank in missed}, timeout=DEATH_SECONDS)
                if hung:
                    break
        self._raise_cause(version, self._missed(sending) if sending.done() else {}, receiving)
        errors = {rank: task.exception() for rank, task in receiving.items()}
        lost = {rank: error.message for rank, error in errors.items() if isinstance(error, WorkerError)}
        if len(lost) == len(receiving):
            rank, reason = next(iter(lost.items()))
            message = f"version {version}: no rollout rank is left; rollout[{rank}]: {reason}"
            raise outage(WeightSyncError(message))
        return lost

    async def _receive(self, rank: int, version: int, what: Sent) -> SyncReport:
        try:
            report: SyncReport = await self._rollout.call_rank(
                rank, RolloutWorker.receive_weights, version, what
            )
        except WorkerError as error:
            if error.died:
                await self._break(str(error))
            raise
        return report

    async def _break(self, why: str) -> None:
        """Tells the ranks that are left that one is gone. They report what comes of it."""
        workers = (self._actor, ActorWorker), (self._rollout, RolloutWorker)
        calls = [group.call_each(worker.break_transfer, why) for group, worker in workers if group.alive]
        with suppress(TimeoutError):  # of one that hangs
            await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), CAUSE_SECONDS)

    def _missed(self, sending: asyncio.Task[list[SendReport]]) -> dict[int, str]:
        """Returns rollout ranks that did not get everything. Raises the sender's error: a receiver's never
        becomes one, so that it is a cause and no echo.
        """
        rank_of = {device: rank for rank, device in enumerate(self._rollout.devices)}
        reports = reversed(sending.result())  # several may have lost one rank: the first one's reason stays
        return {rank_of[device]: reason for report in reports for device, reason in report.lost.items()}

    def _raise_cause(
        self, version: int, missed: Mapping[int, str], receiving: Mapping[int, asyncio.Task[SyncReport]]
    ) -> None:
        """Raises what happened that is no death: a receiver that hangs, then one that raised, then one that
        knows nothing of what it missed.
        """
        unsent = f"version {version} was not sent whole to"
        for rank, reason in missed.items():
            if not receiving[rank].done():
                raise outage(WeightSyncError(f"{unsent} rollout[{rank}]: {reason}"))
        for task in receiving.values():
            if task.done() and _broke_off(task):
                task.result()
        for rank, reason in missed.items():
            if receiving[rank].exception() is None:
                raise outage(WeightSyncError(f"{unsent} rollout[{rank}]: {reason}"))

    def describe(self) -> str:
        return (
            f"weights: point to point from {self._actor.size} to {self._rollout.size} ranks, in rounds of at "
            f"most {self._bucket_bytes} bytes{carried(self._config)}"
        )


class DiskRoute(_MovingRoute):
    """Moves weights by way of safetensors in the run folder, which both sides must see."""

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup, folder: Path, config: Config) -> None:
        super().__init__(actor, rollout, config)
        self._folder = folder

    async def load(self, version: int) -> SyncReport:
        folder = str(self._folder.resolve())
        what = await what_to_send(self._rollout, self._config)
        written: SyncReport = await self._actor.call(
            ActorWorker.write_weights, folder, version, self._bucket_bytes, self._dtype, what
        )
        read = await self._rollout.call_each(RolloutWorker.read_weights, folder, version, what)
        return dataclasses.replace(
            written,
            bytes_moved=written.bytes_moved + sum(report.bytes_moved for report in read.values()),
            bytes_needed=sum(report.bytes_needed for report in read.values()),
            peak_bytes=max(written.peak_bytes, *(report.peak_bytes for report in read.values())),
        )

    def describe(self) -> str:
        size = f"in files of at most {self._bucket_bytes} bytes"
        return f"weights: by way of {self._folder}, {size}{carried(self._config)}"


def _broke_off(task: asyncio.Task[Any], sender: bool = False) -> bool:
    """Says whether a task's error ends the sync: any error of the sender's does, and one of a receiver's that
    is no death.
    """
    error = task.exception()
    return error is not None and (sender or not isinstance(error, WorkerError) or not error.died)
