"""The update of a step: which rows make up a mini-batch, what each row's tokens weigh, and the calls of the
workers that learn. All of the plan is made on the controller from per-row numbers.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from rondo.algorithms import ActorLoss, Aggregate, bind, loss_weights
from rondo.config import ActorConfig, Config, CriticConfig
from rondo.controller import Cluster, WorkerGroup
from rondo.core.batch import ROW_ID, BatchRef, ragged_array, wide_array
from rondo.core.columns import IMAGES, LOSS_WEIGHT, MINI_BATCH, declared, per_row
from rondo.core.types import StepStats
from rondo.data import is_cut_off, is_given, trajectory_of_rows
from rondo.planning import mini_batch_orders, plan_mini_batches
from rondo.system.border import in_thread
from rondo.trainers.program.inputs import conversations
from rondo.trainers.program.stages import PreparationStage, columns_of_loss
from rondo.trainers.program.step import IDLE, Step, count_rows
from rondo.training import Loss
from rondo.workers import ActorWorker, update_columns

_WEIGHTS = ("loss_weight", "lm_weight")  # of a row's tokens in the actor's loss


@dataclass(frozen=True)
class Learner:
    """A role beside the actor that is trained in every step."""

    role: str
    """The role's name."""
    method: Any
    """The worker's method, which reads `columns`."""
    loss: Loss
    """What it is trained on."""
    loss_name: str
    """What the loss is called in its worker."""
    section: ActorConfig | CriticConfig
    """Its section of the configuration."""
    aggregate: Aggregate
    """How the losses of tokens become one."""
    first: bool = False
    """It is trained before the columns that it produces are computed, and so before the advantages; otherwise
    after them."""

    @property
    def columns(self) -> tuple[str, ...]:
        return update_columns(self.loss, self.role)

    @property
    def mini_batch(self) -> str:
        """Names the column that says which of its mini-batches a row is in."""
        return MINI_BATCH(self.role)

    @property
    def loss_weight(self) -> str:
        """Names the column with the weight of a row's tokens in its loss."""
        return LOSS_WEIGHT(self.role)


@dataclass(frozen=True)
class MiniBatches:
    """Which mini-batch each row is in, for every role that learns: by prompt groups, right after take, so
    that shards are fixed for the step.
    """

    config: Config
    """Has the size of a mini-batch."""
    learners: tuple[Learner, ...]
    """The roles beside the actor."""
    number: int | None = None
    """Of each role; None: as its section's mini_batch_size says."""
    phase = "prepare"

    @functools.cached_property
    def writes(self) -> tuple[str, ...]:
        return ("mini_batch", *(learner.mini_batch for learner in self.learners))

    def describe(self) -> str:
        return f"{', '.join(self.writes)} <- controller, by prompt groups"

    async def __call__(self, batch: BatchRef, step: Step) -> BatchRef:
        config, groups = self.config, batch.index.scalars("group_id")
        sizes = [section.mini_batch_size for section in (config.actor, *(x.section for x in self.learners))]
        made = {
            name: plan_mini_batches(groups, size, seed=step.seed, step=step.number, number=self.number)
            for name, size in zip(self.writes, sizes, strict=True)
        }
        return batch.with_index(made)


@dataclass(frozen=True)
class LearnerUpdate:
    """All optimizer steps of a role beside the actor; plans its loss weights, too."""

    learner: Learner
    """The role."""
    config: Config
    """Has the epochs and mini-batches."""
    writes = ()  # its weights are for its own update

    @property
    def phase(self) -> str:
        return f"update_{self.learner.role}"

    def describe(self) -> str:
        learner = self.learner
        return f"{learner.role}.{learner.method.__name__} reads {', '.join(learner.columns)}"

    async def __call__(self, batch: BatchRef, step: Step) -> BatchRef:
        learner = self.learner
        weighted = with_learner_weights(batch, learner, self.config)
        mini_batch, epochs = batch.index.scalars(learner.mini_batch), learner.section.epochs
        order = mini_batch_orders(mini_batch, epochs, seed=step.seed, step=step.number)
        order, _ = without_idle(order, weighted, learner.mini_batch, learner.loss_weight)
        group = step.roles.group(learner.role)
        step.stats.merge(await group.call(learner.method, weighted, order, reads=learner.columns))
        return batch


def with_learner_weights(batch: BatchRef, learner: Learner, config: Config) -> BatchRef:
    """Returns the batch with the weight of each row's tokens in the loss of a role beside the actor."""
    rows = batch.index.scalars(learner.mini_batch)
    weights = _weights(batch, learner.aggregate, rows, _tokens(batch, config))
    return batch.with_index({learner.loss_weight: weights})


@dataclass(frozen=True)
class ActorWeights:
    """The weight of each row's tokens in the actor's loss: computed once, globally, over its mini-batch."""

    config: Config
    """Has the aggregation of the loss."""
    phase = "prepare"

    @functools.cached_property
    def _aggregate(self) -> Aggregate:
        return bind("aggregation", self.config.algorithm.aggregation)

    @property
    def writes(self) -> tuple[str, ...]:
        algorithm = self.config.algorithm
        also_kl = declared("kl_coef") if algorithm.kl is not None else ()
        also_lm = declared("lm_weight") if algorithm.positive_lm_coef or algorithm.pretrain_coef else ()
        also_given = declared("given") if self._reads_given else ()
        return (*declared("loss_weight"), *also_kl, *also_lm, *also_given, *algorithm.coefficients)

    @functools.cached_property
    def _reads_given(self) -> bool:
        return "given" in columns_of_loss(self.config.algorithm)

    def describe(self) -> str:
        return f"loss_weight <- controller ({self.config.algorithm.aggregation.name})"

    async def __call__(self, batch: BatchRef, step: Step) -> BatchRef:
        config, algorithm = self.config, self.config.algorithm
        rows = batch.index.scalars("mini_batch")
        tokens = _tokens(batch, config)
        columns = {"loss_weight": _weights(batch, self._aggregate, rows, tokens)}
        if self._reads_given:
            columns["given"] = is_given(batch.index).astype(np.uint8)
        for name, number in step.coefficients.items():
            if name in self.writes:  # on each row: a micro-batch knows nothing else
                columns[name] = np.full(len(batch), number, np.float32)
        if algorithm.positive_lm_coef or algorithm.pretrain_coef:
            right = np.zeros(len(batch), bool)
            if algorithm.positive_lm_coef:
                right = batch.index.scalars("accuracy") > 0
            counts = batch.index.scalars("sample_weight") if "sample_weight" in batch.index.columns else 1
            per_token = lm_weights(tokens * right * counts, rows, algorithm.positive_lm_coef)
            columns["lm_weight"] = per_token * counts
        return batch.with_index(columns)


def without_idle(
    order: Sequence[Sequence[int]], batch: BatchRef, column: str, *weights: str
) -> tuple[list[list[int]], int]:
    """Returns the order without the mini-batches in which no row of `batch` has a weight (all advantages 0,
    everything rejected or truncated), and how many optimizer steps that saves: momentum and weight decay
    would move a policy that nothing was learned about.
    """
    rows = batch.index.scalars(column)
    busy = set(rows[_weighs(batch, weights)].tolist())
    kept = [[number for number in epoch if number in busy] for epoch in order]
    return kept, sum(map(len, order)) - sum(map(len, kept))


def _weighs(batch: BatchRef, weights: Sequence[str]) -> np.ndarray:
    """Says of each row whether its tokens weigh anything in one of these columns, where they are there."""
    weighs = np.zeros(len(batch), bool)
    for name in weights:
        if name in batch.index.columns:
            weighs |= batch.index.scalars(name) > 0
    return weighs


def _tokens(batch: BatchRef, config: Config) -> np.ndarray:
    """Returns the trained tokens per row; none of what was cut off where that carries no loss."""
    tokens = batch.index.scalars("num_trained_tokens")
    if not config.algorithm.mask_truncated:
        return tokens
    return np.where(is_cut_off(batch.index), 0, tokens)


def _weights(batch: BatchRef, aggregate: Aggregate, mini_batch: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns what each row's tokens weigh, as if a row that was drawn k times stood there k times."""
    trajectories = trajectory_of_rows(batch.index)
    if "sample_weight" not in batch.index.columns:
        return loss_weights(aggregate, tokens, mini_batch, trajectories)
    counts = batch.index.scalars("sample_weight").astype(np.int64)
    rows = np.repeat(np.arange(len(batch)), counts)
    drawn = np.arange(len(rows))  # each of them a trajectory (`Resampling`)
    return counts * loss_weights(aggregate, tokens[rows], mini_batch[rows], drawn)[np.cumsum(counts) - 1]


def idle_apart(
    batch: BatchRef, order: Sequence[Sequence[int]]
) -> tuple[BatchRef, list[list[int]], tuple[int, ...]]:
    """Moves rows whose advantage is 0 into mini-batches of their own, because they count in the metrics but
    not in the gradient. Each of these comes just before the mini-batch that its rows were in.

    Returns the rows that have any part, the order, and the numbers of these mini-batches.
    """
    mini_batch = batch.index.scalars("mini_batch")
    learns = batch.index.scalars("advantages") != 0
    counts = ~learns & (batch.index.scalars("loss_weight") > 0)
    # Behind all others: what learns is then spread over the ranks as if nothing else were there.
    beyond = int(mini_batch.max(initial=-1)) + 1
    idle = set(mini_batch[counts].tolist())
    apart = [
        [x for number in epoch for x in ((number + beyond, number) if number in idle else (number,))]
        for epoch in order
    ]
    batch = batch.with_index({"mini_batch": np.where(learns, mini_batch, mini_batch + beyond)}, replace=True)
    measured = tuple(number + beyond for number in sorted(idle))
    return batch.take(np.flatnonzero(learns | counts)), apart, measured


async def update_actor(
    actor: WorkerGroup,
    batch: BatchRef,
    loss: ActorLoss,
    epochs: int,
    step: Step,
    *,
    pretraining: Pretraining | None = None,
    preparation: PreparationStage | None = None,
    name: str = "policy",
    old_is_current: bool = False,
) -> StepStats:
    """Takes all optimizer steps of the policy on a batch whose mini-batches and loss weights are planned.

    loss: the worker's loss called `name`. epochs: over the mini-batches. pretraining: joins each of them.
    preparation: what is made of a mini-batch's current log-probs before each optimizer step. old_is_current:
    old_log_probs, where the batch has them, are of the policy as it is now.

    Rows that have no part in the gradient, because their advantage is 0, are in the metrics all the same:
    they cost a forward pass, or nothing where their log-probs are known.
    """
    order = mini_batch_orders(batch.index.scalars("mini_batch"), epochs, seed=step.seed, step=step.number)
    learns = np.ones(len(batch), bool)
    if _leaves_out_idle(loss, batch):
        learns = batch.index.scalars("advantages") != 0
    stats = StepStats()
    weighs = _weighs(batch, _WEIGHTS) & learns  # what `mask_truncated` leaves out does not
    stats.add_sum("perf/trained_tokens", float(batch.index.scalars("num_trained_tokens")[weighs].sum()))
    lengths = batch.index.scalars("prompt_length") + batch.index.scalars("response_length")
    count_rows(stats, lengths[learns], epochs)
    if pretraining is not None:
        made_later = () if preparation is None else preparation.writes
        columns = tuple(column for column in update_columns(loss) if column not in made_later)
        batch = await pretraining.join(batch, columns, step.number, step.cluster)
    known = "old_log_probs" if old_is_current and "old_log_probs" in batch.columns else None
    if preparation is None:
        return stats.merge(await _take_steps(actor, batch, order, loss, name, known))
    mini_batch = batch.index.scalars("mini_batch")
    for number in itertools.chain(*order):
        rows = batch.take(np.flatnonzero(mini_batch == number))
        if known is None:
            rows = await actor.call(ActorWorker.compute_current_log_prob, rows)
        rows = await preparation(rows, step)
        stats.merge(await _take_steps(actor, rows, [[number]], loss, name, known or "log_probs"))
        known = None
    return stats


def _leaves_out_idle(loss: ActorLoss, batch: BatchRef) -> bool:
    return loss.zero_where_advantage_is_zero and "advantages" in batch.index.columns


async def _take_steps(
    actor: WorkerGroup,
    batch: BatchRef,
    order: list[list[int]],
    loss: ActorLoss,
    name: str,
    known: str | None,
) -> StepStats:
    """Takes the optimizer steps of `order`. known: the column with the log-probs of the policy as it is."""
    columns, measured = update_columns(loss), tuple[int, ...]()
    if _leaves_out_idle(loss, batch):
        batch, order, measured = idle_apart(batch, order)
        columns = tuple(dict.fromkeys((*columns, *([known] if known else []))))
    order, idle = without_idle(order, batch, "mini_batch", *_WEIGHTS)
    stats = StepStats()
    stats.add_sum(IDLE, float(idle))
    options: dict[str, Any] = {"loss": name, "measured": measured, "known": known}
    return stats.merge(await actor.call(ActorWorker.update_actor, batch, order, reads=columns, **options))


# ---- the language-model term beside the policy loss (algorithm.pretrain_coef) ----


def lm_weights(tokens: np.ndarray, mini_batch: np.ndarray, coef: float) -> np.ndarray:
    """Returns coef / (all of `tokens` in the row's mini-batch), 0 for rows without: the mean over those
    tokens.
    """
    # Without rows the last number is -1, and there are no totals.
    totals = np.bincount(mini_batch, weights=tokens, minlength=int(mini_batch.max(initial=-1)) + 1)
    return np.where(tokens > 0, coef / np.maximum(totals[mini_batch], 1), 0.0)


class Pretraining:
    """data.pretrain_batch_size conversations of data.pretrain join every mini-batch.

    Their rows have loss_weight 0 (no part in the policy loss) and an lm_weight that makes the term
    algorithm.pretrain_coef times their mean negative log-likelihood per token.
    """

    def __init__(self, config: Config) -> None:
        self._coef = config.algorithm.pretrain_coef
        self._size = config.data.pretrain_batch_size
        self._stream = conversations(config, config.data.pretrain, shuffle=config.data.shuffle)
        self._per_step = -(
            -config.data.batch_size // (config.actor.mini_batch_size or config.data.batch_size)
        )

    async def join(self, batch: BatchRef, columns: tuple[str, ...], step: int, cluster: Cluster) -> BatchRef:
        """Returns batch and this step's conversations, which have every one of `columns` (zeros where none
        belongs).

        The conversations of a step are a function of its number, so a resumed run sees the same.
        """
        number = int(batch.index.scalars("mini_batch").max()) + 1
        first = step * self._per_step * self._size
        read = functools.partial(self._stream.batch, range(first, first + number * self._size))
        rows = await asyncio.wrap_future(in_thread(read, "data"))
        mini_batch = np.repeat(np.arange(number), self._size)
        offsets = np.concatenate([[0], np.cumsum(rows.lengths("response_ids"))])
        tokens = [name for name in rows.columns if name not in per_row(rows.columns) or name == IMAGES]
        missing = [name for name in columns if name not in (*batch.index.columns, *tokens)]
        like = await batch.take([0]).fetch(missing)
        per_token = {name: _zeros(like.array(name).type, offsets) for name in missing}
        lengths = ("prompt_length", "response_length", "num_trained_tokens")
        planned = {
            # Negative: no row of an episode has such a number. Less 1, since there is no -0.
            ROW_ID: -1 - rows.scalars(ROW_ID),
            "mini_batch": mini_batch,
            "loss_weight": np.zeros(len(rows)),
            "lm_weight": lm_weights(rows.scalars("num_trained_tokens"), mini_batch, self._coef),
        }
        planned |= {name: rows.scalars(name) for name in lengths}
        repeated = batch.index.take(np.zeros(len(rows), np.int64))  # the same columns, whatever they are
        index = repeated.with_columns(planned, replace=True)
        whole = index.with_columns(rows.select(tokens)).with_columns(per_token)
        return BatchRef.concat([batch, cluster.put(whole, tuple(index.columns))])


def _zeros(kind: pa.ListType, offsets: np.ndarray) -> pa.ListArray:
    """Makes a per-token column of the type `kind`, all 0."""
    value, number = kind.value_type, int(offsets[-1])
    if pa.types.is_fixed_size_list(value):
        dtype = value.value_type.to_pandas_dtype()
        return wide_array(np.zeros((number, value.list_size), dtype), offsets)
    return ragged_array(np.zeros(number, value.to_pandas_dtype()), offsets)
