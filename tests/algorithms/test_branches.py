"""Estimators over branches, by the examples of their papers' code and by identities."""

from __future__ import annotations

import pytest
import torch

from rondo.algorithms.advantages.branches import gains_of_steps, tree_grpo, treerl, vineppo
from rondo.algorithms.advantages.group import grpo
from rondo.core.errors import TrainError

NAN = float("nan")


def vines(values: list[float], steps: list[int], reward: float) -> tuple[torch.Tensor, ...]:
    """A row of steps of these lengths, with the outcome on its last token."""
    length = sum(steps)
    worth = torch.full((1, length), NAN)
    worth[0, torch.tensor([0, *steps[:-1]]).cumsum(0)] = torch.tensor(values)
    rewards = torch.zeros(1, length)
    rewards[0, -1] = reward
    return rewards, worth, torch.ones(1, length)


def test_a_step_gains_what_it_adds() -> None:
    """V = (.5, .25, .75), r = (0, 0, 1): A = (-.25, .5, .25)."""
    inputs = vines([0.5, 0.25, 0.75], [2, 1, 3], 1.0)
    made = vineppo(*inputs, whiten=False)
    torch.testing.assert_close(made, torch.tensor([[-0.25, -0.25, 0.5, 0.25, 0.25, 0.25]]))
    assert float(made[0, [0, 2, 3]].sum()) == pytest.approx(1 - 0.5)


def test_steps_sum_up_to_the_outcome_less_the_first_value() -> None:
    torch.manual_seed(0)
    values, rewards = torch.full((6, 12), NAN), torch.rand(6, 12) - 0.5
    mask = (torch.rand(6, 12) > 0.2).float()
    for row in range(6):
        own = torch.nonzero(mask[row])[:, 0]
        values[row, own[0]] = torch.rand(())
        values[row, own[3]] = torch.rand(())
        values[row, own[torch.randint(4, len(own), ())]] = torch.rand(())
    made = gains_of_steps(rewards, values, mask)
    starts = (mask > 0) & values.isfinite()
    first = torch.tensor([float(row[row.isfinite()][0]) for row in values.where(mask > 0, NAN)])
    sums = torch.where(starts, made, 0.0).sum(1)
    torch.testing.assert_close(sums, ((rewards * mask).sum(1) - first).double(), rtol=1e-5, atol=1e-6)
    assert not made[mask == 0].any()
    # With a value before every token it is GAE with λ = 0.
    dense = torch.rand(6, 12)
    ends = torch.where(mask > 0, dense, 0.0)
    by_hand = torch.zeros(6, 12)
    for row in range(6):
        own = torch.nonzero(mask[row])[:, 0].tolist()
        for token, following in zip(own, [*own[1:], None], strict=True):
            later = 0.0 if following is None else ends[row, following]
            by_hand[row, token] = rewards[row, token] + later - ends[row, token]
    torch.testing.assert_close(gains_of_steps(rewards, dense, mask).float(), by_hand)


def test_tokens_before_the_first_step_gain_nothing() -> None:
    rewards, values, mask = vines([0.5, 0.25], [2, 2], 1.0)
    values[0, 0] = NAN
    assert vineppo(rewards, values, mask, whiten=False).tolist() == [[0.0, 0.0, 0.75, 0.75]]


def test_vines_are_whitened_over_trained_tokens() -> None:
    rewards, values, mask = vines([0.5, 0.25, 0.75], [2, 1, 3], 1.0)
    mask[0, 4] = 0
    made = vineppo(rewards, values, mask)
    own = made[mask > 0].double()
    assert float(own.mean()) == pytest.approx(0, abs=1e-6)
    assert float(own.std()) == pytest.approx(1, abs=1e-4)
    assert made[0, 4] == 0


def test_tree_grpo_adds_prompt_and_tree() -> None:
    reward = torch.tensor([1.0, 0.0, 0.0, 0.0])
    made = tree_grpo(reward, torch.tensor([7, 7, 7, 7]), torch.tensor([1, 1, 2, 2]))
    by_hand = torch.tensor([2.207103, -1.207105, -0.499999, -0.499999])
    torch.testing.assert_close(made, by_hand, rtol=0, atol=2e-6)


def test_tree_grpo_of_one_tree_is_grpo_twice_and_one_alone_adds_its_reward() -> None:
    reward, prompt = torch.tensor([1.0, 0.0, 3.0, 5.0]), torch.tensor([7, 7, 7, 8])
    made = tree_grpo(reward, prompt, prompt)
    torch.testing.assert_close(made[:3], 2 * grpo(reward, prompt)[:3])
    assert made[3] == 2 * 5.0
    alone = tree_grpo(reward, prompt, torch.arange(4))
    torch.testing.assert_close(alone[:3], grpo(reward, prompt)[:3] + reward[:3])


def tree(
    reward: list[float],
    parent: list[int],
    fork: list[int],
    length: list[int],
    group: list[int] | None = None,
) -> torch.Tensor:
    """Rows are numbered by their place."""
    rows = torch.arange(len(reward))
    lengths = torch.tensor(length)
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).float()
    groups = torch.tensor(group or [0] * len(reward))
    return treerl(torch.tensor(reward), groups, rows, torch.tensor(parent), torch.tensor(fork), lengths, mask)


def test_treerl_table() -> None:
    """root → a (leaves 1, 1), b (1, 0), all of one token."""
    made = tree([1.0, 1.0, 1.0, 0.0], [-1, 0, -1, 2], [0, 1, 0, 1], [2, 2, 2, 2])
    by_hand = torch.tensor([[0.4714, 0.4310], [0.4714, 0.4310], [-0.4714, 0.9024], [-0.4714, -1.7643]])
    torch.testing.assert_close(made, by_hand, rtol=0, atol=1e-4)


def test_treerl_of_chains_is_the_rewards_less_those_of_the_others() -> None:
    """Without forks V is R' - c with c the mean by tokens, and the root's V is -c/√N: 2 V + c/√N."""
    reward, length = [1.0, 0.0, 0.0, 1.0], [3, 1, 2, 2]
    made = tree(reward, [-1] * 4, [0] * 4, length)
    centred = [r - (2 - r) / 3 for r in reward]
    mean = sum(r * n for r, n in zip(centred, length, strict=True)) / sum(length)
    for row, (own, number) in enumerate(zip(centred, length, strict=True)):
        by_hand = 2 * (own - mean) + mean / 2
        torch.testing.assert_close(made[row, :number], torch.full((number,), by_hand))
        assert not made[row, number:].any()


def test_where_a_fork_is_named_by_another_row_is_nothing_to_its_tree() -> None:
    """A branch at or before its parent's own fork goes on from what its parent went on from."""
    reward, length = [1.0, 0.0, 1.0, 0.0, 0.5], [6, 6, 5, 6, 4]
    ours = tree(reward, [-1, 0, 1, 1, 2], [0, 3, 5, 2, 3], length)
    theirs = tree(reward, [-1, 0, 1, 0, 0], [0, 3, 5, 2, 3], length)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)
    # What rows share has one number in all of them.
    torch.testing.assert_close(ours[0, :2], ours[3, :2])
    torch.testing.assert_close(ours[1, :5], ours[2, :5])


def test_treerl_keeps_prompts_apart_and_one_answer_at_nothing() -> None:
    single = tree([1.0, 0.0], [-1, 0], [0, 1], [2, 3])
    both = tree([1.0, 0.0, 1.0], [-1, 0, -1], [0, 1, 0], [2, 3, 2], group=[0, 0, 1])
    torch.testing.assert_close(both[:2], single)
    assert not both[2].any()


def test_a_gain_of_nothing_is_the_one_before() -> None:
    """The first leaf is worth 1, as the segment before it is: its local part is that one's, 1 - 0."""
    centred = [1.0, 2 * 2**0.5 - 1, -2 * 2**0.5]
    rewards = [2 / 3 * one for one in centred]
    rows, lengths = torch.arange(3), torch.tensor([2, 2, 2])
    forks, parents = torch.tensor([0, 1, 0]), torch.tensor([-1, 0, -1])
    columns = torch.zeros(3, dtype=torch.int64), rows, parents, forks, lengths, torch.ones(3, 2)
    made = treerl(torch.tensor(rewards, dtype=torch.float64), *columns)
    leaf, other = centred[1], centred[2]
    by_hand = torch.tensor([[2.0, 1 + 1], [2.0, 2 * leaf - 1], [2 * other, 2 * other]], dtype=torch.float64)
    torch.testing.assert_close(made, by_hand)


def test_a_row_without_its_parent_is_named() -> None:
    with pytest.raises(TrainError, match="row 1 goes on from row 9"):
        tree([1.0, 0.0], [-1, 9], [0, 1], [2, 2])
    with pytest.raises(TrainError, match="row 1 goes on from itself"):
        tree([1.0, 0.0], [-1, 1], [0, 1], [2, 2])
