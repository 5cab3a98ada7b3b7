"""The columns that plan an update: which rows make up a mini-batch, and what each row's tokens weigh. Made on
the controller from per-row numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rondo.algorithms.registry import bind, columns_read
from rondo.algorithms.resampling import draw
from rondo.batch import BatchRef
from rondo.config.schema import Config, FunctionConfig
from rondo.planning.update import loss_weights, mini_batch_order, plan_mini_batches
from rondo.trainers.columns import numbers
from rondo.trainers.setup import Learner, Program
from rondo.types import request_seed


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
