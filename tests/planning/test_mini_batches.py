"""Mini-batches of whole prompt groups, their order, and loss weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rondo.algorithms.aggregation import loss_weights, token_mean
from rondo.algorithms.registry import bind, lookup
from rondo.config.schema import FunctionConfig
from rondo.core.errors import TrainError
from rondo.planning.batches import mini_batch_orders, plan_mini_batches


@settings(max_examples=60, deadline=None)
@given(
    group_ids=st.lists(st.integers(0, 1 << 40), max_size=60),
    size=st.integers(1, 9),
    seed=st.integers(-3, 1 << 62),
    step=st.integers(0, 1000),
    data=st.data(),
)
def test_mini_batches_hold_whole_groups_in_even_numbers(
    group_ids: list[int], size: int, seed: int, step: int, data: st.DataObject
) -> None:
    ids = np.array(group_ids, np.int64)
    plan = plan_mini_batches(ids, size, seed=seed, step=step)
    groups = np.unique(ids)
    where = {group: np.unique(plan[ids == group]) for group in groups}
    assert all(len(numbers) == 1 for numbers in where.values())
    counts = np.bincount([numbers[0] for numbers in where.values()]) if len(groups) else np.zeros(0)
    assert len(counts) == -(-len(groups) // size)
    assert counts.max(initial=0) <= size
    assert counts.max(initial=0) - counts.min(initial=size) <= 1
    order = np.array(data.draw(st.permutations(range(len(ids)))), np.int64)
    assert np.array_equal(plan_mini_batches(ids[order], size, seed=seed, step=step), plan[order])


def test_membership_changes_with_step_and_seed() -> None:
    ids = np.arange(32)
    plans = {plan_mini_batches(ids, 8, seed=s, step=t).tobytes() for s in (0, 1) for t in (0, 1, 2)}
    assert len(plans) == 6


def test_a_full_batch_is_one_mini_batch_and_a_short_step_has_fewer() -> None:
    assert plan_mini_batches(np.repeat(np.arange(16), 8), 16, seed=0, step=0).max() == 0
    short = plan_mini_batches(np.repeat(np.arange(5), 8), 4, seed=0, step=0)
    assert sorted(np.bincount(short).tolist()) == [16, 24]


def test_a_mini_batch_of_nothing_is_refused() -> None:
    with pytest.raises(TrainError, match="mini_batch_size=0"):
        plan_mini_batches(np.arange(3), 0, seed=0, step=0)


def test_each_epoch_visits_every_mini_batch_in_its_own_order() -> None:
    orders = mini_batch_orders(np.array([7, 0, 3]), 4, seed=0, step=3)
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert mini_batch_orders(np.arange(8), 2, seed=0, step=3) == orders[:2]
    assert mini_batch_orders(np.arange(0), 1, seed=0, step=0) == [[]]


TOKENS = np.array([4, 0, 2, 6, 3])
MINI_BATCH = np.array([0, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("token-mean", {}, [1 / 6, 0, 1 / 6, 1 / 9, 1 / 9]),
        ("token-sum", {}, [1, 0, 1, 1, 1]),
        ("seq-mean-token-sum", {}, [1 / 2, 0, 1 / 2, 1 / 2, 1 / 2]),
        ("seq-mean-token-mean", {}, [1 / 8, 0, 1 / 4, 1 / 12, 1 / 6]),
        ("seq-mean-token-sum-norm", {"divisor": 10}, [1 / 20, 0, 1 / 20, 1 / 20, 1 / 20]),
        # Chunks of 4 and 0 tokens, and of 2; of 9.
        ("chunk-mean-token-mean", {"rows": 2}, [1 / 8, 0, 1 / 4, 1 / 9, 1 / 9]),
    ],
)
def test_loss_weights_table(name: str, options: dict[str, float], expected: list[float]) -> None:
    """Per mini-batch; a row without trained tokens counts nowhere (D16)."""
    weights = loss_weights(bind("aggregation", FunctionConfig(name, options)), TOKENS, MINI_BATCH)
    assert weights.dtype == np.float64
    np.testing.assert_allclose(weights, expected, rtol=1e-15)


@settings(max_examples=40, deadline=None)
@given(tokens=st.lists(st.integers(0, 50), min_size=1, max_size=30), data=st.data())
def test_mean_weights_sum_to_one_over_each_mini_batch(tokens: list[int], data: st.DataObject) -> None:
    counts = np.array(tokens)
    mini_batch = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(tokens), max_size=len(tokens))))
    for name in ("token-mean", "seq-mean-token-mean"):
        weights = loss_weights(lookup("aggregation", name), counts, mini_batch)
        for number in np.unique(mini_batch):
            rows = mini_batch == number
            assert (weights[rows] * counts[rows]).sum() == pytest.approx(1.0 if counts[rows].any() else 0.0)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("trajectory-mean-token-sum", {}, [1 / 2, 0, 1 / 2, 1, 1]),
        ("trajectory-mean-token-mean", {}, [1 / 8, 0, 1 / 4, 1 / 9, 1 / 9]),
        ("trajectory-mean-token-sum-norm", {"divisor": 10}, [1 / 20, 0, 1 / 20, 1 / 10, 1 / 10]),
        ("token-mean", {}, [1 / 6, 0, 1 / 6, 1 / 9, 1 / 9]),
    ],
)
def test_loss_weights_of_trajectories(name: str, options: dict[str, float], expected: list[float]) -> None:
    """Rows 0 and 1 are one trajectory (its second row has no token), 3 and 4 another."""
    aggregate = bind("aggregation", FunctionConfig(name, options))
    weights = loss_weights(aggregate, TOKENS, MINI_BATCH, np.array([8, 8, 1, 4, 4]))
    np.testing.assert_allclose(weights, expected, rtol=1e-15)
    for mode in ("token-sum", "token-sum-norm", "token-mean"):  # of a row each, they are those of rows
        given = {"divisor": 10.0} if mode == "token-sum-norm" else {}
        alone, rows = (
            loss_weights(
                bind("aggregation", FunctionConfig(f"{kind}-mean-{mode}", given)), TOKENS, MINI_BATCH
            )
            for kind in ("trajectory", "seq")
        )
        np.testing.assert_array_equal(alone, rows)


def test_nothing_to_train_and_nothing_at_all() -> None:
    assert loss_weights(token_mean, np.zeros(3), np.zeros(3)).tolist() == [0, 0, 0]
    assert loss_weights(token_mean, np.zeros(0), np.zeros(0)).tolist() == []


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (1.0, r"\[2\]; it returned 1. of shape \[\]"),
        ([[1.0, 1.0]], r"shape \[2\]; .* of shape \[1, 2\]"),
        ([1.0, np.nan], r"<lambda> must .* \[ ?1. nan\]"),
        ([np.inf, 1.0], r"it returned \[inf +1.\]"),
        ([1.0, -1.0], r"algorithm.aggregation: .*\[ 1. -1.\]"),
    ],
)
def test_what_an_aggregation_of_ones_own_returns_is_checked(made: object, said: str) -> None:
    with pytest.raises(TrainError, match=said):
        loss_weights(lambda num_trained_tokens: made, np.array([3.0, 2.0]), np.zeros(2))
