"""Estimators over branches: what a step adds to the value of its prefix (VinePPO), and trees of answers
(Tree-GRPO, TreeRL). A tree's rows are its leaves: each is a whole answer, whose first `fork` tokens are its
parent's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rondo.algorithms import statistics
from rondo.algorithms.advantages.group import grpo
from rondo.algorithms.arguments import ranked, require
from rondo.algorithms.registry import advantage
from rondo.algorithms.statistics import Groups
from rondo.core.errors import TrainError

_NOTHING = 1e-8  # TreeRL: a gain below it is none


@ranked("rows")
def gains_of_steps(token_rewards: Tensor, branch_values: Tensor, response_mask: Tensor) -> Tensor:
    """Computes what `vineppo` whitens: advantages in float64."""
    counted = response_mask > 0
    starts = counted & branch_values.isfinite()
    step = starts.cumsum(1)  # from 1; 0 before the first
    number = int(step.max()) + 2 if step.numel() else 2
    rewards = torch.where(counted, token_rewards, 0.0).to(torch.float64)
    earned = rewards.new_zeros(len(step), number).scatter_add(1, step, rewards)
    worth = rewards.new_zeros(len(step), number)
    row, token = torch.nonzero(starts, as_tuple=True)
    worth[row, step[row, token]] = branch_values[row, token].to(torch.float64)
    gains = earned + worth.roll(-1, 1) - worth  # behind the last step stands a 0
    gains[:, 0] = 0.0
    return torch.where(counted, gains.gather(1, step), 0.0)


@advantage("vineppo", by_row=gains_of_steps)
def vineppo(
    token_rewards: Tensor, branch_values: Tensor, response_mask: Tensor, *, whiten: bool = True
) -> Tensor:
    """A_k = r_k + V(k+1) - V(k) on every token of step k, [B, T] (VinePPO, 2410.01679).

    branch_values [B, T]: V(k) on the first token of step k, the mean reward of answers that go on from there;
    NaN elsewhere. V is 0 behind the last step, so that a row's steps sum up to R - V(0). token_rewards [B,
    T]: the outcome on the last trained token, and a KL; r_k sums them over the step. Tokens before the first
    step get 0. whiten: over all trained tokens of the batch (the reference: of a micro-batch).
    """
    advantages = gains_of_steps(token_rewards, branch_values, response_mask)
    if whiten:
        advantages = statistics.whiten(advantages, response_mask)
    return advantages.to(token_rewards.dtype)


@advantage("tree_grpo")
def tree_grpo(reward: Tensor, group_id: Tensor, tree_id: Tensor, *, eps: float = 1e-6) -> Tensor:
    """GRPO among the answers of a prompt plus GRPO among those of a tree, [B] -> [B] (Tree-GRPO, 2509.21240;
    form of the released code). As there, a prompt or tree of one answer adds R itself.
    """
    require("algorithm.advantage: tree_grpo", at_least=0, eps=eps)
    total = torch.zeros_like(reward, dtype=torch.float64)
    for cell in (group_id, tree_id):
        groups = Groups.of(cell)
        alone = groups.size[groups.index] == 1
        total += torch.where(alone, reward, grpo(reward, cell, eps=eps)).to(torch.float64)
    return total.to(reward.dtype)


@dataclass(eq=False)
class _Segment:
    """Tokens between two forks, of all answers that have them."""

    start: int
    stop: int
    parent: _Segment | None
    """What comes before; None: nothing, it is the prompt."""
    leaves: int = 0
    """Answers that have it."""
    value: float = 0.0
    """Of these answers: first the sum, at last the mean."""


@advantage("treerl")
def treerl(
    reward: Tensor,
    group_id: Tensor,
    row_id: Tensor,
    parent_id: Tensor,
    fork: Tensor,
    response_length: Tensor,
    response_mask: Tensor,
) -> Tensor:
    """Gains of the segments between forks, global and local, [B, T] (TreeRL, 2506.11902; form of the released
    code by its script's flags, which is not the paper's).

    All answers of a prompt are one tree. R' is R less the mean of its other answers; of a segment s with N
    answers, v = Σ R' - N·c, where c is the token-weighted mean of R' over segments (Σ len·Σ R' / Σ len·N),
    and V = v / (√N · N). A token of s gets (V(s) - V(before s)) + V(s); where the first part is 0, it is that
    of the segment before. A prompt with one answer gets 0. Raises TrainError for a row whose parent is not
    there.
    """
    made = torch.zeros(response_mask.shape, dtype=torch.float64)
    rewards, lengths = reward.tolist(), response_length.tolist()
    ids, parents, forks = row_id.tolist(), parent_id.tolist(), fork.tolist()
    place = {number: row for row, number in enumerate(ids)}
    for group in group_id.unique():
        rows = torch.nonzero(group_id == group)[:, 0].tolist()
        if len(rows) == 1:
            continue
        root = _Segment(0, 0, None)
        paths = _paths(root, rows, ids, parents, forks, lengths, place)
        total = sum(rewards[row] for row in rows)
        for row in rows:
            others = (total - rewards[row]) / (len(rows) - 1)
            for segment in paths[row]:
                segment.leaves += 1
                segment.value += rewards[row] - others
        segments = {id(segment): segment for path in paths.values() for segment in path}.values()
        tokens = sum((one.stop - one.start) * one.leaves for one in segments)
        mean = sum((one.stop - one.start) * one.value for one in segments) / max(tokens, 1)
        for segment in segments:
            segment.value = (
                (segment.value - segment.leaves * mean) / segment.leaves / math.sqrt(segment.leaves)
            )
        for row in rows:
            before = 0.0
            for number, segment in enumerate(paths[row][1:]):
                assert segment.parent is not None
                gain = segment.value - segment.parent.value
                if number and abs(gain) < _NOTHING:
                    gain = before
                made[row, segment.start : segment.stop] = gain + segment.value
                before = gain
    return torch.where(response_mask > 0, made, 0.0).to(reward.dtype)


def _paths(
    root: _Segment,
    rows: Sequence[int],
    ids: Sequence[int],
    parents: Sequence[int],
    forks: Sequence[int],
    lengths: Sequence[int],
    place: dict[int, int],
) -> dict[int, list[_Segment]]:
    """Returns the segments of each row from the root on; what rows share is one segment."""
    owner: dict[int, int] = {}
    for row in rows:
        above, seen = parents[row], {ids[row]}
        while above >= 0:
            if above in seen:
                raise TrainError(f"treerl: row {above} goes on from itself (parent_id)")
            seen.add(above)
            if above not in place:
                raise TrainError(
                    f"treerl: row {ids[row]} goes on from row {above} (parent_id), which is not in the batch"
                )
            if forks[row] > forks[place[above]]:
                break
            above = parents[place[above]]  # it has only what was its parent's, too
        owner[row] = place[above] if above >= 0 else -1
    paths: dict[int, list[_Segment]] = {}

    def path_of(row: int) -> list[_Segment]:
        if row not in paths:
            start, path = 0, [root]
            if owner[row] >= 0:
                start = forks[row]
                path = [one for one in path_of(owner[row]) if one.stop <= start]
            cuts = {forks[other] for other in rows if owner[other] == row}
            for stop in (*sorted(cuts), lengths[row]):
                path.append(_Segment(start, stop, path[-1]))
                start = stop
            paths[row] = path
        return paths[row]

    for row in rows:
        path_of(row)
    return paths
