"""Advantages that reward a group for its best samples instead of its mean."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rondo.algorithms.registry import advantage, require
from rondo.algorithms.statistics import Groups


@advantage("passk")
def passk(reward: Tensor, group_id: Tensor, *, normalize_std: bool = False, eps: float = 1e-6) -> Tensor:
    """Leave-one-out of the group's maximum, [B] -> [B] (2503.19595, with k = n).

    The single best response gets its lead over the second, all others 0; a tie at the top gives 0 everywhere,
    and so does a group of one (D4). normalize_std divides by the sample standard deviation + eps.
    """
    groups = Groups.of(group_id)
    raised = groups.above_minimum(reward)
    advantages = torch.zeros_like(raised)
    for group in range(len(groups.size)):
        rows = torch.nonzero(groups.index == group).squeeze(1)
        if len(rows) > 1:
            best, second = raised[rows].topk(2).values
            advantages[rows[raised[rows].argmax()]] = best - second
    if normalize_std:
        advantages = advantages / (groups.sample_std(reward) + eps)
    return advantages.to(reward.dtype)


@advantage("passk_analytic")
def passk_analytic(reward: Tensor, group_id: Tensor, *, k: int, threshold: float = 0.0) -> Tensor:
    """Exact pass@k advantages of binary rewards, [B] -> [B] (2508.10751): all subsets of k samples at once.

    A response is right when its reward is above `threshold`. With N samples, N⁻ of them wrong: R̄ = 1 -
    C(N⁻,k)/C(N,k), σ = √(R̄(1-R̄)); right: (1-R̄)/σ; wrong: (1 - R̄ - C(N⁻-1,k-1)/C(N-1,k-1))/σ; 0 where σ =
    0. Groups of fewer than k responses get 0.
    """
    require(k >= 1, f"algorithm.advantage: passk_analytic needs k >= 1, got {k}")
    groups = Groups.of(group_id)
    right = reward > threshold
    num_wrong = groups.sums(~right)
    table = torch.zeros(len(groups.size), 2, dtype=torch.float64)
    for group, (size, wrong) in enumerate(zip(groups.size.tolist(), num_wrong.tolist(), strict=True)):
        table[group] = torch.tensor(_binary_passk(int(size), int(wrong), k), dtype=torch.float64)
    return table.to(reward.device)[groups.index, right.to(torch.int64)].to(reward.dtype)


def _binary_passk(size: int, wrong: int, k: int) -> tuple[float, float]:
    """(advantage of a wrong response, of a right one) in a group of `size`."""
    if size < k or wrong == 0:
        return 0.0, 0.0
    mean = 1.0 - math.comb(wrong, k) / math.comb(size, k)
    sigma = math.sqrt(mean * (1.0 - mean))
    if sigma == 0.0:
        return 0.0, 0.0
    return (1.0 - mean - math.comb(wrong - 1, k - 1) / math.comb(size - 1, k - 1)) / sigma, (
        1.0 - mean
    ) / sigma
