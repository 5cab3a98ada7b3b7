"""What the stages of a step share (`Step`): the run's worker groups, the numbers that adapt from step to
step, columns as tensors; and what a stage is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from rondo.algorithms import smooth_cost, update_kl_coef, update_multiplier
from rondo.config import AlgorithmConfig, ConstraintConfig
from rondo.controller import Cluster, WorkerGroup
from rondo.core.batch import ROW_ID, Batch, BatchRef, ragged_rows
from rondo.core.columns import SCORE, SCORE_PREFIX
from rondo.core.errors import TrainError
from rondo.core.types import StepStats
from rondo.data import firsts


@dataclass
class Roles:
    """The worker groups of a run."""

    actor: WorkerGroup
    """The policy that is trained."""
    rollout: WorkerGroup | None
    """The generation engines; None where none runs (rollout.recorded)."""
    models: dict[str, WorkerGroup] = field(default_factory=dict)
    """The models beside actor and rollout, by role."""

    @property
    def engines(self) -> WorkerGroup:
        """Returns the rollout group of a run that generates."""
        assert self.rollout is not None, "nothing generates in this run"
        return self.rollout

    def group(self, role: str) -> WorkerGroup:
        return self.actor if role == "actor" else self.models[role]

    def all(self) -> tuple[WorkerGroup, ...]:
        return (*self.trained(), *([] if self.rollout is None else [self.rollout]))

    def trained(self) -> tuple[WorkerGroup, ...]:
        """Returns all groups with a training engine."""
        return (self.actor, *self.models.values())

    def rollout_stands_alone(self) -> bool:
        """Says whether the rollout ranks have host processes of their own: the run can go on without one of
        them.
        """
        others = {device for group in self.trained() for device in group.devices}
        return others.isdisjoint(self.engines.devices)


class Coefficients:
    """The coefficients that may change from step to step. kl_coef: of algorithm.kl in the next step.
    multiplier: λ >= 0 for the next step; None without a constraint.
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._kl = algorithm.kl
        self._constraint = algorithm.constraint
        self.kl_coef = algorithm.kl.coef if algorithm.kl else 0.0
        self.multiplier = algorithm.constraint.initial if algorithm.constraint else None
        self._average_cost: float | None = None

    @property
    def adapts(self) -> bool:
        """Says whether any coefficient changes in this run."""
        return self._adapts_kl or self._constraint is not None

    @property
    def _adapts_kl(self) -> bool:
        return self._kl is not None and self._kl.controller.name == "adaptive"

    def adapt(self, batch: BatchRef, stats: StepStats) -> None:
        """Adapts the coefficients, after a step has used them. batch: all scored rows of the step; stats: its
        metrics.
        """
        kl = self._kl
        if kl is not None:
            stats.add_max("actor/kl_coef", self.kl_coef)
            aim = kl.controller
            if aim.name == "adaptive":
                measured = stats.values().get(f"actor/kl_{kl.where}", aim.target)
                self.kl_coef = update_kl_coef(self.kl_coef, measured, aim.target, aim.horizon, len(batch))
        if self._constraint is not None:
            self._follow_cost(self._constraint, batch, stats)

    def _follow_cost(self, constraint: ConstraintConfig, batch: BatchRef, stats: StepStats) -> None:
        """Lets λ follow the moving average of the cost."""
        assert self.multiplier is not None
        index = batch.index.take(firsts(batch.index))
        mean = float(index.scalars(SCORE(constraint.cost)).mean())
        self._average_cost = smooth_cost(self._average_cost, mean, constraint.smoothing)
        stats.add_max("actor/multiplier", self.multiplier)
        stats.add_max("reward/cost_average", self._average_cost)
        self.multiplier = update_multiplier(
            self.multiplier, self._average_cost, constraint.limit, constraint.lr
        )

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps; a coefficient that does not adapt is the configuration's."""
        return {
            "kl_coef": self.kl_coef if self._adapts_kl else None,
            "constraint": [self.multiplier, self._average_cost],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was cut."""
        if state["kl_coef"] is not None and self._adapts_kl:
            self.kl_coef = float(state["kl_coef"])
        multiplier, average_cost = state["constraint"]
        self.multiplier = multiplier
        self._average_cost = average_cost


@dataclass
class Step:
    """What the stages of one trainer step share."""

    number: int
    """Trainer steps that were done before this one."""
    seed: int
    """Of the run (trainer.seed); with `number` it seeds whatever a stage draws."""
    cluster: Cluster
    """Has the processes, and the rows of batches."""
    roles: Roles
    """The worker groups of the run."""
    kl_coef: float = 0.0
    """The coefficient of algorithm.kl in this step."""
    multiplier: float | None = None
    """λ of algorithm.constraint in this step."""
    stats: StepStats = field(default_factory=StepStats)
    """The step's metrics so far; stages add to them."""
    rows: BatchRef | None = None
    """Those that its metrics tell of, and that what adapts follows. None: nothing is told."""
    updated: bool = False
    """The actor was updated, and its weights are not served yet."""


class Stage(Protocol):
    """One thing that a step does with its rows."""

    @property
    def phase(self) -> str:
        """Names the phase: the time of the stage counts to timing/<phase>_s."""
        ...

    @property
    def writes(self) -> tuple[str, ...]:
        """Names the columns that it adds, or makes anew."""
        ...

    def describe(self) -> str:
        """Writes one line for `rondo check`."""
        ...

    async def __call__(self, batch: BatchRef, step: Step) -> BatchRef:
        """Returns the batch with more columns, or with fewer rows."""
        ...


# ---- columns of a BatchRef as tensors for pure functions on the controller, and their results back into it


async def padded_columns(batch: BatchRef, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Returns per-token columns as float32 [B, T], 0 beyond a row's end. Raises DataError for a missing
    column.
    """
    wanted = sorted(set(names))
    if not wanted:
        return {}
    tokens = await batch.fetch(wanted)
    return {name: tokens.padded(name).to(torch.float32) for name in wanted}


def numbers(index: Batch, name: str) -> torch.Tensor:
    """Returns a per-row column as numbers [B]: float32 or int64; names (trajectory_id) become integer ids."""
    column = index.scalars(name)
    if column.dtype == object:
        return torch.from_numpy(np.unique(column.astype(str), return_inverse=True)[1].astype(np.int64))
    return torch.from_numpy(column.astype(np.float32 if column.dtype.kind == "f" else np.int64))


def attach(
    batch: BatchRef, named: Mapping[str, torch.Tensor], cluster: Cluster, *, replace: bool = False
) -> BatchRef:
    """Returns batch with further columns: [B] go to the index, [B, T] become one block of ragged columns.

    Floating columns are stored as float32, others in their own type. Raises TrainError for any other shape,
    and DataError for a name that is there already unless `replace`.
    """
    lengths = batch.index.scalars("response_length")
    width = int(lengths.max(initial=0))
    per_row, per_token = {}, {}
    for name, tensor in named.items():
        values = (tensor.to(torch.float32) if tensor.is_floating_point() else tensor).detach().cpu().numpy()
        if values.shape == (len(batch),):
            per_row[name] = values
        elif values.ndim == 2 and len(values) == len(batch) and values.shape[1] >= width:
            rows = [row[:length] for row, length in zip(values, lengths, strict=True)]
            per_token[name] = ragged_rows(rows, values.dtype)
        else:
            raise TrainError(
                f"column {name!r} has the shape {list(values.shape)}; a batch of {len(batch)} rows, the "
                f"longest with {width} tokens, takes [{len(batch)}] or [{len(batch)}, {width}]"
            )
    if per_row:
        batch = batch.with_index(per_row, replace)
    if per_token:
        block = Batch.of({ROW_ID: batch.index.scalars(ROW_ID), **per_token})
        batch = batch.with_blocks(cluster.put(block, ()).blocks, replace)
    return batch


def check_one_row_each(batch: BatchRef, who: str) -> None:
    """Raises TrainError where a trajectory has several rows, which `who` would take for several answers."""
    several = len(batch) - len(firsts(batch.index))
    if several:
        raise TrainError(
            f"{who} compares the answers of a prompt row by row, and some trajectories of this step have "
            f"several rows ({len(batch)} rows of {len(batch) - several}); choose one that reads whole "
            "trajectories (grpo, rloo and the like) or steps (gigpo, hgpo)"
        )


def with_scores_of(everything: BatchRef, scored: BatchRef) -> BatchRef:
    """Returns everything with the reward and the models' scores of `scored`, some of its rows in the same
    order; the others, failures, have NaN.
    """
    there = everything.columns
    names = [x for x in scored.index.columns if x.startswith(SCORE_PREFIX) and x not in there]
    at = np.flatnonzero(np.isin(everything.index.scalars(ROW_ID), scored.index.scalars(ROW_ID)))
    columns = {name: np.full(len(everything), np.nan, np.float32) for name in ("reward", *names)}
    for name, column in columns.items():
        column[at] = scored.index.scalars(name)
    return everything.with_index(columns, replace=True)
