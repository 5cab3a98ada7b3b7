"""GiGPO and HGPO: hand-computed tables on steps of trajectories, identities and rules."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from rondo.algorithms import check_algorithm, names
from rondo.algorithms.advantages.agentic import alike, gigpo, hgpo
from rondo.algorithms.advantages.group import grpo
from rondo.config.schema import AlgorithmConfig, FunctionConfig
from rondo.core.errors import ConfigError

T = torch.tensor

# Task 3: trajectory 8 of two steps (observations 10, 20) with outcome 1 and trajectory 5 of three steps
# (10, 10, 20) with outcome 0 and a penalty on its first step. Task 4: trajectory 6 of one step at 10.
STEPS = {
    "trajectory_id": T([5, 8, 6, 5, 8, 5]),
    "step_index": T([2, 1, 0, 0, 0, 1]),
    "group_id": T([3, 3, 4, 3, 3, 3]),
    "anchor_id": T([20, 20, 10, 10, 10, 10]),
    "step_reward": T([0.0, 1.0, 7.0, -1.0, 0.0, 0.0]),
}
OUTCOME = T([0.0, 1.0, 7.0, 0.0, 1.0, 0.0])
# Returns with γ = ½: trajectory 8: ½, 1. Trajectory 5: -1, 0, 0. Task 3 at observation 10: {½, -1, 0}, mean
# -1/6; at 20: {1, 0}.
STEP_PART = T([-0.5, 0.5, 0.0, -5 / 6, 4 / 6, 1 / 6])
EPISODE_PART = T(
    [-0.5, 0.5, 0.0, -0.5, 0.5, -0.5]
)  # the mean over two trajectories, not over five rows (D18)


def test_observations_that_are_alike() -> None:
    """By hand: `SequenceMatcher` has 2 · (equal characters) / (all of both). Each is compared with the first
    of a cluster, in the order of rows; those of other groups are never.
    """
    texts = ["abcdefghij", "abcdefghix", "abcdefgyyy", "abcdefghij", "abcdefghix", "abcdefyyyy"]
    rows = {"group_id": np.array([1, 1, 1, 2, 1, 1]), "row_id": np.array([5, 6, 7, 1, 8, 9])}
    own = np.array([10, 11, 12, 10, 11, 13])

    def made(similarity: float, order: list[int]) -> list[int]:
        columns = {name: column[order] for name, column in rows.items()}
        out = alike(own[order], [texts[i] for i in order], similarity=similarity, **columns)
        return out[np.argsort(order)].tolist()

    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 4, 2]):
        # ratios with the first: 0.9, 0.7, of another group, 0.9, 0.6; of the last two rows of group 1: 0.9
        assert made(0.95, order) == own.tolist()
        assert made(0.9, order) == [10, 10, 12, 10, 10, 12]
        assert made(0.7, order) == [10, 10, 10, 10, 10, 13]
        assert made(0.6, order) == [10, 10, 10, 10, 10, 10]
    assert own.tolist() == [10, 11, 12, 10, 11, 13]


@pytest.mark.parametrize("name", ["gigpo", "hgpo"])
@pytest.mark.parametrize("similarity", [0.0, 1.5])
def test_how_alike_observations_may_be(name: str, similarity: float) -> None:
    chosen = FunctionConfig(name, {"similarity": similarity})
    with pytest.raises(ConfigError, match="similarity"):
        check_algorithm(AlgorithmConfig(advantage=chosen))


def select(rows: Any) -> dict[str, torch.Tensor]:
    return {name: column[rows] for name, column in STEPS.items()}


def test_gigpo_table_without_std() -> None:
    out = gigpo(OUTCOME, **STEPS, gamma=0.5, step_weight=2.0, normalize_std=False)
    torch.testing.assert_close(out, EPISODE_PART + 2 * STEP_PART)


def test_gigpo_normalises_each_part_by_its_sample_std() -> None:
    out = gigpo(OUTCOME, **STEPS, gamma=0.5)
    pair = math.sqrt(0.5) + 1e-6  # of two values that differ by 1
    triple = math.sqrt((25 + 16 + 1) / 36 / 2) + 1e-6
    scale = T([pair, pair, 1.0, triple, triple, triple])
    torch.testing.assert_close(out, EPISODE_PART / pair + STEP_PART / scale)


def test_gigpo_of_single_steps_with_different_observations_is_grpo() -> None:
    generator = torch.Generator().manual_seed(0)
    reward, group = torch.randn(9, generator=generator), torch.randint(0, 3, (9,), generator=generator)
    one = {"step_index": torch.zeros(9, dtype=torch.long), "trajectory_id": torch.arange(9).flip(0)}
    out = gigpo(reward, reward, group_id=group, anchor_id=torch.arange(9), **one)
    assert torch.equal(out, grpo(reward, group))
    # The same observation everywhere: both parts are grpo.
    out = gigpo(reward, reward, group_id=group, anchor_id=0 * group, **one, step_weight=3.0)
    torch.testing.assert_close(out, 4 * grpo(reward, group))


def test_hgpo_table() -> None:
    """α = 1, depth 1. Contexts of two: 8: (10,20); 5: (10,10), (10,20): the last steps of both agree.

    Those two rows have A_0 = A_1 = ±½ and weights 1/3, 2/3; all others have k = 0 alone.
    """
    torch.testing.assert_close(hgpo(**STEPS, depth=1, gamma=0.5, normalize_std=False), STEP_PART)
    # Another observation before the last step of trajectory 5: its context of two is its own again. A longer
    # one with equal ends has it, though: observations (10, 10, 20) against (10, 20) differ at k = 2.
    torch.testing.assert_close(hgpo(**STEPS, depth=2, gamma=0.5, normalize_std=False), STEP_PART)


def test_hgpo_weights_count_from_zero() -> None:
    """Three trajectories end at observation 2; only the first two come from observation 1.

    Rewards 6, 0, 0: A_0 = 4, -2, -2; in the pair A_1 = 3, -3; weights 1 and 2^α (D3: not 2^α and 3^α).
    """
    rows = {
        "trajectory_id": T([0, 0, 1, 1, 2, 2]),
        "step_index": T([0, 1, 0, 1, 0, 1]),
        "group_id": torch.zeros(6, dtype=torch.long),
        "anchor_id": T([1, 2, 1, 2, 9, 2]),
        "step_reward": T([0.0, 6.0, 0.0, 0.0, 0.0, 0.0]),
    }
    for alpha, first in ((1.0, 1 / 3), (2.0, 1 / 5), (0.0, 1 / 2)):
        out = hgpo(**rows, depth=4, alpha=alpha, gamma=0.0, normalize_std=False)
        expected = [first * 4 + (1 - first) * 3, first * -2 + (1 - first) * -3, -2.0]
        torch.testing.assert_close(out[1::2], T(expected))
        assert torch.equal(out[::2], torch.zeros(3))


def test_hgpo_weights_are_not_rounded_to_float32() -> None:
    """Weights 1 and 2^0.3 of the example above: A = (4 + 3 · 2^0.3) / (1 + 2^0.3)."""
    rows = {
        "trajectory_id": T([0, 0, 1, 1, 2, 2]),
        "step_index": T([0, 1, 0, 1, 0, 1]),
        "group_id": torch.zeros(6, dtype=torch.long),
        "anchor_id": T([1, 2, 1, 2, 9, 2]),
        "step_reward": T([0.0, 6.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64),
    }
    out = hgpo(**rows, depth=1, alpha=0.3, gamma=0.0, normalize_std=False)
    assert out[1].item() == pytest.approx((4 + 3 * 2**0.3) / (1 + 2**0.3), rel=1e-14)


def test_hgpo_of_depth_0_is_the_step_part_of_gigpo() -> None:
    zero = torch.zeros_like(OUTCOME)
    for normalize in (True, False):
        expected = gigpo(zero, **STEPS, normalize_std=normalize)
        torch.testing.assert_close(hgpo(**STEPS, depth=0, normalize_std=normalize), expected)


@pytest.mark.parametrize("name", ["gigpo", "hgpo"])
def test_notes_are_no_steps(name: str) -> None:
    """Where notes fall changes nothing for the steps: neither their returns nor what was seen before them.
    A note has the return of the step that it was written for, and is compared with notes.

    Trajectory 5 (rewards -1, 0, 0) has a note (observation 99) before its second step, trajectory 8 (0, 1)
    one before its second: with γ = ½ the notes' returns are those of these steps, 0 and 1, mean ½.
    """
    # step_index: 5 has steps 0, note 1, steps 2, 3; 8 has step 0, note 1, step 2.
    places = T([3, 2, 0, 0, 0, 2])
    noted = {
        "trajectory_id": torch.cat([STEPS["trajectory_id"], T([5, 8])]),
        "step_index": torch.cat([places, T([1, 1])]),
        "group_id": torch.cat([STEPS["group_id"], T([3, 3])]),
        "anchor_id": torch.cat([STEPS["anchor_id"], T([99, 99])]),
        "step_reward": torch.cat([STEPS["step_reward"], T([math.nan, math.nan])]),
    }
    if name == "gigpo":
        outcome = torch.cat([OUTCOME, T([0.0, 1.0])])
        out = gigpo(outcome, **noted, gamma=0.5, step_weight=2.0, normalize_std=False)
        torch.testing.assert_close(out[:6], EPISODE_PART + 2 * STEP_PART)
        torch.testing.assert_close(out[6:], T([-0.5 + 2 * -0.5, 0.5 + 2 * 0.5]))
        return
    out = hgpo(**noted, depth=2, gamma=0.5, normalize_std=False)
    torch.testing.assert_close(out[:6], hgpo(**STEPS, depth=2, gamma=0.5, normalize_std=False))
    # What was seen before the notes is the first step's observation, 10, in both: A_0 = A_1 = ±½.
    torch.testing.assert_close(out[6:], T([-0.5, 0.5]))


@pytest.mark.parametrize("name", ["gigpo", "hgpo"])
def test_rules(name: str) -> None:
    """Order of rows and labels do not matter; equal values give exactly 0; nothing is not an error."""

    def estimate(rows: dict[str, torch.Tensor], reward: torch.Tensor) -> torch.Tensor:
        return gigpo(reward, **rows) if name == "gigpo" else hgpo(**rows)

    order = T([4, 0, 5, 2, 1, 3])
    out = estimate(STEPS, OUTCOME)
    relabelled = {key: 100 - 3 * c if key.endswith("_id") else c for key, c in select(order).items()}
    torch.testing.assert_close(estimate(relabelled, OUTCOME[order]), out[order])
    assert out[2] == 0  # alone in its task
    huge = estimate({**STEPS, "step_reward": 1e30 * STEPS["step_reward"]}, 1e30 * OUTCOME)
    assert huge.isfinite().all()
    equal = torch.full((8,), 0.9)
    same = {"group_id": T([0] * 8), "anchor_id": T([1] * 8), "step_index": T([0] * 8)}
    same |= {"trajectory_id": torch.arange(8), "step_reward": equal}
    assert torch.equal(estimate(same, equal), torch.zeros(8))
    assert estimate(select(slice(0, 0)), OUTCOME[:0]).shape == (0,)


def test_options_out_of_range_are_refused() -> None:
    for options in ({"gamma": 2.0}, {"depth": -1}, {"alpha": -1.0}):
        with pytest.raises(ConfigError, match=f"hgpo needs {next(iter(options))}"):
            hgpo(**STEPS, **options)
        with pytest.raises(ConfigError, match=f"hgpo needs {next(iter(options))}"):  # at the start of a run
            check_algorithm(AlgorithmConfig(advantage=FunctionConfig("hgpo", options)))


@pytest.mark.parametrize("name", ["grpo", "gpg", "gdpo", "passk", "gigpo", "hgpo", "tree_grpo"])
def test_an_eps_below_0_is_refused_at_the_start_of_a_run(name: str) -> None:
    """It turned advantages round where it outweighs the deviation."""
    with pytest.raises(ConfigError, match=f"{name} needs eps >= 0, got -1.0"):
        check_algorithm(AlgorithmConfig(advantage=FunctionConfig(name, {"eps": -1.0})))
    check_algorithm(AlgorithmConfig(advantage=FunctionConfig(name, {"eps": 0.0})))


@pytest.mark.parametrize("name", [name for name in names("advantage") if name != "passk_analytic"])
def test_every_estimator_can_be_called_at_the_start_of_a_run(name: str) -> None:
    check_algorithm(AlgorithmConfig(advantage=FunctionConfig(name)))
