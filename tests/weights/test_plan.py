"""Transfer plans: by hand, and the properties that every plan has."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rondo.core.errors import WeightSyncError
from rondo.weights.layout import Box, Layout, Parameter, Spec
from rondo.weights.plan import Move, TransferPlan, plan_transfer

W = Parameter("w", (4, 3), "float32")
BIAS = Parameter("b", (2,), "bfloat16")


def _rounds(plan: TransferPlan) -> list[list[Move]]:
    """The moves of every round: of all receivers, one after another."""
    by_rank = [list(plan.receives(rank)) for rank in plan.target.ranks]
    return [[move for moves in together for move in moves] for together in zip(*by_rank, strict=True)]


def test_two_shards_to_one_whole_by_hand() -> None:
    source, target = Layout.sharded([W, BIAS], [0, 1]), Layout.replicated([W, BIAS], [2])
    plan = plan_transfer(source, target, 1000)
    top, bottom = Box((0, 0), (2, 3)), Box((2, 0), (2, 3))
    assert _rounds(plan) == [
        [
            Move("w", top, 0, 2, 24),
            Move("w", bottom, 1, 2, 24),
            Move("b", Box((0,), (1,)), 0, 2, 2),
            Move("b", Box((1,), (1,)), 1, 2, 2),
        ]
    ]
    assert [move.box for moves in plan.sends(1) for move in moves] == [bottom, Box((1,), (1,))]
    assert (plan.bytes_moved, plan.peak_bytes) == (52, 52)  # the receiver has all of it at one time
    assert (plan.targets(0), plan.targets(1), plan.sources(2)) == ([2], [2], [0, 1])


def test_a_small_bucket_makes_rounds_and_cuts_tensors() -> None:
    source, target = Layout.sharded([W, BIAS], [0]), Layout.replicated([W, BIAS], [1])
    plan = plan_transfer(source, target, 20)
    rows = [Box((i, 0), (1, 3)) for i in range(4)]
    assert [[move.box for move in moves] for moves in plan.receives(1)] == [
        [rows[0]],
        [rows[1]],
        [rows[2]],
        [rows[3]],
        [Box((0,), (2,))],
    ]
    assert plan.peak_bytes == 48  # the receiver puts w together: it is larger than a bucket
    slices = plan_transfer(source, Layout.replicated([W, BIAS], [1], whole_tensors=False), 20)
    assert slices.peak_bytes == 16  # the last row and b share a round
    with pytest.raises(ValueError, match="bucket_bytes=3 holds no element of 'w'"):
        plan_transfer(source, target, 3)


def test_a_plan_without_parameters_moves_nothing() -> None:
    plan = plan_transfer(Layout.sharded([], [0]), Layout.replicated([], [1]), 20)
    assert (plan.num_rounds, plan.bytes_moved, plan.peak_bytes) == (0, 0, 0)
    assert (plan.targets(0), plan.sources(1)) == ([], [])


def test_what_a_rank_has_it_does_not_receive() -> None:
    """Four shards gathered on the same four ranks: the all-gather's lower bound, (n - 1) copies."""
    source, target = Layout.sharded([W], range(4)), Layout.replicated([W], range(4))
    plan = plan_transfer(source, target, 1000)
    assert plan.bytes_moved == 3 * W.num_bytes
    local = [move for move in plan.moves() if move.source == move.target]
    assert len(local) == 4
    assert {move.box for move in local} == {Box((i, 0), (1, 3)) for i in range(4)}


def test_replicas_share_the_sending() -> None:
    """Two replicas of four parameters to one receiver: two parameters from each."""
    parameters = [Parameter(f"p{i}", (8,), "float32") for i in range(4)]
    source = Layout.replicated(parameters, [0, 1])
    plan = plan_transfer(source, Layout.replicated(parameters, [5]), 1 << 20)
    assert [(move.name, move.source) for move in plan.moves()] == [("p0", 0), ("p1", 1), ("p2", 0), ("p3", 1)]


def test_rows_and_columns_to_column_shards() -> None:
    """Cut into left and right, and each of them into top and bottom, to two column shards."""
    source = Layout((W,), {"w": Spec((0, 1, 2, 3), (2, 2), (0, 1))})
    target = Layout((W,), {"w": Spec((4, 5), (2,), (1,))})
    plan = plan_transfer(source, target, 1000)
    assert sorted((move.source, move.target, move.box) for move in plan.moves()) == sorted(
        (2 * bottom + right, 4 + right, Box((2 * bottom, 2 * right), (2, 2 - right)))
        for bottom in (0, 1)
        for right in (0, 1)
    )
    assert plan.bytes_moved == W.num_bytes


@pytest.mark.parametrize(
    ("sizes", "cuts", "expected"),
    [
        # FSDP2 (axis 0) over tensor parallel (axis 1) of the same dimension: the latter's halves are cut.
        ((2, 2), (0, 0), [(0, 2), (4, 2), (2, 2), (6, 2)]),
        ((2, 3), (0, 0), [(0, 2), (3, 2), (6, 1), (2, 1), (5, 1), (7, 1)]),
        ((2, 2), (0, None), [(0, 4), (0, 4), (4, 4), (4, 4)]),
        ((3,), (0,), [(0, 3), (3, 3), (6, 2)]),
        ((5,), (0,), [(0, 2), (2, 2), (4, 2), (6, 2), (8, 0)]),
    ],
)
def test_specs_by_hand(
    sizes: tuple[int, ...], cuts: tuple[int | None, ...], expected: list[tuple[int, int]]
) -> None:
    spec = Spec(tuple(range(len(expected))), sizes, cuts)
    for rank, (start, length) in enumerate(expected):
        assert spec.box((8, 3), rank) == Box((start, 0), (length, 3))
    copy = pickle.loads(pickle.dumps(spec))
    assert copy == spec
    assert hash(copy) == hash(spec)
    assert vars(copy).keys() <= {"ranks", "sizes", "cuts", "_hash"}  # nothing of what is worked out travels


def test_what_does_not_fit_is_named() -> None:
    source = Layout.sharded([W, BIAS], [0])
    for parameters, message in (
        ([W], "the rollout engine does not take the parameter 'b'"),
        ([W, BIAS, Parameter("c", (1,), "float32")], "the trainer does not have the parameter 'c'"),
        ([W, Parameter("b", (3,), "bfloat16")], r"'b' is \(2,\) bfloat16 at the trainer, and \(3,\)"),
    ):
        with pytest.raises(WeightSyncError, match=message):
            plan_transfer(source, Layout.replicated(parameters, [1]), 1000)


@st.composite
def layouts(draw: st.DrawFn, parameters: tuple[Parameter, ...], first_rank: int) -> Layout:
    """Any: each parameter on some of a few ranks, cut along some axes of a grid of them."""
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    ranks = tuple(range(first_rank, first_rank + math.prod(sizes)))
    specs = {}
    for parameter in parameters:
        dims = st.integers(-1, len(parameter.shape) - 1)
        chosen = draw(st.lists(dims, min_size=len(sizes), max_size=len(sizes)))
        cuts = [None if dim < 0 else dim for dim in chosen]
        specs[parameter.name] = Spec(ranks, sizes, tuple(cuts))
    return Layout(parameters, specs, whole_tensors=draw(st.booleans()))


@st.composite
def transfers(draw: st.DrawFn) -> tuple[Layout, Layout, int]:
    shapes = draw(st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=4))
    dtypes = st.sampled_from(["float32", "bfloat16"])
    parameters = tuple(Parameter(f"p{i}", shape, draw(dtypes)) for i, shape in enumerate(shapes))
    source = draw(layouts(parameters, 0))
    target = draw(layouts(parameters, draw(st.sampled_from([0, 2, 30]))))
    return source, target, draw(st.sampled_from([4, 16, 100, 10_000]))


def _places(parameter: Parameter, box: Box) -> np.ndarray:
    mask = np.zeros(parameter.shape, int)
    mask[box.slices(Box.whole(parameter.shape))] = 1
    return mask


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(transfers())
def test_every_element_arrives_once_from_a_holder_within_the_bound(case: tuple[Layout, Layout, int]) -> None:
    source, target, bucket_bytes = case
    plan = plan_transfer(source, target, bucket_bytes)
    by_name = {parameter.name: parameter for parameter in source.parameters}
    arrived: dict[tuple[int, str], np.ndarray] = {}
    for move in plan.moves():
        parameter = by_name[move.name]
        held = source.held(move.source, move.name)
        assert held is not None
        assert held.intersection(move.box) == move.box
        assert move.num_bytes == move.box.size * getattr(torch, parameter.dtype).itemsize <= bucket_bytes
        key = (move.target, move.name)
        arrived[key] = arrived.get(key, 0) + _places(parameter, move.box)
    for rank in target.ranks:
        for name, parameter in by_name.items():
            box = target.held(rank, name)
            wanted = np.zeros(parameter.shape, int) if box is None else _places(parameter, box)
            np.testing.assert_array_equal(arrived.get((rank, name), np.zeros(parameter.shape, int)), wanted)
    _check_accounts(plan, source, target, bucket_bytes)


def _check_accounts(plan: TransferPlan, source: Layout, target: Layout, bucket_bytes: int) -> None:
    every = list(plan.moves())
    assert plan.bytes_moved == sum(m.num_bytes for m in every if m.source != m.target)
    if not set(source.ranks) & set(target.ranks):
        assert plan.bytes_moved == sum(
            box.size * parameter.item_bytes
            for rank in target.ranks
            for parameter in target.parameters
            if (box := target.held(rank, parameter.name)) is not None
        )
    sent_by = {rank: [move for moves in plan.sends(rank) for move in moves] for rank in source.ranks}
    between = [move for move in every if move.source != move.target]
    key = lambda move: (move.name, move.box, move.source, move.target)  # noqa: E731
    assert sorted((m for moves in sent_by.values() for m in moves), key=key) == sorted(between, key=key)
    for rank in source.ranks:  # both sides of a pair have its moves in the same order: messages have no names
        for other in plan.targets(rank):
            received = [move for moves in plan.receives(other) for move in moves if move.source == rank]
            assert received == [move for move in sent_by[rank] if move.target == other]
    for rank in {*source.ranks, *target.ranks}:
        for received, sent in zip(plan.receives(rank), plan.sends(rank), strict=True):
            coming = sum(move.num_bytes for move in received)
            going = sum({(move.name, move.box): move.num_bytes for move in sent}.values())
            assert max(coming, going) <= bucket_bytes
            assert coming * (not target.whole_tensors) + going <= plan.peak_bytes
    largest = max(parameter.num_bytes for parameter in target.parameters) if target.whole_tensors else 0
    assert plan.peak_bytes <= bucket_bytes + max(bucket_bytes, largest)  # on both sides at once
