"""One call of a worker group: the records that travel, the controller's end of a host, and the wait for all
ranks.

invoke ─▶ HostHandle.submit ─▶ Host.run of each rank ─▶ (Ran, handle) per rank
                                         a first failure ─▶ WorkerError; a rank that still hangs is broken
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rondo.core.batch import Batch, Shard
from rondo.core.errors import RondoError, WorkerError
from rondo.system.activity import Pulse
from rondo.system.actor import Failure

# After a first failure: how long peers may take to report theirs (the earliest is the cause), and how long to
# wait for the cause when all that arrived are echoes ("connection closed by peer").
GRACE_SECONDS = 0.2
ECHO_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class RankCall:
    """One method on one rank."""

    role: str
    """The worker group."""
    method: str
    """The worker's method."""
    args: tuple[Any, ...] = ()
    """Its positional arguments, after the shard."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Its keyword arguments."""
    shard: Shard | None = None
    """Assembled on the worker's side, it becomes the first argument."""
    keep: tuple[str, ...] | None = None
    """None: a returned Batch travels to the controller. Else it stays with the host, and only `row_id` and
    these columns travel."""
    collect: bool = True
    """False drops the result: another rank of the data-parallel group returns it."""
    is_async: bool = False
    """The method is a coroutine function."""


@dataclass(frozen=True)
class KeptBatch:
    """A returned Batch that stayed with the host."""

    index: Batch
    """Its rows, with the columns that travel."""
    columns: tuple[str, ...]
    """Names of the columns left behind."""
    num_bytes: int
    """Size of the columns left behind."""


@dataclass(frozen=True)
class Ran:
    """What travels back of a call that gave something."""

    value: Any = None
    """The result, less the Batch if that was kept."""
    kept: KeptBatch | None = None
    """What stayed with the host; None: nothing did."""
    span: tuple[float, float] = (0.0, 0.0)
    """When it ran: start and end in seconds since the epoch on the host's clock."""


# What a call gave, and the handle of the Batch that was kept (None: none was).
Answer = tuple[Ran, Any]
# What it ends with.
Ended = Answer | tuple[Failure, None]


def for_other_calls(failure: Failure) -> Failure:
    """Returns the failure of all other calls to a host that `failure` made unusable."""
    message = f"this rank's host process is unusable since: {failure.message}"
    return Failure(message, failure.traceback, at=failure.at, outage=failure.outage)


class CallWatcher(Protocol):
    """Hears of every call of a worker group's ranks, on the controller's event loop.

    device: the device (= host process) that the rank stands on. Each `call_sent` is followed by one
    `call_ended`.
    """

    def call_sent(self, role: str, rank: int, device: int, method: str) -> None:
        """Hears that a call leaves the controller. Sync calls may wait for others on the host."""

    def call_ended(
        self, role: str, rank: int, device: int, method: str, start: float, end: float, *, died: bool
    ) -> None:
        """Hears that a call ran from `start` to `end`: seconds since the epoch on the host's clock.

        Of a call that was cancelled, or whose host died, they are the controller's: sent, and given up.
        died: the host takes no more calls, of any role.
        """


class HostHandle:
    """One host as the controller sees it. A backend says how calls travel: `send`, and `pack` if need be."""

    def __init__(self, device: int) -> None:
        # The host's number in the world.
        self.device = device
        # Why this host can take no more calls.
        self.broken: Failure | None = None
        # The roles of the workers that live there.
        self.roles: set[str] = set()
        # Its process runs on the controller's machine.
        self.here = True
        # Where its process writes what it prints and logs.
        self.log: Path | None = None
        # Sync calls that it has not answered.
        self.owed = 0
        # Bytes of calls and replies that passed through the controller.
        self.num_bytes = 0
        self._tickets = itertools.count()
        self._tasks: set[asyncio.Task[Ended]] = set()  # the event loop holds tasks weakly

    def pack(self, call: RankCall, alike: dict[Any, bytes]) -> Any:
        """Returns what travels; it may be submitted to several hosts. alike: what was pickled of the calls
        to other ranks, so that nothing is twice; it goes with these calls, for it knows objects by `id`.
        """
        return call

    def send(self, packed: Any, ticket: int | None) -> Coroutine[Any, Any, Ended]:
        """Sends a call; the coroutine ends with its answer. ticket: the place of a sync call among those of
        this host."""
        raise NotImplementedError

    def pulse(self, stacks: bool) -> Future[Pulse]:
        """Asks what its process is doing; from any thread. Whatever ends its process ends the answer with an
        exception. See Host.pulse.
        """
        raise NotImplementedError

    def submit(self, packed: Any, is_async: bool) -> asyncio.Task[Ended]:
        """Sends a call now; sync ones run in this order."""
        ticket = None if is_async else next(self._tickets)
        task = asyncio.get_running_loop().create_task(self.send(packed, ticket))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if not is_async:
            self.owed += 1
            task.add_done_callback(self._answered)
        return task

    def _answered(self, task: asyncio.Task[Ended]) -> None:
        self.owed -= 1

    def condemn(self, failure: Failure) -> None:
        """Marks the host broken; everything that waits for it fails."""
        if self.broken is None:
            self.broken = failure
            for task in self._tasks:
                task.cancel()


async def invoke(
    calls: Mapping[int, RankCall], hosts: Sequence[HostHandle], watchers: Sequence[CallWatcher] = ()
) -> dict[int, Answer]:
    """Submits one call per rank to the ranks' hosts without a pause in between, and waits for all answers.

    Raises WorkerError with the first cause of a failure.
    """
    sent = time.time()
    for watcher in watchers:
        for rank, call in calls.items():
            watcher.call_sent(call.role, rank, hosts[rank].device, call.method)
    tasks: dict[asyncio.Task[Ended], int] = {}
    answers: dict[int, Answer] = {}
    try:
        packed: dict[int, Any] = {}
        alike: dict[Any, bytes] = {}
        for rank, call in calls.items():
            broken = hosts[rank].broken
            if broken is not None:
                raise _error(call, rank, for_other_calls(broken), died=True)
            if id(call) not in packed:  # a broadcast is one call to all
                packed[id(call)] = hosts[rank].pack(call, alike)
        tasks = {hosts[rank].submit(packed[id(call)], call.is_async): rank for rank, call in calls.items()}
        if not await _all_well(tasks):
            error = await _first_cause(tasks, calls, hosts)
            raise error from error.cause_error
        for task, rank in tasks.items():
            ran, kept = task.result()
            assert isinstance(ran, Ran)
            answers[rank] = ran, kept
        return answers
    except asyncio.CancelledError:
        for task, rank in tasks.items():
            # A sync method cannot be stopped: it ends in the background, and its result is dropped.
            if calls[rank].is_async:
                task.cancel()
        raise
    finally:
        given_up = sent, max(sent, time.time())
        for watcher in watchers:
            for rank, call in calls.items():
                span = answers[rank][0].span if rank in answers else given_up
                died, device = hosts[rank].broken is not None, hosts[rank].device
                watcher.call_ended(call.role, rank, device, call.method, *span, died=died)


async def _all_well(tasks: Collection[asyncio.Task[Ended]]) -> bool:
    """Waits for all tasks (True), or for the first that has no result (False). It wakes up once, however many
    ranks there are: `asyncio.wait` would look through all of them whenever one of them is done.
    """
    done = asyncio.get_running_loop().create_future()
    left = len(tasks)

    def ended(task: asyncio.Task[Ended]) -> None:
        nonlocal left
        left -= 1
        failed = task.cancelled() or isinstance(task.result()[0], Failure)
        if (failed or not left) and not done.done():
            done.set_result(not failed)

    for task in tasks:
        task.add_done_callback(ended)
    return bool(await done)


async def _first_cause(
    tasks: Mapping[asyncio.Task[Ended], int], calls: Mapping[int, RankCall], hosts: Sequence[HostHandle]
) -> WorkerError:
    """Returns why a call failed, as far as its ranks say so within the grace; those that still hang then are
    condemned."""
    clock = asyncio.get_running_loop().time
    first_at = clock()
    while True:
        pending = {task for task in tasks if not task.done()}
        found = {rank: _failure(task, hosts[rank]) for task, rank in tasks.items() if task not in pending}
        failures = {rank: failure for rank, failure in found.items() if failure is not None}
        only_echoes = all(failure.echo for failure in failures.values())
        left = first_at + (ECHO_GRACE_SECONDS if only_echoes else GRACE_SECONDS) - clock()
        if not pending or left <= 0:
            break
        await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
    first = min(failures, key=lambda rank: (not failures[rank].died, failures[rank].echo, failures[rank].at))
    for rank in calls:
        if rank not in found or (rank in failures and failures[rank].died):
            hosts[rank].condemn(failures[first])
    return _error(calls[first], first, failures[first], died=hosts[first].broken is not None)


def _failure(task: asyncio.Task[Ended], host: HostHandle) -> Failure | None:
    """Returns why a call has no result; None: it has one. A call to a broken host was cancelled."""
    if task.cancelled() and host.broken is not None:
        return for_other_calls(host.broken)
    ran, _ = task.result()
    return ran if isinstance(ran, Failure) else None


def _error(call: RankCall, rank: int, failure: Failure, *, died: bool) -> WorkerError:
    error = WorkerError(call.role, rank, call.method, failure.message, failure.traceback)
    error.cause_error = cause = failure.cause()
    error.died = died
    error.is_outage = failure.outage or (isinstance(cause, RondoError) and cause.is_outage)
    return error
