"""Group baselines: hand-computed tables, identities between estimators, and rules for all of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rondo.algorithms import columns_read, lookup
from rondo.algorithms.advantages.group import (
    dr_grpo,
    gdpo,
    gpg,
    grpo,
    opo,
    passk,
    passk_analytic,
    reinforce_pp_baseline,
    rloo,
    win_rate,
)
from rondo.algorithms.statistics import whiten

T = torch.tensor
GROUP_ESTIMATORS = ["grpo", "dr_grpo", "rloo", "opo", "gpg", "reinforce_pp_baseline", "passk", "win_rate"]


def estimate(name: str, reward: torch.Tensor, group_id: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    columns = {"reward": reward, "group_id": group_id, "num_trained_tokens": lengths}
    function = lookup("advantage", name)
    return function(**{column: columns[column] for column in columns_read(function)})


# Groups 7 = {1, 0, 0, 1}, 3 = {2, 5}, 9 = {4}, interleaved.
REWARD = T([1.0, 2.0, 0.0, 4.0, 0.0, 5.0, 1.0])
GROUP = T([7, 3, 7, 9, 7, 3, 7])
LENGTHS = T([1, 2, 3, 9, 4, 2, 2])


def test_grpo_table() -> None:
    half = 0.5 / (math.sqrt(1 / 3) + 1e-6)  # sample std of {1,0,0,1}: sqrt(4 · 0.25 / 3)
    pair = 1.5 / (math.sqrt(4.5) + 1e-6)  # of {2,5}: sqrt(2 · 2.25 / 1)
    expected = T([half, -pair, -half, 0.0, -half, pair, half])
    torch.testing.assert_close(grpo(REWARD, GROUP), expected, rtol=1e-6, atol=0)


def test_dr_grpo_rloo_and_opo_tables() -> None:
    assert dr_grpo(REWARD, GROUP).tolist() == [0.5, -1.5, -0.5, 0.0, -0.5, 1.5, 0.5]
    torch.testing.assert_close(rloo(REWARD, GROUP), T([2 / 3, -3, -2 / 3, 0, -2 / 3, 3, 2 / 3]))
    # group 7: (1·1 + 2·1)/10 = 0.3; group 3: (2·2 + 2·5)/4 = 3.5
    torch.testing.assert_close(opo(REWARD, GROUP, LENGTHS), T([0.7, -1.5, -0.3, 0.0, -0.3, 1.5, 0.7]))


def test_gpg_scales_by_the_share_of_useful_groups() -> None:
    """3 groups, one of them (of a single response) constant: α = 3/2. It counts groups, not rewards (D1)."""
    torch.testing.assert_close(gpg(REWARD, GROUP), 1.5 * dr_grpo(REWARD, GROUP))
    signs = T([1.0, -1.0, -1.0, -1.0])
    torch.testing.assert_close(gpg(signs, T([0, 0, 1, 1])), T([2.0, -2.0, 0.0, 0.0]))


def test_reinforce_pp_baseline_equals_whitening_broadcast_tokens() -> None:
    mask = torch.arange(9) < LENGTHS.unsqueeze(1)
    broadcast = (dr_grpo(REWARD, GROUP).unsqueeze(1) * mask).float()
    tokens = whiten(broadcast, mask)
    per_row = reinforce_pp_baseline(REWARD, GROUP, LENGTHS)
    torch.testing.assert_close(per_row.double(), torch.where(GROUP == 9, 0.0, tokens[:, 0]))  # 9 is alone
    assert (tokens[~mask] == 0).all()


def test_whiten_table() -> None:
    """Weights 1, 2: mean 2, var = (1·4 + 2·1)/(3-1) = 3."""
    out = whiten(T([0.0, 3.0, 99.0]), T([1, 2, 0]))
    torch.testing.assert_close(out, T([-2.0, 1.0, 0.0], dtype=torch.float64) / math.sqrt(3 + 1e-8))
    assert whiten(T([5.0, float("nan")]), T([1, 0])).tolist() == [
        0.0,
        0.0,
    ]  # one token: no spread, no error (D20)


def test_passk_rewards_the_lead_of_the_best() -> None:
    reward, group = T([0.2, 0.9, 0.5, 3.0, 3.0, 1.0]), T([0, 0, 0, 1, 1, 2])
    torch.testing.assert_close(
        passk(reward, group), T([0.0, 0.4, 0.0, 0.0, 0.0, 0.0])
    )  # a tie and a single: 0
    scaled = passk(reward, group, normalize_std=True)
    assert scaled[1] == pytest.approx(0.4 / (T([0.2, 0.9, 0.5]).std().item() + 1e-6))


def test_passk_analytic_table() -> None:
    """N = 4, 3 wrong, k = 2: R̄ = 1 - 3/6 = ½, σ = ½; right (1-½)/½ = 1, wrong (½ - 2/3)/½ = -1/3."""
    reward, group = T([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64)
    torch.testing.assert_close(passk_analytic(reward, group, k=2), T([1.0, -1 / 3, -1 / 3, -1 / 3]))
    assert passk_analytic(T([1.0, 1.0]), T([0, 0]), k=1).tolist() == [0.0, 0.0]


def test_passk_analytic_with_k_1_is_grpo_with_the_population_std() -> None:
    reward, group = T([1.0, 0.0, 0.0, 1.0, 1.0]), torch.zeros(5, dtype=torch.int64)
    expected = (reward - reward.mean()) / reward.std(correction=0)
    torch.testing.assert_close(passk_analytic(reward, group, k=1), expected)


def test_gdpo_of_one_score_is_whitened_grpo_and_ignores_a_constant_score() -> None:
    scores = REWARD.unsqueeze(1)
    expected = whiten(grpo(REWARD.double(), GROUP), LENGTHS).float()
    assert expected[3] != 0  # the group of one: what whitening makes of 0 is not its advantage
    expected[3] = 0.0
    torch.testing.assert_close(gdpo(scores, GROUP, LENGTHS), expected)
    constant = torch.cat([scores, torch.full_like(scores, 0.9)], dim=1)
    torch.testing.assert_close(gdpo(constant, GROUP, LENGTHS), expected)


def test_gdpo_keeps_a_small_component_visible_and_skips_missing_scores() -> None:
    group, lengths = torch.zeros(4, dtype=torch.int64), torch.ones(4)
    scores = T([[1000.0, 0.0], [-1000.0, 0.0], [1000.0, 1.0], [-1000.0, 1.0]])
    out = gdpo(scores, group, lengths)
    assert out[2] > out[0]
    assert out[3] > out[1]
    assert out[2].item() == pytest.approx(-out[1].item())
    missing = gdpo(T([[1.0], [float("nan")], [0.0]]), torch.zeros(3, dtype=torch.int64), torch.ones(3))
    assert missing.isfinite().all()
    assert missing[1] == 0


def test_gdpo_is_0_where_no_known_score_tells_a_row_from_its_group() -> None:
    """Group 0: the first score differs, but row 2 has only the second; 1: both constant; row 6 has none."""
    nan = float("nan")
    scores = T([[1.0, 5.0], [0.0, 5.0], [nan, 5.0], [0.3, 2.0], [0.3, 2.0], [1.0, 0.0], [nan, nan]])
    group, lengths = T([0, 0, 0, 1, 1, 2, 0]), T([5, 1, 1, 1, 1, 1, 1])
    out = gdpo(scores, group, lengths)
    assert (out != 0).tolist() == [True, True] + [False] * 5
    assert out[0] > 0 > out[1]


def test_grpo_without_std_is_dr_grpo_and_rloo_is_its_multiple() -> None:
    reward, group = torch.randn(40), torch.randint(0, 6, (40,), generator=torch.Generator().manual_seed(1))
    without = grpo(reward, group, normalize_std=False)
    assert torch.equal(without, dr_grpo(reward, group))
    size = torch.bincount(group)[group].float()
    torch.testing.assert_close(rloo(reward, group), without * size / (size - 1).clamp(min=1))


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@pytest.mark.parametrize("value", [0.9, 9.1, 100.7, 1e-30, -0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(name: str, value: float, dtype: torch.dtype) -> None:
    """D7: eight rewards of 0.9 are 0.056 in a widely used implementation."""
    reward = torch.full((11,), value, dtype=dtype)
    out = estimate(name, reward, T([0] * 8 + [1] * 2 + [2]), torch.arange(1, 12))
    assert (out == 0).all()
    assert out.dtype == dtype


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_a_group_of_one_has_no_advantage(name: str) -> None:
    assert estimate(name, T([5.0, 5.0]), T([1, 2]), T([3, 4])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_rows_without_trained_tokens_are_harmless(name: str) -> None:
    out = estimate(name, T([1.0, 0.0, 2.0, 5.0]), T([0, 0, 1, 1]), T([0, 3, 0, 0]))
    assert out.isfinite().all()


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_an_empty_batch_is_legal(name: str) -> None:
    empty = torch.zeros(0)
    assert estimate(name, empty, empty.long(), empty.long()).shape == (0,)


rewards = st.lists(st.integers(-8, 8).map(lambda i: i / 4), min_size=1, max_size=24)


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@settings(max_examples=25, deadline=None)
@given(values=rewards, data=st.data())
def test_order_and_shift_do_not_matter(name: str, values: list[float], data: st.DataObject) -> None:
    """Permuting rows permutes advantages; a constant added to all rewards and new labels change nothing."""
    size = len(values)
    reward = T(values)
    group = T(data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size)))
    lengths = T(data.draw(st.lists(st.integers(1, 9), min_size=size, max_size=size)))
    order = T(data.draw(st.permutations(range(size))))
    out = estimate(name, reward, group, lengths)
    assert out.isfinite().all()
    moved = estimate(name, reward[order], 100 - 7 * group[order], lengths[order])
    # passk gives a tie's lead to nobody, so the order of equal rewards cannot show either.
    torch.testing.assert_close(moved, out[order])
    torch.testing.assert_close(estimate(name, reward + 2, group, lengths), out, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "gpg"])
def test_advantages_of_a_group_sum_to_zero(name: str) -> None:
    out = estimate(
        name, torch.randn(12, generator=torch.Generator().manual_seed(0)), T([0, 1, 2] * 4), torch.ones(12)
    )
    sums = torch.zeros(3).index_add(0, T([0, 1, 2] * 4), out)
    torch.testing.assert_close(sums, torch.zeros(3), rtol=0, atol=1e-5)


def test_win_rate_table() -> None:
    """Group 7 = {1, 0, 0, 1}: ones beat two of three, tie with one: 2.5/3; 3 = {2, 5}; 9 is alone."""
    reward, group = T([1.0, 2.0, 0.0, 4.0, -0.0, 5.0, 1.0]), T([7, 3, 7, 9, 7, 3, 7])
    third = 1 / 3
    torch.testing.assert_close(win_rate(reward, group), T([third, -0.5, -third, 0.0, -third, 0.5, third]))
    assert lookup("advantage", "win_rate") is win_rate


def test_win_rate_by_pairs() -> None:
    generator = torch.Generator().manual_seed(2)
    reward, group = (
        torch.randint(0, 4, (30,), generator=generator) / 7,
        torch.randint(0, 5, (30,), generator=generator),
    )
    wins = (reward[:, None] > reward) + 0.5 * (reward[:, None] == reward)
    others = (group[:, None] == group) & ~torch.eye(30, dtype=torch.bool)
    expected = ((wins * others).sum(1) / others.sum(1)).nan_to_num(0.5) - 0.5  # alone: 0 / 0
    torch.testing.assert_close(win_rate(reward, group), expected)


def test_win_rate_of_equal_rewards_is_exactly_zero_and_huge_ones_are_ranks() -> None:
    assert torch.equal(win_rate(torch.full((9,), 0.9), T([0] * 7 + [1, 2])), torch.zeros(9))
    assert win_rate(T([1e38, -1e38, 3.0]), T([0, 0, 0])).tolist() == [0.5, -0.5, 0.0]
    assert win_rate(T([]), T([], dtype=torch.long)).shape == (0,)
