"""What the losses on a probability ratio share: the clamped ratio, the clip range and the metrics.

Columns are flat here, [N]: one entry per response token of a micro-batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rondo.algorithms.arguments import ranked, require
from rondo.algorithms.statistics import Metrics, share

# Of a token's log-ratio, and of a response's: e^20 is far beyond any clip range, and finite when squared.
LOG_RATIO_LIMIT = 20.0


@ranked("flat")
def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Returns δ = ℓ - ℓ_old, clamped to ±20 (no inf; beyond it the gradient is 0): [N]."""
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def clip_range(clip: float, clip_low: float | None, clip_high: float | None) -> tuple[float, float]:
    """Returns (ε_l, ε_h): `clip` sets both unless one is given (D10). Raises ConfigError where one is < 0."""
    low = clip if clip_low is None else clip_low
    high = clip if clip_high is None else clip_high
    require("algorithm.policy_loss: the clip range or threshold", at_least=0, low=low, high=high)
    return low, high


@ranked("flat", delta="token", is_clipped="token", mask="token")
def clip_metrics(delta: Tensor, is_clipped: Tensor, advantages: Tensor, mask: Tensor) -> Metrics:
    """Adds to `ratio_metrics` the shares of trained tokens that a loss clipped: all of them
    (actor/clip_fraction), those with A < 0 (…_low), those with A > 0 (…_high). All [N].
    """
    return ratio_metrics(delta, mask) | {
        "actor/clip_fraction": share(is_clipped, mask),
        "actor/clip_fraction_low": share(is_clipped & (advantages < 0), mask),
        "actor/clip_fraction_high": share(is_clipped & (advantages > 0), mask),
    }


@ranked("flat", delta="token", mask="token")
def ratio_metrics(delta: Tensor, mask: Tensor) -> Metrics:
    """Makes actor/ppo_kl (masked mean of -δ) and actor/ratio (mean and maximum) of log-ratios [N]."""
    delta = delta.detach()
    ratio = delta.exp() * mask
    return {
        "actor/ppo_kl": ((-delta * mask).sum(), mask.sum()),
        "actor/ratio": (ratio.sum(), mask.sum()),
        "actor/ratio_max": torch.cat([ratio.new_zeros(1), ratio]).amax(),
    }


@ranked("flat", mask="token")
def usual_metrics(
    log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, bounds: tuple[float | None, float | None]
) -> Metrics:
    """Makes what a loss on the ratio ρ = π/π_old reports that does not do so itself, of log-probs [N]:
    `ratio_metrics`, and with bounds (ε_l, ε_h), of which one may be None, the shares of trained tokens with
    ρ < 1-ε_l or ρ > 1+ε_h: actor/clip_fraction, …_low, …_high.
    """
    delta = log_ratio(log_probs, old_log_probs).detach()
    metrics, ratio = ratio_metrics(delta, mask), delta.exp()
    if bounds != (None, None):
        low, high = bounds
        below = ratio < (0.0 if low is None else 1 - low)
        above = ratio > (math.inf if high is None else 1 + high)
        metrics |= {
            "actor/clip_fraction": share(below | above, mask),
            "actor/clip_fraction_low": share(below, mask),
            "actor/clip_fraction_high": share(above, mask),
        }
    return metrics
