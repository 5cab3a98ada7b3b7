"""Balanced shards and micro-batches: the guarantees that the docstrings give, for any lengths."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rondo.core.errors import TrainError
from rondo.planning.batches import attention_work, balance, micro_batches, rows_of_units
from tests.messages import full_text

LENGTHS = st.lists(st.integers(0, 60), max_size=40)


@settings(max_examples=80, deadline=None)
@given(costs=LENGTHS, parts=st.integers(1, 6), num_groups=st.integers(1, 3))
def test_balance_keeps_every_row_once_and_each_group_even(
    costs: list[int], parts: int, num_groups: int
) -> None:
    values = np.asarray(costs, np.int64)
    groups = np.arange(len(costs)) % num_groups
    shards = balance(values, parts, groups)
    assert len(shards) == parts
    assert sorted(np.concatenate(shards).tolist()) == list(range(len(costs)))
    assert all(np.all(np.diff(shard) > 0) for shard in shards)
    for group in range(num_groups):
        in_group = [values[shard[groups[shard] == group]].sum() for shard in shards]
        assert max(in_group) - min(in_group) <= values[groups == group].max(initial=0)
    again = balance(values, parts, groups)
    assert all(np.array_equal(a, b) for a, b in zip(shards, again, strict=True))


def test_balance_finds_the_perfect_cut() -> None:
    assert [shard.tolist() for shard in balance(np.array([4, 5, 6, 7, 8]), 2)] != []
    sums = sorted(
        int(np.array([10, 9, 8, 7, 6, 5, 4, 3, 2, 1])[s].sum()) for s in balance(np.arange(10, 0, -1), 5)
    )
    assert sums == [11, 11, 11, 11, 11]


@settings(max_examples=80, deadline=None)
@given(costs=LENGTHS, parts=st.integers(1, 6), num_groups=st.integers(1, 3))
def test_equal_sizes_are_equal_to_one_row_in_each_group(
    costs: list[int], parts: int, num_groups: int
) -> None:
    values = np.asarray(costs, np.int64)
    groups = np.arange(len(costs)) % num_groups
    shards = balance(values, parts, groups, equal_sizes=True)
    assert sorted(np.concatenate(shards).tolist()) == list(range(len(costs)))
    for group in range(num_groups):
        sizes = [int((groups[shard] == group).sum()) for shard in shards]
        assert max(sizes) - min(sizes) <= 1


def test_equal_sizes_may_cost_balance() -> None:
    """One row as long as all others: alone, or with three of them."""
    costs = np.array([7, 1, 1, 1, 1, 1, 1, 1])
    assert sorted(int(costs[shard].sum()) for shard in balance(costs, 2)) == [7, 7]
    assert sorted(int(costs[shard].sum()) for shard in balance(costs, 2, equal_sizes=True)) == [4, 10]
    rows = np.array([10, 9, 8, 7, 6, 5, 4, 3])
    even = balance(rows, 2, equal_sizes=True)
    assert [(len(shard), int(rows[shard].sum())) for shard in even] == [(4, 26), (4, 26)]
    pairs = np.array([0, 0, 1, 1, 2, 2, 3, 3])
    together = balance(rows, 2, units=pairs, equal_sizes=True)
    assert [sorted(set(pairs[shard].tolist())) for shard in together] == [[0, 3], [1, 2]]


def test_the_work_of_attention_by_hand() -> None:
    """4 + 4 against 8: the same tokens, but 8² is twice 2 · 4²; with much linear work it does not matter."""
    assert attention_work(np.array([4, 8]), linear=10.0).tolist() == [56.0, 144.0]
    assert attention_work(np.array([2])).tolist() == [2 * 24576.0 + 4]
    lengths = np.array([8000, 4000, 4000, 4000, 4000])
    by_tokens, by_work = (
        {tuple(sorted(lengths[shard].tolist())) for shard in balance(costs, 2)}
        for costs in (lengths, attention_work(lengths, linear=1000.0))
    )
    assert by_tokens == {(4000, 8000), (4000, 4000, 4000)}
    assert by_work == {(8000,), (4000, 4000, 4000, 4000)}


def test_balance_evens_out_over_groups_too() -> None:
    """One heavy row per group and two parts: the heavy rows must not all land on part 0."""
    costs, groups = np.array([9, 1, 9, 1, 9, 1, 9, 1]), np.array([0, 0, 1, 1, 2, 2, 3, 3])
    assert [int(costs[shard].sum()) for shard in balance(costs, 2, groups)] == [20, 20]


def test_balance_with_fewer_rows_than_parts_leaves_empty_parts() -> None:
    assert sorted(len(shard) for shard in balance(np.array([3.0, 2.0]), 4)) == [0, 0, 1, 1]
    assert [len(shard) for shard in balance(np.empty(0), 3)] == [0, 0, 0]


def test_balance_refuses_nonsense() -> None:
    with pytest.raises(TrainError, match="not negative"):
        balance(np.array([1.0, float("nan")]), 2)
    with pytest.raises(TrainError, match="3 costs and 2 group"):
        balance(np.ones(3), 2, np.zeros(2))


@settings(max_examples=80, deadline=None)
@given(lengths=LENGTHS, budget=st.integers(60, 200))
def test_micro_batches_never_exceed_the_budget_and_are_few(lengths: list[int], budget: int) -> None:
    values = np.asarray(lengths, np.int64)
    bins = micro_batches(values, budget)
    assert sorted(itertools.chain.from_iterable(b.tolist() for b in bins)) == list(range(len(lengths)))
    assert all(values[b].sum() <= budget and np.all(np.diff(b) > 0) for b in bins)
    assert len(bins) <= max(1, 2 * values.sum() / budget) + 1
    sums = [int(values[b].sum()) for b in bins]
    assert sums == sorted(sums, reverse=True)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 10), min_size=1, max_size=6))
def test_micro_batches_close_to_the_fewest(lengths: list[int]) -> None:
    budget, values = 12, np.asarray(lengths)

    def fewest() -> int:
        for k in range(1, len(lengths) + 1):
            for where in itertools.product(range(k), repeat=len(lengths)):
                if np.bincount(where, values, k).max() <= budget:
                    return k
        raise AssertionError

    assert len(micro_batches(values, budget)) <= 11 / 9 * fewest() + 1


def test_micro_batches_name_the_row_over_the_budget() -> None:
    with pytest.raises(TrainError, match=full_text("row 1 has 9 tokens")):
        micro_batches(np.array([3, 9, 8, 12]), 8)


# Units of 1–3 rows as (number, lengths); numbers repeat, so that the rows of a unit need not be adjacent.
UNITS = st.lists(st.tuples(st.integers(-3, 12), st.integers(0, 12)), max_size=24)


@settings(max_examples=80, deadline=None)
@given(rows=UNITS, room=st.integers(0, 40))
def test_micro_batches_never_split_a_unit(rows: list[tuple[int, int]], room: int) -> None:
    units, lengths = (np.array([row[i] for row in rows], np.int64) for i in (0, 1))
    members = [np.flatnonzero(units == unit) for unit in dict.fromkeys(units.tolist())]
    assert [part.tolist() for part in rows_of_units(units)] == [part.tolist() for part in members]
    budget = max((int(lengths[part].sum()) for part in members), default=0) + room
    bins = micro_batches(lengths, budget, units)
    assert sorted(itertools.chain.from_iterable(b.tolist() for b in bins)) == list(range(len(rows)))
    assert all(lengths[part].sum() <= budget for part in bins)
    for part in bins:
        inside = [
            where for where in members if where[0] in part
        ]  # in the batch's order, rows next to each other
        assert part.tolist() == np.concatenate(inside).tolist()


@settings(max_examples=60, deadline=None)
@given(rows=UNITS, parts=st.integers(1, 5), num_groups=st.integers(1, 3))
def test_balance_never_splits_a_unit(rows: list[tuple[int, int]], parts: int, num_groups: int) -> None:
    units, costs = (np.array([row[i] for row in rows], np.int64) for i in (0, 1))
    groups = units % num_groups
    shards = balance(costs, parts, groups, units)
    assert sorted(np.concatenate(shards).tolist()) == list(range(len(rows)))
    assert all(np.all(np.diff(shard) > 0) for shard in shards)
    owner = np.empty(len(rows), np.int64)
    for part, shard in enumerate(shards):
        owner[shard] = part
    assert all(len(set(owner[units == unit].tolist())) == 1 for unit in units)
    for group in range(num_groups):
        sums = [costs[shard[groups[shard] == group]].sum() for shard in shards]
        largest = max((int(costs[units == unit].sum()) for unit in units[groups == group]), default=0)
        assert max(sums) - min(sums) <= largest


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, parts=st.integers(1, 4))
def test_units_of_one_row_change_nothing(lengths: list[int], parts: int) -> None:
    values = np.asarray(lengths, np.int64)
    alone = np.arange(len(values)) * 7 % 1009  # all different, in no order
    for with_units, without in (
        (micro_batches(values, 90, alone), micro_batches(values, 90)),
        (balance(values, parts, units=alone), balance(values, parts)),
    ):
        assert [part.tolist() for part in with_units] == [part.tolist() for part in without]


def test_units_that_cannot_be_kept_are_named() -> None:
    with pytest.raises(TrainError, match=full_text("unit 5 (rows 0, 2) has 9 tokens")):
        micro_batches(np.array([4, 1, 5]), 8, np.array([5, 3, 5]))
    with pytest.raises(TrainError, match=r"unit 5 lies in the mini-batches \[0, 1\]"):
        balance(np.ones(3), 2, np.array([0, 0, 1]), np.array([5, 3, 5]))


def joined_as_published(costs: np.ndarray, parts: int, equal_sizes: bool) -> list[list[int]]:
    """Largest differencing as it is written down: all parts of every partial partition, empty ones too."""
    at_once, order = 1, np.arange(len(costs))
    if equal_sizes:
        at_once, order = parts, np.argsort(-costs, kind="stable")
    waiting = []
    for start in range(0, len(costs), at_once):
        rows = order[start : start + at_once]
        members = [[int(row)] for row in rows] + [[] for _ in range(parts - len(rows))]
        waiting.append((start, np.append(costs[rows], np.zeros(parts - len(rows))), members))
    while len(waiting) > 1:
        waiting.sort(key=lambda one: (one[1][-1] - one[1][0], one[0]))
        (first, sums, members), (_, others, theirs) = waiting.pop(0), waiting.pop(0)
        sums = sums + others[::-1]
        order = np.argsort(-sums, kind="stable")
        members = [members[k] + theirs[parts - 1 - k] for k in order]
        waiting.append((first, sums[order], members))
    return [sorted(rows) for rows in waiting[0][2]]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=40)
    | st.lists(st.floats(0.5, 1e6), min_size=1, max_size=40),
    st.integers(2, 9),
    st.booleans(),
)
def test_balance_is_largest_differencing_to_the_row(
    costs: list[float], parts: int, equal_sizes: bool
) -> None:
    """The short way through sorted lists places every row where the long way does, ties included."""
    values = np.array(costs, np.float64)
    expected = joined_as_published(values, parts, equal_sizes)
    found = balance(values, parts, equal_sizes=equal_sizes)
    assert sorted(rows.tolist() for rows in found) == sorted(expected)
