"""Rewards under a constraint on a cost; the multiplier itself is in `rondo.algorithms.constraint`."""

from __future__ import annotations

import torch
from torch import Tensor

from rondo.algorithms import statistics
from rondo.algorithms.advantages.gae import gae
from rondo.algorithms.registry import advantage


@advantage("safe_rlhf")
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
    both = [
        gae(given, estimate.to(torch.float64), response_mask, gamma=gamma, lam=lam, whiten=False)
        for given, estimate in ((token_rewards, values), (token_costs, cost_values))
    ]
    (reward_advantages, returns), (cost_advantages, cost_returns) = both
    scale = multiplier.to(torch.float64)
    advantages = reward_advantages / (1.0 + scale) - cost_advantages * (scale / (1.0 + scale))
    if whiten:
        advantages = statistics.whiten(advantages, response_mask)
    out = {"advantages": advantages, "returns": returns, "cost_returns": cost_returns}
    return {name: column.to(values.dtype) for name, column in out.items()}
