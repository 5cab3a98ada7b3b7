"""Estimators whose baseline is the prompt group: one number per row, from per-row numbers only.

Common to all: groups may be of any size and in any order; a group of one and a group of equal rewards get
exactly 0 (no baseline, no signal: D4, D7). R is the reward (with the KL inside, where the KL is in the
reward), n the group's size, μ its mean, s its sample standard deviation. `passk` and `passk_analytic` reward
a group for its best samples instead of its mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rondo.algorithms.arguments import require
from rondo.algorithms.registry import advantage
from rondo.algorithms.statistics import Groups, whiten
from rondo.core.errors import ConfigError


@advantage("grpo")
def grpo(reward: Tensor, group_id: Tensor, *, normalize_std: bool = True, eps: float = 1e-6) -> Tensor:
    """(R - μ) / (s + eps), [B] -> [B] (GRPO, outcome supervision: 2402.03300 §4.1.2).

    normalize_std: false leaves R - μ, which is Dr.GRPO's.
    """
    require("algorithm.advantage: grpo", at_least=0, eps=eps)
    groups = Groups.of(group_id)
    centred = groups.centred(reward)
    if normalize_std:
        centred = centred / (groups.sample_std(reward) + eps)
    return centred.to(reward.dtype)


@advantage("dr_grpo")
def dr_grpo(reward: Tensor, group_id: Tensor) -> Tensor:
    """R - μ, [B] -> [B] (Dr.GRPO, 2503.20783). Use with aggregation seq-mean-token-sum-norm, the other half
    of it.
    """
    return Groups.of(group_id).centred(reward).to(reward.dtype)


@advantage("rloo")
def rloo(reward: Tensor, group_id: Tensor) -> Tensor:
    """R minus the mean of the group's *other* rewards = n/(n-1) · (R - μ), [B] -> [B] (RLOO, 2402.14740)."""
    groups = Groups.of(group_id)
    factor = groups.size / (groups.size - 1).clamp(min=1)
    return (groups.centred(reward) * factor[groups.index]).to(reward.dtype)


@advantage("win_rate")
def win_rate(reward: Tensor, group_id: Tensor) -> Tensor:
    """P(y ≻ π_t | x) - ½ from the samples of the same prompt, [B] -> [B] (SPPO, 2405.00675).

    P is the share of the group's other samples that this one beats; a tie is half a win. Per prompt, where
    the reference takes one softmax mean over the whole batch (D17). A ranking: the size of R does not matter.
    """
    groups = Groups.of(group_id)
    pairs = torch.stack([groups.index.to(torch.float64), reward.to(torch.float64)], 1)
    # Sorted by group, then reward: what is smaller in the whole list, less all of earlier groups, is what a
    # sample beats in its own.
    _, level, ties = torch.unique(pairs, dim=0, return_inverse=True, return_counts=True)
    below = (ties.cumsum(0) - ties)[level] - (groups.size.cumsum(0) - groups.size)[groups.index]
    others = (groups.size - 1)[groups.index]
    wins = below + (ties[level] - 1) / 2
    return torch.where(others > 0, wins / others.clamp(min=1) - 0.5, 0.0).to(reward.dtype)


@advantage("reinforce_pp_baseline")
def reinforce_pp_baseline(reward: Tensor, group_id: Tensor, num_trained_tokens: Tensor) -> Tensor:
    """whiten(R - μ) over the tokens of the whole batch, [B] -> [B] (REINFORCE++-baseline, 2501.03262).

    num_trained_tokens: [B]; a row counts once per token in mean and variance, as if it were broadcast over
    them. A group of one or of equal rewards gets 0, where the paper has minus the whitened mean: lengths that
    go with rewards move that mean off 0, and such a group has no signal.
    """
    groups = Groups.of(group_id)
    whitened = whiten(groups.centred(reward), num_trained_tokens)
    return torch.where(groups.is_constant(reward)[groups.index], 0.0, whitened).to(reward.dtype)


@advantage("opo")
def opo(reward: Tensor, group_id: Tensor, num_trained_tokens: Tensor) -> Tensor:
    """R - b with the length-weighted baseline b = Σ L R / Σ L, [B] -> [B] (OPO, 2505.23585). For on-policy
    updates.

    num_trained_tokens: [B], L. A group without trained tokens gets 0.
    """
    groups = Groups.of(group_id)
    raised = groups.above_minimum(reward)
    lengths = num_trained_tokens.to(torch.float64)
    total = groups.sums(lengths)
    baseline = groups.sums(lengths * raised) / total.clamp(min=1)
    return torch.where(total[groups.index] > 0, raised - baseline[groups.index], 0.0).to(reward.dtype)


@advantage("gpg")
def gpg(reward: Tensor, group_id: Tensor, *, normalize_std: bool = False, eps: float = 1e-6) -> Tensor:
    """α (R - μ), [B] -> [B], α = G/(G - M) with M of the G groups constant (GPG, 2504.02546).

    α makes up for groups without signal; it counts groups, not responses with a non-zero reward (D1).
    normalize_std divides by s + eps. Use with the policy loss `reinforce`.
    """
    require("algorithm.advantage: gpg", at_least=0, eps=eps)
    groups = Groups.of(group_id)
    constant = groups.is_constant(reward)
    useful = (~constant).sum().clamp(min=1)
    centred = grpo(reward, group_id, normalize_std=normalize_std, eps=eps)
    return (centred * (len(constant) / useful)).to(reward.dtype)


@advantage("gdpo")
def gdpo(
    scores: Tensor,
    group_id: Tensor,
    num_trained_tokens: Tensor,
    *,
    weights: Sequence[float] | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Normalises each score in its group, sums with `weights`, whitens over the batch's tokens: [B] (GDPO,
    2601.05242).

    scores: [B, K], one column per named score; NaN where a row has no such score (it is then in no statistic
    of that score). weights: K numbers, default all 1. No component's variance can hide another's. A row whose
    every score is constant in its group gets 0, where the paper has minus the whitened mean.
    """
    require("algorithm.advantage: gdpo", at_least=0, eps=eps)
    given = [1.0] * scores.shape[1] if weights is None else list(weights)
    if len(given) != scores.shape[1]:
        raise ConfigError(
            f"algorithm.advantage: gdpo has {len(given)} weights for {scores.shape[1]} scores; "
            "give one for each"
        )
    total = scores.new_zeros(len(scores), dtype=torch.float64)
    has_signal = torch.zeros_like(total, dtype=torch.bool)
    for weight, score in zip(given, scores.unbind(1), strict=True):
        known = ~score.isnan()
        groups, wide = Groups.of(group_id[known]), score[known].to(torch.float64)
        total[known] += weight * grpo(wide, group_id[known], eps=eps)
        has_signal[known] |= ~groups.is_constant(wide)[groups.index]
    return torch.where(has_signal, whiten(total, num_trained_tokens), 0.0).to(scores.dtype)


@advantage("passk")
def passk(reward: Tensor, group_id: Tensor, *, normalize_std: bool = False, eps: float = 1e-6) -> Tensor:
    """Leave-one-out of the group's maximum, [B] -> [B] (2503.19595, with k = n).

    The single best response gets its lead over the second, all others 0; a tie at the top gives 0 everywhere,
    and so does a group of one (D4). normalize_std divides by the sample standard deviation + eps.
    """
    require("algorithm.advantage: passk", at_least=0, eps=eps)
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
    require("algorithm.advantage: passk_analytic", at_least=1, k=k)
    groups = Groups.of(group_id)
    right = reward > threshold
    num_wrong = groups.sums(~right)
    table = torch.zeros(len(groups.size), 2, dtype=torch.float64)
    for group, (size, wrong) in enumerate(zip(groups.size.tolist(), num_wrong.tolist(), strict=True)):
        table[group] = torch.tensor(_binary_passk(int(size), int(wrong), k), dtype=torch.float64)
    return table.to(reward.device)[groups.index, right.to(torch.int64)].to(reward.dtype)


def _binary_passk(size: int, wrong: int, k: int) -> tuple[float, float]:
    """Returns (advantage of a wrong response, of a right one) in a group of `size`, `wrong` of them wrong."""
    if size < k or wrong == 0:
        return 0.0, 0.0
    mean = 1.0 - math.comb(wrong, k) / math.comb(size, k)
    sigma = math.sqrt(mean * (1.0 - mean))
    # All subsets have a right response, or none has: no sample makes a difference.
    if sigma == 0.0:
        return 0.0, 0.0
    of_wrong = 1.0 - mean - math.comb(wrong - 1, k - 1) / math.comb(size - 1, k - 1)
    return of_wrong / sigma, (1.0 - mean) / sigma
