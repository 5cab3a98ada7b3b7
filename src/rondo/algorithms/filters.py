"""Which prompt groups are worth training on (dynamic sampling), which of a step's (StarPO-S), and how often
each sample of a prompt is trained on (PF-PPO).

A filter reads per-row columns of ONE group and returns why the group is dropped, or None to keep it. It reads
the raw accuracy, never the shaped reward: a length penalty would make every group look mixed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rondo.algorithms.arguments import ranked, require
from rondo.algorithms.registry import group_filter, resampler, selection
from rondo.algorithms.statistics import Groups
from rondo.core.errors import ConfigError, TrainError
from rondo.core.types import request_seed


@group_filter("mixed_accuracy")
def mixed_accuracy(accuracy: np.ndarray) -> str | None:
    """Keeps groups whose samples [n] differ in accuracy (DAPO's dynamic sampling, 2503.14476 §3.2).

    All equal means no gradient; so does a group of one, which the reference keeps.
    """
    if np.all(accuracy == accuracy[:1]):
        return "all samples have the same accuracy"
    return None


@group_filter("accuracy_range")
def accuracy_range(accuracy: np.ndarray, *, low: float = 0.2, high: float = 0.8) -> str | None:
    """Keeps groups whose share of right answers (accuracy > 0) is in [low, high] (PRIME, 2502.01456: 0.2 to
    0.8).
    """
    if not 0.0 <= low <= high <= 1.0:
        raise ConfigError(
            f"algorithm.filter: accuracy_range needs 0 <= low <= high <= 1, got low={low}, high={high}"
        )
    share = np.count_nonzero(accuracy > 0) / max(len(accuracy), 1)
    if not low <= share <= high:
        return f"the share of right answers is not in {low} to {high}"
    return None


# ---- resampling: probabilities in a group, and draws of them ----


_SPREADS = ("sum", "count", "largest", "softmax")


@selection("reward_spread")
def reward_spread(reward: Tensor, group_id: Tensor, *, by: str = "sum", share: float = 0.9) -> Tensor:
    """Says of each answer [B] whether its group is among those of largest spread, the sample standard
    deviation of its rewards: bool [B] (StarPO-S, 2504.20073, which calls it variance).

    Groups by falling spread, as many as it takes: sum: until their spreads add up to `share` of all, less .01
    (as its code: linear top-p). count: max(1, ⌊share · groups⌋) (the paper: .25). largest: those of at least
    `share` of the largest. softmax: until the softmax of all spreads adds up to `share`. Groups without
    spread are taken by count and softmax only; where no group has any, all are kept: nothing tells them
    apart.
    """
    if by not in _SPREADS:
        raise ConfigError(
            f"algorithm.select: reward_spread has no by={by!r}; choose one of {', '.join(_SPREADS)}"
        )
    require("algorithm.select: reward_spread", above=0, at_most=1, share=share)
    groups = Groups.of(group_id)
    spread = groups.sums(groups.sample_std(reward)) / groups.size
    if not bool((spread > 0).any()):
        return torch.ones_like(reward, dtype=torch.bool)
    if by == "largest":
        return (spread >= share * spread.max())[groups.index]
    order = torch.argsort(spread, descending=True, stable=True)
    if by == "count":
        number = max(1, int(share * len(spread) + 1e-9))
    else:
        mass, wanted = spread[order], share * float(spread.sum()) - 0.01
        if by == "softmax":
            mass, wanted = spread.softmax(0)[order], share
        number = int(((mass.cumsum(0) - mass) < wanted - 1e-12).sum())
        if by == "sum":
            number = min(number, int((spread > 0).sum()))
    kept = torch.zeros(len(spread), dtype=torch.bool)
    kept[order[:number]] = True
    return kept[groups.index]


@selection("resample_on_correct")
@ranked("rows", tool_use="row")
def resample_on_correct(
    reward: Tensor, group_id: Tensor, tool_use: Tensor, *, keep: int, least: int = 2
) -> Tensor:
    """Says of each answer [B] whether it is among the `keep` of its group that are trained on: of those that
    are right (reward above 0) the ones of smallest penalty, of the others the first: bool [B] (GRPO-RoC,
    2508.20722, its code; the paper draws both). tool_use: the penalty, a score of that name.

    Of each kind the share of all answers, rounded half to even, but `least` of it where there are so many.
    Groups whose rewards are all equal, or that have fewer than `keep` answers, are left out; where that is
    all of them, all answers are kept: nothing tells them apart.
    """
    require("algorithm.select: resample_on_correct", at_least=1, keep=keep, least=least)
    groups, kept = Groups.of(group_id), torch.zeros_like(reward, dtype=torch.bool)
    for members in torch.argsort(groups.index, stable=True).split(groups.size.long().tolist()):
        given = reward[members]
        if len(members) < keep or bool((given == given[0]).all()):
            continue
        right, wrong = members[given > 0], members[given <= 0]
        number = _of_right(len(right), len(wrong), keep, least)
        order = torch.argsort(tool_use[right], stable=True)
        kept[right[order[:number]]] = True
        kept[wrong[: keep - number]] = True
    return kept if bool(kept.any()) else torch.ones_like(kept)


def _of_right(right: int, wrong: int, keep: int, least: int) -> int:
    """Returns how many right answers are among `keep` of both; what rounding leaves over is right ones'."""
    chosen = round(wrong * keep / (right + wrong))
    chosen = max(chosen, min(least, wrong), keep - right)  # of the wrong ones
    return max(keep - chosen, min(least, right), keep - wrong)


_STRATEGIES = ("best", "best_random", "best_worst", "power")


@resampler("pf_ppo")
def pf_ppo(
    reward: Tensor, group_id: Tensor, *, strategy: str = "best_random", power: float | None = None
) -> Tensor:
    """Gives each row its probability in its group, [B] -> float64 [B]; a group sums to 1 (PF-PPO,
    2409.06957).

    best: all on the best sample. best_random: ½ on the best, ½ over the others. best_worst: ½ and ½. power:
    ∝ |R|^power (uniform if all R are 0). Samples that share the best (or worst) reward share its part; equal
    rewards give the uniform distribution. Ranks are those inside one prompt's samples, and the draw comes
    before advantages are whitened; the reference ranks over the whole batch and draws afterwards (D5).
    """
    if strategy not in _STRATEGIES:
        raise ConfigError(
            f"algorithm.resample: pf_ppo has no strategy {strategy!r}; choose one of {', '.join(_STRATEGIES)}"
        )
    if (power is not None) != (strategy == "power"):
        raise ConfigError(
            "algorithm.resample: pf_ppo takes `power` with strategy=power, where it is required, and only "
            "there"
        )
    require("algorithm.resample: pf_ppo", above=0, power=power)
    groups = Groups.of(group_id)
    if power is not None:
        return _share(groups, _relative_size(groups, reward) ** power)
    best = groups.above_minimum(-reward) == 0
    if strategy == "best":
        return _share(groups, best)
    if strategy == "best_worst":
        return (_share(groups, best) + _share(groups, groups.above_minimum(reward) == 0)) / 2
    others = ~best | groups.is_constant(reward)[groups.index]
    return (_share(groups, best) + _share(groups, others)) / 2


def _share(groups: Groups, weights: Tensor) -> Tensor:
    """Divides weights [B] by their group's sum, which is positive: float64 [B]."""
    return weights.to(torch.float64) / groups.sums(weights)[groups.index]


def _relative_size(groups: Groups, reward: Tensor) -> Tensor:
    """Divides |R| by the largest of its group, so that no power overflows: float64 [B]; 1 where all are 0."""
    size = reward.to(torch.float64).abs()
    largest = size.new_zeros(len(groups.size)).scatter_reduce(0, groups.index, size, "amax")[groups.index]
    return torch.where(largest > 0, size / largest, 1.0)


@ranked("rows", probabilities="row")
def draw(probabilities: Tensor, group_id: Tensor, *, seed: int) -> Tensor:
    """Draws how often each row counts: int64 [B]; with replacement, as often per group as the group has rows.

    probabilities: [B], summing to 1 in each group. The draws are a function of the seed, the group's id and
    the group's probabilities alone: neither other groups nor the order of rows matter (rows of one group that
    are equally likely are told apart by their order).
    """
    groups = Groups.of(group_id)
    counts = torch.zeros(len(probabilities), dtype=torch.int64)
    by_group = torch.argsort(groups.index, stable=True).cpu()
    ids, given = group_id.cpu(), probabilities.detach().to(torch.float64).cpu()
    for members in by_group.split(groups.size.long().tolist()):
        rows = members[torch.argsort(given[members], stable=True)]  # the impossible ones first
        generator = np.random.default_rng(request_seed(seed, "resample", int(ids[rows[0]])))
        shares = given[rows].numpy()
        if not (np.isfinite(shares).all() and shares.min() >= 0 and shares.sum() > 0):
            raise TrainError(
                f"algorithm.resample made the probabilities {np.array2string(shares, threshold=8)} of a "
                "prompt's samples; they are numbers >= 0 that sum to 1 in each group"
            )
        counts[rows] = torch.from_numpy(generator.multinomial(len(rows), shares / shares.sum()))
    return counts.to(probabilities.device)
