"""Divergence PPO: a token is dropped when its probability has moved too far, not when its ratio has."""

from __future__ import annotations

import torch
from torch import Tensor

from rondo.algorithms.policy_losses.ratio import Metrics, clip_range, log_ratio, ratio_metrics, share
from rondo.algorithms.registry import policy_loss, require

LEAST_PROBABILITY = 1e-20


@policy_loss("dppo_tv", zero_at_zero_advantage=True)
def dppo_tv(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    threshold: float = 0.15,
    threshold_low: float | None = None,
    threshold_high: float | None = None,
    cap: float = 1e4,
) -> tuple[Tensor, Metrics]:
    """-A·sg[min(ρ, cap)·keep]·ℓ, [N] (DPPO-Binary-TV, 2602.04879); gradient -A·min(ρ, cap)·keep.

    keep: π - π_old <= threshold_high where A > 0, >= -threshold_low elsewhere; a move against the advantage
    is never dropped. `threshold` sets both sides unless one is given. The paper compares with the policy that
    sampled, which π_old is in bypass mode. cap only guards against overflow (D11: own default; the PPO
    dual-clip constant 3 would change the algorithm); the log-ratio is clamped to ±20. Metrics: clip_fraction
    counts dropped tokens, `_low` those with A < 0, `_high` those with A > 0.
    """
    low, high = clip_range(threshold, threshold_low, threshold_high)
    move = _probability(log_probs) - _probability(old_log_probs)
    keep = torch.where(advantages > 0, move <= high, move >= -low)
    return _surrogate(log_probs, old_log_probs, advantages, response_mask, keep, cap)


@policy_loss("dppo_kl", zero_at_zero_advantage=True)
def dppo_kl(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    threshold: float = 0.05,
    threshold_low: float | None = None,
    threshold_high: float | None = None,
    cap: float = 1e4,
) -> tuple[Tensor, Metrics]:
    """As `dppo_tv` with the KL divergence of the two-way choice "this token or another", [N]
    (DPPO-Binary-KL).

    KL = p_o (ℓ_o - ℓ) + (1-p_o) log((1-p_o)/(1-p)). keep: KL <= threshold (_high where A > 0, else _low), or
    the token moved against its advantage.
    """
    low, high = clip_range(threshold, threshold_low, threshold_high)
    old, new = _probability(old_log_probs), log_probs.detach().clamp(max=0)
    rest_old, rest_new = (
        (-torch.expm1(logs.detach().clamp(max=0))).clamp(min=LEAST_PROBABILITY)
        for logs in (old_log_probs, log_probs)
    )
    divergence = old * (old_log_probs.detach().clamp(max=0) - new) + rest_old * (rest_old / rest_new).log()
    follows = torch.where(advantages > 0, log_probs > old_log_probs, log_probs < old_log_probs)
    keep = ~(follows & torch.where(advantages > 0, divergence > high, divergence > low))
    return _surrogate(log_probs, old_log_probs, advantages, response_mask, keep, cap)


def _probability(log_probs: Tensor) -> Tensor:
    return log_probs.detach().clamp(max=0).exp()


def _surrogate(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, keep: Tensor, cap: float
) -> tuple[Tensor, Metrics]:
    require(cap > 0, f"algorithm.policy_loss: cap must be positive, got {cap}")
    delta = log_ratio(log_probs, old_log_probs).detach()
    weight = delta.exp().clamp(max=cap) * keep
    dropped = ~keep & (advantages != 0)
    metrics = ratio_metrics(delta, mask) | {
        "actor/clip_fraction": share(dropped, mask),
        "actor/clip_fraction_low": share(dropped & (advantages < 0), mask),
        "actor/clip_fraction_high": share(dropped & (advantages > 0), mask),
    }
    return -advantages * weight * log_probs, metrics
