"""The scheduler alone: a cache of tokens in place of keys and values says what every block really holds."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rondo.core.types import GenerateRequest, SamplingParams
from rondo.rollout.native.blocks import BLOCK, BlockPool, content_keys
from rondo.rollout.native.scheduler import Copy, Plan, Scheduler, Sequence


def tokens(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


def sequence(name: str, prompt: list[int], max_tokens: int = 4, *, urgent: bool = False) -> Sequence:
    request = GenerateRequest(name, np.array(prompt, np.int32), SamplingParams(max_tokens), urgent=urgent)

    async def made_on_a_loop() -> Sequence:  # as every call that waits; here nobody does
        return Sequence(request)

    return asyncio.run(made_on_a_loop())


def scheduler(num_slots: int, num_blocks: int, max_context: int = 256, chunk: int | None = None) -> Scheduler:
    return Scheduler(num_slots, num_blocks, max_context, chunk=chunk)


def add(to: Scheduler, *sequences: Sequence) -> Plan:
    for one in sequences:
        to.add(one)
    return to.plan()


def names(of: Scheduler) -> list[str | None]:
    return [None if one is None else one.request.request_id for one in of.slots]


def decode(of: Scheduler, count: int = 1) -> None:
    """Makes tokens: the slot's number, and never a reason to stop."""
    for _ in range(count):
        rows = np.array([slot for slot, _ in of.running])
        of.grow(rows)
        rows = np.array([slot for slot, _ in of.running])
        of.table.append(rows, rows, np.zeros(len(rows), np.float32), 0)


# ---- blocks ----


def test_a_pool_takes_blank_blocks_first_and_then_those_given_back_earliest() -> None:
    pool = BlockPool(4)
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    for block in (0, 1):
        pool.publish(block, b"%d" % block)
    for block in (1, 0, 2):
        pool.give_back(block)
    assert pool.num_free == 4
    assert pool.take() == 2  # the blank one that was used last
    assert pool.take() == 3
    assert pool.find(b"1") == 1
    assert pool.take() == 1
    assert pool.find(b"1") is None
    assert pool.find(b"0") == 0


def test_a_shared_block_is_free_when_its_last_owner_gives_it_back() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.publish(block, b"x")
    pool.share(block)
    pool.give_back(block)
    assert pool.num_free == 0
    pool.give_back(block)
    assert pool.num_free == 1
    pool.share(pool.find(b"x"))  # still there, and out of the free ones again
    assert pool.num_free == 0
    pool.forget()
    assert pool.find(b"x") is None
    pool.give_back(block)
    assert pool.take() == block


def test_a_key_depends_on_all_tokens_up_to_the_blocks_end() -> None:
    a, b = tokens(150), tokens(150)
    b[70] += 1
    one, other = (content_keys(b"", np.array(ids)) for ids in (a, b))
    assert len(one) == 3
    assert [x == y for x, y in zip(one, other, strict=True)] == [True, False, False]
    assert content_keys(b"", np.array(a[:128])) == one[:2]
    assert content_keys(b"r", np.array(a))[0] != one[0]


# ---- sharing ----


def test_a_group_is_prefilled_once_shares_whole_blocks_and_copies_the_last_one() -> None:
    group = scheduler(3, 12)
    prompt = tokens(150)  # 149 positions to fill: two whole blocks and 21 in a third
    plan = add(group, *(sequence(str(i), prompt) for i in range(4)))
    assert names(group) == ["0", "1", "2"]
    assert [(one.slot, one.start, len(one.tokens), one.wave) for one in plan.prefills] == [(0, 0, 149, 0)]
    assert [one.blocks for _, one in group.running] == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    assert plan.copies == [Copy(2, 3, 21), Copy(2, 4, 21)]
    assert plan.num_shared == 2 * 149
    assert group.pool.num_free == 12 - 5
    group.release(0)
    plan = group.plan()  # the fourth: the first one's part of a block is still there
    assert (plan.prefills, plan.copies) == ([], [Copy(2, 5, 21)])
    assert group.table.blocks[0, :3].tolist() == [0, 1, 5]


def test_a_prompt_that_goes_on_differently_is_prefilled_behind_the_shared_blocks() -> None:
    one = scheduler(2, 12)
    common = tokens(100)
    plan = add(one, sequence("a", common + tokens(30, 1)), sequence("b", common + tokens(60, 2)))
    assert [(p.slot, p.start, p.wave) for p in plan.prefills] == [(0, 0, 0), (1, 64, 1)]
    assert [s.blocks for _, s in one.running] == [[0, 1, 2], [0, 3, 4]]
    other = scheduler(2, 12, chunk=512)
    plan = add(other, sequence("a", common + tokens(30, 1)), sequence("b", common + tokens(60, 2)))
    assert [(p.slot, p.start, p.wave) for p in plan.prefills] == [(0, 0, 0), (1, 0, 0)]


def test_prompts_share_whole_chunks_and_their_last_one_where_they_are_the_same() -> None:
    """A prompt of 300 tokens has two whole chunks of 128; a later turn computes its last one anew."""
    turns = scheduler(3, 20, max_context=512, chunk=128)
    prompt = tokens(300)
    add(turns, sequence("a", prompt, 60), sequence("b", prompt, 60))
    decode(turns, 50)
    first = turns.release(0)
    other = [*prompt[:200], *tokens(100, 7)]
    plan = add(turns, sequence("c", [*first.tokens.tolist(), *tokens(20, 5)]), sequence("d", other))
    assert [(p.start, len(p.tokens)) for p in plan.prefills] == [(256, 369), (128, 299)]
    assert plan.num_shared == 256 + 128


def test_a_prompt_whose_blocks_are_all_there_is_not_prefilled() -> None:
    """Of 129 tokens 128 are to be there before the first is decoded: two whole blocks."""
    both = scheduler(2, 12)
    prompt = tokens(129)
    plan = add(both, sequence("a", prompt), sequence("b", prompt))
    assert [(p.slot, p.start, len(p.tokens), p.wave) for p in plan.prefills] == [(0, 0, 128, 0)]
    assert (plan.copies, plan.num_shared) == ([], 128)
    assert [s.blocks for _, s in both.running] == [[0, 1, 2], [0, 1, 3]]


def test_a_later_turn_finds_what_an_earlier_one_decoded() -> None:
    turns = scheduler(1, 6)
    add(turns, sequence("a", tokens(60), 100))
    decode(turns, 75)
    first = turns.release(0)
    assert len(first.tokens) == 135  # 134 positions: two whole blocks
    plan = add(turns, sequence("b", [*first.tokens.tolist(), *tokens(20, 5)]))
    assert plan.prefills[0].start == 128
    assert plan.num_shared == 128


def test_new_weights_share_nothing_and_prefill_everybody_again() -> None:
    old = scheduler(3, 12, chunk=512)
    add(old, *(sequence(str(i), tokens(70)) for i in range(3)))
    decode(old, 2)
    old.invalidate(new_weights=True)
    assert names(old) == [None, None, None]
    plan = add(old, sequence("3", tokens(70)))
    assert names(old) == ["0", "1", "2"]
    # Two tokens each, of one value in one slot only: nothing in common, and all in one prefill.
    assert [(p.start, p.together, len(p.tokens)) for p in plan.prefills] == [(0, 71, 71)] * 3
    asleep = scheduler(1, 4, chunk=512)
    add(asleep, sequence("a", tokens(70)))
    decode(asleep, 2)
    asleep.invalidate(new_weights=False)
    prefill = asleep.plan().prefills[0]
    assert (prefill.start, prefill.together, len(prefill.tokens)) == (0, 69, 71)


# ---- too few blocks ----


def test_the_youngest_gives_its_blocks_back_and_goes_on_before_all_who_wait() -> None:
    tight = scheduler(3, 7, max_context=256)
    add(tight, *(sequence(str(i), tokens(60, i), 190) for i in range(3)))
    decode(tight, 69)  # from position 59 to 128; since 64 each has two blocks
    assert (tight.num_preempted, tight.pool.num_free) == (0, 1)
    decode(tight)  # "0" takes the free one for position 128; "1" takes one of "2", which is the youngest
    assert names(tight) == ["0", "1", None]
    assert (tight.num_preempted, tight.pool.num_free) == (1, 1)
    back = tight.returning[0]
    assert (back.request.request_id, len(back.tokens), back.blocks) == ("2", 129, [])
    assert back.token_ids == [2] * 69
    add(tight, sequence("urgent", [2], urgent=True))
    assert names(tight) == ["0", "1", None]  # no room for the first in line, and nobody overtakes it
    tight.release(0)
    plan = tight.plan()
    assert names(tight) == ["2", "1", None]
    assert [(p.start, len(p.tokens)) for p in plan.prefills] == [(64, 128)]  # its first block was not taken
    assert tight.table.response(0, 0)[0].tolist() == [2] * 69


def test_the_youngest_itself_waits_and_the_oldest_always_goes_on() -> None:
    tight = scheduler(2, 4, max_context=256)
    add(tight, sequence("old", tokens(60, 1), 190), sequence("young", tokens(70, 2), 180))
    decode(tight, 59)  # "young" comes to position 128
    assert (names(tight), tight.pool.num_free) == (["old", "young"], 0)
    decode(tight)
    assert (names(tight), tight.pool.num_free) == (["old", None], 2)
    decode(tight, 130)
    assert len(tight.slots[0].blocks) == 4  # type: ignore[union-attr]
    tight.release(0)
    tight.plan()
    assert names(tight) == ["young", None]
    decode(tight, 100)
    assert tight.num_preempted == 1


def test_a_newcomer_leaves_a_block_for_each_that_grows() -> None:
    careful = scheduler(3, 4, max_context=256)
    add(careful, sequence("a", tokens(60), 100), sequence("b", tokens(60, 1), 100), sequence("c", [1, 2]))
    assert names(careful) == ["a", "b", None]
    assert careful.pool.num_free == 2
    finite = scheduler(3, 4, max_context=256)
    add(finite, sequence("a", tokens(60), 5), sequence("b", tokens(60, 1), 5), sequence("c", [1, 2]))
    assert names(finite) == ["a", "b", "c"]  # one block is all they ever need


def test_a_copy_is_given_up_where_only_its_source_is_free() -> None:
    tight = scheduler(1, 2, max_context=128)
    add(tight, sequence("a", tokens(100), 4))
    tight.release(0)
    plan = add(tight, sequence("b", tokens(100), 4))
    assert [(p.start, len(p.tokens)) for p in plan.prefills] == [(64, 99)]
    assert plan.copies == []


def test_an_urgent_one_gets_the_next_free_slot() -> None:
    line = scheduler(1, 4)
    for name in ("runs", "waits", "urgent", "urgent too"):
        add(line, sequence(name, [1, 2], urgent=name.startswith("urgent")))
    seen = []
    while line.slots[0] is not None:
        seen.append(line.release(0).request.request_id)
        line.plan()
    assert seen == ["runs", "urgent", "urgent too", "waits"]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 512, 128, 64, 16])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_block_holds_what_its_sequence_needs(chunk: int | None, data: st.DataObject) -> None:
    """A position's content is its token, all before it and, unless beginnings are shared, its whole chunk or
    what was prefilled together; whatever order of arrivals, ends, new weights and preemptions.
    """
    of = scheduler(data.draw(st.integers(1, 5)), data.draw(st.integers(4, 12)), chunk=chunk)
    cache: dict[tuple[int, int], object] = {}
    common, weights = tokens(200), 0

    def content(one: Sequence, ids: np.ndarray, at: int) -> object:
        if chunk is None:
            return weights, ids[: at + 1].tobytes()
        end = (at // chunk + 1) * chunk
        if end < one.together:  # a whole chunk
            return weights, ids[: at + 1].tobytes(), ids[:end].tobytes()
        together = one.together - 1
        return weights, ids[: at + 1].tobytes(), ids[:together].tobytes(), min(together, at + 1)

    def write(slot: int, ids: np.ndarray, positions: range) -> None:
        one = of.slots[slot]
        assert one is not None
        for at in positions:
            cache[one.blocks[at // BLOCK], at % BLOCK] = content(one, ids, at)

    for number in range(data.draw(st.integers(1, 15))):
        for i in range(data.draw(st.integers(0, 3))):
            length = data.draw(st.sampled_from([1, 2, 63, 64, 65, 66, 130, 200]))
            own = data.draw(st.sampled_from([0, 1, 70]))
            prompt = [*common[: length - min(own, length)], *tokens(min(own, length), number)]
            urgent = data.draw(st.booleans())
            of.add(sequence(f"{number}.{i}", prompt, 256 - len(prompt), urgent=urgent))
        if data.draw(st.integers(0, 6)) == 0:
            weights += 1
            of.invalidate(new_weights=True)
        plan = of.plan()
        for prefill in sorted(plan.prefills, key=lambda p: p.wave):
            write(prefill.slot, prefill.tokens, range(prefill.start, len(prefill.tokens)))
        for copy in plan.copies:
            for at in range(copy.length):
                cache[copy.target, at] = cache[copy.source, at]
        assert not of.sequences() or of.running
        for _ in range(data.draw(st.sampled_from([0, 1, 3, 70]))):
            rows = np.array([slot for slot, _ in of.running], int)
            of.grow(rows)
            for slot, one in of.running:
                made = of.table.ids[slot, one.num_response : of.table.indices[slot]]
                ids = np.concatenate([one.tokens, made])
                assert len(ids) == of.table.positions[slot] + 1
                for at in range(len(ids) - 1):
                    assert cache[one.blocks[at // BLOCK], at % BLOCK] == content(one, ids, at)
                write(slot, ids, range(len(ids) - 1, len(ids)))
            rows = np.array([slot for slot, _ in of.running], int)
            _, full = of.table.append(rows, rows % 2, np.zeros(len(rows), np.float32), 0)
            for slot in rows[full]:
                of.release(int(slot))
            if of.changed:
                break
        owned = {block for _, one in of.running for block in one.blocks}
        assert of.pool.num_free == len(of.pool._owners) - len(owned)
        for slot, _ in of.running:
            if data.draw(st.integers(0, 3)) == 0:
                of.release(slot)
