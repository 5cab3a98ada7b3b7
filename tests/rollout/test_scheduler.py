"""The scheduler alone: a model cache of strings says what every slot really holds after each plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rondo.rollout.native.scheduler import Copy, Move, Prefill, Scheduler, Sequence
from rondo.types import GenerateRequest, SamplingParams


def sequence(
    name: str, tokens: list[int], affinity: str = "", num_prefix: int = 0, *, urgent: bool = False
) -> Sequence:
    ids = np.array(tokens, np.int64)
    request = GenerateRequest(name, ids, SamplingParams(4), affinity=affinity, urgent=urgent)
    return Sequence(request, ids, num_prefix)


def test_a_group_is_prefilled_once_and_copied() -> None:
    scheduler = Scheduler(4, dense=False)
    for i in range(5):
        scheduler.add(sequence(str(i), [1, 2, 3], "g"))
    plan = scheduler.plan()
    assert [slot for slot, _ in plan.joins] == [0, 1, 2, 3]
    assert plan.prefills == [Prefill(0)]
    assert plan.late_copies == [Copy(0, 1, 2), Copy(0, 2, 2), Copy(0, 3, 2)]
    assert not plan.early_copies
    assert not plan.moves
    scheduler.release(2)
    plan = scheduler.plan()  # the fifth sits down where the prompt still lies
    assert [slot for slot, _ in plan.joins] == [2]
    assert [plan.prefills, plan.early_copies, plan.late_copies] == [[], [], []]


def test_other_affinity_or_tokens_or_a_prefix_share_nothing() -> None:
    scheduler = Scheduler(4, dense=False)
    scheduler.add(sequence("a", [1, 2, 3], "g"))
    scheduler.add(sequence("b", [1, 2, 3], "h"))
    scheduler.add(sequence("c", [1, 2, 4], "g"))
    scheduler.add(sequence("d", [1, 2, 3], "g", num_prefix=1))
    assert scheduler.plan().prefills == [Prefill(i) for i in range(4)]


def test_an_urgent_one_gets_the_next_free_slot() -> None:
    scheduler = Scheduler(1, dense=False)
    for name in ("runs", "waits", "urgent", "urgent too"):
        scheduler.add(sequence(name, [1, 2], urgent=name.startswith("urgent")))
        scheduler.plan()
    seen = []
    while (sitting := scheduler.slots[0]) is not None:
        seen.append(sitting.request.request_id)
        scheduler.release(0)
        scheduler.plan()
    assert seen == ["runs", "urgent", "urgent too", "waits"]


def test_dense_slots_close_holes_from_the_top() -> None:
    scheduler = Scheduler(4, dense=True)
    for i in range(4):
        scheduler.add(sequence(str(i), [i, 9]))
    scheduler.plan()
    scheduler.release(0)
    scheduler.release(2)
    plan = scheduler.plan()
    assert plan.moves == [Move(3, 0)]
    assert [s.request.request_id if s else None for s in scheduler.slots] == ["3", "1", None, None]


def test_invalidate_prefills_everybody_again() -> None:
    scheduler = Scheduler(3, dense=True)
    for i in range(3):
        scheduler.add(sequence(str(i), [1, 2], "g"))
    scheduler.plan()
    scheduler.invalidate()
    scheduler.release(0)
    scheduler.add(sequence("3", [1, 2], "g"))
    plan = scheduler.plan()
    assert sorted(p.slot for p in plan.prefills) == [0, 1, 2]
    assert not plan.early_copies


@pytest.mark.parametrize("dense", [True, False])
@settings(max_examples=50, deadline=None)
@given(st.data())
def test_every_slot_holds_what_its_sequence_needs(dense: bool, data: st.DataObject) -> None:
    num_slots = data.draw(st.integers(1, 6))
    scheduler = Scheduler(num_slots, dense=dense)
    cache: list[tuple[int, ...]] = [()] * num_slots
    names = iter(range(10_000))
    for _ in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.integers(0, 5))):
            prompt = data.draw(st.sampled_from([[1, 2, 3], [1, 2, 4, 5], [7]]))
            affinity, prefix = data.draw(st.sampled_from("gh")), data.draw(st.sampled_from([0, 0, 0, 1]))
            scheduler.add(sequence(str(next(names)), prompt, affinity, prefix))
        if data.draw(st.integers(0, 5)) == 0:
            scheduler.invalidate()
            cache = [(-1,) * 9] * num_slots
        plan = scheduler.plan()
        wanted = {prefill.slot for prefill in plan.prefills}
        for copy in plan.early_copies:
            cache[copy.target] = cache[copy.source][: copy.length]
        for move in plan.moves:
            cache[move.target] = cache[move.source]
        for slot in wanted:
            occupant = scheduler.slots[slot]
            assert occupant is not None
            cache[slot] = tuple(occupant.tokens[:-1])
        for copy in plan.late_copies:
            cache[copy.target] = cache[copy.source][: copy.length]
        active = [i for i, s in enumerate(scheduler.slots) if s is not None]
        for slot in active:
            tokens = scheduler.slots[slot].tokens  # type: ignore[union-attr]
            assert cache[slot][: len(tokens) - 1] == tuple(tokens[:-1])
            cache[slot] = (*cache[slot][: len(tokens) - 1], 99)  # decoding goes on behind the prompt
        for slot, source, length in scheduler.prefixes():
            assert source <= slot
            assert scheduler.slots[source] is not None
            assert cache[source][: length - 1] == cache[slot][: length - 1]
        if dense:
            assert active == list(range(len(active)))
        assert not scheduler.waiting or len(active) == num_slots
        for slot in active:
            if data.draw(st.booleans()):
                scheduler.release(slot)
