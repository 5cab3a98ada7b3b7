"""The ways to turn per-token losses into one number, as the weight of each row's tokens.

With x[i,t] the token losses, m the response mask, L_i = Σ_t m[i,t] and B* the rows with L_i > 0, the
aggregate of a mini-batch is Σ_i weight_i Σ_t m[i,t] x[i,t]. The weights need the whole mini-batch, so they
are computed once, by `loss_weights`, and no split of the mini-batch changes the gradient. Rows without
trained tokens do not count (D16) and have weight 0. An agent's trajectory may have several rows: token-…
weighs tokens, seq-… rows, and trajectory-… gives each trajectory the same weight, however many rows it has.
Where each has one row, trajectory-… is seq-…. Numpy only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from rondo.algorithms.arguments import ranked, require
from rondo.algorithms.registry import aggregation, columns_read
from rondo.core.errors import TrainError

# Trained tokens of each row of one mini-batch [B], and its trajectory [B] where the second parameter is
# trajectory_id -> weight of each row's tokens [B].
Aggregate = Callable[..., np.ndarray]


def _num_sequences(num_trained_tokens: np.ndarray) -> int:
    return max(int(np.count_nonzero(num_trained_tokens > 0)), 1)


@aggregation("token-mean")
def token_mean(num_trained_tokens: np.ndarray) -> np.ndarray:
    """Every token counts the same: Σ_i S_i / N (DAPO 2503.14476)."""
    return (num_trained_tokens > 0) / max(num_trained_tokens.sum(), 1)


@aggregation("token-sum")
def token_sum(num_trained_tokens: np.ndarray) -> np.ndarray:
    """Sums all tokens: Σ_i S_i. The gradient grows with the batch."""
    return (num_trained_tokens > 0).astype(np.float64)


@aggregation("seq-mean-token-sum")
def seq_mean_token_sum(num_trained_tokens: np.ndarray) -> np.ndarray:
    """A response is one action: Σ_i S_i / B* (REINFORCE, RLOO 2402.14740)."""
    return (num_trained_tokens > 0) / _num_sequences(num_trained_tokens)


@aggregation("seq-mean-token-mean")
def seq_mean_token_mean(num_trained_tokens: np.ndarray) -> np.ndarray:
    """Takes the mean per response, then over responses: (1/B*) Σ_i S_i / L_i (GRPO 2402.03300, GSPO)."""
    return (num_trained_tokens > 0) / (_num_sequences(num_trained_tokens) * np.maximum(num_trained_tokens, 1))


@aggregation("seq-mean-token-sum-norm")
def seq_mean_token_sum_norm(num_trained_tokens: np.ndarray, *, divisor: float) -> np.ndarray:
    """Has no length bias: (1/B*) Σ_i S_i / divisor (Dr.GRPO 2503.20783).

    divisor: a constant, usually rollout.max_tokens; never the padded width, which would make the loss depend
    on padding. Raises ConfigError unless it is positive.
    """
    require("algorithm.aggregation: seq-mean-token-sum-norm", above=0, divisor=divisor)
    return (num_trained_tokens > 0) / (_num_sequences(num_trained_tokens) * divisor)


@aggregation("chunk-mean-token-mean")
def chunk_mean_token_mean(num_trained_tokens: np.ndarray, *, rows: int) -> np.ndarray:
    """Takes the mean over the tokens of each `rows` rows, in their order, then over these chunks: where
    another program takes the mean in each micro-batch, its numbers. Raises ConfigError unless it is above 0.
    """
    require("algorithm.aggregation: chunk-mean-token-mean", at_least=1, rows=rows)
    chunk = np.arange(len(num_trained_tokens)) // rows
    tokens = np.bincount(chunk, num_trained_tokens)
    return (num_trained_tokens > 0) / (len(tokens) * np.maximum(tokens[chunk], 1))


@aggregation("trajectory-mean-token-mean")
def trajectory_mean_token_mean(num_trained_tokens: np.ndarray, trajectory_id: np.ndarray) -> np.ndarray:
    """Takes the mean over all tokens of a trajectory, then over trajectories: (1/M*) Σ_τ S_τ / L_τ."""
    tokens, number = _trajectories(num_trained_tokens, trajectory_id)
    return (num_trained_tokens > 0) / (number * np.maximum(tokens, 1))


@aggregation("trajectory-mean-token-sum")
def trajectory_mean_token_sum(num_trained_tokens: np.ndarray, trajectory_id: np.ndarray) -> np.ndarray:
    """A trajectory is one action: Σ_τ S_τ / M*."""
    return (num_trained_tokens > 0) / _trajectories(num_trained_tokens, trajectory_id)[1]


@aggregation("trajectory-mean-token-sum-norm")
def trajectory_mean_token_sum_norm(
    num_trained_tokens: np.ndarray, trajectory_id: np.ndarray, *, divisor: float
) -> np.ndarray:
    """Has no length bias: (1/M*) Σ_τ S_τ / divisor. divisor: as of seq-mean-token-sum-norm."""
    require("algorithm.aggregation: trajectory-mean-token-sum-norm", above=0, divisor=divisor)
    number = _trajectories(num_trained_tokens, trajectory_id)[1]
    return (num_trained_tokens > 0) / (number * divisor)


def _trajectories(num_trained_tokens: np.ndarray, trajectory_id: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns the trained tokens of each row's trajectory, and how many trajectories have any."""
    _, number = np.unique(trajectory_id, return_inverse=True)
    tokens = np.bincount(number, num_trained_tokens)
    return tokens[number], max(int(np.count_nonzero(tokens)), 1)


@ranked("rows")
def loss_weights(
    aggregate: Aggregate,
    num_trained_tokens: np.ndarray,
    mini_batch: np.ndarray,
    trajectory_id: np.ndarray | None = None,
) -> np.ndarray:
    """Returns the weight of each row's tokens in the loss, float64 [B]. aggregate: an aggregation mode.
    trajectory_id: [B], any numbers; None: each row is one.

    Σ_rows weight · Σ_tokens mask · token loss over the rows of a mini-batch is the aggregation over that
    mini-batch. num_trained_tokens, mini_batch: [B]. Give it every row of the step, also those whose compute
    may be skipped: rows with zero advantage count, rows without trained tokens do not. Raises TrainError
    where `aggregate` returns anything but a finite weight >= 0 for each row.
    """
    tokens = np.asarray(num_trained_tokens, np.float64)
    trajectories = np.arange(len(tokens)) if trajectory_id is None else trajectory_id
    reads_them = "trajectory_id" in columns_read(aggregate)
    weights = np.zeros(len(tokens))
    for index in np.unique(mini_batch):
        rows = np.flatnonzero(mini_batch == index)
        made = np.asarray(aggregate(tokens[rows], *([trajectories[rows]] if reads_them else [])))
        if made.shape != rows.shape or not (np.isfinite(made) & (made >= 0)).all():
            function = aggregate.func if isinstance(aggregate, functools.partial) else aggregate
            name = getattr(function, "__name__", function)
            raise TrainError(
                f"algorithm.aggregation: {name} must return a finite weight >= 0 for each row of the "
                f"mini-batch, of shape {list(rows.shape)}; it returned "
                f"{np.array2string(made, threshold=8)} of shape {list(made.shape)}"
            )
        weights[rows] = made
    return weights
