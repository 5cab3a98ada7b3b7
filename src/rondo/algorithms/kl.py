"""KL(policy || reference): per-token estimators, the penalty in the reward, and the adaptive coefficient.

With d = ℓ - ℓ_ref and q = exp(-d) on tokens sampled from the policy. Value and gradient are different
questions: as a *loss*, only k2 and the straight-through forms follow ∇KL(policy || reference); k1's expected
gradient is 0, and k3's is that of the *forward* KL(reference || policy). (docs/algorithms.md has the table.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rondo.algorithms.arguments import ranked
from rondo.algorithms.registry import columns_read, kl_estimator, lookup
from rondo.algorithms.statistics import masked_mean
from rondo.core.errors import DataError, TrainError
from rondo.core.types import StepStats

EXPONENT_LIMIT = 20.0  # of a log-ratio before exp: e^20 is far beyond any use, and finite when squared
K3_LIMIT = 10.0  # of one token's estimate: a single token must not make the gradient of a whole batch


@kl_estimator("k1")
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """d: unbiased, may be negative, with gradient 1; right in the reward, useless in the loss."""
    return log_probs - ref_log_probs


@kl_estimator("abs")
def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """|d|: the gradient, sign d, is that of no divergence."""
    return (log_probs - ref_log_probs).abs()


@kl_estimator("k2")
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """d²/2: the gradient is d, in expectation ∇KL(policy || reference)."""
    return (log_probs - ref_log_probs).square() / 2


@kl_estimator("k3")
def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """q - 1 + d >= 0: unbiased, low variance; gradient 1 - q, in expectation ∇KL(reference || policy), the
    forward KL.

    d is clamped to ±20 before the exponential and the result to 10, beyond which the gradient is 0.
    (Schulman, joschu.net/blog/kl-approx; used in the loss by GRPO 2402.03300.)
    """
    d = (log_probs - ref_log_probs).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
    return (torch.expm1(-d) + d).clamp(max=K3_LIMIT)


def _straight_through(value: Tensor, carrier: Tensor) -> Tensor:
    return carrier - carrier.detach() + value.detach()


@kl_estimator("k1+")
def k1_plus(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Has the value of k1 and the gradient of k2."""
    return _straight_through(k1(log_probs, ref_log_probs), k2(log_probs, ref_log_probs))


@kl_estimator("k3+")
def k3_plus(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Has the value of k3 and the gradient of k2."""
    return _straight_through(k3(log_probs, ref_log_probs), k2(log_probs, ref_log_probs))


@kl_estimator("k3-unbiased")
def k3_unbiased(log_probs: Tensor, ref_log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """ρ·(q - 1 + d) with the ratio ρ = π/π_old differentiated too (DeepSeek-V3.2, 2512.02556).

    The gradient is ρ·d, in expectation over π_old exactly ∇KL(policy || reference), also off-policy. It is
    attached to the value (straight-through), so that no bound cuts it: log ρ is clamped to ±20 in both, d to
    ±20 in the value only.
    """
    d = (log_probs - ref_log_probs).detach()
    ratio = (log_probs - old_log_probs).detach().clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()
    bounded = d.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
    return _straight_through(ratio * (torch.expm1(-bounded) + bounded), ratio * d * log_probs)


def of_each_token(made: Any, name: str, mask: Tensor) -> Tensor:
    """Returns what the estimator `name` made. Raises TrainError unless it is a number for each token, as
    `mask` is: one number for all would go to each token as its own.
    """
    if isinstance(made, Tensor) and made.shape == mask.shape:
        return made
    shape = f"shape {list(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
    raise TrainError(
        f"algorithm.kl: {name} must return a tensor with a number for each token, of shape "
        f"{list(mask.shape)}; it returned {shape}"
    )


@ranked("rows")
def kl_reward(
    reward: Tensor,
    response_mask: Tensor,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    *,
    estimator: str | None = None,
    coef: float = 0.0,
) -> tuple[Tensor, StepStats]:
    """Makes token rewards [B, T]: the outcome on the last trained token, minus coef · k(ℓ_old, ℓ_ref) on
    every trained one.

    reward: [B]. response_mask, old_log_probs, ref_log_probs: [B, T]. estimator: a KL estimator's name, or
    None for no penalty (then the log-probs may be None). A row without trained tokens gets zeros. Also
    returns the metric `actor/kl_reward`, the mean over rows of the masked mean KL (rows without tokens count
    as 0), which is what the adaptive coefficient is steered by.
    """
    counted = response_mask > 0
    position = torch.arange(counted.shape[1], device=counted.device).expand_as(counted)
    last = torch.where(counted, position, -1).amax(1, keepdim=True) if counted.shape[1] else position
    rewards = torch.where(counted & (position == last), reward.unsqueeze(1), 0.0)
    stats = StepStats()
    if estimator is None:
        return rewards, stats
    if old_log_probs is None or ref_log_probs is None:
        raise DataError("a KL in the reward needs the columns old_log_probs and ref_log_probs")
    function = lookup("kl", estimator)
    given = {"log_probs": old_log_probs, "ref_log_probs": ref_log_probs, "old_log_probs": old_log_probs}
    clean = {name: torch.where(counted, given[name], 0.0) for name in columns_read(function)}
    penalty = torch.where(counted, of_each_token(function(**clean), estimator, counted), 0.0)
    if not penalty.isfinite().all():
        raise TrainError(f"algorithm.kl: {estimator} made a number that is not finite of a token's log-probs")
    stats.add_mean("actor/kl_reward", float(masked_mean(penalty, response_mask).sum()), len(reward))
    return rewards - coef * penalty, stats


def update_kl_coef(coef: float, measured: float, target: float, horizon: float, num_responses: int) -> float:
    """Returns the next coefficient of the adaptive controller (Ziegler et al. 1909.08593), after a step with
    `coef`.

    e = clip(measured/target - 1, ±0.2); coef · (1 + e · min(num_responses/horizon, 1)): the paper has no
    minimum, but with more than 5 horizons of responses in a step the coefficient would turn negative.
    measured: this step's mean KL: the mean over rows of their token means where it is in the reward
    (actor/kl_reward); where it is in the loss the mean over tokens (actor/kl_loss), which is what the loss
    averages (exactly so with aggregation token-mean).
    """
    error = min(max(measured / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * min(num_responses / horizon, 1.0))
