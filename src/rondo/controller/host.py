"""The host: everything of one process. Its workers by role, one training thread, and the one place that runs
a call.

    controller ── RankCall, ticket ─▶ Host.run ─┬─ sync method: the training thread, in the order of tickets
                                                └─ async method: the event loop, at once
               ◀── Ran (+ kept Batch), or Failure

Both backends run this class: `local` in the controller's own process, `ray` inside one actor per device.
Tickets are handed out by the controller, the same way for every host, so that two calls that overlap run in
one order on all ranks (collectives would deadlock otherwise). A worker's exception never leaves as an
exception but as a Failure.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from rondo.controller.calls import Answer, Ended, KeptBatch, Ran, RankCall
from rondo.controller.distributed import Groups, axis_groups, flight_record, init_distributed, is_echo
from rondo.controller.mesh import Mesh
from rondo.controller.worker import Worker, WorkerContext
from rondo.core.batch import Batch
from rondo.platform import Profiler, ProfileTurn
from rondo.system import activity
from rondo.system.activity import Activity, Pulse
from rondo.system.actor import Failure

JOIN, CREATE, PROFILE = "join a mesh", "__init__", "profile"
_NEW_OBJECTS = 20_000  # between looks for garbage among them
_thresholds: list[tuple[int, ...]] = []  # of the garbage collector, before there was a worker here
_freezes: list[bool] = []  # whether `collect_less` has it leave out what there is; empty: not asked yet
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NewWorker:
    """The argument of a CREATE call: what to build, and where it stands."""

    worker_class: type[Worker]
    """What to build."""
    rank: int
    """The worker's rank in its group."""
    accelerators: tuple[str, ...] = ()
    """The GPUs of the rank; see `WorkerContext.accelerators`."""


@dataclass(frozen=True)
class NewMesh:
    """The argument of a JOIN call, which every host of the world gets before some of them build a worker."""

    mesh: Mesh
    """The grid of the group's ranks."""
    ranks: tuple[int, ...]
    """The group's ranks in the world of hosts."""


def failure_of(error: BaseException) -> Failure:
    """Returns the record of a worker's exception; its traceback begins in the worker's code, not in this
    file.
    """
    frames = error.__traceback__
    while (
        frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__
    ):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    echo = is_echo(error)
    message = f"{type(error).__name__}: {error}"
    return Failure(message, text, at=time.time(), echo=echo, outage=echo, error=error)


def collect_less() -> None:
    """Has this process's garbage collector leave out what there is now, and look less often at what comes.

    Modules, classes and models stay until the end: to look through them takes a quarter of a second with
    torch and transformers. And the episodes of a step are some hundred objects each that live until they are
    scored: a look after every 700 of them, as Python does, takes a sixth of all that a row costs beside the
    model, and finds next to nothing.

    Where something is left out already (by the command line, by a fork server), that stays, and no more is:
    Python cannot take back a part of it, and to take back all costs the end of the process a second.
    """
    if not _freezes:  # asked once: it counts what is left out, a million objects in a tenth of a second
        _freezes.append(gc.get_freeze_count() == 0)
    if _freezes == [True]:
        gc.freeze()
    first, *others = gc.get_threshold()
    if 0 < first < _NEW_OBJECTS:  # 0: somebody has turned it off
        _thresholds.append((first, *others))
        gc.set_threshold(_NEW_OBJECTS, *others)


def collect_as_before() -> None:
    """Undoes `collect_less`."""
    if _freezes == [True]:
        gc.unfreeze()
        _freezes.clear()
    while _thresholds:
        gc.set_threshold(*_thresholds.pop())


class Host:
    """Runs the workers of one process, and their calls in order. rank: of this process in the world of hosts.
    timeout_seconds: of a collective operation. inline: sync methods run on the event loop's own thread.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: str,
        threads: int,
        timeout_seconds: float,
        *,
        inline: bool = False,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.threads = threads
        self.workers: dict[str, Worker] = {}
        self._meshes: dict[str, tuple[NewMesh, Mapping[str, tuple[dist.ProcessGroup, ...]]]] = {}
        self._groups: Groups = {}
        self._timeout = timedelta(seconds=timeout_seconds)
        self._started_distributed = False
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(threads)
        self._profiler = Profiler(device)
        self._ticket = 0  # whose turn it is
        self._waiting: dict[int, asyncio.Event] = {}
        self._thread = (
            None if inline else ThreadPoolExecutor(1, "rondo-train", torch.set_num_threads, (threads,))
        )

    async def start(self, store: dist.Store | None = None) -> None:
        """Joins the world, as all hosts do at once. store: where they meet; None for a world of one."""
        self._started_distributed = await self._on_thread(
            init_distributed, self.rank, self.world_size, self.device, store, self._timeout
        )

    async def run(self, call: RankCall, blocks: Sequence[Batch], ticket: int | None) -> Ended:
        """Runs one call. blocks: what the handles of `call.shard` stand for. ticket: None for async
        methods.
        """
        if ticket is not None:
            async with self._turn(ticket):
                done = self._on_thread(self._run_sync, call, blocks)
            return await done
        clock = time.time(), time.perf_counter()
        try:
            with self._activity(call, in_turn=False):
                return _ended(call, clock, await self._bound(call, blocks)())
        except (Exception, SystemExit) as error:
            return failure_of(error), None

    async def skip(self, ticket: int) -> None:
        """Skips the ticket of a call that cannot run."""
        async with self._turn(ticket):
            pass

    @asynccontextmanager
    async def _turn(self, ticket: int) -> AsyncIterator[None]:
        """Lets the holders of tickets 0, 1, 2 … in, one after the other."""
        if ticket != self._ticket:
            await self._waiting.setdefault(ticket, asyncio.Event()).wait()
        yield
        self._ticket += 1
        if self._ticket in self._waiting:
            self._waiting.pop(self._ticket).set()

    def _on_thread(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        if self._thread is not None:
            return loop.run_in_executor(self._thread, function, *args)
        done = loop.create_future()
        done.set_result(function(*args))
        return done

    # Here, and in `run` for async methods, a worker's exception, whatever it is, becomes a Failure.
    def _run_sync(self, call: RankCall, blocks: Sequence[Batch]) -> Ended:
        clock = time.time(), time.perf_counter()
        try:
            with self._activity(call, in_turn=True) as doing:
                if call.method == PROFILE:  # in no span of what it ends
                    self._turn_profile(*call.args)
                    return _ended(call, clock, None)
                with torch.profiler.record_function(doing.name):
                    return _ended(call, clock, self._bound(call, blocks)())
        except (Exception, SystemExit) as error:
            return failure_of(error), None

    def _activity(self, call: RankCall, *, in_turn: bool) -> Activity:
        """Returns what this process does while it runs a call. Engines may compile when they are built."""
        worker = self.workers.get(call.role)
        rank = self.rank if worker is None else worker.context.rank
        bound = {JOIN: True, CREATE: False, PROFILE: False}.get(call.method)
        return Activity(f"{call.role}[{rank}].{call.method}", in_turn=in_turn, bound=bound)

    def pulse(self, stacks: bool) -> Pulse:
        """Returns what this process is doing; from any thread, whatever the others do. stacks: with those of
        the processes that its workers have started, as far as they answer, and the flight record.
        """
        own = activity.pulse(stacks)
        if not stacks:
            return own
        below = [worker.stacks() for worker in list(self.workers.values())]
        return replace(own, stacks="\n".join(filter(None, [own.stacks, *below, flight_record()])))

    def _bound(self, call: RankCall, blocks: Sequence[Batch]) -> Callable[[], Any]:
        """Returns the method of a call with all its arguments."""
        if call.method == JOIN:
            return partial(self._join, call)
        if call.method == CREATE:
            return partial(self._create, call)
        args = call.args if call.shard is None else (call.shard.assemble(blocks), *call.args)
        return partial(getattr(self.workers[call.role], call.method), *args, **call.kwargs)

    def _join(self, call: RankCall) -> None:
        new: NewMesh = call.args[0]
        self._meshes[call.role] = (
            new,
            {
                name: axis_groups(axes, new.ranks, self._groups, self._timeout)
                for name, axes in new.mesh.grids.items()
            },
        )

    def _create(self, call: RankCall) -> None:
        new: NewWorker = call.args[0]
        placed, groups = self._meshes[call.role]
        context = WorkerContext(
            role=call.role,
            rank=new.rank,
            world_size=placed.mesh.size,
            device=self.device,
            threads=self.threads,
            peers=MappingProxyType(self.workers),
            mesh=placed.mesh,
            ranks=placed.ranks,
            groups=groups,
            accelerators=new.accelerators,
        )
        self.workers[call.role] = new.worker_class(context, **call.kwargs)
        collect_less()

    def _turn_profile(self, change: ProfileTurn) -> None:
        """Ends and begins the profile of this process, called as its oldest worker is, and of those that its
        workers have started. A process without a worker has none.
        """
        for number, worker in enumerate(self.workers.values()):
            if number == 0:
                self._profiler.turn(change, f"{worker.context.role}-{worker.context.rank}")
            worker.turn_profile(change)

    async def close(self) -> None:
        """Closes the workers, youngest first, and what was started here."""
        await self._on_thread(self._close_workers)  # behind what is still running
        if self._thread is not None:
            self._thread.shutdown()
        torch.set_num_threads(self._threads_before)

    def _close_workers(self) -> None:
        for role, worker in reversed(self.workers.items()):  # the younger may use the older (`peers`)
            ran, _ = self._run_sync(RankCall(role, "close"), ())
            if isinstance(ran, Failure):
                _log.warning("%s[%d].close failed: %s", role, worker.context.rank, ran.traceback)
        self._profiler.turn(ProfileTurn(), "")  # of a step that has not ended; nothing computes any more
        self.workers.clear()
        self._meshes.clear()
        self._groups.clear()
        collect_as_before()
        if self._started_distributed:
            dist.destroy_process_group()
            self._started_distributed = False


def _ended(call: RankCall, clock: tuple[float, float], result: Any) -> Answer:
    """Returns the answer to a call that began at `clock` and ended now, and the Batch that stays here.

    clock: `time.time()` and `time.perf_counter()`. The first may be set meanwhile, so it is read once: spans
    are never negative.
    """
    span = clock[0], clock[0] + time.perf_counter() - clock[1]
    if not call.collect:
        return Ran(span=span), None
    is_pair = isinstance(result, tuple) and len(result) == 2
    batch, rest = result if is_pair else (result, None)
    if call.keep is None or not isinstance(batch, Batch):
        return Ran(result, span=span), None
    index, data = batch.parted(call.keep)
    return Ran(rest, KeptBatch(index, tuple(data.columns), data.num_bytes), span=span), data
