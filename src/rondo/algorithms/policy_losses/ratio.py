"""What the losses on a probability ratio share: the clamped ratio, the clip range and the metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from rondo.algorithms.registry import require

LOG_RATIO_LIMIT = 20.0
Metrics = dict[str, tuple[Tensor, Tensor] | Tensor]


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """δ = ℓ - ℓ_old, clamped to ±20 (no inf; beyond it the gradient is 0): [N]."""
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def clip_range(clip: float, clip_low: float | None, clip_high: float | None) -> tuple[float, float]:
    """(ε_l, ε_h): `clip` sets both unless one is given (D10). Raises ConfigError for a negative one."""
    low = clip if clip_low is None else clip_low
    high = clip if clip_high is None else clip_high
    require(
        low >= 0 and high >= 0,
        f"algorithm.policy_loss: clip ranges and thresholds must not be negative, got {low} and {high}",
    )
    return low, high


def share(condition: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The share of trained tokens for which `condition` holds, as (numerator, denominator)."""
    return (condition * mask).sum(), mask.sum()


def ratio_metrics(delta: Tensor, mask: Tensor) -> Metrics:
    """actor/ppo_kl (masked mean of -δ) and actor/ratio (its mean and maximum) from log-ratios [N]."""
    delta = delta.detach()
    ratio = delta.exp() * mask
    return {
        "actor/ppo_kl": ((-delta * mask).sum(), mask.sum()),
        "actor/ratio": (ratio.sum(), mask.sum()),
        "actor/ratio_max": torch.cat([ratio.new_zeros(1), ratio]).amax(),
    }
