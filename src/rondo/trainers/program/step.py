"""What the stages of a step share (`Step`): the run's worker groups, the numbers that adapt from step to
step, columns as tensors; and what a stage is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from rondo.algorithms import bind
from rondo.algorithms.coefficients import ROWS, Measured, OfNothingError, adaptive_kl, lagrange
from rondo.config import AlgorithmConfig
from rondo.controller import Cluster, WorkerGroup
from rondo.core.batch import ROW_ID, Batch, BatchRef, ragged_rows
from rondo.core.columns import SCORE_PREFIX, judges
from rondo.core.errors import TrainError
from rondo.core.types import StepStats
from rondo.data import firsts

LEARNT_TOKENS, LEARNT_PAIRS = "perf/row_tokens", "perf/row_pairs"  # of the rows that were learnt from
IDLE = "actor/idle_mini_batches"  # how many of the actor's were left out, as nothing in them has a weight
KL, MULTIPLIER = "kl_coef", "multiplier"  # coefficients that the configuration has keys of their own for


def count_rows(stats: StepStats, lengths: npt.NDArray[Any], times: int = 1) -> None:
    """Adds what training takes on rows of these lengths: tokens, and pairs for attention. times: epochs."""
    stats.add_sum(LEARNT_TOKENS, float(times * lengths.sum()))
    stats.add_sum(LEARNT_PAIRS, float(times * (lengths.astype(np.float64) ** 2).sum() / 2))


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
    """The numbers that adapt from step to step: those of algorithm.coefficients by their names, `kl_coef` of
    algorithm.kl (which may stay as it is), and `multiplier`, λ of algorithm.constraint.
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._rules: dict[str, Callable[..., Any]] = {}
        self._kept: dict[str, Any] = {}
        self.read: dict[str, float] = {}
        """What losses and estimators read in the next step."""
        for name, chosen in algorithm.coefficients.items():
            self._add(name, chosen.start)
        self.begin_stage(algorithm)
        kl, constraint = algorithm.kl, algorithm.constraint
        if kl is not None:
            self._add(KL, kl.coef)
            if (aim := kl.controller).name == "adaptive":
                metric = f"actor/kl_{kl.where}"
                self._rules[KL] = partial(adaptive_kl, metric=metric, target=aim.target, horizon=aim.horizon)
        if constraint is not None:
            options = {name: getattr(constraint, name) for name in ("cost", "limit", "lr", "smoothing")}
            self._add(MULTIPLIER, constraint.initial, partial(lagrange, **options))

    def begin_stage(self, algorithm: AlgorithmConfig) -> None:
        """Goes on by the rules as a stage has them; the numbers stay."""
        for name, chosen in algorithm.coefficients.items():
            self._rules[name] = bind("coefficient", chosen, key=f"algorithm.coefficients.{name}")

    def _add(self, name: str, start: float, rule: Callable[..., Any] | None = None) -> None:
        self._kept[name] = self.read[name] = start
        if rule is not None:
            self._rules[name] = rule

    @property
    def adapts(self) -> bool:
        """Says whether any of them changes in this run."""
        return bool(self._rules)

    def adapt(self, batch: BatchRef, stats: StepStats) -> None:
        """Adapts them, after a step has used them. batch: all scored rows of the step; stats: its metrics.
        A number stays whose metric is a mean over nothing, or is missing as each of the actor's mini-batches
        was left out. Raises TrainError for a metric that is not there otherwise, and for what is
        no finite number.
        """
        for name, value in self.read.items():
            stats.add_max(name_of_metric(name), value)
        if not self._rules:
            return
        known = StepStats(dict(stats.means), stats.sums, stats.maxima, stats.minima)
        _add_scores(batch, known)
        values = {**known.values(), ROWS: float(len(batch))}
        is_whole = "actor/loss" in values or not values.get(IDLE)
        for name, rule in self._rules.items():
            measured = Measured(values, known.means, f"algorithm.coefficients.{name}", is_whole)
            try:
                made = rule(self._kept[name], measured)
            except OfNothingError:
                continue
            self._kept[name], self.read[name] = _checked(made, name)
        if isinstance(kept := self._kept.get(MULTIPLIER), list):  # not before the first cost
            stats.add_max("reward/cost_average", kept[1])

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps; what does not adapt is the configuration's."""
        return {"coefficients": {name: [self._kept[name], self.read[name]] for name in self._rules}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was cut; what the configuration has since begins at its start."""
        saved = state.get("coefficients")
        if saved is None:  # of an older rondo, which knew these two
            saved = {} if state["kl_coef"] is None else {KL: [state["kl_coef"]] * 2}
            if state["constraint"][0] is not None:
                saved[MULTIPLIER] = [state["constraint"], state["constraint"][0]]
        for name in saved.keys() & self._rules.keys():
            self._kept[name], self.read[name] = saved[name]


def name_of_metric(coefficient: str) -> str:
    """Returns the metric of an adapting number's value in a step."""
    own = coefficient in (KL, MULTIPLIER)
    return f"actor/{coefficient}" if own else f"actor/coefficient/{coefficient}"


def _add_scores(batch: BatchRef, stats: StepStats) -> None:
    """Adds the mean of each score over the answers that have it, by its column."""
    index = batch.index.take(firsts(batch.index))
    for name in index.columns:
        if name == "accuracy" or (name.startswith(SCORE_PREFIX) and judges(name)):
            scores = index.scalars(name)
            known = scores[np.isfinite(scores)]
            if name == "accuracy" and not len(known):  # no score says which answers are right
                continue
            stats.add_mean(name, float(known.sum(dtype=np.float64)), len(known))


def _checked(made: Any, name: str) -> tuple[Any, float]:
    """Returns what is kept of a number, and what is read. made: what its rule has returned. Raises TrainError
    for what is no number, or would come back from a checkpoint as something else.
    """
    who = f"algorithm.coefficients.{name}"
    if isinstance(made, tuple) and len(made) != 2:
        raise TrainError(f"{who} returned {made!r:.80}; a rule returns a number, or two things, (kept, read)")
    kept, read = (
        one.item() if isinstance(one, np.generic) else one
        for one in (made if isinstance(made, tuple) else (made, made))
    )
    if isinstance(read, bool) or not isinstance(read, (int, float)) or not math.isfinite(read):
        raise TrainError(f"{who} became {read!r}, which is no finite number")
    try:
        again = json.loads(json.dumps(kept, allow_nan=False))
    except (TypeError, ValueError):
        again = None
    if again != kept or again is None:
        raise TrainError(
            f"{who} keeps {kept!r:.80}, which a checkpoint would give back as something else; keep a finite "
            "number or a list of them"
        )
    return again, float(read)


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
    coefficients: Mapping[str, float] = field(default_factory=dict)
    """The numbers that adapt, in this step (`Coefficients.read`)."""
    stats: StepStats = field(default_factory=StepStats)
    """The step's metrics so far; stages add to them."""
    rows: BatchRef | None = None
    """Those that its metrics tell of, and that what adapts follows. None: nothing is told."""
    updated: bool = False
    """The actor was updated, and its weights are not served yet."""

    @property
    def kl_coef(self) -> float:
        """The coefficient of algorithm.kl in this step; 0 without one."""
        return self.coefficients.get(KL, 0.0)


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
    return with_tokens(batch, per_token, cluster, replace=replace)


def with_tokens(
    batch: BatchRef, columns: Mapping[str, pa.Array], cluster: Cluster, *, replace: bool = False
) -> BatchRef:
    """Returns batch with further per-token columns, which lie in one block. Raises DataError for a name that
    is there already unless `replace`.
    """
    if not columns:
        return batch
    block = Batch.of({ROW_ID: batch.index.scalars(ROW_ID), **columns})
    return batch.with_blocks(cluster.put(block, ()).blocks, replace)


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
