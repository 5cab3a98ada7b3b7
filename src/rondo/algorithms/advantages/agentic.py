"""Credit for the steps of an agent: rows are steps (one model call each) of trajectories.

Common columns, all [B], in any order: group_id (the task), trajectory_id (unique in the batch), step_index
(order inside the trajectory), step_reward r_t (what the environment gave for the step; the outcome, where it
is to count, on the last one; NaN: the row is a note, no step), anchor_id (equal numbers: equal observations
before the step). The return of a step is G_t = r_t + γ G_{t+1} over its trajectory's steps; that of a note is
the next step's. Groups of one and of equal values give exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np
import torch
from torch import Tensor

from rondo.algorithms.advantages.group import grpo
from rondo.algorithms.arguments import require
from rondo.algorithms.registry import advantage
from rondo.algorithms.statistics import Groups


@advantage("gigpo")
def gigpo(
    reward: Tensor,
    step_reward: Tensor,
    step_index: Tensor,
    trajectory_id: Tensor,
    group_id: Tensor,
    anchor_id: Tensor,
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    normalize_std: bool = True,
    similarity: float = 1.0,
    eps: float = 1e-6,
) -> Tensor:
    """A^E + ω A^S, [B] -> [B] (GiGPO, 2505.10978).

    A^E = (R(τ) - mean) / F over the *trajectories* of the task (the reference averages over step rows, so
    that long trajectories weigh more: D18); A^S = (G_t - mean) / F over the task's steps with the same anchor
    observation. F: sample standard deviation + eps, or 1. reward: the episode's outcome R(τ), the same on all
    rows of a trajectory. step_weight: ω. similarity: see `check_similarity`.
    """
    require("algorithm.advantage: gigpo", at_least=0, at_most=1, gamma=gamma)
    require("algorithm.advantage: gigpo", at_least=0, eps=eps)
    check_similarity("gigpo", similarity)
    steps = StepPlaces.of(trajectory_id, step_index)
    first = torch.nonzero(steps.position == 0).squeeze(1)
    episode = torch.zeros(len(first), dtype=torch.float64, device=reward.device)
    episode[steps.trajectory[first]] = grpo(
        reward[first].to(torch.float64), group_id[first], normalize_std=normalize_std, eps=eps
    )
    anchors = _pairs(group_id, anchor_id)
    step = grpo(steps.returns(step_reward, gamma), anchors, normalize_std=normalize_std, eps=eps)
    return (episode[steps.trajectory] + step_weight * step).to(reward.dtype)


@advantage("hgpo")
def hgpo(
    step_reward: Tensor,
    step_index: Tensor,
    trajectory_id: Tensor,
    group_id: Tensor,
    anchor_id: Tensor,
    *,
    depth: int = 2,
    alpha: float = 1.0,
    gamma: float = 0.95,
    normalize_std: bool = True,
    similarity: float = 1.0,
    eps: float = 1e-6,
) -> Tensor:
    """Σ_k w_k A_k, [B] -> [B] (HGPO, 2602.22817).

    For k = 0..depth: A_k = (G_t - mean) / F over the task's steps whose last k + 1 observations agree; w_k =
    (k+1)^α / Σ_j (j+1)^α over those k whose group has more than one member (0 if there is none). Here k
    counts from 0 as in the paper, the observations before are those of steps, not of notes, F is the sample
    standard deviation + eps as in GiGPO, and a group is recognised by its size; the reference has weights 2,
    3, …, the population deviation, and takes an advantage of 0 for a missing group (D3). similarity: see
    `check_similarity`.
    """
    require("algorithm.advantage: hgpo", at_least=0, at_most=1, gamma=gamma)
    require("algorithm.advantage: hgpo", at_least=0, depth=depth, alpha=alpha, eps=eps)
    check_similarity("hgpo", similarity)
    steps = StepPlaces.of(trajectory_id, step_index)
    returns = steps.returns(step_reward, gamma)
    before = steps.before(step_reward)
    is_step = ~step_reward.isnan()
    anchors = torch.zeros_like(steps.padded(anchor_id))  # of a trajectory's steps, one after the other
    anchors[steps.trajectory[is_step], before[is_step]] = anchor_id[is_step]
    total, total_weight = torch.zeros_like(returns), torch.zeros_like(returns)
    context = _pairs(group_id, anchor_id)
    for k in range(depth + 1):
        rows = torch.nonzero(before >= k).squeeze(1)  # the others have no k observations before
        if k > 0:
            earlier = anchors[steps.trajectory[rows], before[rows] - k]
            context = context.index_copy(0, rows, _pairs(context[rows], earlier))
        groups = Groups.of(context[rows])
        weight = (k + 1.0) ** alpha * (groups.size > 1).to(torch.float64)[groups.index]
        total[rows] += weight * grpo(returns[rows], context[rows], normalize_std=normalize_std, eps=eps)
        total_weight[rows] += weight
    return torch.where(total_weight > 0, total / total_weight.clamp(min=1.0), 0.0).to(step_reward.dtype)


def check_similarity(name: str, similarity: float) -> None:
    """Raises ConfigError where no texts are as similar as that.

    1: observations have one anchor where they are equal. Below, anchor_id is made anew of their texts before
    an estimator gets it (`anchors.alike`).
    """
    require(f"algorithm.advantage: {name}", above=0, at_most=1, similarity=similarity)


def _pairs(first: Tensor, second: Tensor) -> Tensor:
    """Numbers the pairs of two columns: rows with the same pair get the same number, int64 [B]."""
    return torch.unique(torch.stack([first.long(), second.long()], 1), dim=0, return_inverse=True)[1]


@dataclass(frozen=True)
class StepPlaces:
    """Says where each step stands: of the rows of a batch, or of turns."""

    trajectory: Tensor
    """[B], the step's trajectory, 0..N-1."""
    position: Tensor
    """[B], the step's place in its trajectory, 0 first."""
    shape: tuple[int, int]
    """(N, steps of the longest trajectory)."""

    @classmethod
    def of(cls, trajectory_id: Tensor, step_index: Tensor) -> StepPlaces:
        groups = Groups.of(trajectory_id)
        size = groups.size.long()
        # Rows come in any order. Sorted by step, then stably by trajectory, a row's place in its trajectory
        # is its place in that order less the place where its trajectory begins.
        order = torch.argsort(step_index, stable=True)
        order = order[torch.argsort(groups.index[order], stable=True)]
        position = torch.empty_like(order)
        position[order] = (
            torch.arange(len(order), device=order.device) - (size.cumsum(0) - size)[groups.index[order]]
        )
        return cls(groups.index, position, (len(size), int(size.max()) if len(size) else 0))

    def padded(self, values: Tensor) -> Tensor:
        """Lays values [B] out as [N, steps], 0 where there is no step."""
        out = values.new_zeros(self.shape)
        out[self.trajectory, self.position] = values
        return out

    def before(self, step_reward: Tensor) -> Tensor:
        """Counts the steps before each row in its trajectory, without notes: int64 [B]."""
        is_step = self.padded((~step_reward.isnan()).long())
        return (is_step.cumsum(1) - is_step)[self.trajectory, self.position]

    def returns(self, step_reward: Tensor, gamma: float) -> Tensor:
        """Returns G_t of each row, of a note that of the next step, 0 where none follows: float64 [B]."""
        is_step = self.padded(~step_reward.isnan())
        rewards = self.padded(step_reward.to(torch.float64).nan_to_num(nan=0.0))
        out = torch.zeros_like(rewards)
        following = rewards.new_zeros(len(rewards))
        for t in reversed(range(rewards.shape[1])):
            following = torch.where(is_step[:, t], rewards[:, t] + gamma * following, following)
            out[:, t] = following
        return out[self.trajectory, self.position]


# ---- observations that are nearly the same: one anchor for texts that are alike, of one prompt ----


def alike(
    anchor_id: np.ndarray, texts: Sequence[str], group_id: np.ndarray, row_id: np.ndarray, similarity: float
) -> np.ndarray:
    """Returns the anchor of each row, int64 [B]: that of the first observation of its group whose text is as
    similar as that, or its own.

    As GiGPO's code has it: rows are taken one after the other (by row_id, so that a batch's order does not
    matter), and compared with the first of each cluster so far by `difflib.SequenceMatcher.ratio`.
    """
    out = anchor_id.copy()
    clusters: dict[int, list[tuple[int, str]]] = {}  # of each group: anchor and text of the first
    known: dict[tuple[int, int], int] = {}  # group and own anchor: that of its cluster
    matcher = SequenceMatcher()
    for row in np.argsort(row_id, kind="stable"):
        group, own, text = int(group_id[row]), int(anchor_id[row]), texts[row]
        if (group, own) not in known:
            firsts = clusters.setdefault(group, [])
            matcher.set_seq2(text)
            found = next((anchor for anchor, first in firsts if _is_similar(matcher, first, similarity)), own)
            if found == own:
                firsts.append((own, text))
            known[group, own] = found
        out[row] = known[group, own]
    return out


def _is_similar(matcher: SequenceMatcher[str], text: str, similarity: float) -> bool:
    """Says whether a text is similar to the matcher's. The two quick ratios bound the real one from above,
    and cost little.
    """
    matcher.set_seq1(text)
    return all(
        ratio() >= similarity for ratio in (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)
    )
