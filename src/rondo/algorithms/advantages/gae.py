"""Estimators with a critic: generalized advantage estimation (1506.02438), also decoupled and length-adaptive
(VAPO, 2504.05118), and under a constraint on a cost, whose multiplier is here, too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rondo.algorithms import statistics
from rondo.algorithms.arguments import ranked, require
from rondo.algorithms.registry import advantage
from rondo.core.errors import ConfigError


@ranked("rows")
def gae_of_rows(
    token_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    lam_critic: float | None = None,
    length_alpha: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes what `gae` whitens: advantages in float64."""
    if length_alpha is not None and lam != 1.0:
        raise ConfigError("algorithm.advantage: gae takes lam or length_alpha, not both")
    require("algorithm.advantage: gae", above=0, length_alpha=length_alpha)
    require("algorithm.advantage: gae", at_least=0, at_most=1, gamma=gamma, lam=lam, lam_critic=lam_critic)
    counted = response_mask > 0
    rewards = torch.where(counted, token_rewards, 0.0).to(torch.float64)
    before = torch.where(counted, values, 0.0).to(torch.float64)
    policy_lam = rewards.new_full((len(rewards),), lam)
    if length_alpha is not None:
        lengths = counted.sum(1).clamp(min=1).to(torch.float64)
        policy_lam = (1.0 - 1.0 / (length_alpha * lengths)).clamp(min=0.0)
    advantages = accumulate(rewards, before, counted, gamma, policy_lam)
    targets = advantages
    if lam_critic is not None:
        targets = accumulate(rewards, before, counted, gamma, torch.full_like(policy_lam, lam_critic))
    returns = torch.where(counted, targets + before, 0.0)
    return advantages, returns.to(values.dtype)


@advantage("gae", by_row=gae_of_rows)
def gae(
    token_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    lam_critic: float | None = None,
    length_alpha: float | None = None,
    whiten: bool = True,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, T] from token rewards and values [B, T] of the states *before* each token.

    Δ_t = r_t + γ V_next - v_t,  Â_t = Δ_t + γ λ Â_next,  G_t = Â_t + v_t, where `next` is the next *trained*
    token: the state passes through holes of the mask untouched, and the end of a response is terminal.
    whiten: normalise advantages over all trained tokens of the batch, after the returns were formed from the
    raw ones; a token counts `response_mask` times (0, 1, or how often a resampled row counts). lam_critic:
    another λ for the returns (decoupled GAE; VAPO uses 1). length_alpha: λ = 1 - 1/(alpha · L) per row
    instead of `lam`, not below 0 (VAPO: 0.05). Both outputs are 0 where the mask is 0.
    """
    advantages, returns = gae_of_rows(
        token_rewards,
        values,
        response_mask,
        gamma=gamma,
        lam=lam,
        lam_critic=lam_critic,
        length_alpha=length_alpha,
    )
    if whiten:
        advantages = statistics.whiten(advantages, response_mask)
    return advantages.to(values.dtype), returns


def accumulate(
    rewards: Tensor,
    values: Tensor,
    counted: Tensor,
    gamma: float,
    lam: Tensor,
    ends: Tensor | None = None,
) -> Tensor:
    """Accumulates Â [B, T] backwards over trained tokens; it is 0 where the mask is 0. lam: [B]. ends: tokens
    behind which nothing follows, beside the last.
    """
    assert rewards.shape == values.shape == counted.shape
    assert lam.shape == rewards.shape[:1]
    decay = gamma * lam
    next_value = rewards.new_zeros(len(rewards))
    next_advantage = rewards.new_zeros(len(rewards))
    out = torch.zeros_like(rewards.t())  # position first: a step reads and writes contiguous memory
    goes_on = torch.ones_like(rewards) if ends is None else (~ends).to(rewards.dtype)
    columns = (column.t().contiguous() for column in (rewards, values, counted, goes_on))
    for reward, value, here, on, row in reversed(list(zip(*columns, out, strict=True))):
        next_value, next_advantage = on * next_value, on * next_advantage
        delta = reward + gamma * next_value - value
        next_advantage = torch.where(here, delta + decay * next_advantage, next_advantage)
        next_value = torch.where(here, value, next_value)
        row.copy_(next_advantage)
    return torch.where(counted, out.t(), 0.0)


@ranked("rows")
def safe_rlhf_of_rows(
    token_rewards: Tensor,
    values: Tensor,
    token_costs: Tensor,
    cost_values: Tensor,
    response_mask: Tensor,
    multiplier: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> dict[str, Tensor]:
    """Computes what `safe_rlhf` whitens: advantages in float64."""
    both = [
        gae_of_rows(given, estimate.to(torch.float64), response_mask, gamma=gamma, lam=lam)
        for given, estimate in ((token_rewards, values), (token_costs, cost_values))
    ]
    (reward_advantages, returns), (cost_advantages, cost_returns) = both
    scale = multiplier.to(torch.float64)
    advantages = reward_advantages / (1.0 + scale) - cost_advantages * (scale / (1.0 + scale))
    targets = {"returns": returns.to(values.dtype), "cost_returns": cost_returns.to(values.dtype)}
    return {"advantages": advantages, **targets}


@advantage("safe_rlhf", by_row=safe_rlhf_of_rows)
def safe_rlhf(
    token_rewards: Tensor,
    values: Tensor,
    token_costs: Tensor,
    cost_values: Tensor,
    response_mask: Tensor,
    multiplier: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = False,
) -> dict[str, Tensor]:
    """(A_r - λ A_c) / (1 + λ) from two GAEs, and the targets of both critics (Safe-RLHF, 2310.12773).

    token_rewards, token_costs, values and cost_values (before each token), response_mask: [B, T]; multiplier:
    0-dim, λ >= 0. Returns advantages, returns, cost_returns: [B, T], 0 where the mask is 0. See `gae` for
    gamma and lam. whiten: normalise the *sum* over the batch's tokens; the paper does not, hence the default,
    and normalising A_r and A_c each by its own spread would change the trade that λ stands for.
    """
    columns = token_rewards, values, token_costs, cost_values, response_mask, multiplier
    out = safe_rlhf_of_rows(*columns, gamma=gamma, lam=lam)
    if whiten:
        out["advantages"] = statistics.whiten(out["advantages"], response_mask)
    return out | {"advantages": out["advantages"].to(values.dtype)}


# ---- the multiplier of a constraint on the cost ----


_LARGEST_LOG = 10.0  # λ stays in [e^-10, e^10]: beyond that the advantages are cost, or reward, alone
_LARGEST_STEP = 1.0  # of ln λ: the step grows with λ itself, and would else leap from one bound to the other


def update_multiplier(multiplier: float, average_cost: float, limit: float, lr: float) -> float:
    """Returns the next λ: ln λ += lr · λ · J_C, J_C = average_cost - limit, up while it is violated.

    average_cost: a moving average of the steps' mean costs, finite. The step of ln λ is held in ±1 and ln λ
    in ±10 (the paper bounds neither), so that λ neither overflows nor vanishes.
    """
    assert math.isfinite(average_cost), f"average cost {average_cost}"
    log = math.log(max(multiplier, math.exp(-_LARGEST_LOG)))
    step = lr * multiplier * (average_cost - limit)
    log += max(-_LARGEST_STEP, min(_LARGEST_STEP, step))
    return math.exp(max(-_LARGEST_LOG, min(_LARGEST_LOG, log)))


def smooth_cost(average: float | None, step_mean: float, smoothing: float) -> float:
    """Returns the moving average after a step, smoothing · average + (1 - smoothing) · step_mean; at first
    (None) the step's mean.
    """
    return step_mean if average is None else smoothing * average + (1.0 - smoothing) * step_mean
