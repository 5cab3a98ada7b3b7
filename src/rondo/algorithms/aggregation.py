"""The five ways to turn per-token losses into one number, as the weight of each row's tokens.

With x[i,t] the token losses, m the response mask, L_i = Σ_t m[i,t] and B* the rows with L_i > 0, the
aggregate of a mini-batch is Σ_i weight_i Σ_t m[i,t] x[i,t]. The weights need the whole mini-batch, so they
are computed once, by `planning.mini_batches.loss_weights`, and no split of the mini-batch changes the
gradient. Rows without trained tokens do not count (D16) and have weight 0. Numpy only.
"""

from __future__ import annotations

import numpy as np

from rondo.algorithms.registry import aggregation, require


def _per_row(value: float | np.ndarray, num_trained_tokens: np.ndarray) -> np.ndarray:
    return np.where(num_trained_tokens > 0, value, 0.0)


def _num_sequences(num_trained_tokens: np.ndarray) -> int:
    return max(int(np.count_nonzero(num_trained_tokens > 0)), 1)


@aggregation("token-mean")
def token_mean(num_trained_tokens: np.ndarray) -> np.ndarray:
    """Every token counts the same: Σ_i S_i / N (DAPO 2503.14476)."""
    return _per_row(1.0 / max(num_trained_tokens.sum(), 1), num_trained_tokens)


@aggregation("token-sum")
def token_sum(num_trained_tokens: np.ndarray) -> np.ndarray:
    """Plain sum: Σ_i S_i. The gradient grows with the batch."""
    return _per_row(1.0, num_trained_tokens)


@aggregation("seq-mean-token-sum")
def seq_mean_token_sum(num_trained_tokens: np.ndarray) -> np.ndarray:
    """A response is one action: Σ_i S_i / B* (REINFORCE, RLOO 2402.14740)."""
    return _per_row(1.0 / _num_sequences(num_trained_tokens), num_trained_tokens)


@aggregation("seq-mean-token-mean")
def seq_mean_token_mean(num_trained_tokens: np.ndarray) -> np.ndarray:
    """Mean per response, then over responses: (1/B*) Σ_i S_i / L_i (GRPO 2402.03300, GSPO)."""
    per_token = 1.0 / (_num_sequences(num_trained_tokens) * np.maximum(num_trained_tokens, 1))
    return _per_row(per_token, num_trained_tokens)


@aggregation("seq-mean-token-sum-norm")
def seq_mean_token_sum_norm(num_trained_tokens: np.ndarray, *, divisor: float) -> np.ndarray:
    """No length bias: (1/B*) Σ_i S_i / divisor (Dr.GRPO 2503.20783).

    divisor: a constant, usually rollout.max_tokens; never the padded width, which would make the loss depend
    on padding. Raises ConfigError unless it is positive.
    """
    require(divisor > 0, f"algorithm.aggregation: divisor must be positive, got {divisor}")
    return _per_row(1.0 / (_num_sequences(num_trained_tokens) * divisor), num_trained_tokens)
