"""Workers that own a training engine: actor, critic, reference, and those whose models judge the policy's
tokens (a teacher, a reward or cost model, an implicit process reward model). Each method is one verb of the
paper's.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rondo.algorithms import GAP, try_loss
from rondo.checkpoint import Files
from rondo.config.schema import ActorConfig
from rondo.controller import Worker, WorkerContext, dispatch
from rondo.controller.mesh import DATA
from rondo.core.batch import ROW_ID, Batch, ragged_array
from rondo.core.columns import IMAGES, LOG_PROBS, MINI_BATCH, ROUTED, ROUTES, SCORE, declared
from rondo.core.errors import TrainError
from rondo.core.roles import ROLES
from rondo.core.types import StepStats
from rondo.models.context import Context
from rondo.models.loading import dtype_of
from rondo.platform import on_host, platform_of
from rondo.system.storage import storing
from rondo.system.usage import counted_checks
from rondo.training import Loss, ModelSpec, make_engine
from rondo.training.loss import equal_rows, metrics_of
from rondo.training.offload import HostMemory
from rondo.training.views import Views
from rondo.workers.estimating import EstimatingWorker
from rondo.workers.transfer import SendsWeights

_log = logging.getLogger(__name__)


class WritesRows:
    """A worker that writes rows into the run's folder, where its machine has that."""

    @dispatch("per_rank")
    def sees(self, path: str, content: bytes) -> bool:
        """Says whether a file of the controller's is here, and not another one of that name."""
        return Path(path).is_file() and Path(path).read_bytes() == content

    @dispatch("split")
    def sum_columns(self, batch: Batch, names: Sequence[str]) -> Mapping[str, int]:
        """Returns the sums of these columns (`Batch.sums`), which add up over the ranks."""
        with counted_checks():
            return batch.sums(names)

    def write_rows(self, batch: Batch, path: str) -> int:
        """Writes a Parquet file; returns its size. Raises StorageError."""
        with storing(path, needs=lambda: batch.table.nbytes):
            batch.write_parquet(path)
            return Path(path).stat().st_size


TOKENS = declared("prompt_ids", "response_ids")
# What a model reads beside the tokens, of rows that have it.
SHOWN = (IMAGES,)
BESIDE = (*ROUTES, *SHOWN)


def update_columns(loss: Loss, role: str = "actor") -> tuple[str, ...]:
    """Returns what an update with `loss` reads: the tokens, the loss's columns, and the role's
    mini-batches.
    """
    mini_batch = "mini_batch" if role == "actor" else MINI_BATCH(role)
    return (*TOKENS, *loss.columns, mini_batch)


def views_of(context: WorkerContext) -> Views:
    """Returns the ranks as the role's mesh sees them; one that says nothing of models shards over all."""
    grids = context.mesh.grids
    if "dense" not in grids:
        return Views.of(context.device_mesh())
    return Views(
        context.groups["single"][0],
        dense=context.device_mesh("dense"),
        expert=context.device_mesh("expert") if "expert" in grids else None,
        alone=context.device_mesh("single")["alone"],
        context=_context(context),
    )


def _context(context: WorkerContext) -> Context | None:
    size = context.mesh.axis_size("cp")
    if size == 1:
        return None
    group = context.groups[DATA][context.mesh.names.index("cp")]
    return Context(group, context.mesh.coords(context.rank)["cp"], size)


class ModelWorker(Worker):
    """A role with a model: builds the engine on the group's mesh; saves, loads and exports it."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        model: ModelSpec,
        losses: dict[str, Loss] | None = None,
    ) -> None:
        super().__init__(context)
        for loss in (losses or {}).values():
            try_loss(loss, torch.device(context.device))
        self.engine = make_engine(model, mesh=views_of(context), device=context.device)
        plan = self.engine.backend.residency.plan
        if plan is not None:
            _log.info("%s on %s: %s", context.role, context.device, plan.describe())
        if model.optimizer is not None and model.head == "lm":
            self.engine.check_causal()
        self._losses = losses or {}
        self._snapshot: Any = None
        self._memory = HostMemory(self.engine.device)

    @dispatch("broadcast")
    def num_parameters(self) -> int:
        """Counts the parameters of the whole model (tied tensors once)."""
        return self.engine.num_parameters()

    @dispatch("broadcast")
    def begin_stage(self, lr: float | None, temperature: float, losses: Mapping[str, Loss]) -> None:
        """Takes, from here on, another learning rate (None: a frozen model), temperature of the logits and
        losses in the places of those with their names.
        """
        self.engine.backend.retune(lr, temperature)
        self._losses = {**self._losses, **losses}

    @dispatch("broadcast")
    def snapshot(self) -> None:
        """Copies all state (parameters, optimizer, schedule) in memory; `write_snapshot` writes that copy
        later.
        """
        self._snapshot = self.engine.snapshot(self._memory if self._snapshot is None else None)

    @dispatch("broadcast")
    def write_snapshot(self, path: str) -> Files:
        """Writes the copy (collective: every rank its shards) and forgets it; returns the checksums."""
        files = self.engine.save(path, self._snapshot)
        self._snapshot = None
        return files

    @dispatch("broadcast")
    def load(self, path: str, files: Files) -> None:
        """Loads what `write_snapshot` wrote, on any number of ranks. files: what it returned."""
        self.engine.load(path, files)

    @dispatch("broadcast")
    def export(self, path: str, dtype: str | None) -> str:
        """Writes a Hugging Face folder, and returns the dtype of its weights. None: that of the folder that
        they come from, where it is narrower than the trained ones'. Collective; all ranks write.
        """
        trained, origin = self.engine.config.param_dtype, dtype_of(self.engine.source)
        if dtype is None and origin is not None and origin.itemsize < getattr(torch, trained).itemsize:
            dtype = str(origin).removeprefix("torch.")
        self.engine.export(path, dtype or trained)
        return dtype or trained

    @dispatch("broadcast")
    def copy_parameters_from(self, role: str) -> None:
        """Takes over the parameters of another role on the same hosts, sharded alike (reference ← actor).

        Raises TrainError when there is no such role here or shapes differ.
        """
        peer = self.context.peers.get(role)
        if not isinstance(peer, ModelWorker):
            raise TrainError(
                f"{self.context.role} copies the parameters of {role!r}, which has no model on this host "
                f"({', '.join(sorted(self.context.peers))} are here): place both roles on the same devices"
            )
        self.engine.copy_parameters_from(peer.engine)

    @dispatch("broadcast")
    def weight_sums(self) -> Mapping[str, int]:
        """Returns the checksum of each tensor that learns, in the type that it is trained in, by checkpoint
        name: of a model with adapters, of these alone. Collective.
        """
        has_adapters = getattr(self.engine.config, "lora", None) is not None
        return self.engine.parameters("adapters" if has_adapters else "merged").checksums()

    @dispatch("per_rank")
    def peak_memory_bytes(self) -> int:
        return self.engine.peak_memory_bytes()

    def _update(
        self, batch: Batch, loss: str, mini_batch_column: str, orders: Sequence[Sequence[int]]
    ) -> StepStats:
        """Runs epochs × mini-batches × (forward_backward, optimizer_step). orders[e]: mini-batch numbers of
        epoch e. Metrics are named after the role.
        """
        stats = StepStats()
        mini_batch = batch.scalars(mini_batch_column)
        with self.engine.on_device():
            for number in itertools.chain(*orders):
                stats.merge(self._step(batch.take(np.flatnonzero(mini_batch == number)), loss))
        return stats.merge(self._memory_told())

    def _memory_told(self) -> StepStats:
        """Returns what the model had on its device in each phase since the last call."""
        told = StepStats()
        for name, size in self.engine.backend.residency.measured().items():
            told.add_max(f"perf/{self.context.role}_{name}", float(size))
        return told

    def _step(self, rows: Batch, loss: str) -> StepStats:
        """Takes one optimizer step on a mini-batch."""
        stats, prefix = self.engine.forward_backward(rows, self._losses[loss]), self.context.role
        step = self.engine.optimizer_step()
        if np.isfinite(step.grad_norm):
            stats.add_mean(f"{prefix}/grad_norm", step.grad_norm)
        stats.add_max(f"{prefix}/lr", step.lr)
        stats.add_mean(f"{prefix}/skipped_steps", float(step.skipped))
        if step.experts is not None:
            stats.merge(step.experts.metrics(prefix))
        if not on_host(self.engine.device):
            free, total = platform_of(self.engine.device).memory(self.engine.device)
            stats.add_max("perf/device_bytes_in_use", float(total - free))
        return stats


class ActorWorker(EstimatingWorker, SendsWeights, WritesRows, ModelWorker):
    """The policy that is trained."""

    @dispatch(
        "split",
        reads=TOKENS,
        takes=BESIDE,
        writes=("old_log_probs", "sum_p_squared", "entropy"),
        replaces=ROUTES,
    )
    def compute_log_prob(self, batch: Batch, also: tuple[str, ...] = ()) -> Batch:
        """Adds old_log_probs: under the policy as it is now (at the start of an update), float32 per response
        token. also: further outputs of the same pass (sum_p_squared, entropy), under their own names. With
        actor.router.replay=trainer it adds a mixture's routes.
        """
        outputs = {"log_probs": "old_log_probs", **{name: name for name in also}}
        return self.engine.forward(batch, outputs, routes=self._replay == "trainer")

    @property
    def _replay(self) -> str | None:
        config = self.engine.config
        return config.router.replay if isinstance(config, ActorConfig) else None

    @dispatch("split", reads=TOKENS, takes=BESIDE, writes=("log_probs",))
    def compute_current_log_prob(self, batch: Batch) -> Batch:
        """Adds log_probs: under the policy as it is now, in the middle of an update."""
        return self.engine.forward(batch, {"log_probs": "log_probs"})

    @dispatch("split", reads=TOKENS, takes=SHOWN, writes=("ref_log_probs",))
    def compute_ref_log_prob(self, batch: Batch) -> Batch:
        """Adds ref_log_probs: under the model without its adapters, which is the reference. Raises TrainError
        where it has none.
        """
        with self.engine.without_adapters():
            return self.engine.forward(batch, {"log_probs": "ref_log_probs"})

    @dispatch("split", reads=("rollout_log_probs",), writes=("old_log_probs",))
    def adopt_rollout_log_prob(self, batch: Batch) -> Batch:
        """Adds old_log_probs: the sampler's own numbers, as they are (rollout correction in bypass mode)."""
        return batch.select([ROW_ID]).with_columns({"old_log_probs": batch.array("rollout_log_probs")})

    @dispatch("split", takes=BESIDE)
    def update_actor(
        self,
        batch: Batch,
        orders: Sequence[Sequence[int]],
        loss: str = "policy",
        measured: Collection[int] = (),
        known: str | None = None,
    ) -> StepStats:
        """Takes all optimizer steps of one trainer step. Mini-batches are planned by the controller (column
        mini_batch).

        measured: those whose rows have no part in the gradient; the loss's metrics of them are taken, with
        the weights of their turn, and no step. known: the column with the log-probs of the weights before the
        first step, where they are known.
        """
        if self._replay == "sampler" and ROUTED not in batch.columns:
            raise TrainError(
                f"actor.router.replay=sampler, and the rows have no {ROUTED}: they were not generated in "
                "this run; train on rows that were, or leave it out"
            )
        started = time.process_time()
        stats = StepStats()
        mini_batch = batch.scalars("mini_batch")
        has_moved = False
        with self.engine.on_device():
            for number in itertools.chain(*orders):
                rows = batch.take(np.flatnonzero(mini_batch == number))
                if number in measured:
                    told = self._measure(rows, self._losses[loss], known)
                else:
                    told = self._step(rows, loss)
                    known = None
                # Without old log-probs the gap between sampler and trainer is that of the current ones, and
                # behind a step what was learnt is in it.
                is_learning = has_moved and "old_log_probs" not in self._losses[loss].columns
                stats.merge(told.without(GAP) if is_learning else told)
                has_moved |= number not in measured
        stats.add_sum("perf/update_cpu_seconds", time.process_time() - started)
        return stats.merge(self._memory_told())

    def _measure(self, batch: Batch, loss: Loss, known: str | None) -> StepStats:
        """Returns the loss's metrics of rows, after a forward pass over those that differ; without one where
        the column `known` has their current log-probs.
        """
        if known is not None and loss.outputs == ("log_probs",):
            return metrics_of(batch.with_columns({"log_probs": batch.array(known)}, replace=True), loss)
        first, same = equal_rows(batch)
        made = self.engine.forward(batch.take(first), {name: name for name in loss.outputs})
        return metrics_of(batch.with_columns(made.without(ROW_ID).take(same), replace=True), loss)

    @dispatch("split", takes=SHOWN)
    def evaluate_loss(self, batch: Batch, loss: str = "sft") -> StepStats:
        """Returns the loss's metrics on rows that are not trained on."""
        with torch.no_grad():
            return self.engine.evaluate(batch, self._losses[loss])


class CriticWorker(ModelWorker):
    """A value function: of the reward (role critic) or of the cost (cost_critic)."""

    @dispatch("split", reads=TOKENS, takes=SHOWN)
    def compute_values(self, batch: Batch) -> Batch:
        """Computes V of the state before each response token, float32, in the column that the role makes:
        values or cost_values.
        """
        return self.engine.forward(batch, {"values": ROLES[self.context.role].makes})

    @dispatch("split", takes=SHOWN)
    def update_critic(self, batch: Batch, orders: Sequence[Sequence[int]]) -> StepStats:
        """Takes all optimizer steps of one trainer step: loss "critic", mini-batches in column
        `<role>_mini_batch`.
        """
        return self._update(batch, "critic", MINI_BATCH(self.context.role), orders)


class ReferenceWorker(ModelWorker):
    """The frozen policy that a KL term measures against."""

    @dispatch("split", reads=TOKENS, takes=SHOWN, writes=("ref_log_probs",))
    def compute_ref_log_prob(self, batch: Batch) -> Batch:
        return self.engine.forward(batch, {"log_probs": "ref_log_probs"})


class TeacherWorker(ModelWorker):
    """The frozen model that is distilled from. top_k: how many tokens per position `compute_topk` gives."""

    def __init__(self, context: WorkerContext, *, model: ModelSpec, top_k: int) -> None:
        super().__init__(context, model=model)
        self._top_k = top_k

    @dispatch("split", reads=TOKENS, takes=SHOWN, writes=("teacher_log_probs",))
    def compute_log_prob(self, batch: Batch) -> Batch:
        """Adds teacher_log_probs: of the response tokens, float32."""
        return self.engine.forward(batch, {"log_probs": "teacher_log_probs"})

    @dispatch("split", reads=TOKENS, takes=SHOWN)
    def compute_named_log_prob(self, batch: Batch) -> Batch:
        """Adds <name>_log_probs, of one of `models`: of the response tokens, float32."""
        return self.engine.forward(batch, {"log_probs": LOG_PROBS(self.context.role)})

    @dispatch(
        "split",
        reads=TOKENS,
        takes=SHOWN,
        writes=("teacher_log_probs", "teacher_topk_ids", "teacher_topk_log_probs"),
    )
    def compute_topk(self, batch: Batch) -> Batch:
        """Adds teacher_log_probs, and per response token the top_k likeliest tokens, descending:
        teacher_topk_ids int32 and teacher_topk_log_probs float32, both wide [N, top_k].
        """
        return self.engine.forward_topk(batch, self._top_k)


class RewardModelWorker(ModelWorker):
    """A frozen reward or cost model, built with head="value". Its role is the name of its score."""

    @dispatch("split", reads=TOKENS, takes=SHOWN)
    def compute_reward(self, batch: Batch) -> Batch:
        """Adds score/<name>, per row: the value head after the last response token; NaN without one."""
        return self.engine.forward_scores(batch, SCORE(self.context.role))


class PrmWorker(ModelWorker):
    """The implicit process reward model (PRIME, arXiv:2502.01456): a causal LM trained on outcomes, whose
    log-ratio to the reference is the reward of a token. beta: its scale.
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        model: ModelSpec,
        beta: float,
        losses: dict[str, Loss] | None = None,
    ) -> None:
        super().__init__(context, model=model, losses=losses)
        self._beta = beta

    @dispatch("split", reads=(*TOKENS, "ref_log_probs"), takes=SHOWN, writes=("process_rewards",))
    def compute_process_reward(self, batch: Batch) -> Batch:
        """Adds process_rewards: beta · (log π_prm - log π_ref) of each response token, float32."""
        own = self.engine.forward(batch, {"log_probs": "process_rewards"})
        log_probs, bounds = own.ragged("process_rewards")
        reference, _ = batch.aligned("ref_log_probs", "response_ids").ragged("ref_log_probs")
        rewards = ragged_array(self._beta * (log_probs - reference), bounds)
        return own.with_columns({"process_rewards": rewards}, replace=True)

    @dispatch("split", takes=SHOWN)
    def update_prm(self, batch: Batch, orders: Sequence[Sequence[int]]) -> StepStats:
        """Takes all optimizer steps of one trainer step: loss "prm", mini-batches in column
        `prm_mini_batch`.
        """
        return self._update(batch, "prm", MINI_BATCH(self.context.role), orders)
