"""Workers that own a training engine: actor, critic, reference. Each method is one verb of the paper's."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rondo.batch import Batch
from rondo.config.schema import EngineConfig, OptimizerConfig
from rondo.controller import Worker, WorkerContext, dispatch
from rondo.models.source import ModelSource
from rondo.training import FsdpEngine, Loss
from rondo.types import StepStats

TOKENS = ("prompt_ids", "response_ids")


class ModelWorker(Worker):
    """A role with a model: builds the engine on the group's mesh; saves, loads and exports it."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        source: ModelSource,
        engine: EngineConfig,
        optimizer: OptimizerConfig | None = None,
        head: str = "lm",
        temperature: float = 1.0,
        total_optimizer_steps: int | None = None,
        losses: dict[str, Loss] | None = None,
    ) -> None:
        super().__init__(context)
        self.engine = FsdpEngine(
            source,
            engine,
            optimizer,
            mesh=context.device_mesh(),
            head=head,  # type: ignore[arg-type]
            temperature=temperature,
            total_optimizer_steps=total_optimizer_steps,
            device=context.device,
        )
        self._losses = losses or {}
        self._snapshot: Any = None

    @dispatch("broadcast")
    def num_parameters(self) -> int:
        """Of the whole model (tied tensors once)."""
        return self.engine.num_parameters()

    @dispatch("broadcast")
    def snapshot(self) -> None:
        """Copy all state (parameters, optimizer, schedule) in memory; `write_snapshot` writes that copy
        later.
        """
        self._snapshot = self.engine.snapshot()

    @dispatch("broadcast")
    def write_snapshot(self, path: str) -> None:
        """Write the copy (collective: every rank its shards) and forget it."""
        self.engine.save(path, self._snapshot)
        self._snapshot = None

    @dispatch("broadcast")
    def load(self, path: str) -> None:
        """Load what `write_snapshot` wrote, on any number of ranks."""
        self.engine.load(path)

    @dispatch("broadcast")
    def export(self, path: str) -> None:
        """Write a Hugging Face folder (collective; rank 0 writes)."""
        self.engine.export(path)

    @dispatch("per_rank")
    def peak_memory_bytes(self) -> int:
        return self.engine.peak_memory_bytes()

    @dispatch("per_rank")
    def cpu_seconds(self) -> float:
        """Of the host process so far, all threads."""
        return time.process_time()

    @dispatch("per_rank")
    def process_id(self) -> int:
        return os.getpid()

    def _update(
        self, batch: Batch, loss: str, mini_batch_column: str, orders: Sequence[Sequence[int]]
    ) -> StepStats:
        """Epochs × mini-batches × (forward_backward, optimizer_step). orders[e]: mini-batch numbers of epoch
        e.
        """
        stats = StepStats()
        mini_batch = batch.scalars(mini_batch_column)
        prefix = "critic" if loss == "critic" else "actor"
        for order in orders:
            for number in order:
                part = batch.take(np.flatnonzero(mini_batch == number))
                stats.merge(self.engine.forward_backward(part, self._losses[loss]))
                step = self.engine.optimizer_step()
                if np.isfinite(step.grad_norm):
                    stats.add_mean(f"{prefix}/grad_norm", step.grad_norm)
                stats.add_max(f"{prefix}/lr", step.lr)
                stats.add_mean(f"{prefix}/skipped_steps", float(step.skipped))
        return stats


class ActorWorker(ModelWorker):
    """The policy that is trained."""

    @dispatch("split", reads=TOKENS, writes=("old_log_probs",))
    def compute_log_prob(self, batch: Batch) -> Batch:
        """old_log_probs: under the policy as it is now (at the start of an update), float32 per response
        token.
        """
        return self.engine.forward(batch, {"log_probs": "old_log_probs"})

    @dispatch("split")
    def update_actor(self, batch: Batch, orders: Sequence[Sequence[int]], loss: str = "policy") -> StepStats:
        """All optimizer steps of one trainer step. Mini-batches are planned by the controller (column
        mini_batch).
        """
        started = time.process_time()
        stats = self._update(batch, loss, "mini_batch", orders)
        stats.add_sum("perf/update_cpu_seconds", time.process_time() - started)
        return stats

    @dispatch("split")
    def evaluate_loss(self, batch: Batch, loss: str = "sft") -> StepStats:
        """The loss's metrics on rows that are not trained on."""
        with torch.no_grad():
            return self.engine.evaluate(batch, self._losses[loss])


class CriticWorker(ModelWorker):
    """The value function."""

    @dispatch("split", reads=TOKENS, writes=("values",))
    def compute_values(self, batch: Batch) -> Batch:
        """values: V of the state before each response token, float32."""
        return self.engine.forward(batch, {"values": "values"})

    @dispatch("split")
    def update_critic(self, batch: Batch, orders: Sequence[Sequence[int]]) -> StepStats:
        return self._update(batch, "critic", "critic_mini_batch", orders)


class ReferenceWorker(ModelWorker):
    """The frozen policy that a KL term measures against."""

    @dispatch("split", reads=TOKENS, writes=("ref_log_probs",))
    def compute_ref_log_prob(self, batch: Batch) -> Batch:
        return self.engine.forward(batch, {"log_probs": "ref_log_probs"})
