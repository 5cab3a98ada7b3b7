"""Estimators from a signal on every token: process rewards beside the outcome (PRIME), and a teacher that
judges what the student sampled (on-policy distillation).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rondo.algorithms.advantages.group import rloo
from rondo.algorithms.advantages.returns import returns_to_go
from rondo.algorithms.arguments import require
from rondo.algorithms.registry import advantage
from rondo.algorithms.statistics import Groups, masked_mean


@advantage("prime")
def prime(
    process_rewards: Tensor,
    reward: Tensor,
    group_id: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
    process_coef: float = 1.0,
) -> Tensor:
    """Adds process and outcome rewards, each less a leave-one-out baseline: [B, T] (PRIME 2502.01456 Eq. 5).

    A_t = c Σ_{s>=t} γ^{s-t} (r_s - mean_{j≠i} r̄_j) + R - mean_{j≠i} R_j over trained tokens, where r is the
    implicit process reward β log(π_prm / π_ref), process_rewards [B, T], r̄_j its mean over the tokens of
    response j, R the outcome, reward [B], and c = process_coef. γ discounts the process rewards only.
    Responses without trained tokens are in no process baseline; without any other one (a group of one) there
    is no baseline and the part is 0. The reference departs from Eq. 5: a factor n/(n-1), another whitening,
    the last token's process reward dropped (D6).
    """
    require("algorithm.advantage: prime", at_least=0, at_most=1, gamma=gamma)
    counted = response_mask > 0
    groups = Groups.of(group_id)
    # Above the group's smallest process reward, which every baseline contains as well: equal ones become 0.
    process = torch.zeros_like(process_rewards, dtype=torch.float64)
    tokens = Groups(groups.index.unsqueeze(1).expand_as(counted)[counted], groups.size)
    process[counted] = tokens.above_minimum(process_rewards[counted])
    mean = masked_mean(process, response_mask)
    others = (groups.sums(counted.any(1))[groups.index] - counted.any(1).to(torch.float64)).unsqueeze(1)
    baseline = (groups.sums(mean)[groups.index] - mean).unsqueeze(1) / others.clamp(min=1)
    process = torch.where(others > 0, process - baseline, 0.0)
    outcome = rloo(reward.to(torch.float64), group_id).unsqueeze(1)
    advantages = process_coef * returns_to_go(process, response_mask, gamma) + outcome
    return torch.where(counted, advantages, 0.0).to(process_rewards.dtype)


@advantage("teacher_gap", by_row=True)
def teacher_gap(
    teacher_log_probs: Tensor, old_log_probs: Tensor, response_mask: Tensor, *, clamp: float = 20.0
) -> Tensor:
    """A_t = ℓ_teacher - ℓ_old of the sampled token, [B, T]: minus the one-sample reverse KL (on-policy
    distillation, Thinking Machines 2025; 2306.13649 §3 with λ = 1).

    Per token: no discount (a token is not credited with later ones), no baseline, no whitening. clamp: bounds
    |A_t|, so that one token that the teacher all but excludes cannot rule the batch. 0 where the mask is 0.
    """
    require("algorithm.advantage: teacher_gap", above=0, clamp=clamp)
    gap = (teacher_log_probs - old_log_probs).clamp(-clamp, clamp)
    return torch.where(response_mask > 0, gap, 0.0).to(old_log_probs.dtype)
