"""Transfer plans: by hand, and the properties that every plan has."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rondo.errors import WeightSyncError
from rondo.weights.layout import Box, Layout, Parameter
from rondo.weights.plan import Move, TransferPlan, plan_transfer

W = Parameter("w", (4, 3), "float32")
BIAS = Parameter("b", (2,), "bfloat16")


def test_two_shards_to_one_whole_by_hand() -> None:
    source, target = Layout.sharded([W, BIAS], [0, 1]), Layout.replicated([W, BIAS], [2])
    plan = plan_transfer(source, target, 1000)
    top, bottom = Box((0, 0), (2, 3)), Box((2, 0), (2, 3))
    assert plan.rounds == (
        (
            Move("w", top, 0, 2, 24),
            Move("w", bottom, 1, 2, 24),
            Move("b", Box((0,), (1,)), 0, 2, 2),
            Move("b", Box((1,), (1,)), 1, 2, 2),
        ),
    )
    assert (plan.bytes_moved, plan.bytes_needed, plan.peers) == (52, 52, ((0, 2), (1, 2)))
    assert plan.peak_bytes == {0: 26, 1: 26, 2: 52}


def test_a_small_bucket_makes_rounds_and_cuts_tensors() -> None:
    source, target = Layout.sharded([W, BIAS], [0]), Layout.replicated([W, BIAS], [1])
    plan = plan_transfer(source, target, 20)
    rows = [Box((i, 0), (1, 3)) for i in range(4)]
    assert [[move.box for move in moves] for moves in plan.rounds] == [
        [rows[0]],
        [rows[1]],
        [rows[2]],
        [rows[3]],
        [Box((0,), (2,))],
    ]
    assert plan.peak_bytes == {0: 12, 1: 48}  # the receiver puts w together: it is larger than a bucket
    slices = plan_transfer(source, Layout.replicated([W, BIAS], [1], whole_tensors=False), 20)
    assert slices.peak_bytes == {0: 16, 1: 16}  # the last row and b share a round
    with pytest.raises(ValueError, match="bucket_bytes=3 holds no element of 'w'"):
        plan_transfer(source, target, 3)


def test_what_a_rank_has_it_does_not_receive() -> None:
    """Four shards gathered on the same four ranks: the all-gather's lower bound, (n - 1) copies."""
    source, target = Layout.sharded([W], range(4)), Layout.replicated([W], range(4))
    plan = plan_transfer(source, target, 1000)
    assert plan.bytes_moved == plan.bytes_needed == 3 * W.num_bytes
    local = [move for move in plan.moves() if move.source == move.target]
    assert len(local) == 4
    assert {move.box for move in local} == {Box((i, 0), (1, 3)) for i in range(4)}


def test_replicas_share_the_sending() -> None:
    """Two replicas of four parameters to one receiver: two parameters from each."""
    parameters = [Parameter(f"p{i}", (8,), "float32") for i in range(4)]
    held = {p.name: (Box.whole(p.shape),) for p in parameters}
    source = Layout(tuple(parameters), {0: held, 1: held})
    plan = plan_transfer(source, Layout.replicated(parameters, [5]), 1 << 20)
    assert [(move.name, move.source) for move in plan.moves()] == [("p0", 0), ("p1", 1), ("p2", 0), ("p3", 1)]


def test_an_interleaved_source_to_column_shards() -> None:
    """Rows 0, 2 on one rank and 1, 3 on the other (several boxes of one tensor) to two column shards."""
    source = Layout(
        (W,),
        {
            0: {"w": (Box((0, 0), (1, 3)), Box((2, 0), (1, 3)))},
            1: {"w": (Box((1, 0), (1, 3)), Box((3, 0), (1, 3)))},
        },
    )
    target = Layout((W,), {2: {"w": (Box((0, 0), (4, 2)),)}, 3: {"w": (Box((0, 2), (4, 1)),)}})
    plan = plan_transfer(source, target, 1000)
    assert [(move.source, move.target, move.box) for move in plan.moves()] == [
        *((row % 2, 2, Box((row, 0), (1, 2))) for row in range(4)),
        *((row % 2, 3, Box((row, 2), (1, 1))) for row in range(4)),
    ]
    assert plan.bytes_moved == W.num_bytes


def test_what_does_not_fit_is_named() -> None:
    source = Layout.sharded([W, BIAS], [0])
    for parameters, message in (
        ([W], "the rollout engine does not take the parameter 'b'"),
        ([W, BIAS, Parameter("c", (1,), "float32")], "the trainer does not have the parameter 'c'"),
        ([W, Parameter("b", (3,), "bfloat16")], r"'b' is \(2,\) bfloat16 at the trainer, and \(3,\)"),
    ):
        with pytest.raises(WeightSyncError, match=message):
            plan_transfer(source, Layout.replicated(parameters, [1]), 1000)
    hole = Layout((W,), {0: {"w": (Box((0, 0), (3, 3)),)}})
    with pytest.raises(WeightSyncError, match=r"no rank of the trainer holds 'w' at \(3, 0\) \+ \(1, 3\)"):
        plan_transfer(hole, Layout.replicated([W], [1]), 1000)


@st.composite
def layouts(draw: st.DrawFn, parameters: tuple[Parameter, ...], first_rank: int, *, full: bool) -> Layout:
    """Any: parameters cut along random edges, each cell on one rank or several. full: no hole."""
    ranks = range(first_rank, first_rank + draw(st.integers(1, 4)))
    held: dict[int, dict[str, tuple[Box, ...]]] = {rank: {} for rank in ranks}
    for parameter in parameters:
        edges = [
            Box((at,) * len(parameter.shape), (0,) * len(parameter.shape))
            for at in draw(st.lists(st.integers(0, 6), max_size=3))
        ]
        for cell in Box.whole(parameter.shape).cells(edges):
            owners = draw(st.sets(st.sampled_from(list(ranks)), min_size=1 if full else 0, max_size=3))
            for rank in owners:
                held[rank][parameter.name] = (*held[rank].get(parameter.name, ()), cell)
    return Layout(parameters, held, whole_tensors=draw(st.booleans()))


@st.composite
def transfers(draw: st.DrawFn) -> tuple[Layout, Layout, int]:
    shapes = draw(st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=4))
    dtypes = st.sampled_from(["float32", "bfloat16"])
    parameters = tuple(Parameter(f"p{i}", shape, draw(dtypes)) for i, shape in enumerate(shapes))
    source = draw(layouts(parameters, 0, full=True))
    target = draw(layouts(parameters, draw(st.sampled_from([0, 2, 10])), full=False))
    return source, target, draw(st.sampled_from([4, 16, 100, 10_000]))


def _places(parameter: Parameter, box: Box) -> np.ndarray:
    mask = np.zeros(parameter.shape, int)
    mask[box.slices(Box.whole(parameter.shape))] = 1
    return mask


@settings(max_examples=150, deadline=None)
@given(transfers())
def test_every_element_arrives_once_from_a_holder_within_the_bound(case: tuple[Layout, Layout, int]) -> None:
    source, target, bucket_bytes = case
    plan = plan_transfer(source, target, bucket_bytes)
    by_name = {parameter.name: parameter for parameter in source.parameters}
    arrived: dict[tuple[int, str], np.ndarray] = {}
    for move in plan.moves():
        parameter = by_name[move.name]
        assert any(box.contains(move.box) for box in source.held(move.source, move.name))
        assert move.num_bytes == move.box.size * getattr(torch, parameter.dtype).itemsize <= bucket_bytes
        key = (move.target, move.name)
        arrived[key] = arrived.get(key, 0) + _places(parameter, move.box)
    for rank in target.ranks:
        for name, parameter in by_name.items():
            wanted = sum(
                (_places(parameter, box) for box in target.held(rank, name)),
                np.zeros(parameter.shape, int),
            )
            np.testing.assert_array_equal(arrived.get((rank, name), np.zeros(parameter.shape, int)), wanted)
    _check_accounts(plan, source, target, bucket_bytes)
    assert plan_transfer(source, target, bucket_bytes) == plan


def _check_accounts(plan: TransferPlan, source: Layout, target: Layout, bucket_bytes: int) -> None:
    assert plan.bytes_moved == sum(m.num_bytes for m in plan.moves() if m.source != m.target)
    assert plan.bytes_moved == plan.bytes_needed
    if not set(source.ranks) & set(target.ranks):
        assert plan.bytes_needed == sum(
            box.size * parameter.item_bytes
            for rank in target.ranks
            for parameter in target.parameters
            for box in target.held(rank, parameter.name)
        )
    for moves in plan.rounds:
        received: dict[int, int] = defaultdict(int)
        sent: dict[int, dict[tuple[str, Box], int]] = defaultdict(dict)
        for move in moves:
            received[move.target] += move.num_bytes
            sent[move.source][move.name, move.box] = move.num_bytes
        assert max(received.values()) <= bucket_bytes
        assert max(sum(boxes.values()) for boxes in sent.values()) <= bucket_bytes
    largest = max(parameter.num_bytes for parameter in target.parameters) if target.whole_tensors else 0
    bound = bucket_bytes + max(bucket_bytes, largest)  # on both sides at once
    assert all(peak <= bound for peak in plan.peak_bytes.values())
