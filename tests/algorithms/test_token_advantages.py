"""GAE, REINFORCE++ and ReMax: hand-computed tables with holes in the mask, identities and rules."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rondo.algorithms import kl_reward
from rondo.algorithms.advantages.gae import gae
from rondo.algorithms.advantages.returns import reinforce_pp, remax, returns_to_go
from rondo.algorithms.statistics import Whitening, moments, whiten
from rondo.algorithms.token_rewards import made_columns
from rondo.core.errors import ConfigError, TrainError

T = torch.tensor
NAN = float("nan")


def test_gae_table_through_a_hole() -> None:
    """γ = .5, λ = .5, tokens 0, 2, 3 trained; token 1 is an observation, token 4 padding.

    Δ3 = 1 - .4 = .6; Δ2 = .5·.4 - .2 = 0; Δ0 = .5·.2 - .6 = -.5.  Â3 = .6, Â2 = .15, Â0 = -.4625.
    """
    rewards, values = T([[0.0, 7.0, 0.0, 1.0, NAN]]), T([[0.6, 9.0, 0.2, 0.4, NAN]])
    mask = T([[1.0, 0.0, 1.0, 1.0, 0.0]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5, whiten=False)
    torch.testing.assert_close(advantages, T([[-0.4625, 0.0, 0.15, 0.6, 0.0]]))
    torch.testing.assert_close(returns, T([[0.1375, 0.0, 0.35, 1.0, 0.0]]))


def test_gae_whitens_after_forming_returns() -> None:
    rewards, values, mask = torch.randn(3, 5), torch.randn(3, 5), torch.ones(3, 5)
    raw, raw_returns = gae(rewards, values, mask, lam=0.9, whiten=False)
    white, returns = gae(rewards, values, mask, lam=0.9)
    assert torch.equal(returns, raw_returns)
    torch.testing.assert_close(white, (raw - raw.mean()) / (raw.var() + 1e-8).sqrt())


padded = st.integers(0, 2**31).map(lambda seed: torch.Generator().manual_seed(seed))


def random_rows(generator: torch.Generator, rows: int = 4, width: int = 7) -> tuple[torch.Tensor, ...]:
    rewards = torch.randn(rows, width, generator=generator)
    values = torch.randn(rows, width, generator=generator)
    mask = (torch.rand(rows, width, generator=generator) < 0.6).float()
    return rewards, values, mask


@settings(max_examples=30, deadline=None)
@given(generator=padded, gamma=st.sampled_from([1.0, 0.9, 0.5]))
def test_gae_with_lambda_1_is_discounted_return_minus_value(generator: torch.Generator, gamma: float) -> None:
    rewards, values, mask = random_rows(generator)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=1.0, whiten=False)
    expected = returns_to_go(rewards, mask, gamma).float()
    torch.testing.assert_close(returns, expected)
    torch.testing.assert_close(advantages, (expected - values) * mask)


@settings(max_examples=30, deadline=None)
@given(generator=padded)
def test_gae_equals_gae_of_the_compacted_tokens(generator: torch.Generator) -> None:
    """Holes change nothing: the trained tokens get what they would get if the others were cut out."""
    rewards, values, mask = random_rows(generator)
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.8, whiten=False)
    for i, kept in enumerate(mask.bool()):
        dense = torch.ones(1, int(kept.sum()))
        short, short_returns = gae(
            rewards[i : i + 1, kept], values[i : i + 1, kept], dense, gamma=0.9, lam=0.8, whiten=False
        )
        torch.testing.assert_close(advantages[i, kept], short[0])
        torch.testing.assert_close(returns[i, kept], short_returns[0])
        assert (advantages[i, ~kept] == 0).all()
        assert (returns[i, ~kept] == 0).all()


def test_gae_lambda_0_is_the_td_error() -> None:
    rewards, values, mask = torch.randn(2, 4), torch.randn(2, 4), torch.ones(2, 4)
    following = torch.cat([values[:, 1:], torch.zeros(2, 1)], dim=1)
    advantages, _ = gae(rewards, values, mask, gamma=0.7, lam=0.0, whiten=False)
    torch.testing.assert_close(advantages, rewards + 0.7 * following - values)


def test_gae_decoupled_and_length_adaptive() -> None:
    """lam_critic changes the returns only; length_alpha gives each row its own λ = 1 - 1/(α L)."""
    rewards, values, mask = torch.randn(2, 6), torch.randn(2, 6), torch.ones(2, 6)
    mask[1, 3:] = 0
    both, _ = gae(rewards, values, mask, lam=0.5, whiten=False)
    _, critic = gae(rewards, values, mask, lam=1.0, whiten=False)
    advantages, returns = gae(rewards, values, mask, lam=0.5, lam_critic=1.0, whiten=False)
    assert torch.equal(advantages, both)
    assert torch.equal(returns, critic)
    adaptive, _ = gae(rewards, values, mask, length_alpha=0.5, whiten=False)
    for i, lam in enumerate([1 - 1 / 3, 1 - 1 / 1.5]):
        row = slice(i, i + 1)
        expected, _ = gae(rewards[row], values[row], mask[row], lam=lam, whiten=False)
        torch.testing.assert_close(adaptive[row], expected)


@pytest.mark.parametrize("options", [{"gamma": 1.5}, {"lam": -0.1}, {"lam": 0.5, "length_alpha": 0.05}])
def test_gae_refuses_options_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="gae"):
        gae(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), **options)


def test_returns_to_go_and_remax_tables() -> None:
    rewards, mask = T([[1.0, 50.0, 2.0, 4.0, NAN]]), T([[1.0, 0.0, 1.0, 1.0, 0.0]])
    assert returns_to_go(rewards, mask, 0.5).tolist() == [[3.0, 0.0, 4.0, 4.0, 0.0]]
    assert remax(rewards, mask, T([3.0])).tolist() == [[4.0, 0.0, 3.0, 1.0, 0.0]]


def test_reinforce_pp_table() -> None:
    """Two rows of two and one tokens with outcomes 1 and 4: tokens {1, 1, 4}, mean 2, sample variance 3."""
    rewards, mask = T([[0.0, 1.0], [4.0, 0.0]]), T([[1.0, 1.0], [1.0, 0.0]])
    expected = T([[-1.0, -1.0], [2.0, 0.0]]) / math.sqrt(3 + 1e-8)
    torch.testing.assert_close(reinforce_pp(rewards, mask), expected)


def test_equal_outcomes_give_exactly_zero() -> None:
    rewards, stats = kl_reward(torch.full((8,), 0.9), torch.ones(8, 5))
    assert (reinforce_pp(rewards, torch.ones(8, 5)) == 0).all()
    assert stats.values() == {}


@pytest.mark.parametrize("shape", [(0, 0), (2, 0), (2, 3)])
def test_nothing_trained_gives_zeros(shape: tuple[int, int]) -> None:
    mask, nothing = torch.zeros(shape), torch.full(shape, NAN)
    reward = torch.ones(shape[0])
    assert torch.equal(kl_reward(reward, mask, nothing, nothing, estimator="k3", coef=1.0)[0], mask)
    for out in (*gae(nothing, nothing, mask), reinforce_pp(nothing, mask), remax(nothing, mask, reward)):
        assert torch.equal(out, mask)


def test_whitening_of_rows_that_are_apart_is_that_of_the_batch() -> None:
    """From four numbers per row, in any number of parts; equal values become exact zeros."""
    generator = torch.Generator().manual_seed(2)
    values = 1e3 + torch.randn(9, 7, generator=generator, dtype=torch.float64)
    weights = torch.randint(0, 4, (9, 7), generator=generator)
    weights[4] = 0
    values[weights == 0] = torch.nan
    how = Whitening.of(moments(values, weights))
    torch.testing.assert_close(how(values, weights), whiten(values, weights), rtol=1e-12, atol=1e-12)
    apart = torch.cat([moments(part, w) for part, w in zip(values.split(2), weights.split(2), strict=True)])
    assert Whitening.of(apart) == how
    same = torch.full((9, 7), 0.1, dtype=torch.float64)
    assert not Whitening.of(moments(same, weights))(same, weights).any()
    assert not Whitening.of(moments(values, 0 * weights))(values, 0 * weights).any()
    assert Whitening.of(moments(values[:0], weights[:0])) == Whitening(0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (np.zeros(2), "'mine' .* it returned a ndarray"),
        ([0.0, 0.0], "advantages as a tensor .* a list"),
        (T([True, False]), r"torch.bool of shape \[2\]"),
        (T(1.0), r"\[2\] or \[2, 3\], .* of shape \[\]"),
        (torch.zeros(3), r"of shape \[3\]"),
        (torch.zeros(2, 4), r"of shape \[2, 4\]"),
        ((torch.zeros(2), torch.zeros(2, 1)), r"must return returns .* of shape \[2, 1\]"),
        ((torch.zeros(2),) * 3, "'mine' returned 3 things"),
        ({"advantages": torch.zeros(2), "bonus": 1.0}, "must return bonus .* a float"),
    ],
)
def test_what_an_estimator_of_ones_own_returns_is_checked(made: object, said: str) -> None:
    with pytest.raises(TrainError, match=said):
        made_columns("mine", made, ("advantages",), 2, 3)


def test_an_estimator_returns_numbers_of_rows_or_of_tokens() -> None:
    for values in (T([1, 0]), torch.zeros(2, 3), torch.zeros(2, dtype=torch.float64)):
        assert made_columns("mine", (values, values), ("returns",), 2, 3)["returns"] is values
    assert made_columns("mine", torch.zeros(2, 7), (), 2)["advantages"].shape == (2, 7)  # it reads no tokens
