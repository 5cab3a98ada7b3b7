"""Workers for the controller's tests: arithmetic instead of models."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rondo.controller import Worker, WorkerContext, dispatch
from rondo.core.batch import ROW_ID, Batch, ragged_rows
from rondo.core.errors import DataError
from rondo.core.types import StepStats


class UnwritableError(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("unwritable")
        self.lock = threading.Lock()


class Calculator(Worker):
    def __init__(self, context: WorkerContext, *, factor: int = 2, fail: bool = False) -> None:
        super().__init__(context)
        if fail:
            raise DataError("the constructor said no")
        self.factor = factor
        self.order: list[str] = []
        self.gate = threading.Event()
        self.meeting = 0
        self.closed = 0

    @dispatch("split", reads=("tokens",), writes=("multiplied",))
    def multiply(self, batch: Batch) -> Batch:
        """Rows come back in reverse order."""
        backwards = batch.take(np.arange(len(batch))[::-1].copy())
        rows = [row * self.factor for row in backwards.rows("tokens")]
        return Batch.of({ROW_ID: backwards.scalars(ROW_ID), "multiplied": ragged_rows(rows, np.int32)})

    @dispatch("split", reads=("tokens", "weight"))
    def count(self, batch: Batch, label: str) -> StepStats:
        stats = StepStats()
        stats.add_sum(f"{label}/tokens", float(batch.lengths("tokens").sum()))
        stats.add_mean(f"{label}/weight", float(batch.scalars("weight").sum()), len(batch))
        stats.add_max(f"{label}/rows", len(batch))
        return stats

    @dispatch("split", reads=("tokens",))
    def sums_and_stats(self, batch: Batch) -> tuple[Batch, StepStats]:
        stats = StepStats()
        stats.add_sum("rows", len(batch))
        sums = np.array([row.sum() for row in batch.rows("tokens")], np.float32)
        return Batch.of({ROW_ID: batch.scalars(ROW_ID), "token_sum": sums}), stats

    @dispatch("split", reads=("tokens",))
    def row_ids(self, batch: Batch) -> list[int]:
        return batch.scalars(ROW_ID).tolist()

    @dispatch("split", reads=("tokens",))
    def shape_of(self, batch: Batch) -> tuple[list[str], int]:
        return batch.columns, len(batch)

    @dispatch("split", reads=("tokens",), writes=("declared",))
    def undeclared(self, batch: Batch) -> Batch:
        return batch.select([ROW_ID]).with_columns({"other": batch.scalars(ROW_ID)})

    @dispatch("split", reads=("tokens",))
    def loses_rows(self, batch: Batch) -> Batch:
        return batch.take(np.arange(max(0, len(batch) - 1)))

    @dispatch("broadcast")
    def total(self, batch: Batch) -> int:
        """Given a BatchRef, every rank sees all rows."""
        return int(batch.ragged("tokens")[0].sum())

    @dispatch("per_rank")
    def place(self, value: Any, power: int = 1) -> tuple[int, int, int, Any]:
        return self.context.rank, self.context.world_size, os.getpid(), value**power

    @dispatch("per_rank")
    def threads(self) -> tuple[int, str]:
        return torch.get_num_threads(), threading.current_thread().name

    @dispatch("per_rank")
    def kind_of_devices(self) -> str:
        """Of the mesh that tensors are spread over."""
        return self.context.device_mesh().device_type

    @dispatch("per_rank")
    def reduce_over(self, axis: str) -> tuple[float, tuple[str, ...], bool]:
        """The sum of ranks + 1 over one mesh axis; and whether its group is the default group."""
        mesh = self.context.device_mesh()
        group = mesh.get_group(axis)
        x = torch.tensor(float(self.context.rank + 1))
        dist.all_reduce(x, group=group)
        return float(x), mesh.mesh_dim_names, group is dist.group.WORLD

    @dispatch("broadcast")
    def fails(self, ranks: tuple[int, ...], kind: str = "data") -> str:
        """These ranks raise; the others return."""
        if self.context.rank in ranks:
            if kind == "unwritable":
                raise UnwritableError
            if kind == "exit":
                raise SystemExit(3)
            raise DataError(f"bad row on rank {self.context.rank}")
        return "fine"

    @dispatch("broadcast")
    def fails_in_collective(self, rank: int) -> None:
        """This rank raises while the others wait for it in an all-reduce."""
        group = self.context.device_mesh().get_group("dp")
        if self.context.rank == rank:
            raise DataError("the cause")
        dist.all_reduce(torch.ones(1), group=group)

    @dispatch("broadcast")
    def dies_in_collective(self, rank: int) -> None:
        group = self.context.device_mesh().get_group("dp")
        if self.context.rank == rank:
            os.kill(os.getpid(), 9)
        dist.all_reduce(torch.ones(1), group=group)

    @dispatch("broadcast")
    def note(self, name: str) -> None:
        self.order.append(name)

    @dispatch("broadcast")
    def hold(self) -> None:
        """Keeps the training thread until the gate is opened."""
        self.order.append("holding")
        self.gate.wait()

    @dispatch("per_rank")
    def notes(self) -> list[str]:
        return self.order

    def make_rows(self, n: int) -> Batch:
        return Batch.of(
            {ROW_ID: np.arange(n), "reward": np.ones(n), "tokens": ragged_rows([np.arange(3)] * n, np.int32)}
        )

    def make_rows_and_name(self, n: int) -> tuple[Batch, str]:
        return self.make_rows(n), self.context.role

    async def napping(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return threading.current_thread().name

    async def meet(self, number: int) -> None:
        """Returns when so many of these calls, and `hold`, are under way at once."""
        self.meeting += 1
        while self.meeting < number or "holding" not in self.order:
            await asyncio.sleep(0.001)

    async def open_gate(self) -> None:
        self.gate.set()

    async def wait_at_the_gate(self) -> None:
        self.order.append("waiting")
        try:
            while not self.gate.is_set():
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.order.append("cancelled")
            raise

    @dispatch("broadcast")
    def address_of_tokens(self, batch: Batch) -> tuple[int, int]:
        """(bytes that pickling the rows takes, bytes of their tokens)"""
        import pickle

        return len(pickle.dumps(batch)), batch.array("tokens").nbytes


class Neighbour(Worker):
    """Finds another role's worker in its own process."""

    def __init__(self, context: WorkerContext, *, of: str) -> None:
        super().__init__(context)
        self.neighbour: Calculator = context.peers[of]  # type: ignore[assignment]

    @dispatch("per_rank")
    def factor(self) -> tuple[int, int]:
        return self.neighbour.factor, self.neighbour.context.rank
