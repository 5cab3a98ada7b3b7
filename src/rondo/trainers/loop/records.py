"""What a run's folder keeps of each step's rows: the rows themselves, what the step had for each of their
tokens, and a sum of each column and weight (`rondo.tracking.sums`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from rondo.config import Config
from rondo.controller import WorkerGroup
from rondo.core.arrays import GOLDEN
from rondo.core.batch import BatchRef
from rondo.core.columns import GREEDY_REWARD, IMAGES, ROUTES, SCORE_PREFIX, TABLE, TRANSCRIPT
from rondo.core.errors import StorageError
from rondo.core.types import StepStats
from rondo.data import firsts, trajectory_of_rows
from rondo.system.usage import counted_checks
from rondo.tracking import RunFolder
from rondo.tracking.checks import SPREAD, STILL
from rondo.tracking.sums import SumsWriter, last_sums, weight_name
from rondo.weights import SyncReport
from rondo.workers import ActorWorker, ModelWorker

PART_ROWS = 1024  # of a step, for each rank that writes: a call to more of them costs more than it saves
# Routes are many times as large as all else; texts of rows say once more what their tokens do.
_LEFT_OUT = {one.name for one in TABLE if one.per == "row" and pa.types.is_string(one.dtype)} - {IMAGES}
_LEFT_OUT |= {*ROUTES}
# What of a row's columns beside its numbers is of its tokens: and not in its trajectory.
_NOT_OF_TOKENS = {one.name for one in TABLE if one.per in ("row", "turn", "choice")} | {"prompt_ids"}
_MODULUS = 1 << 64


class StepRecords:
    """One per run."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self._config = config.tracking
        self._has_adapters = config.actor.lora is not None
        self._folder = folder
        self._ranks: dict[str, list[int]] = {}  # of each group, those that see the folder, once asked
        self._lines = SumsWriter()
        self._sums: dict[str, int] = {}  # of this step so far
        self._batches: dict[str, int] = {}  # of each policy, that this step has trained on
        self._before: dict[str, int] | None = None  # of the weights after the last step; None: to be read

    async def columns(self, step: int, batch: BatchRef, group: WorkerGroup) -> None:
        """Takes the sums of all columns of a batch that is about to be trained on, and writes those of its
        tokens where it is their turn (tracking.token_columns). group: of the policy that learns.
        """
        if not len(batch):
            return
        index = batch.index.columns
        names = [name for name in batch.columns if name not in index and name not in _LEFT_OUT]
        parts = await group.call(ActorWorker.sum_columns, batch, names, reads=tuple(names))
        with counted_checks():
            sums = batch.index.sums(index)
        sums |= {name: sum(part[name] for part in parts) % _MODULUS for name in names}
        before = "" if group.role == "actor" else f"{group.role}/"
        for name, value in sums.items():
            # Of several batches the order counts, too.
            self._sums[before + name] = (self._sums.get(before + name, 0) * GOLDEN + value) % _MODULUS
        number = self._batches[group.role] = self._batches.get(group.role, 0) + 1
        every = self._config.token_columns
        if every is not None and step % every == 0:
            named = "" if (group.role, number) == ("actor", 1) else f".{group.role}-{number}"
            kept = {*index, *(name for name in names if name not in _NOT_OF_TOKENS)}
            others = [name for name in batch.columns if name not in kept]
            await self.write(group, batch.without(*others), step, f"{named}.tokens")

    async def end_step(self, step: int, learning: Mapping[str, WorkerGroup], report: SyncReport) -> StepStats:
        """Writes down the sums of a step, when its weights are published. learning: all roles that learn.
        report: of the actor's way to the engines, for which their checksums may have been taken. Returns, for
        each role of which some tensors are as they were before the step and others are not,
        still/<role>:<the first of them>: how many.
        """
        if self._before is None:
            self._before = last_sums(self._folder.path) if step > 1 else {}
        stats, weights = StepStats(), dict[str, int]()
        for role, group in learning.items():
            known = report.checksums if role == "actor" and not self._has_adapters else None
            sums = await group.call(ModelWorker.weight_sums) if known is None else known
            with counted_checks():
                named = {weight_name(role, tensor): value for tensor, value in sums.items()}
                still = [name for name, value in named.items() if self._before.get(name) == value]
            if 0 < len(still) < len(named):
                stats.add_max(STILL + still[0], float(len(still)))
            weights |= named
        with counted_checks():
            self._folder.append_sums(self._lines.line(step, self._sums | weights))
        self._sums, self._batches, self._before = {}, {}, weights
        return stats

    async def write(self, group: WorkerGroup | None, rows: BatchRef, step: int, also: str = "") -> None:
        """Has the ranks of a group write rows, each some of them in a row: every process finds them by their
        handles, and they need not pass through this one. Where no rank sees this folder, it writes them.
        Then removes what the recipe keeps no longer. also: see `RunFolder.new_rollouts`.
        """
        await self._write(group, rows, step, also)
        keep = self._config.keep_rollouts, self._config.keep_token_columns
        if keep != (None, None):  # in a thread: it waits for the disk
            await asyncio.to_thread(self._folder.remove_rollouts, *keep)

    async def _write(self, group: WorkerGroup | None, rows: BatchRef, step: int, also: str) -> None:
        if group is not None and group.role not in self._ranks:
            lock = self._folder.path / "run.lock"
            asked = [str(lock.absolute())] * group.size, [lock.read_bytes()] * group.size
            saw = await group.call(ActorWorker.sees, *asked)
            self._ranks[group.role] = [rank for rank, there in enumerate(saw) if there]
        if group is None or not self._ranks[group.role]:
            with self._folder.new_rollouts(step, 1, also) as (path,):
                (await rows.fetch()).write_parquet(path)
            return
        ranks = self._ranks[group.role]
        count = min(len(ranks), max(1, len(rows) // PART_ROWS))
        parts = dict(zip(ranks, np.array_split(np.arange(len(rows)), count), strict=False))
        with self._folder.new_rollouts(step, count, also) as paths:
            names = [str(path.absolute()) for path in paths]
            sizes = await group.call_parts(ActorWorker.write_rows, rows, parts, names)
            for path, size in zip(paths, sizes, strict=True):
                if not path.is_file() or path.stat().st_size != size:
                    raise StorageError(
                        f"{path}: a rank has written {size} bytes of this step's rows, and they are not "
                        "here. Is trainer.run_dir another folder on its machine? "
                        "tracking.save_rollouts=false writes none"
                    )


def describe_rows(batch: BatchRef, stats: StepStats) -> None:
    """Adds the reward and length metrics of a step's scored rows, which count trajectories."""
    rows = batch.index
    index = rows.take(firsts(rows))
    if TRANSCRIPT in batch.columns:
        stats.add_mean("rollout/rows_per_trajectory", float(len(rows)), len(index))
    reward = index.scalars("reward").astype(np.float64)
    of_rows = trajectory_of_rows(rows)
    lengths = np.bincount(of_rows, rows.scalars("response_length"), len(index))
    stats.add_mean("reward/mean", float(reward.sum()), len(reward))
    stats.add_max("reward/max", float(reward.max(initial=-np.inf)))
    stats.add_min("reward/min", float(reward.min(initial=np.inf)))
    if GREEDY_REWARD in index.columns:
        greedy = index.scalars(GREEDY_REWARD)
        stats.add_mean("reward/greedy", float(greedy.sum(dtype=np.float64)), len(greedy))
    for name in index.columns:
        if name.startswith(SCORE_PREFIX):
            scores = index.scalars(name)
            known = np.isfinite(scores)
            stats.add_mean("reward/" + name, float(scores[known].sum()), int(known.sum()))
            if known.any():
                stats.add_max(SPREAD + name.removeprefix(SCORE_PREFIX), float(np.ptp(scores[known])))
    sources = index.scalars("source").astype(str)
    names = np.unique(sources)
    if len(names) > 1:
        for source in names:
            of_source = reward[sources == source]
            stats.add_mean(f"reward/mean/{source}", float(of_source.sum()), len(of_source))
    stats.add_mean("rollout/response_length", float(lengths.sum()), len(lengths))
    stats.add_max("rollout/response_length_max", float(lengths.max(initial=0)))
    truncated = np.bincount(of_rows, rows.scalars("finish_reason") == "length", len(index)) > 0
    stats.add_mean("rollout/truncated_share", float(truncated.sum()), len(truncated))
    group_ids = index.scalars("group_id")
    in_groups = np.argsort(group_ids, kind="stable")
    cuts = np.flatnonzero(np.diff(group_ids[in_groups])) + 1
    spreads = np.array([own.std() for own in np.split(reward[in_groups], cuts) if len(own)])
    stats.add_mean("reward/constant_group_share", float((spreads == 0).sum()), len(spreads))
