"""PF-PPO: probabilities inside a prompt's samples, draws of them, and advantages that count the draws."""

from __future__ import annotations

import pytest
import torch

from rondo.algorithms import lookup
from rondo.algorithms.advantages.gae import gae
from rondo.algorithms.filters import draw, pf_ppo
from rondo.core.errors import ConfigError, TrainError

T = torch.tensor

# Groups 9 = {3, 1, 1, 0}, 2 = {-1, 2, 2}, 4 = {5}, interleaved.
REWARD = T([3.0, -1.0, 1.0, 2.0, 5.0, 1.0, 2.0, 0.0])
GROUP = T([9, 2, 9, 2, 4, 9, 2, 9])
TABLE = {
    "best": [1.0, 0.0, 0.0, 0.5, 1.0, 0.0, 0.5, 0.0],
    "best_random": [1 / 2, 1 / 2, 1 / 6, 1 / 4, 1.0, 1 / 6, 1 / 4, 1 / 6],
    "best_worst": [1 / 2, 1 / 2, 0.0, 1 / 4, 1.0, 0.0, 1 / 4, 1 / 2],
}


@pytest.mark.parametrize("strategy", sorted(TABLE))
def test_ranks_are_those_inside_a_group(strategy: str) -> None:
    """The best of the batch (5) is the best of its own group only (D5)."""
    out = pf_ppo(REWARD, GROUP, strategy=strategy)
    torch.testing.assert_close(out, T(TABLE[strategy], dtype=torch.float64))
    assert lookup("resample", "pf_ppo") is pf_ppo


def test_power_of_the_reward() -> None:
    out = pf_ppo(REWARD, GROUP, strategy="power", power=2.0)
    torch.testing.assert_close(out, T([9, 1, 1, 4, 1, 1, 4, 0]) / T([11.0, 9, 11, 9, 1, 11, 9, 11]).double())
    assert (
        pf_ppo(T([0.0, 0.0, 1e38, 1e38]), T([0, 0, 1, 1]), strategy="power", power=9.0).tolist() == [0.5] * 4
    )


@pytest.mark.parametrize(
    "options", [{"strategy": name} for name in TABLE] + [{"strategy": "power", "power": 3.0}]
)
def test_equal_rewards_are_uniform_and_groups_sum_to_1(options: dict) -> None:
    group = T([1] * 5 + [0] * 3)
    out = pf_ppo(torch.full((8,), 0.9), group, **options)
    torch.testing.assert_close(out, T([1 / 5] * 5 + [1 / 3] * 3, dtype=torch.float64))
    random = pf_ppo(torch.randn(8, generator=torch.Generator().manual_seed(0)), group, **options)
    sums = torch.zeros(2, dtype=torch.float64).index_add(0, group, random)
    torch.testing.assert_close(sums, torch.ones(2, dtype=torch.float64))
    assert pf_ppo(REWARD[:0], GROUP[:0], **options).shape == (0,)


@pytest.mark.parametrize(
    "options",
    [{"strategy": "worst"}, {"strategy": "power"}, {"power": 2.0}, {"strategy": "power", "power": -1.0}],
)
def test_options_that_do_not_fit_are_refused(options: dict) -> None:
    with pytest.raises(ConfigError, match="pf_ppo"):
        pf_ppo(REWARD, GROUP, **options)


def test_draws_are_as_many_as_rows_and_follow_the_probabilities() -> None:
    probabilities = pf_ppo(REWARD, GROUP, strategy="best_worst")
    total = torch.zeros(8, dtype=torch.float64)
    for seed in range(400):
        counts = draw(probabilities, GROUP, seed=seed)
        assert counts.dtype == torch.int64
        assert [counts[GROUP == g].sum().item() for g in (9, 2, 4)] == [4, 3, 1]
        total += counts
    size = T([4.0, 3, 4, 3, 1, 4, 3, 4])
    torch.testing.assert_close(total / 400 / size, probabilities, atol=0.05, rtol=0)
    assert (total[probabilities == 0] == 0).all()


@pytest.mark.parametrize("wrong", [0.0, float("nan"), -1.0, float("inf")])
def test_probabilities_that_cannot_be_drawn_by_are_named(wrong: float) -> None:
    probabilities = torch.where(GROUP == 9, wrong, 1.0)
    with pytest.raises(TrainError, match="resample made the probabilities"):
        draw(probabilities, GROUP, seed=0)


def test_a_draw_depends_on_seed_and_group_alone() -> None:
    probabilities = T([0.1, 0.5, 0.2, 0.3, 1.0, 0.3, 0.2, 0.4]).double()  # groups: .1 .2 .3 .4, .5 .3 .2, 1
    counts = draw(probabilities, GROUP, seed=7)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(draw(probabilities[order], GROUP[order], seed=7), counts[order])
    alone = GROUP == 9
    assert torch.equal(draw(probabilities[alone], GROUP[alone], seed=7), counts[alone])
    others = [draw(probabilities, GROUP, seed=seed) for seed in range(8, 16)]
    assert any(not torch.equal(other, counts) for other in others)
    assert draw(probabilities[:0], GROUP[:0], seed=7).shape == (0,)


def test_gae_counts_a_row_as_often_as_it_was_drawn() -> None:
    """A mask of multiplicities is the batch with repeated rows; a mask of 0 and 1 is what it was."""
    generator = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(4, 5, generator=generator), torch.randn(4, 5, generator=generator)
    mask = (torch.rand(4, 5, generator=generator) < 0.7).float()
    times = T([2, 0, 1, 3])
    kept = torch.repeat_interleave(torch.arange(4), times)
    expected, _ = gae(rewards[kept], values[kept], mask[kept], lam=0.9)
    weighted, _ = gae(rewards, values, mask * times.unsqueeze(1), lam=0.9)
    torch.testing.assert_close(weighted[kept], expected)
    assert (weighted[1] == 0).all()
    assert torch.equal(gae(rewards, values, mask)[0], gae(rewards, values, mask.bool())[0])
