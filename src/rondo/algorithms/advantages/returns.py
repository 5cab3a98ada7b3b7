"""Estimators from returns-to-go, without a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from rondo.algorithms.registry import advantage, require
from rondo.algorithms.statistics import whiten


def require_gamma(estimator: str, gamma: float) -> None:
    """Raise ConfigError unless 0 <= gamma <= 1."""
    require(0.0 <= gamma <= 1.0, f"algorithm.advantage: {estimator} needs gamma between 0 and 1, got {gamma}")


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


@advantage("reinforce_pp")
def reinforce_pp(token_rewards: Tensor, response_mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """whiten(returns-to-go) over all trained tokens of the batch, [B, T] (REINFORCE++, 2501.03262).

    One response per prompt is enough. The paper has a k1 penalty in the reward (algorithm.kl.where=reward).
    """
    require_gamma("reinforce_pp", gamma)
    return whiten(returns_to_go(token_rewards, response_mask, gamma), response_mask).to(token_rewards.dtype)


@advantage("remax")
def remax(token_rewards: Tensor, response_mask: Tensor, greedy_reward: Tensor) -> Tensor:
    """Returns-to-go minus the reward of the greedy response to the same prompt, [B, T] (ReMax, 2310.10505).

    greedy_reward: [B], the greedy response's outcome without KL. 0 where the mask is 0 (D20).
    """
    difference = returns_to_go(token_rewards, response_mask) - greedy_reward.to(torch.float64).unsqueeze(1)
    return torch.where(response_mask > 0, difference, 0.0).to(token_rewards.dtype)
