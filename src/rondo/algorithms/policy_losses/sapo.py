"""Soft adaptive policy optimisation: a smooth gate where PPO clips."""

from __future__ import annotations

import torch
from torch import Tensor

from rondo.algorithms.policy_losses.ratio import Metrics, log_ratio, ratio_metrics
from rondo.algorithms.registry import policy_loss, require


@policy_loss("sapo", zero_at_zero_advantage=True)
def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[Tensor, Metrics]:
    """-A·(4/τ)·σ(τ(ρ-1)), [N], τ by the sign of A (SAPO, 2511.20347); gradient -A·4σ(1-σ)·ρ, at ρ = 1 that of
    PPO.

    The paper averages per response: aggregation seq-mean-token-mean (not forced, D13). The log-ratio is
    clamped to ±20.
    """
    require(
        tau_positive > 0 and tau_negative > 0, "algorithm.policy_loss: sapo's temperatures must be positive"
    )
    delta = log_ratio(log_probs, old_log_probs)
    tau = torch.where(advantages > 0, delta.new_full((), tau_positive), delta.new_full((), tau_negative))
    gate = torch.sigmoid(tau * (delta.exp() - 1))
    return -advantages * (4 / tau) * gate, ratio_metrics(delta, response_mask)
