"""Worker groups: plan a call (who gets what), have it carried out, join the results.

call ─▶ mark of the method ─▶ one RankCall per rank ─▶ invoke (calls.py) ─▶ (Ran, handle) per rank ─▶ result
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rondo.controller.calls import Answer, CallWatcher, HostHandle, Ran, RankCall, invoke
from rondo.controller.mesh import Mesh
from rondo.controller.worker import MARK, Dispatch, Placer, Worker
from rondo.core.batch import ROW_ID, BatchRef, Block, Resolver
from rondo.core.errors import DataError, WorkerError
from rondo.core.types import StepStats


class WorkerGroup:
    """One role's ranks. Built by `Cluster.create_group`."""

    def __init__(
        self,
        role: str,
        worker_class: type[Worker],
        mesh: Mesh,
        hosts: Sequence[HostHandle],
        resolve: Resolver,
        watchers: Sequence[CallWatcher] = (),
        placer: Placer | None = None,
    ) -> None:
        """placer: the cluster's, so that roles with as many ranks agree on who computes which rows."""
        self.role = role
        self.worker_class = worker_class
        self.mesh = mesh
        self.size = mesh.size
        self.devices = tuple(host.device for host in hosts)
        self._hosts = tuple(hosts)
        self._resolve = resolve
        self._placer = placer or Placer()
        self._watchers = watchers  # the cluster's own list: it may grow

    @property
    def alive(self) -> tuple[int, ...]:
        """Returns the ranks whose host takes calls. A host is dead once a call has found it so."""
        return tuple(rank for rank, host in enumerate(self._hosts) if host.broken is None)

    async def call(
        self,
        method: Callable[..., Any],
        *args: Any,
        reads: Sequence[str] | None = None,
        ranks: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Calls a marked method (`ActorWorker.update_actor`) on all ranks; done, or raised, when this
        returns.

        reads: columns to ship instead of those in the mark. ranks: only these (not for split). split returns,
        by what the method returns: Batch → the BatchRef with its columns as new blocks; StepStats → merged;
        (Batch, rest) → (BatchRef, rest joined likewise); None → None; anything else → a list with one entry
        per shard. broadcast returns the result of the first rank (a BatchRef as first argument is assembled
        whole on every rank). per_rank takes positional arguments as lists, one entry for each rank called,
        and returns the list of results; keyword arguments are common to all. Raises WorkerError with the
        first cause (`died`: a rank that is called is gone); DataError for missing, conflicting or undeclared
        columns.
        """
        mark: Dispatch | None = getattr(method, MARK, None)
        if mark is None:
            raise TypeError(
                f"{method.__qualname__} is not marked: put @dispatch(...) on it, or use call_rank"
            )
        columns = mark.reads if reads is None else tuple(reads)
        if mark.how == "split":
            if ranks is not None:
                raise ValueError(f"{self.role}.{method.__name__} is split over all ranks: call it on all")
            return await self._split(method, mark, columns, args, kwargs)
        chosen = range(self.size) if ranks is None else tuple(ranks)
        if not chosen:
            raise ValueError(f"{self.role}.{method.__name__} was called on no rank")
        if mark.how == "broadcast":
            plan = self._plan(method, args, kwargs, columns)
            answers = await invoke(dict.fromkeys(chosen, plan), self._hosts, self._watchers)
            return answers[chosen[0]][0].value
        if any(len(argument) != len(chosen) for argument in args):
            raise ValueError(
                f"{self.role}.{method.__name__}: each argument is a list of {len(chosen)}, one per rank"
            )
        rows = zip(*args, strict=True) if args else [()] * len(chosen)
        calls = {rank: self._plan(method, row, kwargs) for rank, row in zip(chosen, rows, strict=True)}
        answers = await invoke(calls, self._hosts, self._watchers)
        return [answers[rank][0].value for rank in chosen]

    async def call_each(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[int, Any]:
        """Calls any method on every rank that is alive, each for itself; results by rank.

        For ranks that need no other one to answer: none waits for another, or is given up because of it, and
        one that dies is left out. Raises the WorkerError of the first rank whose worker raised, and, with
        `died`, when no rank is left.
        """
        ranks = self.alive or (0,)  # which says why it is not
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

    async def call_rank(
        self,
        rank: int,
        method: Callable[..., Any],
        *args: Any,
        keep: Sequence[str] | None = None,
        reads: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Calls any method on one rank. A BatchRef as first argument is assembled whole from `reads`.

        keep: index columns of the Batch with `row_id` (or of the Batch in a pair) that it returns; the rest
        stays in the store, and the result is a BatchRef (or a pair with one). Without `keep` the Batch
        travels here.
        """
        mark: Dispatch | None = getattr(method, MARK, None)
        declared = mark.reads if mark else ()
        columns = declared if reads is None else tuple(reads)
        plan = self._plan(method, args, kwargs, columns, keep=None if keep is None else tuple(keep))
        ran, handle = (await invoke({rank: plan}, self._hosts, self._watchers))[rank]
        if keep is None:
            return ran.value
        if ran.kept is None:
            found = type(ran.value).__name__
            raise TypeError(f"{self.role}.{method.__name__} returned {found}, of which nothing can be kept")
        index, names = ran.kept.index, ran.kept.columns
        blocks = (Block(handle, names, index.scalars(ROW_ID)),) if names else ()
        ref = BatchRef(index, blocks, self._resolve)
        return ref if ran.value is None else (ref, ran.value)

    async def call_parts(
        self,
        method: Callable[..., Any],
        ref: BatchRef,
        parts: Mapping[int, np.ndarray],
        *args: Sequence[Any],
    ) -> list[Any]:
        """Calls any method on some ranks, each with a part of the rows, by position, and all their columns.

        Further arguments are lists, one entry for each rank called. Returns the results. Raises as `call`.
        """
        shards = ref.shards(ref.columns, list(parts.values()))
        rows = zip(*args, strict=True) if args else [()] * len(parts)
        calls = {
            rank: self._plan(method, row, {}, shard=shard)
            for rank, row, shard in zip(parts, rows, shards, strict=True)
        }
        answers = await invoke(calls, self._hosts, self._watchers)
        return [answers[rank][0].value for rank in parts]

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
        held = ref.columns
        missing = [name for name in columns if name not in held]
        if missing:
            raise DataError(
                f"{self.role}.{method.__name__} reads {', '.join(missing)}, which not all rows of the batch "
                f"have; it has {', '.join(held)}"
            )
        # Before any rank computes: afterwards a step's work would be lost.
        conflicts = sorted(set(mark.writes) & set(held))
        if conflicts:
            raise DataError(
                f"{self.role}.{method.__name__} writes {', '.join(conflicts)}, which the batch has already"
            )
        num_shards = len(self.mesh.collect_ranks)
        whole = num_shards == 1
        # Ranks that compute the same rows together (along tensor, context or expert) are one shard; one of
        # each returns what they made.
        parts = [np.arange(len(ref))] if whole else self._placer.place(ref.index, num_shards)
        shards = ref.shards((*columns, *(name for name in mark.takes if name in held)), parts)
        plan, collecting = self._plan(method, rest, kwargs, keep=()), set(self.mesh.collect_ranks)
        calls = {
            rank: replace(plan, shard=shards[at], collect=rank in collecting)
            for rank, at in enumerate(self.mesh.dp_shards)
        }
        answers = await invoke(calls, self._hosts, self._watchers)
        chosen = [answers[rank] for rank in self.mesh.collect_ranks]
        extra = _join([ran.value for ran, _ in chosen])
        if all(ran.kept is None for ran, _ in chosen):
            return extra
        for shard, (ran, _), rank in zip(shards, chosen, self.mesh.collect_ranks, strict=True):
            self._check_rows(f"{self.role}[{rank}].{method.__name__}", mark, shard.index.scalars(ROW_ID), ran)
        grown = ref.with_blocks(_blocks(chosen), replace=bool(mark.replaces))
        return grown if extra is None else (grown, extra)

    def _check_rows(self, where: str, mark: Dispatch, row_ids: np.ndarray, ran: Ran) -> None:
        if ran.kept is None:
            raise DataError(
                f"{where} returned no Batch where another rank did; all ranks return the same kind"
            )
        returned = ran.kept.index.scalars(ROW_ID)
        # The order may be another: blocks are read by row id.
        same = np.array_equal(returned, row_ids) or np.array_equal(np.sort(returned), np.sort(row_ids))
        if not same:
            raise DataError(
                f"{where} returned {len(returned)} rows that are not the {len(row_ids)} of its shard"
            )
        undeclared = sorted(set(ran.kept.columns) - {*mark.writes, *mark.replaces})
        if mark.writes and undeclared:
            raise DataError(f"{where} returned {', '.join(undeclared)}, not declared in writes={mark.writes}")

    def _plan(
        self,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        reads: tuple[str, ...] = (),
        **options: Any,
    ) -> RankCall:
        own = getattr(self.worker_class, method.__name__, None)
        if own is None:
            raise TypeError(f"{self.role}'s {self.worker_class.__name__} has no method {method.__name__}")
        if args and isinstance(args[0], BatchRef):
            options["shard"], args = args[0].shard(reads), args[1:]
        is_async = inspect.iscoroutinefunction(own)
        return RankCall(self.role, method.__name__, args, kwargs, is_async=is_async, **options)


def _blocks(answers: Sequence[Answer]) -> tuple[Block, ...]:
    """Returns blocks of what the ranks kept. An empty one counts only if all are: it carries the columns of
    an empty batch.
    """
    kept = [(ran.kept, handle) for ran, handle in answers if ran.kept is not None and ran.kept.columns]
    full = [(batch, handle) for batch, handle in kept if len(batch.index)] or kept[:1]
    return tuple(Block(handle, batch.columns, batch.index.scalars(ROW_ID)) for batch, handle in full)


def _join(values: Sequence[Any]) -> Any:
    if all(value is None for value in values):
        return None
    if all(isinstance(value, StepStats) for value in values):
        return StepStats().merge(*values)
    return list(values)


async def together(batch: BatchRef, *calls: Callable[[BatchRef], Awaitable[BatchRef]]) -> BatchRef:
    """Runs independent calls on the same rows at once; returns the batch with the new columns of all of them.

    The first error is raised and the other calls are no longer waited for. Raises DataError when a call
    returns other rows, or when two write the same column.
    """
    tasks = [asyncio.ensure_future(call(batch)) for call in calls]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    known = {id(block) for block in batch.blocks}
    for result in results:
        if not np.array_equal(result.index.scalars(ROW_ID), batch.index.scalars(ROW_ID)):
            raise DataError(
                "a call inside together() returned other rows, or another order, than it was given"
            )
        new = [name for name in result.index.columns if name not in batch.index.columns]
        batch = batch.with_index({name: result.index.array(name) for name in new})
        batch = batch.with_blocks([block for block in result.blocks if id(block) not in known])
        known |= {id(block) for block in result.blocks}
    return batch
