"""Worker groups: plan a call (who gets what), hand it to the hosts, join the results. Backends supply hosts.

call ─▶ mark of the method ─▶ one Call per rank ─▶ HostHandle.submit ─▶ (Reply, handle) per rank ─▶ result
                                         a first failure ─▶ WorkerError; a rank that still hangs is broken
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rondo.batch import ROW_ID, BatchRef, Block, Resolver
from rondo.controller.dispatch import Dispatch, cut, dispatch_of
from rondo.controller.handle import Answer, HostHandle
from rondo.controller.host import CREATE, JOIN, Call, Failure, NewMesh, NewWorker, Reply
from rondo.controller.mesh import Mesh
from rondo.controller.worker import Worker
from rondo.errors import ConfigError, DataError, WorkerError
from rondo.types import StepStats

# After a first failure: how long peers may take to report theirs (the earliest is the cause), and how long to
# wait for the cause when all that arrived are echoes ("connection closed by peer").
GRACE_SECONDS = 0.2
ECHO_GRACE_SECONDS = 5.0


class CallWatcher(Protocol):
    """Hears of every call of a worker group's ranks, on the controller's event loop.

    device: the device (= host process) that the rank stands on. Each `call_sent` is followed by one
    `call_ended`.
    """

    def call_sent(self, role: str, rank: int, device: int, method: str) -> None:
        """The call leaves the controller. Sync calls may wait for others on the host."""

    def call_ended(
        self, role: str, rank: int, device: int, method: str, start: float, end: float, *, died: bool
    ) -> None:
        """The call ran from `start` to `end`: seconds since the epoch on the host's clock.

        Of a call that was cancelled, or whose host died, they are the controller's: sent, and given up.
        died: the host takes no more calls, of any role.
        """


class WorkerGroup:
    """One role's ranks. Built by `Cluster.create_group`."""

    def __init__(
        self,
        role: str,
        worker_class: type[Worker],
        mesh: Mesh,
        hosts: Sequence[HostHandle],
        resolve: Resolver,
        devices: Sequence[int] | None = None,
        watchers: Sequence[CallWatcher] = (),
    ) -> None:
        self.role = role
        self.worker_class = worker_class
        self.mesh = mesh
        self._hosts = tuple(hosts)
        self._resolve = resolve
        self.devices = tuple(range(mesh.size)) if devices is None else tuple(devices)
        self._watchers = watchers  # the cluster's own list: it may grow

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.mesh.size

    @property
    def alive(self) -> tuple[int, ...]:
        """The ranks whose host takes calls. A host counts as dead from the first call that finds it so."""
        return tuple(rank for rank, host in enumerate(self._hosts) if host.broken is None)

    async def call(
        self,
        method: Callable[..., Any],
        *args: Any,
        reads: Sequence[str] | None = None,
        ranks: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a marked method (`ActorWorker.update_actor`) on all ranks; done, or raised, when this returns.

        reads: columns to ship instead of those in the mark. ranks: only these (not for split). split returns,
        by what the method returns: Batch → the BatchRef with its columns as new blocks; StepStats → merged;
        (Batch, rest) → (BatchRef, rest joined likewise); None → None; anything else → a list with one entry
        per shard. broadcast returns the result of the first rank (a BatchRef as first argument is assembled
        whole on every rank). per_rank takes positional arguments as lists, one entry for each rank called,
        and returns the list of results; keyword arguments are common to all. Raises WorkerError with the
        first cause (`died`: a rank that is called is gone); DataError for missing, conflicting or undeclared
        columns.
        """
        mark = dispatch_of(method)
        if mark is None:
            raise TypeError(
                f"{method.__qualname__} is not marked: put @dispatch(...) on it, or use call_rank"
            )
        columns = mark.reads if reads is None else tuple(reads)
        chosen = range(self.size) if ranks is None else tuple(ranks)
        if mark.how == "split":
            if ranks is not None:
                raise ValueError(f"{self.role}.{method.__name__} is split over all ranks: call it on all")
            return await self._split(method, mark, columns, args, kwargs)
        if not chosen:
            raise ValueError(f"{self.role}.{method.__name__} was called on no rank")
        if mark.how == "per_rank":
            if any(len(argument) != len(chosen) for argument in args):
                raise ValueError(
                    f"{self.role}.{method.__name__}: each argument is a list of {len(chosen)}, one per rank"
                )
            rows = zip(*args, strict=True) if args else [()] * len(chosen)
            calls = {
                rank: self._plan(method, tuple(row), kwargs) for rank, row in zip(chosen, rows, strict=True)
            }
            answers = await self._invoke(method, calls)
            return [answers[rank][0].value for rank in chosen]
        plan = self._plan(method, args, kwargs, columns)
        answers = await self._invoke(method, dict.fromkeys(chosen, plan))
        return answers[chosen[0]][0].value

    async def call_each(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[int, Any]:
        """Call any method on every rank that is alive, each for itself; results by rank.

        For ranks that need no other one to answer: none waits for another, or is given up because of it, and
        one that dies is left out. Raises the WorkerError of the first rank whose worker raised, and, with
        `died`, when no rank is left.
        """
        ranks = self.alive
        if not ranks:
            raise _error(self.role, 0, method.__name__, _abandoned(self._broken(0)), died=True)
        results = await asyncio.gather(
            *(self.call_rank(rank, method, *args, **kwargs) for rank in ranks), return_exceptions=True
        )
        found, lost = {}, None
        for rank, result in zip(ranks, results, strict=True):
            if isinstance(result, WorkerError) and result.died:
                lost = result
            elif isinstance(result, BaseException):
                raise result
            else:
                found[rank] = result
        if lost is not None and not found:
            raise lost
        return found

    def _broken(self, rank: int) -> Failure:
        broken = self._hosts[rank].broken
        assert broken is not None
        return broken

    async def call_rank(
        self,
        rank: int,
        method: Callable[..., Any],
        *args: Any,
        keep: Sequence[str] | None = None,
        reads: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call any method on one rank. keep: index columns of a Batch (or of the Batch in a pair) that it
        returns; the rest stays in the store, and the result is a BatchRef (or a pair with one). Without
        `keep` the Batch travels here. A BatchRef as first argument is assembled whole from `reads`."""
        mark = dispatch_of(method)
        columns = tuple(reads) if reads is not None else mark.reads if mark else ()
        plan = self._plan(method, args, kwargs, columns, keep=None if keep is None else tuple(keep))
        reply, handle = (await self._invoke(method, {rank: plan}))[rank]
        if reply.kept is None:
            return reply.value
        ref = BatchRef(reply.kept.index, _blocks([(reply, handle)]), self._resolve)
        return ref if reply.value is None else (ref, reply.value)

    async def call_rank_for_ref(
        self,
        rank: int,
        method: Callable[..., Any],
        *args: Any,
        index_columns: Sequence[str] = (),
        **kwargs: Any,
    ) -> BatchRef:
        """Call a method that returns a Batch with `row_id`: its index columns come here, the rest stays a
        block."""
        ref = await self.call_rank(rank, method, *args, keep=index_columns, **kwargs)
        if not isinstance(ref, BatchRef):
            raise TypeError(f"{self.role}.{method.__name__} returned {type(ref).__name__}, not a Batch")
        return ref

    async def _split(
        self,
        method: Callable[..., Any],
        mark: Dispatch,
        columns: tuple[str, ...],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        if not args or not isinstance(args[0], BatchRef):
            raise TypeError(f"{self.role}.{method.__name__} is split: its first argument is a BatchRef")
        ref, rest = args[0], args[1:]
        missing = [name for name in columns if name not in ref.columns]
        if missing:
            raise DataError(
                f"{self.role}.{method.__name__} reads {', '.join(missing)}, which not all rows of the batch "
                f"have; it has {', '.join(ref.columns)}"
            )
        conflicts = sorted(set(mark.writes) & set(ref.columns))
        if conflicts:
            raise DataError(
                f"{self.role}.{method.__name__} writes {', '.join(conflicts)}, which the batch has already"
            )
        parts = cut(ref.index, self.mesh.axis_size("dp"))
        shards = [ref.shard(columns, part) for part in parts]
        calls = {}
        for rank, at in enumerate(self.mesh.dp_shards):
            collect = rank in self.mesh.collect_ranks
            calls[rank] = self._plan(method, rest, kwargs, shard=shards[at], keep=(), collect=collect)
        answers = await self._invoke(method, calls)
        chosen = [answers[rank] for rank in self.mesh.collect_ranks]
        extra = _join([reply.value for reply, _ in chosen])
        if all(reply.kept is None for reply, _ in chosen):
            return extra
        for shard, (reply, _), rank in zip(shards, chosen, self.mesh.collect_ranks, strict=True):
            self._check_rows(
                f"{self.role}[{rank}].{method.__name__}", mark, shard.index.scalars(ROW_ID), reply
            )
        grown = ref.with_blocks(_blocks(chosen))
        return grown if extra is None else (grown, extra)

    def _check_rows(self, where: str, mark: Dispatch, row_ids: np.ndarray, reply: Reply) -> None:
        if reply.kept is None:
            raise DataError(
                f"{where} returned no Batch where another rank did; all ranks return the same kind"
            )
        returned = reply.kept.index.scalars(ROW_ID)
        if not np.array_equal(np.sort(returned), np.sort(row_ids)):
            raise DataError(
                f"{where} returned {len(returned)} rows that are not the {len(row_ids)} of its shard"
            )
        undeclared = sorted(set(reply.kept.columns) - set(mark.writes))
        if mark.writes and undeclared:
            raise DataError(f"{where} returned {', '.join(undeclared)}, not declared in writes={mark.writes}")

    def _plan(
        self,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        reads: tuple[str, ...] = (),
        **options: Any,
    ) -> Call:
        own = getattr(self.worker_class, method.__name__, None)
        if own is None:
            raise TypeError(f"{self.role}'s {self.worker_class.__name__} has no method {method.__name__}")
        if args and isinstance(args[0], BatchRef):
            options["shard"], args = args[0].shard(reads), args[1:]
        is_async = inspect.iscoroutinefunction(own)
        return Call(self.role, method.__name__, args, kwargs, is_async=is_async, **options)

    async def _invoke(self, method: Callable[..., Any], calls: Mapping[int, Call]) -> dict[int, Answer]:
        name = method.__name__
        sent = time.time()
        for watcher in self._watchers:
            for rank in calls:
                watcher.call_sent(self.role, rank, self.devices[rank], name)
        spans: Mapping[int, tuple[float, float]] = {}
        try:
            answers = await _invoke(self.role, name, {rank: self._hosts[rank] for rank in calls}, calls)
            spans = {rank: reply.span for rank, (reply, _) in answers.items()}
            return answers
        finally:
            spans = spans or dict.fromkeys(calls, (sent, max(sent, time.time())))
            for watcher in self._watchers:
                for rank in calls:
                    died = self._hosts[rank].broken is not None
                    watcher.call_ended(self.role, rank, self.devices[rank], name, *spans[rank], died=died)


async def create_group(
    role: str,
    worker_class: type[Worker],
    mesh: Mesh,
    devices: tuple[int, ...],
    hosts: Sequence[HostHandle],
    kwargs: Mapping[str, Any],
    resolve: Resolver,
    watchers: Sequence[CallWatcher],
    accelerators: Sequence[tuple[str, ...]] = (),
) -> WorkerGroup:
    """Build one worker on each of `devices`. All hosts of the world take part in making the process
    groups. accelerators: per rank, see WorkerContext. Raises ConfigError for a role that one of the devices
    has already: the calls of both groups would go to one worker."""
    taken = [device for device in devices if role in hosts[device].roles]
    if taken:
        raise ConfigError(
            f"there is a worker group {role!r} on device {taken[0]} already: use that one, or "
            "give the second one another name or other devices"
        )
    join = Call(role, JOIN, (NewMesh(mesh, devices),))
    await _invoke(role, JOIN, dict(enumerate(hosts)), dict.fromkeys(range(len(hosts)), join))
    chosen = [hosts[device] for device in devices]
    given = accelerators or [()] * mesh.size
    workers = [NewWorker(worker_class, rank, given[rank]) for rank in range(mesh.size)]
    calls = {rank: Call(role, CREATE, (worker,), kwargs) for rank, worker in enumerate(workers)}
    await _invoke(role, CREATE, dict(enumerate(chosen)), calls)
    for host in chosen:
        host.roles.add(role)
    return WorkerGroup(role, worker_class, mesh, chosen, resolve, devices, watchers)


def pool(
    num_devices: int, mesh: Mesh | None, devices: Sequence[int] | None, devices_per_rank: int = 1
) -> tuple[Mesh, tuple[int, ...]]:
    """The mesh of a new group, and the first device of each of its ranks. Raises ConfigError when they do not
    fit each other or the cluster."""
    size = mesh.size if mesh else num_devices // devices_per_rank
    chosen = tuple(range(0, size * devices_per_rank, devices_per_rank)) if devices is None else tuple(devices)
    mesh = mesh or Mesh.data_parallel(len(chosen))
    if mesh.size != len(chosen):
        raise ConfigError(
            f"mesh {mesh.axes} has {mesh.size} ranks, the resource pool {chosen} {len(chosen)} devices"
        )
    every = [device + i for device in chosen for i in range(devices_per_rank)]
    if every != sorted(set(every)) or not every or every[0] < 0 or every[-1] >= num_devices:
        raise ConfigError(
            f"a group on devices {tuple(every)} (mesh {mesh.axes}), but the cluster has {num_devices}: raise "
            "cluster.devices, or name each device once, rising"
        )
    return mesh, chosen


async def _invoke(
    role: str, method: str, hosts: Mapping[int, HostHandle], calls: Mapping[int, Call]
) -> dict[int, Answer]:
    """Submit to all ranks without a pause in between, then wait for all, or for the first cause of a
    failure."""
    for rank, host in hosts.items():
        if host.broken is not None:
            raise _error(role, rank, method, _abandoned(host.broken), died=True)
    packed = {id(call): hosts[rank].pack(call) for rank, call in calls.items()}
    tasks = {rank: hosts[rank].submit(packed[id(call)], call.is_async) for rank, call in calls.items()}
    try:
        failures = await _settle(tasks, hosts)
    except asyncio.CancelledError:
        for rank, call in calls.items():
            if (
                call.is_async
            ):  # a sync method cannot be stopped: it ends in the background, its result is dropped
                tasks[rank].cancel()
        raise
    if not failures:
        return {rank: task.result() for rank, task in tasks.items()}
    first = min(failures, key=lambda rank: (not failures[rank].died, failures[rank].echo, failures[rank].at))
    for rank, task in tasks.items():
        if not task.done() or (rank in failures and failures[rank].died):
            hosts[rank].condemn(failures[first])
    error = _error(role, first, method, failures[first], died=hosts[first].broken is not None)
    raise error from error.cause_error


async def _settle(
    tasks: Mapping[int, asyncio.Task[Answer]], hosts: Mapping[int, HostHandle]
) -> dict[int, Failure]:
    """Wait until all ranks answered, or a failure's grace is over. Returns the failures so far, by rank."""
    clock = asyncio.get_running_loop().time
    failures: dict[int, Failure] = {}
    first_at = 0.0
    while pending := {rank: task for rank, task in tasks.items() if not task.done() and rank not in failures}:
        timeout = None
        if failures:
            only_echoes = all(failure.echo for failure in failures.values())
            timeout = first_at + (ECHO_GRACE_SECONDS if only_echoes else GRACE_SECONDS) - clock()
            if timeout <= 0:
                break
        watched: list[asyncio.Future[Any]] = [
            *pending.values(),
            *(hosts[rank].on_broken() for rank in pending),
        ]
        await asyncio.wait(watched, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        found = _failures(pending, hosts)
        first_at = first_at if failures or not found else clock()
        failures |= found
    return failures | _failures(tasks, hosts)


def _failures(
    tasks: Mapping[int, asyncio.Task[Answer]], hosts: Mapping[int, HostHandle]
) -> dict[int, Failure]:
    out: dict[int, Failure] = {}
    for rank, task in tasks.items():
        broken = hosts[rank].broken
        if task.done():
            failure = task.result()[0].failure
            if failure is not None:
                out[rank] = failure
        elif broken is not None:
            out[rank] = _abandoned(broken)
    return out


def _abandoned(cause: Failure) -> Failure:
    return Failure(f"this rank's host process is unusable since: {cause.message}", cause.traceback, cause.at)


def _error(role: str, rank: int, method: str, failure: Failure, *, died: bool) -> WorkerError:
    error = WorkerError(role, rank, method, failure.message, failure.traceback)
    error.cause_error, error.died = failure.cause, died
    return error


def _blocks(answers: Sequence[Answer]) -> tuple[Block, ...]:
    """Blocks of what the ranks kept. Empty ones only if all are: they carry the columns of an empty batch."""
    kept = [
        (reply.kept, handle) for reply, handle in answers if reply.kept is not None and reply.kept.columns
    ]
    full = [(batch, handle) for batch, handle in kept if len(batch.index)] or kept[:1]
    return tuple(Block(handle, batch.columns, batch.index.scalars(ROW_ID)) for batch, handle in full)


def _join(values: Sequence[Any]) -> Any:
    if all(value is None for value in values):
        return None
    if all(isinstance(value, StepStats) for value in values):
        return StepStats().merge(*values)
    return list(values)


async def together(batch: BatchRef, *calls: Callable[[BatchRef], Awaitable[BatchRef]]) -> BatchRef:
    """Run independent calls on the same rows at once; returns the batch with the new columns of all of them.

    The first error is raised and the other calls are no longer waited for. Raises DataError when a call
    returns other rows, or when two write the same column.
    """
    tasks = [asyncio.ensure_future(_awaited(call(batch))) for call in calls]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    known = {id(block) for block in batch.blocks}
    for result in results:
        if not np.array_equal(result.row_ids, batch.row_ids):
            raise DataError(
                "a call inside together() returned other rows, or another order, than it was given"
            )
        new = [name for name in result.index.columns if name not in batch.index.columns]
        batch = batch.with_index({name: result.index.array(name) for name in new})
        batch = batch.with_blocks([block for block in result.blocks if id(block) not in known])
        known |= {id(block) for block in result.blocks}
    return batch


async def _awaited(result: Awaitable[BatchRef]) -> BatchRef:
    return await result
