"""The clipped surrogate of PPO."""

from __future__ import annotations

import torch
from torch import Tensor

from rondo.algorithms.policy_losses.ratio import Metrics, clip_range, log_ratio, ratio_metrics, share
from rondo.algorithms.registry import policy_loss, require


@policy_loss("ppo_clip", zero_at_zero_advantage=True)
def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip: float = 0.2,
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = 3.0,
) -> tuple[Tensor, Metrics]:
    """max(-Aρ, -A·clip(ρ, 1-ε_l, 1+ε_h)), all [N] (PPO 1707.06347 eq. 7; clip-higher: DAPO 2503.14476, .2 and
    .28).

    ρ = π/π_old with the log-ratio clamped to ±20. dual_clip: for A < 0 the loss is at most -A·dual_clip
    (1912.09729, c = 3; null: off). Clip fractions count tokens whose clipped branch is strictly larger:
    `clip_fraction` all of them, `_low` those with A < 0 (ρ < 1-ε_l), `_high` those with A > 0 (ρ > 1+ε_h),
    `_dual` those that the dual clip cut.
    """
    low, high = clip_range(clip, clip_low, clip_high)
    require(
        dual_clip is None or dual_clip > 1,
        f"algorithm.policy_loss: dual_clip must be above 1, got {dual_clip}",
    )
    delta = log_ratio(log_probs, old_log_probs)
    ratio = delta.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(unclipped, clipped)
    is_clipped = clipped > unclipped
    metrics = ratio_metrics(delta, response_mask) | {
        "actor/clip_fraction": share(is_clipped, response_mask),
        "actor/clip_fraction_low": share(is_clipped & (advantages < 0), response_mask),
        "actor/clip_fraction_high": share(is_clipped & (advantages > 0), response_mask),
    }
    if dual_clip is not None:
        bound = -advantages * dual_clip
        is_cut = (advantages < 0) & (bound < loss)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
        metrics["actor/clip_fraction_dual"] = share(is_cut, response_mask)
    return loss, metrics
