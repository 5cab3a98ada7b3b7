"""Estimators from returns-to-go, without a critic: whitened (REINFORCE++), minus a greedy answer's reward
(ReMax), or minus the baseline per token that minimises the variance of the gradient (OTB).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rondo.algorithms.arguments import ranked, require
from rondo.algorithms.policy_losses.ratio import LOG_RATIO_LIMIT
from rondo.algorithms.registry import advantage
from rondo.algorithms.statistics import Groups, whiten

# Of a token that was certain, in OTB: a policy that is certain everywhere gets the plain mean.
_SMALLEST_WEIGHT = 1e-8


@ranked("rows")
def returns_to_go(token_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0) -> Tensor:
    """G_t = r_t + γ G_next over trained tokens, [B, T] float64; passes through holes of the mask, where it is
    0.
    """
    counted = response_mask > 0
    rewards = torch.where(counted, token_rewards, 0.0).to(torch.float64)
    out = torch.zeros_like(rewards)
    following = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        following = torch.where(counted[:, t], rewards[:, t] + gamma * following, following)
        out[:, t] = torch.where(counted[:, t], following, 0.0)
    return out


@ranked("rows")
def reinforce_pp_of_rows(token_rewards: Tensor, response_mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Computes what `reinforce_pp` whitens."""
    require("algorithm.advantage: reinforce_pp", at_least=0, at_most=1, gamma=gamma)
    return returns_to_go(token_rewards, response_mask, gamma)


@advantage("reinforce_pp", by_row=reinforce_pp_of_rows)
def reinforce_pp(token_rewards: Tensor, response_mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """whiten(returns-to-go) over all trained tokens of the batch, [B, T] (REINFORCE++, 2501.03262).

    One response per prompt is enough. The paper has a k1 penalty in the reward (algorithm.kl.where=reward).
    """
    returns = reinforce_pp_of_rows(token_rewards, response_mask, gamma=gamma)
    return whiten(returns, response_mask).to(token_rewards.dtype)


@advantage("remax", by_row=True)
def remax(token_rewards: Tensor, response_mask: Tensor, greedy_reward: Tensor) -> Tensor:
    """Returns-to-go minus the reward of the greedy response to the same prompt, [B, T] (ReMax, 2310.10505).

    greedy_reward: [B], the greedy response's outcome without KL. 0 where the mask is 0 (D20).
    """
    difference = returns_to_go(token_rewards, response_mask) - greedy_reward.to(torch.float64).unsqueeze(1)
    return torch.where(response_mask > 0, difference, 0.0).to(token_rewards.dtype)


@advantage("otb")
def otb(
    token_rewards: Tensor,
    response_mask: Tensor,
    sum_p_squared: Tensor,
    old_log_probs: Tensor,
    group_id: Tensor,
    *,
    turn_aligned: bool = False,
    gamma: float = 1.0,
) -> Tensor:
    """G_t - b_t, [B, T] (optimal token baseline, 2602.07078).

    w_t = 1 - 2π(y_t) + Σ_j p_j² is the squared norm of the score at the logits, W_t = Σ_{s<=t} m_s w_s, and
    b_t = Σ_i G_it W_it / Σ_i W_it over the group's responses with a trained token at t; G: returns-to-go.
    turn_aligned: t is the t-th *trained* token (the paper's multi-turn form), else the position itself.
    token_rewards, response_mask, sum_p_squared (Σ_j p_j² of the old policy), old_log_probs: [B, T]; group_id:
    [B].

    Where only one response of the group is trained, b = 0 (it would else be its own baseline): judged by the
    position itself, where the reference compares it with a number of tokens (D12). A group without signal
    gets exactly 0 everywhere: a single response, or returns that are all equal. For samples of another
    policy: `otb_is`.
    """
    counted = response_mask > 0
    weight = _realised_energy(sum_p_squared, old_log_probs, counted)
    return _above_baseline(token_rewards, counted, weight, group_id, turn_aligned, gamma)


@advantage("otb_is")
def otb_is(
    token_rewards: Tensor,
    response_mask: Tensor,
    sum_p_squared: Tensor,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    group_id: Tensor,
    *,
    upper: float = 2.0,
    turn_aligned: bool = False,
    gamma: float = 1.0,
) -> Tensor:
    """Is `otb` for samples of another policy: b_t = Σ_i ρ_it² W_it G_it / Σ_i ρ_it² W_it, [B, T] (2602.07078,
    with importance weights).

    A token's term in the gradient is multiplied by ρ_t = min(π_old/π_rollout, upper), so the baseline that
    minimises its variance is weighted by ρ_t² times W_t. (W_t is that of `otb`: the reference multiplies each
    token's w by ρ² before it sums them, which is not what it documents: D12.) upper: that of
    algorithm.rollout_correction.importance with level: token. The log-ratio is clamped to ±20.
    """
    require("algorithm.advantage: otb_is", above=0, upper=upper)
    counted = response_mask > 0
    gap = torch.where(counted, old_log_probs - rollout_log_probs, 0.0).to(torch.float64)
    ratio = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=upper)
    weight = ratio.square() * _realised_energy(sum_p_squared, old_log_probs, counted)
    return _above_baseline(token_rewards, counted, weight, group_id, turn_aligned, gamma)


def _above_baseline(
    token_rewards: Tensor, counted: Tensor, weight: Tensor, group_id: Tensor, turn_aligned: bool, gamma: float
) -> Tensor:
    """Returns G_t - Σ_i weight_it G_it / Σ_i weight_it of the group's responses with a trained token at t."""
    require("algorithm.advantage: otb", at_least=0, at_most=1, gamma=gamma)
    returns = returns_to_go(token_rewards, counted, gamma)
    groups = Groups.of(group_id)
    group = groups.index.unsqueeze(1).expand_as(counted)[counted]
    raised = Groups(group, groups.size).above_minimum(returns[counted])
    trained_rows = groups.sums(counted.any(1))
    has_signal = (trained_rows > 1) & (Groups(group, groups.size).sums(raised) > 0)

    reached = counted if turn_aligned else torch.ones_like(counted)
    cells = Groups.of(group * counted.shape[1] + reached.cumsum(1)[counted] - 1)
    baseline = cells.sums(weight[counted] * raised) / cells.sums(weight[counted])
    advantages = torch.where((cells.size > 1)[cells.index], raised - baseline[cells.index], returns[counted])
    out = torch.zeros_like(returns)
    out[counted] = torch.where(has_signal[group], advantages, 0.0)
    return out.to(token_rewards.dtype)


def _realised_energy(sum_p_squared: Tensor, old_log_probs: Tensor, counted: Tensor) -> Tensor:
    """Sums w up to each token: W [B, T], float64, positive where counted (w is (1-π)² and more)."""
    squares = torch.where(counted, sum_p_squared, 0.0).to(torch.float64)
    chosen = torch.where(counted, old_log_probs, 0.0).to(torch.float64).exp()
    token = (1.0 - 2.0 * chosen + squares).clamp(min=_SMALLEST_WEIGHT)
    return torch.where(counted, token, 0.0).cumsum(1)
