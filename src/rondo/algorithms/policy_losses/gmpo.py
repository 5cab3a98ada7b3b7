"""Geometric-mean policy optimisation: the geometric mean of clipped token ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from rondo.algorithms.policy_losses.ratio import LOG_RATIO_LIMIT, Metrics, clip_range, ratio_metrics, share
from rondo.algorithms.registry import policy_loss
from rondo.algorithms.statistics import row_index, row_means


@policy_loss("gmpo", zero_at_zero_advantage=True)
def gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    clip: float = 0.4,
    clip_low: float | None = None,
    clip_high: float | None = None,
) -> tuple[Tensor, Metrics]:
    """-Ā_i exp(Σ_t m u_t / L_i) on every token of response i, [N] (GMPO, 2507.20673).

    u = sgn(A)·min(sgn(A)·δ, sgn(A)·clip(δ, -ε_l, ε_h)); the clip range is that of the *log*-ratio (paper:
    0.4, ratios e^±0.4). Ā_i is the response's mean advantage. Aggregation seq-mean-token-mean gives the
    paper's mean over responses, over the whole mini-batch (D8). The exponent is clamped to ±20.
    """
    low, high = clip_range(clip, clip_low, clip_high)
    rows, num_rows = row_index(cu_seqlens, len(log_probs)), len(cu_seqlens) - 1
    delta = log_probs - old_log_probs
    sign = advantages.sign()
    bounded = delta.clamp(-low, high)
    chosen = sign * torch.minimum(sign * delta, sign * bounded)
    exponent = row_means(chosen, response_mask, rows, num_rows).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    advantage = row_means(advantages, response_mask, rows, num_rows)
    is_clipped = sign * bounded < sign * delta
    metrics = ratio_metrics(delta.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), response_mask) | {
        "actor/clip_fraction": share(is_clipped, response_mask),
        "actor/clip_fraction_low": share(is_clipped & (advantages < 0), response_mask),
        "actor/clip_fraction_high": share(is_clipped & (advantages > 0), response_mask),
    }
    return (-advantage * exponent.exp())[rows], metrics
