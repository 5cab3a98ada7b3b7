"""The host: everything of one process. Its workers by role, one training thread, and the one place that runs
a call.

    controller ── Call + ticket ─▶ Host.run ──┬─ sync method: the training thread, in the order of the tickets
                                              └─ async method: the event loop, at once
               ◀── Reply (+ kept Batch) ───────

Both backends run this class: `local` in the controller's own process, `ray` inside one actor per device.
Tickets are handed out by the controller, the same way for every host, so that two calls that overlap run in
one order on all ranks (collectives would deadlock otherwise). A worker's exception never leaves as an
exception but as a Failure.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from rondo.batch import Batch, Shard
from rondo.controller.distributed import init_distributed, is_echo, new_axis_groups
from rondo.controller.mesh import Mesh
from rondo.controller.worker import Worker, WorkerContext

JOIN, CREATE = "join a mesh", "__init__"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Call:
    """One method on one rank."""

    role: str
    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    # Assembled on the worker's side, it becomes the first argument.
    shard: Shard | None = None
    # None: a returned Batch travels to the controller. Else it stays with the host, and only `row_id` and
    # these columns travel.
    keep: tuple[str, ...] | None = None
    # False drops the result: another rank of the data-parallel group returns it.
    collect: bool = True
    # The method is a coroutine function.
    is_async: bool = False


@dataclass(frozen=True)
class NewWorker:
    """The argument of a CREATE call: what to build, and where it stands."""

    worker_class: type[Worker]
    rank: int
    accelerators: tuple[str, ...] = ()


@dataclass(frozen=True)
class NewMesh:
    """The argument of a JOIN call, which every host of the world gets before some of them build a worker."""

    mesh: Mesh
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Failure:
    """Why a call has no result."""

    message: str
    traceback: str = ""
    # Seconds since the epoch on the host's clock.
    at: float = 0.0
    # It only reports a peer's failure.
    echo: bool = False
    # The host process is gone.
    died: bool = False
    # The exception itself, or None where it could not travel.
    cause: BaseException | None = None


@dataclass(frozen=True)
class Kept:
    """A returned Batch that stayed with the host: its index, and the names and size of the columns left
    behind."""

    index: Batch
    columns: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True)
class Reply:
    """What travels back."""

    # The result, less the Batch if that was kept.
    value: Any = None
    kept: Kept | None = None
    failure: Failure | None = None
    # When it ran: start and end in seconds since the epoch on the host's clock; (0, 0) if it never did.
    span: tuple[float, float] = (0.0, 0.0)


Result = tuple[Reply, Batch | None]


def failure_of(error: BaseException) -> Failure:
    """The record of a worker's exception; its traceback begins in the worker's code, not in this file."""
    frames = error.__traceback__
    while (
        frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__
    ):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return Failure(f"{type(error).__name__}: {error}", text, time.time(), is_echo(error), cause=error)


class _Stopwatch:
    """Starts when it is made. Spans are never negative: the clock that may be set is read once."""

    def __init__(self) -> None:
        self._start, self._started = time.time(), time.perf_counter()

    def stamped(self, reply: Reply) -> Reply:
        """The reply with the span from the start until now."""
        elapsed = time.perf_counter() - self._started
        return replace(reply, span=(self._start, self._start + elapsed))


class _Turnstile:
    """Lets the holders of tickets 0, 1, 2 … through in that order."""

    def __init__(self) -> None:
        self._next = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def enter(self, ticket: int) -> None:
        if ticket != self._next:
            self._waiting[ticket] = asyncio.get_running_loop().create_future()
            await self._waiting[ticket]

    def leave(self) -> None:
        self._next += 1
        following = self._waiting.pop(self._next, None)
        if following is not None:
            following.set_result(None)


class Host:
    """rank: of this process in the world of hosts. inline: sync methods run on the event loop's own
    thread."""

    def __init__(
        self, rank: int, world_size: int, device: str, threads: int, *, inline: bool = False
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.threads = threads
        self.workers: dict[str, Worker] = {}
        self._meshes: dict[str, tuple[NewMesh, tuple[dist.ProcessGroup, ...]]] = {}
        self._started_distributed = False
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(threads)
        self._turnstile = _Turnstile()
        self._thread = (
            None if inline else ThreadPoolExecutor(1, "rondo-train", torch.set_num_threads, (threads,))
        )

    async def start(self, store: dist.Store | None = None) -> None:
        """Join the world. All hosts at once; store: where they meet (None for a world of one)."""
        self._started_distributed = await self._on_thread(
            lambda: init_distributed(self.rank, self.world_size, self.device, store)
        )

    async def run(self, call: Call, blocks: Sequence[Batch], ticket: int | None) -> Result:
        """Run one call. blocks: what the pieces of `call.shard` stand for. ticket: None for async methods."""
        if ticket is None:
            clock = _Stopwatch()
            reply, kept = await self._run_async(call, blocks)
            return clock.stamped(reply), kept
        await self._turnstile.enter(ticket)
        done = self._on_thread(lambda: self._run_timed(call, blocks))
        self._turnstile.leave()
        return await done

    async def skip(self, ticket: int) -> None:
        """Let a ticket pass whose call cannot run."""
        await self._turnstile.enter(ticket)
        self._turnstile.leave()

    def _on_thread(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        if self._thread is not None:
            return loop.run_in_executor(self._thread, function)
        done = loop.create_future()
        done.set_result(function())
        return done

    def _run_timed(self, call: Call, blocks: Sequence[Batch]) -> Result:
        clock = _Stopwatch()
        reply, kept = self._run_sync(call, blocks)
        return clock.stamped(reply), kept

    # The two methods below are the boundary at which a worker's exception, whatever it is, becomes a Failure.
    def _run_sync(self, call: Call, blocks: Sequence[Batch]) -> Result:
        try:
            if call.method == JOIN:
                new: NewMesh = call.args[0]
                self._meshes[call.role] = new, new_axis_groups(new.mesh, new.ranks)
                return Reply(), None
            if call.method == CREATE:
                self._create(call)
                return Reply(), None
            method = getattr(self.workers[call.role], call.method)
            return _reply(call, method(*_arguments(call, blocks), **call.kwargs))
        except (Exception, SystemExit) as error:
            return Reply(failure=failure_of(error)), None

    async def _run_async(self, call: Call, blocks: Sequence[Batch]) -> Result:
        try:
            method = getattr(self.workers[call.role], call.method)
            return _reply(call, await method(*_arguments(call, blocks), **call.kwargs))
        except (Exception, SystemExit) as error:
            return Reply(failure=failure_of(error)), None

    def _create(self, call: Call) -> None:
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

    async def close(self) -> None:
        """Close the workers, youngest first, and what was started here."""
        if self._thread is not None:  # behind what is still running
            await asyncio.get_running_loop().run_in_executor(self._thread, self._close_workers)
            self._thread.shutdown()
        else:
            self._close_workers()
        torch.set_num_threads(self._threads_before)

    def _close_workers(self) -> None:
        for role, worker in reversed(self.workers.items()):
            reply, _ = self._run_sync(Call(role, "close"), ())
            if reply.failure is not None:
                _log.warning("%s[%d].close failed: %s", role, worker.context.rank, reply.failure.traceback)
        self.workers.clear()
        if self._started_distributed:
            dist.destroy_process_group()
            self._started_distributed = False


def _arguments(call: Call, blocks: Sequence[Batch]) -> tuple[Any, ...]:
    return call.args if call.shard is None else (call.shard.assemble(blocks), *call.args)


def _reply(call: Call, result: Any) -> Result:
    if not call.collect:
        return Reply(), None
    batch, extra = _batch_and_rest(result)
    if batch is None or call.keep is None:
        return Reply(result), None
    index, data = batch.parted(call.keep)
    return Reply(extra, Kept(index, tuple(data.columns), data.num_bytes)), data


def _batch_and_rest(result: Any) -> tuple[Batch | None, Any]:
    if isinstance(result, Batch):
        return result, None
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Batch):
        return result[0], result[1]
    return None, result
