"""The buffer: credits, order, refills, the short last step, and an exact account of every prompt."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rondo.batch import Batch, BatchRef
from rondo.data.buffer import Buffer, Group, Ledger


def group(seq: int, version: int) -> Group:
    batch = Batch.of({"row_id": np.array([seq]), "reward": np.array([1.0], np.float32)})
    return Group(seq, version, version, BatchRef.of(batch, ["reward"]))


def buffer(batch_size: int = 2, max_staleness: int = 0, total_steps: int = 3, **kwargs: Any) -> Buffer:
    kwargs.setdefault("total_groups", 10**9)
    return Buffer(batch_size=batch_size, max_staleness=max_staleness, total_steps=total_steps, **kwargs)


async def simulate(
    make: Callable[[], Buffer], seed: int, fails: Callable[[int], bool] = lambda seq: False
) -> tuple[Buffer, list[list[int]]]:
    """Episodes of random duration against a trainer that takes, then advances the version."""
    rng = random.Random(seed)
    buf = make()
    tasks: list[asyncio.Task[None]] = []

    async def episode(seq: int, version: int) -> None:
        await asyncio.sleep(rng.random() * 0.002)
        await (buf.drop(seq, "failed") if fails(seq) else buf.put(group(seq, version)))

    async def feed() -> None:
        while True:
            seq = await buf.ticket()
            tasks.append(asyncio.create_task(episode(seq, buf.version)))

    feeder = asyncio.create_task(feed())
    steps: list[list[int]] = []
    while taken := await asyncio.wait_for(buf.take(), 10):
        assert max(buf.version - g.oldest_version for g in taken) <= buf.max_staleness
        steps.append([g.seq for g in taken])
        await asyncio.sleep(rng.random() * 0.002)
        await buf.advance(buf.version + 1)
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
        assert {seq: reason for seq, reason in buf.ledger.dropped.items() if seq < 7} == {
            0: "failed",
            3: "failed",
            6: "failed",
        }


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
        await buf.put(group(first, 0))
        assert buf.ledger.dropped == {0: "all answers are right"}
        assert buf.credits() == 2

    asyncio.run(main())


def test_an_episode_error_reaches_whoever_waits() -> None:
    async def main() -> None:
        buf = buffer()
        waiting = asyncio.create_task(buf.take())
        await asyncio.sleep(0)
        await buf.fail(ValueError("scorer broke"))
        with pytest.raises(ValueError, match="scorer broke"):
            await asyncio.wait_for(waiting, 1)
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
    ledger.drop(3, "timeout")
    ledger.give_back(4)
    again = Ledger.from_records(ledger.records())
    assert (again.next_seq, again.num_trained, again.dropped, again.reissue) == (
        6,
        2,
        {3: "timeout"},
        [2, 4, 5],
    )
    assert again.num_admitted == 3
    assert [again.admit(1) for _ in range(4)] == [2, 4, 5, 6]
