"""The columns that plan an update: which rows make up a mini-batch, and what each row's tokens weigh. Made on
the controller from per-row numbers.

One trainer step's update of a role: the order of its mini-batches, the rows and columns that travel, the
call. For the loop and for hand-written programs alike.

PPO-ptx: conversations learned by language modelling in the same optimizer steps as the policy loss
(InstructGPT, 2203.02155).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from rondo.algorithms.objective import ActorLoss
from rondo.algorithms.registry import bind, columns_read
from rondo.algorithms.resampling import draw
from rondo.batch import ROW_ID, BatchRef, ragged_array
from rondo.columns import wide_array
from rondo.config.schema import Config, FunctionConfig
from rondo.controller import Cluster, WorkerGroup
from rondo.planning.update import loss_weights, mini_batch_order, plan_mini_batches
from rondo.trainers.program.inputs import conversations
from rondo.trainers.program.plan import Learner, Program
from rondo.trainers.program.tensors import numbers
from rondo.types import StepStats, request_seed
from rondo.workers.models import ActorWorker, update_columns


def with_mini_batches(batch: BatchRef, config: Config, program: Program, step: int) -> BatchRef:
    """Which mini-batch each row is in, for every role that learns: by prompt groups, right after take, so
    that shards are fixed for the step.
    """
    sizes = {"mini_batch": config.actor.mini_batch_size}
    sizes |= {f"{x.role}_mini_batch": x.section.mini_batch_size for x in program.learners}
    return batch.with_index({name: mini_batches(batch, size, config, step) for name, size in sizes.items()})


def mini_batches(batch: BatchRef, size: int | None, config: Config, step: int) -> np.ndarray:
    """The mini-batch of each row, `size` prompt groups each (None: the whole batch)."""
    groups, full = batch.index.scalars("group_id"), config.data.batch_size
    return plan_mini_batches(groups, size or full, seed=config.trainer.seed, step=step)


def resampled(batch: BatchRef, config: Config, step: int) -> BatchRef:
    """How often each sample of a prompt counts (column sample_weight), drawn by algorithm.resample from the
    step's seed; rows that were not drawn are gone, before any statistic is taken.
    """
    resample = config.algorithm.resample
    if resample is None:
        return batch
    function = bind("resample", resample)
    probabilities = function(**{name: numbers(batch.index, name) for name in columns_read(function)})
    seed = request_seed(config.trainer.seed, "resample", step)
    counts = draw(probabilities, numbers(batch.index, "group_id"), seed=seed).numpy()
    return batch.with_index({"sample_weight": counts.astype(np.float32)}).take(np.flatnonzero(counts))


def with_learner_weights(batch: BatchRef, learner: Learner, config: Config) -> BatchRef:
    """The weight of each row's tokens in the loss of a role beside the actor."""
    rows = batch.index.scalars(f"{learner.role}_mini_batch")
    weights = _weights(batch, learner.aggregation, rows, _tokens(batch, config))
    return batch.with_index({f"{learner.role}_loss_weight": weights})


def with_actor_weights(batch: BatchRef, config: Config, kl_coef: float) -> BatchRef:
    """The weight of each row's tokens in the actor's loss: computed once, globally, over its mini-batch."""
    algorithm = config.algorithm
    rows = batch.index.scalars("mini_batch")
    tokens = _tokens(batch, config)
    columns = {"loss_weight": _weights(batch, algorithm.aggregation, rows, tokens)}
    if algorithm.kl is not None:
        columns["kl_coef"] = np.full(len(batch), kl_coef, np.float32)  # read where adaptive and in the loss
    if algorithm.positive_lm_coef or algorithm.pretrain_coef:
        right = np.zeros(len(batch), bool)
        if algorithm.positive_lm_coef:
            right = batch.index.scalars("accuracy") > 0
        counts = batch.index.scalars("sample_weight") if "sample_weight" in batch.index.columns else 1
        per_token = lm_weights(tokens * right * counts, rows, algorithm.positive_lm_coef)
        columns["lm_weight"] = per_token * counts
    return batch.with_index(columns)


def lm_weights(tokens: np.ndarray, mini_batch: np.ndarray, coef: float) -> np.ndarray:
    """coef / (all of `tokens` in the row's mini-batch), 0 for rows without: the mean over those tokens."""
    totals = np.bincount(mini_batch, weights=tokens, minlength=int(mini_batch.max(initial=-1)) + 1)
    return np.where(tokens > 0, coef / np.maximum(totals[mini_batch], 1), 0.0)


def orders(batch: BatchRef, column: str, epochs: int, *, seed: int, step: int) -> list[list[int]]:
    """The mini-batches' order in each epoch."""
    number = int(batch.index.scalars(column).max(initial=-1)) + 1
    return [mini_batch_order(number, seed=seed, step=step, epoch=epoch) for epoch in range(epochs)]


def without_idle(
    order: Sequence[Sequence[int]], batch: BatchRef, column: str, *weights: str
) -> tuple[list[list[int]], int]:
    """Without the mini-batches in which no row of `batch` has a weight (all advantages 0, everything rejected
    or truncated), and how many optimizer steps that saves: momentum and weight decay would move a policy that
    nothing was learned about.
    """
    rows = batch.index.scalars(column)
    weighs = np.zeros(len(batch), bool)
    for name in weights:
        weighs |= batch.index.scalars(name) > 0
    busy = set(rows[weighs].tolist())
    kept = [[number for number in epoch if number in busy] for epoch in order]
    return kept, sum(map(len, order)) - sum(map(len, kept))


def _tokens(batch: BatchRef, config: Config) -> np.ndarray:
    """Trained tokens per row; none in a truncated response where those carry no loss."""
    tokens = batch.index.scalars("num_trained_tokens")
    if not config.algorithm.mask_truncated:
        return tokens
    return np.where(batch.index.scalars("finish_reason") == "length", 0, tokens)


def _weights(
    batch: BatchRef, aggregation: FunctionConfig, mini_batch: np.ndarray, tokens: np.ndarray
) -> np.ndarray:
    """As if a row that was drawn k times stood there k times."""
    if "sample_weight" not in batch.index.columns:
        return loss_weights(aggregation, tokens, mini_batch)
    counts = batch.index.scalars("sample_weight").astype(np.int64)
    rows = np.repeat(np.arange(len(batch)), counts)
    return counts * loss_weights(aggregation, tokens[rows], mini_batch[rows])[np.cumsum(counts) - 1]


async def update_actor(
    actor: WorkerGroup,
    batch: BatchRef,
    loss: ActorLoss,
    config: Config,
    step: int,
    cluster: Cluster,
    pretraining: Pretraining | None,
    name: str = "policy",
) -> StepStats:
    """All optimizer steps of the policy on a batch whose mini-batches and loss weights are planned. loss: the
    worker's loss called `name`. pretraining: joins every mini-batch.
    """
    order = orders(batch, "mini_batch", config.actor.epochs, seed=config.trainer.seed, step=step)
    if loss.zero_where_advantage_is_zero and "advantages" in batch.index.columns:
        batch = batch.take(np.flatnonzero(batch.index.scalars("advantages") != 0))
    stats = StepStats()
    stats.add_sum("perf/trained_tokens", float(batch.index.scalars("num_trained_tokens").sum()))
    columns = update_columns(loss)
    if pretraining is not None:
        batch = await pretraining.join(batch, columns, step, cluster)
    weights = [column for column in ("loss_weight", "lm_weight") if column in batch.index.columns]
    order, idle = without_idle(order, batch, "mini_batch", *weights)
    stats.add_sum("actor/idle_mini_batches", float(idle))
    return stats.merge(await actor.call(ActorWorker.update_actor, batch, order, loss=name, reads=columns))


async def update_learner(
    group: WorkerGroup, learner: Learner, batch: BatchRef, config: Config, step: int
) -> StepStats:
    """All optimizer steps of a role beside the actor; plans its loss weights, too."""
    batch = with_learner_weights(batch, learner, config)
    column, epochs = f"{learner.role}_mini_batch", learner.section.epochs
    order = orders(batch, column, epochs, seed=config.trainer.seed, step=step)
    order, _ = without_idle(order, batch, column, f"{learner.role}_loss_weight")
    stats: StepStats = await group.call(learner.method, batch, order, reads=learner.columns)
    return stats


TOKENS = ("prompt_ids", "response_ids", "response_mask")


class Pretraining:
    """data.pretrain_batch_size conversations of data.pretrain join every mini-batch.

    Their rows have loss_weight 0 (no part in the policy loss) and an lm_weight that makes the term
    algorithm.pretrain_coef times their mean negative log-likelihood per token.
    """

    def __init__(self, config: Config) -> None:
        self._coef, self._size = config.algorithm.pretrain_coef, config.data.pretrain_batch_size
        self._stream = conversations(config, config.data.pretrain, shuffle=config.data.shuffle)
        self._per_step = -(
            -config.data.batch_size // (config.actor.mini_batch_size or config.data.batch_size)
        )

    async def join(self, batch: BatchRef, columns: tuple[str, ...], step: int, cluster: Cluster) -> BatchRef:
        """batch and this step's conversations, which have every one of `columns` (zeros where none belongs).

        The conversations of a step are a function of its number, so a resumed run sees the same.
        """
        number = int(batch.index.scalars("mini_batch").max()) + 1
        first = step * self._per_step * self._size
        rows = self._stream.batch(range(first, first + number * self._size))
        mini_batch = np.repeat(np.arange(number), self._size)
        offsets = np.concatenate([[0], np.cumsum(rows.lengths("response_ids"))])
        missing = [name for name in columns if name not in (*batch.index.columns, *TOKENS)]
        like = await batch.take([0]).fetch(missing)
        per_token = {name: _zeros(like.array(name).type, offsets) for name in missing}
        lengths = ("prompt_length", "response_length", "num_trained_tokens")
        planned = {
            ROW_ID: -1 - rows.scalars(ROW_ID),
            "mini_batch": mini_batch,
            "loss_weight": np.zeros(len(rows)),
            "lm_weight": lm_weights(rows.scalars("num_trained_tokens"), mini_batch, self._coef),
        }
        planned |= {name: rows.scalars(name) for name in lengths}
        repeated = batch.index.take(np.zeros(len(rows), np.int64))  # the same columns, whatever they are
        index = repeated.with_columns(planned, replace=True)
        whole = index.with_columns(rows.select(TOKENS)).with_columns(per_token)
        return BatchRef.concat([batch, cluster.put(whole, tuple(index.columns))])


def _zeros(kind: pa.ListType, offsets: np.ndarray) -> pa.ListArray:
    """A per-token column of the type `kind`, all 0."""
    value, number = kind.value_type, int(offsets[-1])
    if pa.types.is_fixed_size_list(value):
        dtype = value.value_type.to_pandas_dtype()
        return wide_array(np.zeros((number, value.list_size), dtype), offsets)
    return ragged_array(np.zeros(number, value.to_pandas_dtype()), offsets)
