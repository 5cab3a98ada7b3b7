"""The buffer: credits, order, refills, the short last step, and an exact account of every prompt."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rondo.core.batch import Batch, BatchRef
from rondo.core.errors import RewardError, TrainError
from rondo.trainers.loop.buffer import Buffer, Group, Ledger
from tests.messages import full_text
from tests.trainers.drops import Drops


def group(seq: int, version: int) -> Group:
    """Two rows: a reward that depends on the number, and a failure."""
    rows = {
        "row_id": np.array([2 * seq, 2 * seq + 1]),
        "reward": np.array([seq % 7, np.nan], np.float32),
        "response_length": np.array([3 + seq % 5, 8], np.int32),
        "step_index": np.zeros(2, np.int32),
        "outcome": ["scored", "reward_error"],
    }
    index = ["reward", "outcome", "response_length", "step_index"]
    return Group(seq, version, version, BatchRef.of(Batch.of(rows), index))


def buffer(batch_size: int = 2, max_staleness: int = 0, total_steps: int = 3, **kwargs: Any) -> Buffer:
    kwargs = {"total_groups": 10**9, "journal": Drops()} | kwargs
    return Buffer(batch_size=batch_size, max_staleness=max_staleness, total_steps=total_steps, **kwargs)


async def simulate(
    make: Callable[[], Buffer],
    seed: int,
    fails: Callable[[int], bool] = lambda seq: False,
    reports: list[dict[str, float]] | None = None,
) -> tuple[Buffer, list[list[int]]]:
    """Episodes of random duration against a trainer that takes, then advances the version. reports: gets the
    statistics of each step.
    """
    rng = random.Random(seed)
    buf = make()
    tasks: list[asyncio.Task[None]] = []

    async def episode(seq: int, version: int) -> None:
        await asyncio.sleep(rng.random() * 0.002)
        if fails(seq):
            buf.drop(seq, "failed", ["a", "b"])
        else:
            buf.put(group(seq, version))

    async def feed() -> None:
        while True:
            seq = await buf.ticket()
            tasks.append(asyncio.create_task(episode(seq, buf.version)))

    feeder = asyncio.create_task(feed())
    steps: list[list[int]] = []
    try:
        while taken := await asyncio.wait_for(buf.take(), 240):
            assert max(buf.version - g.oldest_version for g in taken) <= buf.max_staleness
            steps.append([g.seq for g in taken])
            if reports is not None:
                reports.append({**buf.end_step(), "failed": buf.num_failed})
            await asyncio.sleep(rng.random() * 0.002)
            await buf.settled()
            buf.advance(buf.version + 1)
    finally:
        feeder.cancel()
        await asyncio.gather(feeder, *tasks, return_exceptions=True)
    return buf, steps


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_every_prompt_once_in_order_within_the_bound(max_staleness: int, seed: int) -> None:
    buf, steps = asyncio.run(simulate(lambda: buffer(4, max_staleness, 6), seed))
    assert steps == [list(range(4 * i, 4 * i + 4)) for i in range(6)]
    assert buf.ledger.num_trained == 24
    assert not buf.ledger.open
    assert not buf.ready


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_dropped_group_is_replaced_by_the_next_prompt(max_staleness: int) -> None:
    runs = [
        asyncio.run(simulate(lambda: buffer(2, max_staleness, 3), seed, fails=lambda seq: seq % 3 == 0))
        for seed in range(4)
    ]
    for buf, steps in runs:
        assert steps == [[1, 2], [4, 5], [7, 8]]
        assert sorted(seq for seq in buf.journal if seq < 7) == [0, 3, 6]
        assert set(buf.journal.values()) == {"failed"}


def test_the_last_step_is_short_when_the_prompts_end() -> None:
    _, steps = asyncio.run(simulate(lambda: buffer(4, 0, 3, total_groups=10), 0))
    assert steps == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_credits_at_version_zero_are_the_batches_that_may_be_in_flight() -> None:
    assert buffer(4, 0, 6).credits() == 4
    assert buffer(4, 2, 6).credits() == 12
    assert buffer(4, 9, 6).credits() == 24
    assert buffer(4, 9, 6, total_groups=5).credits() == 5


def test_the_filter_drops_with_its_reason_and_returns_the_credit() -> None:
    async def main() -> None:
        buf = buffer(2, 0, 1, keep=lambda g: "all answers are right" if g.seq == 0 else None)
        first = await buf.ticket()
        buf.put(group(first, 0))
        assert buf.journal == {0: "all answers are right"}
        assert buf.credits() == 2

    asyncio.run(main())


def test_an_episode_error_reaches_whoever_waits() -> None:
    async def main() -> None:
        buf = buffer()
        waiting = asyncio.create_task(buf.take())
        await asyncio.sleep(0)
        buf.fail(ValueError("scorer broke"))
        with pytest.raises(ValueError, match="scorer broke"):
            await asyncio.wait_for(waiting, 240)
        with pytest.raises(ValueError, match="scorer broke"):
            await buf.settled()

    asyncio.run(main())


def test_ledger_round_trip_lists_what_is_in_flight_to_be_issued_again() -> None:
    ledger = Ledger()
    for _ in range(6):
        ledger.admit(0)
    for seq in (0, 1):
        del ledger.open[seq]
    ledger.num_trained = 2
    ledger.drop(3)
    ledger.give_back(4)
    again = Ledger.from_records(ledger.records())
    assert (again.next_seq, again.num_trained, again.num_dropped, again.reissue) == (6, 2, 1, [2, 4, 5])
    assert [again.admit(1) for _ in range(4)] == [2, 4, 5, 6]


def test_a_ledger_that_names_all_that_was_ever_dropped_is_read() -> None:
    """As rondo wrote it before: a line for each, with the reason, and none where a filter's are counted."""
    ledger = Ledger(next_seq=7, num_trained=2, num_dropped=2, filtered={5: (1.5, 2, "easy")}, reissue=[6])
    head, *others = ledger.records()
    del head["num_dropped"], others[-1]["reason"]
    dropped = [{"kind": "dropped", "seq": seq, "reason": why} for seq, why in ((3, "failed"), (5, "easy"))]
    assert Ledger.from_records([head, *dropped, *others]) == ledger


def test_a_ledger_does_not_grow_with_what_was_dropped() -> None:
    """In 50 steps a filter and failures drop two of three groups; but for the count nothing is left."""
    keep = lambda g: "easy" if g.seq % 3 == 0 else None  # noqa: E731
    sizes = []

    async def main() -> None:
        buf = buffer(4, 1, 50, keep=keep)
        while True:
            while buf.credits() > 0:
                seq = await buf.ticket()
                if seq % 3 == 1:
                    buf.drop(seq, "failed")
                else:
                    buf.put(group(seq, buf.version))
            if not await buf.take():
                return
            buf.end_step()
            buf.advance(buf.version + 1)
            sizes.append(len(buf.ledger.records()))

    asyncio.run(main())
    assert len(sizes) == 50
    assert max(sizes[-10:]) <= max(sizes[:10])


def filtering(seed: int) -> tuple[Callable[[Group], str | None], int, int, int, int | None]:
    """A random filter, batch size, staleness, steps, and number of prompts."""
    rng = random.Random(seed)
    wrong = {seq for seq in range(4000) if rng.random() < rng.choice([0.3, 0.6])}
    keep = lambda group: "all are right" if group.seq in wrong else None  # noqa: E731
    return (
        keep,
        rng.randint(1, 4),
        rng.randint(0, 3),
        rng.randint(1, 6),
        rng.choice([None, rng.randint(5, 40)]),
    )


def expected(
    keep: Callable[[Group], str | None], batch_size: int, total_steps: int, num_prompts: int
) -> tuple[list[list[int]], list[list[int]]]:
    """What a stream gives without any concurrency: kept and filtered numbers of each step. Behind the last
    full step the prompts may end with filtered ones only.
    """
    kept: list[list[int]] = [[]]
    filtered: list[list[int]] = [[]]
    for seq in range(num_prompts):
        if keep(group(seq, 0)) is None:
            kept[-1].append(seq)
        else:
            filtered[-1].append(seq)
        if len(kept[-1]) == batch_size:
            if len(kept) == total_steps:
                return kept, filtered
            kept.append([])
            filtered.append([])
    return kept, filtered


@pytest.mark.parametrize("seed", range(40))
def test_filtered_streams_keep_every_invariant(seed: int) -> None:
    keep, batch_size, max_staleness, total_steps, prompts = filtering(seed)
    max_refills = 0.5 * random.Random(seed).randint(1, 8)
    kept, filtered = expected(keep, batch_size, total_steps, prompts or 4000)
    reports: list[dict[str, float]] = []

    def make() -> Buffer:
        more = {"keep": keep, "max_refills": max_refills, "total_groups": prompts or 4000}
        return buffer(batch_size, max_staleness, total_steps, **more)

    def run() -> tuple[Buffer, list[list[int]]]:
        return asyncio.run(simulate(make, seed, reports=reports))

    if any(len(step) > max_refills * batch_size for step in filtered):
        with pytest.raises(TrainError, match=full_text("because all are right. The prompts")):
            run()
        return
    buf, steps = run()
    assert steps == [step for step in kept if step]
    assert buf.journal == {seq: "all are right" for step in filtered for seq in step}
    assert all(len(step) == batch_size for step in steps[:-1])
    assert buf.ledger.num_trained + buf.ledger.num_dropped == buf.ledger.next_seq
    assert not [*buf.ledger.open, *buf.ledger.reissue, *buf.ready]
    for report, trained, dropped in zip(reports, steps, filtered, strict=False):
        everything = [seq % 7 for seq in (*trained, *dropped)]
        assert report["buffer/filtered"] == len(dropped)
        assert report["buffer/filtered_share"] == len(dropped) / len(everything)
        assert report["reward/generated_mean"] == pytest.approx(np.mean(everything))


def test_the_bound_is_an_error_with_the_group_that_goes_beyond_it() -> None:
    async def main(filtered: int) -> None:
        buf = buffer(2, 0, 1, keep=lambda g: "all right" if g.seq else "all wrong", max_refills=2)
        for _ in range(filtered):
            buf.put(group(await buf.ticket(), 0))
        taking = asyncio.create_task(buf.take())
        await asyncio.sleep(0)
        if taking.done():
            taking.result()
        taking.cancel()

    asyncio.run(main(4))
    with pytest.raises(TrainError) as caught:
        asyncio.run(main(5))
    text = str(caught.value)
    for part in (
        "dropped 5 prompt groups for one step of 2",
        "algorithm.filter.max_refills=2 times",
        "4 because all right; 1 because all wrong",
        "raise algorithm.filter.max_refills",
    ):
        assert part in text


def test_what_may_belong_to_a_later_step_does_not_count() -> None:
    """Two steps in flight: numbers 2 and 3 are filtered, yet 0 and 1, still open, may be the next step."""

    async def main() -> Buffer:
        buf = buffer(2, 1, 3, keep=lambda g: "easy" if g.seq in (2, 3) else None, max_refills=0.5)
        for seq in [await buf.ticket() for _ in range(4)][2:]:
            buf.put(group(seq, 0))
        for seq in (0, 1):
            buf.put(group(seq, 0))
        assert [g.seq for g in await buf.take()] == [0, 1]
        assert buf.end_step()["buffer/filtered"] == 0
        with pytest.raises(TrainError, match="dropped 2 prompt groups"):
            await buf.take()
        return buf

    asyncio.run(main())


def test_a_resumed_ledger_counts_what_was_filtered_before() -> None:
    keep = lambda g: "easy" if g.seq in (2, 3) else None  # noqa: E731

    async def start(buf: Buffer) -> None:
        for seq in [await buf.ticket() for _ in range(4)]:
            buf.put(group(seq, 0))
        await buf.take()

    async def go_on(buf: Buffer) -> dict[str, float]:
        for seq in [await buf.ticket() for _ in range(2)]:
            buf.put(group(seq, 0))
        assert [g.seq for g in await buf.take()] == [4, 5]
        return dict(buf.end_step())

    async def main() -> None:
        buf, resumed = buffer(2, 1, 3, keep=keep), buffer(2, 1, 3, keep=keep)
        await start(buf)
        resumed.ledger = Ledger.from_records(json.loads(json.dumps(buf.ledger.records())))
        assert await go_on(resumed) == await go_on(buf)
        assert buf.end_step()["buffer/filtered"] == 2
        assert buf.end_step()["reward/generated_mean"] == (2 + 3 + 4 + 5) / 4

    asyncio.run(main())


def test_without_a_filter_there_are_no_statistics_of_one() -> None:
    reports: list[dict[str, float]] = []
    asyncio.run(simulate(buffer, 0, reports=reports))
    assert not [name for name in reports[0] if "filter" in name or "generated" in name]


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_a_failure_counts_for_the_step_around_it_whatever_finished_first(max_staleness: int) -> None:
    for seed in range(4):
        counts: list[dict[str, float]] = []
        make = lambda: buffer(2, max_staleness, 4)  # noqa: E731
        asyncio.run(simulate(make, seed, fails=lambda seq: seq % 3 == 1, reports=counts))
        # 0 [1] 2 | 3 [4] 5 | …: one failure in each group that is trained on, two in one that is dropped
        assert [count["failed"] for count in counts] == [4, 4, 4, 4]


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (3, 1, 4, 0, 2)])
def test_too_many_failures_of_one_step_are_an_error_of_whoever_waits(order: tuple[int, ...]) -> None:
    """Two steps in flight; the first is 0, (1, dropped,) and 2: four failures, and two are the next one's."""

    async def run(limit: int) -> Buffer:
        buf = buffer(2, 1, 2, n=4, max_dropped_share=limit / 8)
        for _ in range(4):
            await buf.ticket()
        buf.ledger.admit(0)  # what replaces number 1
        for seq in order:
            if seq == 1:
                buf.drop(seq, "too few", ["rollout_error", "reward_timeout"])
            else:
                buf.put(group(seq, 0))
        await buf.settled()
        return buf

    buf = asyncio.run(run(4))
    assert sorted(buf.ledger.failed) == [0, 1, 2, 3, 4]
    with pytest.raises(RewardError, match=full_text("2 reward_error, 1 reward_timeout, 1")):
        asyncio.run(run(3))


def test_a_resumed_ledger_counts_what_failed_before() -> None:
    async def main() -> None:
        buf, resumed = buffer(2, 1, 3), buffer(2, 1, 3)
        for seq in [await buf.ticket() for _ in range(4)]:
            buf.put(group(seq, 0))
        await buf.take()
        assert buf.num_failed == 2
        resumed.ledger = Ledger.from_records(json.loads(json.dumps(buf.ledger.records())))
        resumed.ready.update(buf.ready)
        await resumed.take()
        assert resumed.num_failed == 2
        assert not resumed.ledger.failed

    asyncio.run(main())


def test_the_failures_of_a_group_that_is_started_again_are_forgotten() -> None:
    ledger = Ledger(next_seq=2, reissue=[0], failed={0: ["reward_error"], 1: ["reward_error"]})
    assert ledger.admit(3) == 0
    assert ledger.failed == {1: ["reward_error"]}


def cut(first: Buffer, again: Buffer, version: int) -> Buffer:
    """`again` goes on where a checkpoint of `first` was cut."""
    ledger = Ledger.from_records(json.loads(json.dumps(first.ledger.records())))
    again.restore(ledger, first.ready.values(), version, json.loads(json.dumps(first.rules)))
    return again


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@pytest.mark.parametrize("order", ["prompt", "completion"])
def test_a_run_that_ended_with_a_short_step_goes_on_with_more_prompts(max_staleness: int, order: str) -> None:
    """Ten prompts in steps of four, then ten more: what the short step left empty is no credit."""
    more = {"batch_size": 4, "max_staleness": max_staleness, "order": order}
    first, steps = asyncio.run(simulate(lambda: buffer(**more, total_steps=3, total_groups=10), 0))
    assert [len(step) for step in steps] == [4, 4, 2]
    for seed in range(3):
        make = lambda: cut(first, buffer(**more, total_steps=6, total_groups=20), 3)  # noqa: E731
        _, steps = asyncio.run(simulate(make, seed))
        assert sorted(seq for step in steps for seq in step) == list(range(10, 20))
        assert [len(step) for step in steps] == [4, 4, 2]


@pytest.mark.parametrize("order", ["prompt", "completion"])
def test_a_run_that_was_made_shorter_ends_there(order: str) -> None:
    async def main() -> None:
        first = buffer(2, 2, 9, order=order)
        for seq in [await first.ticket() for _ in range(6)][:5]:
            first.put(group(seq, 0))
        again = cut(first, buffer(2, 2, 1, order=order), 0)
        assert again.credits() == 0
        assert len(await asyncio.wait_for(again.take(), 240)) == 2
        again.advance(1)
        assert await asyncio.wait_for(again.take(), 240) == []

    asyncio.run(main())


def test_buffered_groups_start_again_where_the_rules_would_make_them_too_old() -> None:
    """Completion order has trained 2 and 3 ahead, 1 waits and is due, 0 was aborted twice: in prompt order 0
    would come first, and 1 too late.
    """

    async def main() -> None:
        first = buffer(1, 2, 9, order="completion")
        assert [await first.ticket() for _ in range(3)] == [0, 1, 2]
        for version, newest in ((1, 2), (2, 3)):
            first.put(group(newest, version - 1))
            assert [g.seq for g in await first.take()] == [newest]
            first.give_back([0], aborted=True)
            if version == 2:
                first.put(group(1, 0))
            first.advance(version)
            if version == 1:
                assert [await first.ticket() for _ in range(2)] == [0, 3]
        assert list(first.ready) == [1]

        assert list(cut(first, buffer(1, 3, 9, order="completion"), 2).ready) == [1]
        assert cut(first, buffer(1, 1, 9, order="completion"), 2).ledger.reissue == [0, 1]
        again = cut(first, buffer(1, 2, 9, order="prompt"), 2)
        for seq in [await again.ticket() for _ in range(again.credits())]:
            again.put(group(seq, again.version))
        assert [g.seq for g in await again.take()] == [0]
        again.advance(3)
        assert [g.seq for g in await again.take()] == [1]  # raises where it is older than the bound

    asyncio.run(main())
