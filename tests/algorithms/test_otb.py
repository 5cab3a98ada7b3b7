"""The optimal token baseline: a hand-computed table, its zero tail, and identities."""

from __future__ import annotations

import math

import pytest
import torch

from rondo.algorithms.advantages.returns import otb, otb_is, returns_to_go
from rondo.core.errors import ConfigError

T = torch.tensor
NAN = float("nan")


def test_table_with_a_zero_tail() -> None:
    """w = 1 - 2π + Σp². Row 0: π ½, Σp² ½ → w ½ each, W = ½, 1. Row 1: π ¼, Σp² ⅞ → w 1⅜, W 1⅜, 2¾, 4⅛.

    Outcomes 1 and 0: b_0 = ½ / (½ + 1⅜) = 4/15, b_1 = 1 / (1 + 2¾) = 4/15; position 2 has only row 1.
    """
    rewards = T([[0.0, 1.0, NAN], [0.0, 0.0, 0.0]])
    mask = T([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    squares = T([[0.5, 0.5, NAN], [0.875] * 3])
    log_probs = T([[math.log(0.5)] * 2 + [NAN], [math.log(0.25)] * 3])
    out = otb(rewards, mask, squares, log_probs, T([5, 5]))
    torch.testing.assert_close(out, T([[11 / 15, 11 / 15, 0.0], [-4 / 15, -4 / 15, 0.0]]))
    tail = otb(rewards.nan_to_num() + T([0.0, 0.0, 3.0]), mask, squares, log_probs, T([5, 5]))
    assert tail[1, 2].item() == 3.0  # no baseline: the lone response keeps its return


def test_importance_weights_multiply_what_is_summed() -> None:
    """The table's W = ½, 1 and 1⅜, 2¾ with ρ = 2 (cut to 1½), ½ and 1, 1: ρ²W = 9/8, ¼ and 1⅜, 2¾."""
    rewards, mask = T([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2)
    squares = T([[0.5, 0.5], [0.875, 0.875]])
    log_probs = T([[0.5, 0.5], [0.25, 0.25]]).log()
    rollout = log_probs - T([[2.0, 0.5], [1.0, 1.0]]).log()
    out = otb_is(rewards, mask, squares, log_probs, rollout, T([5, 5]), upper=1.5)
    first, second = 1.125 / (1.125 + 1.375), 0.25 / (0.25 + 2.75)
    torch.testing.assert_close(out, T([[1 - first, 1 - second], [-first, -second]]))


def test_of_its_own_samples_it_is_otb() -> None:
    generator = torch.Generator().manual_seed(8)
    rewards, squares = torch.randn(2, 6, 4, generator=generator)
    mask, log_probs = torch.ones(6, 4), -torch.rand(6, 4, generator=generator)
    group = T([0, 1, 0, 1, 0, 2])
    for aligned in (False, True):
        columns = (rewards, mask, squares.abs(), log_probs)
        plain = otb(*columns, group, turn_aligned=aligned, gamma=0.9)
        assert torch.equal(otb_is(*columns, log_probs, group, turn_aligned=aligned, gamma=0.9), plain)


def equal_weights(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Σp² and ℓ of a uniform choice of four: w = 1 - ½ + ¼ for every token."""
    return torch.full_like(mask, 0.25), torch.full_like(mask, math.log(0.25))


def test_equal_weights_give_the_mean_of_the_group_with_oneself_in_it() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, mask = torch.randn(6, 4, generator=generator), torch.ones(6, 4)
    group = T([2, 1, 2, 1, 1, 2])
    returns = returns_to_go(rewards, mask, 0.9).float()
    mean = torch.stack([returns[group == g].mean(0) for g in group])
    torch.testing.assert_close(otb(rewards, mask, *equal_weights(mask), group, gamma=0.9), returns - mean)


def test_a_certain_policy_gets_the_plain_mean() -> None:
    """π = Σp² = 1: all weights would be 0."""
    rewards, mask = T([[1.0], [0.0], [0.0]]), torch.ones(3, 1)
    out = otb(rewards, mask, mask, torch.zeros(3, 1), T([0, 0, 0]))
    torch.testing.assert_close(out, T([[2 / 3], [-1 / 3], [-1 / 3]]))


def test_positions_are_positions_or_trained_tokens() -> None:
    """Row 1 has its second trained token at position 2: alone there, or the partner of row 0's second."""
    rewards, mask = T([[0.0, 1.0, 0.0], [0.0, 0.0, 4.0]]), T([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    plain = otb(rewards, mask, *equal_weights(mask), T([0, 0]))
    torch.testing.assert_close(plain, T([[-1.5, 1.0, 0.0], [1.5, 0.0, 4.0]]))
    aligned = otb(rewards, mask, *equal_weights(mask), T([0, 0]), turn_aligned=True)
    torch.testing.assert_close(aligned, T([[-1.5, -1.5, 0.0], [1.5, 0.0, 1.5]]))


def test_turn_aligned_equals_otb_of_the_compacted_tokens() -> None:
    generator = torch.Generator().manual_seed(3)
    rewards, log_probs = torch.randn(5, 6, generator=generator), -torch.rand(5, 6, generator=generator)
    squares = torch.rand(5, 6, generator=generator)
    mask = (torch.rand(5, 6, generator=generator) < 0.6).float()
    order = torch.argsort(mask, dim=1, descending=True, stable=True)
    group = T([0, 1, 0, 1, 0])
    dense = (x.gather(1, order) for x in (rewards, mask, squares, log_probs))
    out = otb(rewards, mask, squares, log_probs, group, turn_aligned=True)
    torch.testing.assert_close(out.gather(1, order), otb(*dense, group))


@pytest.mark.parametrize("turn_aligned", [False, True])
def test_no_signal_is_exactly_zero(turn_aligned: bool) -> None:
    """Equal outcomes (of unequal lengths), a group of one, a group with one trained row, nothing trained."""
    mask = T([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    rewards = T([[0.0, 0.0, 0.9], [0.9, 0.0, 0.0], [0.0, 0.0, 0.9], [2.0, 3.0, 0.0], [NAN] * 3])
    noise = torch.rand(5, 3, generator=torch.Generator().manual_seed(1))
    for group in (T([4, 4, 4, 1, 2]), T([4, 4, 4, 1, 1])):
        out = otb(rewards, mask, noise, -noise, group, turn_aligned=turn_aligned)
        assert torch.equal(out, torch.zeros(5, 3))
    empty = torch.zeros(0, 3)
    assert otb(empty, empty, empty, empty, T([], dtype=torch.long)).shape == (0, 3)


def test_huge_values_stay_finite_and_order_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(2)
    rewards, mask = 1e30 * torch.randn(6, 5, generator=generator), torch.ones(6, 5)
    mask[:, 3:] = (torch.rand(6, 2, generator=generator) < 0.5).float()
    squares, log_probs = torch.rand(6, 5, generator=generator), -1e4 * torch.rand(6, 5, generator=generator)
    group, order = T([0, 1, 0, 1, 2, 0]), torch.randperm(6, generator=generator)
    out = otb(rewards, mask, squares, log_probs, group)
    assert out.isfinite().all()
    assert (out[mask == 0] == 0).all()
    moved = otb(rewards[order], mask[order], squares[order], log_probs[order], 9 - 4 * group[order])
    torch.testing.assert_close(moved, out[order])


def test_gamma_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="otb needs gamma"):
        otb(*[torch.zeros(1, 1)] * 4, T([0]), gamma=1.5)
    with pytest.raises(ConfigError, match="otb_is needs upper"):
        otb_is(*[torch.zeros(1, 1)] * 5, T([0]), upper=0.0)
