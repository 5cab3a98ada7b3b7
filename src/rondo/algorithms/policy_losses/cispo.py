"""Clipped importance weights that keep every token's gradient."""

from __future__ import annotations

from torch import Tensor

from rondo.algorithms.policy_losses.ratio import Metrics, log_ratio, ratio_metrics, share
from rondo.algorithms.registry import policy_loss, require


@policy_loss("cispo", zero_at_zero_advantage=True)
def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float | None = None,
    clip_high: float = 0.2,
) -> tuple[Tensor, Metrics]:
    """-sg[clip(ρ, 1-ε_l, 1+ε_h)]·A·ℓ, [N] (CISPO, MiniMax-M1 2506.13585); gradient -clip(ρ)·A, never zero.

    clip_low: null for no lower bound, as in the paper. The log-ratio is clamped to ±20.
    """
    require(clip_high >= 0, f"algorithm.policy_loss: clip_high must not be negative, got {clip_high}")
    require(
        clip_low is None or clip_low >= 0,
        f"algorithm.policy_loss: clip_low must not be negative, got {clip_low}",
    )
    delta = log_ratio(log_probs, old_log_probs).detach()
    ratio = delta.exp()
    lowest = 0.0 if clip_low is None else 1 - clip_low
    weight = ratio.clamp(lowest, 1 + clip_high)
    metrics = ratio_metrics(delta, response_mask) | {
        "actor/clip_fraction_low": share(ratio < lowest, response_mask),
        "actor/clip_fraction_high": share(ratio > 1 + clip_high, response_mask),
    }
    return -weight * advantages * log_probs, metrics
