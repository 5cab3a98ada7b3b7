"""Safe-RLHF: two GAEs under a multiplier, and the multiplier's own update."""

from __future__ import annotations

import math

import pytest
import torch

from rondo.algorithms.advantages.gae import gae, safe_rlhf, smooth_cost, update_multiplier

T = torch.tensor
NAN = float("nan")


def columns(rows: int = 3, width: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    names = ("token_rewards", "values", "token_costs", "cost_values")
    given = {name: torch.randn(rows, width, generator=generator) for name in names}
    mask = (torch.rand(rows, width, generator=generator) < 0.7).float()
    return {name: column.masked_fill(mask == 0, NAN) for name, column in given.items()} | {
        "response_mask": mask
    }


def test_multiplier_0_is_gae_and_a_huge_one_is_minus_the_cost() -> None:
    given = columns()
    mask = given["response_mask"]
    for whiten in (False, True):
        options = {"gamma": 0.9, "lam": 0.8, "whiten": whiten}
        expected, returns = gae(given["token_rewards"], given["values"], mask, **options)
        cost, cost_returns = gae(given["token_costs"], given["cost_values"], mask, **options)
        free = safe_rlhf(**given, multiplier=T(0.0), **options)
        torch.testing.assert_close(free["advantages"], expected)
        torch.testing.assert_close(free["returns"], returns)
        torch.testing.assert_close(free["cost_returns"], cost_returns)
        bound = safe_rlhf(**given, multiplier=T(1e30), **options)
        torch.testing.assert_close(bound["advantages"], -cost)


def test_table_and_masked_positions() -> None:
    """λ = 3, γ = lam = 1, no values: A = (R - 3 C) / 4 with R = 4, C = 2 to go."""
    rewards, costs = T([[0.0, NAN, 4.0]]), T([[1.0, NAN, 1.0]])
    zero = T([[0.0, NAN, 0.0]])
    out = safe_rlhf(rewards, zero, costs, zero, T([[1.0, 0.0, 1.0]]), T(3.0))
    assert out["advantages"].tolist() == [[(4 - 6) / 4, 0.0, (4 - 3) / 4]]
    assert out["returns"].tolist() == [[4.0, 0.0, 4.0]]
    assert out["cost_returns"].tolist() == [[2.0, 0.0, 1.0]]
    nothing = safe_rlhf(*[torch.full((2, 2), NAN)] * 4, torch.zeros(2, 2), T(3.0), whiten=True)
    assert all(torch.equal(column, torch.zeros(2, 2)) for column in nothing.values())


def test_multiplier_follows_the_violation() -> None:
    """ln λ += lr λ (cost - limit): from λ = 2 with .1 · 2 · (1.5 - .5) = .2."""
    assert update_multiplier(2.0, 1.5, 0.5, 0.1) == pytest.approx(2 * math.exp(0.2))
    assert update_multiplier(2.0, -0.5, 0.5, 0.1) == pytest.approx(2 * math.exp(-0.2))
    assert update_multiplier(2.0, 0.5, 0.5, 0.1) == pytest.approx(2.0)


@pytest.mark.parametrize("cost", [1e300, -1e300, 3.0, -3.0])
def test_multiplier_stays_finite_and_positive(cost: float) -> None:
    """It grows by at most e per step and ends at a bound; from 0, which has no logarithm, it starts there."""
    multiplier = 1.0
    for _ in range(100):
        following = update_multiplier(multiplier, cost, 0.0, 10.0)
        assert 0 < following <= multiplier * math.e * (1 + 1e-9)
        multiplier = following
    assert math.exp(-10) * 0.99 < multiplier < math.exp(10) * 1.01
    assert update_multiplier(0.0, cost, 0.0, 10.0) == pytest.approx(math.exp(-10))


def test_smoothed_cost() -> None:
    assert smooth_cost(None, 4.0, 0.9) == 4.0
    assert smooth_cost(2.0, 4.0, 0.75) == pytest.approx(2.5)
    assert smooth_cost(2.0, 4.0, 0.0) == 4.0
