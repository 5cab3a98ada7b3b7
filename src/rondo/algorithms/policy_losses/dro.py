"""A policy gradient with a quadratic pull towards the old policy."""

from __future__ import annotations

from torch import Tensor

from rondo.algorithms.policy_losses.ratio import Metrics, log_ratio, ratio_metrics
from rondo.algorithms.registry import policy_loss, require


@policy_loss("dro")
def dro(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    beta: float = 0.1,
) -> tuple[Tensor, Metrics]:
    """-(A·ℓ - (β/2)·δ²), [N]; gradient -(A - β δ), also where A is 0.

    This is the form that verl calls `dro`, per token and on the policy's own samples. The paper (2405.19107)
    is offline and regresses whole responses: ½(r - V(x) - β log(π/π_ref))² with a learned V; neither it nor
    verl has a default β for this form. δ is not clamped: far from π_old the pull must not vanish.
    """
    require(beta >= 0, f"algorithm.policy_loss: dro's beta must not be negative, got {beta}")
    delta = log_probs - old_log_probs
    metrics = ratio_metrics(log_ratio(log_probs, old_log_probs), response_mask)
    return -(advantages * log_probs - beta / 2 * delta.square()), metrics
