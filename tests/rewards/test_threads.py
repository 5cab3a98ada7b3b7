"""Calls of plain functions in threads: short ones share one, long ones have one each, and all have limits of
their own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rondo.core.errors import RewardError
from rondo.rewards import execution
from rondo.rewards.execution import DaemonThreads

SHORT = 40  # calls, after which a function is known to be short


@pytest.fixture
def threads() -> Iterator[DaemonThreads]:
    made = DaemonThreads(8, max_hung=3)
    yield made
    made.close()


@pytest.fixture
def all_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is, all calls of the test count as short."""
    monkeypatch.setattr(execution, "_SHORT_SECONDS", 1000.0)


async def together(
    threads: DaemonThreads, calls: list[Callable[[], Any]], timeout: float = 60.0
) -> list[Any]:
    """What each call returns or raises; all are there at once."""
    waiting = (threads.run(call, timeout, "mine") for call in calls)
    return await asyncio.gather(*waiting, return_exceptions=True)


async def short_calls(threads: DaemonThreads) -> None:
    for _ in range(SHORT):
        await threads.run(threading.get_ident, 60.0, "mine")


def test_short_calls_share_a_thread_and_run_in_their_order(
    threads: DaemonThreads, all_short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "_LOOK_SECONDS", 1000.0)  # no other thread helps
    order: list[int] = []

    def call(number: int) -> Callable[[], Any]:
        return lambda: (order.append(number), number, threading.get_ident())[1:]

    async def main() -> list[Any]:
        await short_calls(threads)
        return await together(threads, [call(number) for number in range(500)])

    answers = asyncio.run(main())
    assert [number for number, _ in answers] == list(range(500)) == order
    assert len({ident for _, ident in answers}) == 1


def test_calls_that_are_not_known_to_be_short_run_eight_at_a_time(
    threads: DaemonThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 24 waits for 7 others; no look is needed for it."""
    monkeypatch.setattr(execution, "_LOOK_SECONDS", 1000.0)
    met = threading.Barrier(8, timeout=60)
    assert sorted(asyncio.run(together(threads, [met.wait] * 24))) == sorted([*range(8)] * 3)


def test_so_do_those_that_take_longer_than_the_ones_before(threads: DaemonThreads, all_short: None) -> None:
    met = threading.Barrier(8, timeout=60)

    async def main() -> list[Any]:
        await short_calls(threads)
        return await together(threads, [met.wait] * 8)

    assert sorted(asyncio.run(main())) == [*range(8)]


def test_one_that_hangs_among_short_ones_is_over_its_limit_alone(
    threads: DaemonThreads, all_short: None
) -> None:
    """So is one that raises: it alone has its error."""
    released = threading.Event()

    def wrong() -> None:
        raise KeyError("mine")

    async def main() -> list[Any]:
        await short_calls(threads)
        calls: list[Callable[[], Any]] = [lambda number=n: number for n in range(30)]  # type: ignore[misc]
        calls[3], calls[5] = released.wait, wrong
        made = await together(threads, calls, 0.5)
        released.set()
        return made

    answers = asyncio.run(main())
    assert [n for n, answer in enumerate(answers) if answer == n] == [*range(3), 4, *range(6, 30)]
    assert isinstance(answers[3], TimeoutError)
    assert repr(answers[5]) == "KeyError('mine')"


def test_waiting_for_a_thread_is_no_running_time(threads: DaemonThreads) -> None:
    """Of 16 calls that take more than half of the limit, 8 wait as long before they begin."""
    answers = asyncio.run(together(threads, [lambda: time.sleep(0.6)] * 16, 1.0))
    assert answers == [None] * 16


def test_what_hangs_is_counted_until_it_comes_back(threads: DaemonThreads) -> None:
    released, hangs = threading.Event(), 3

    async def main() -> list[Any]:
        late = await together(threads, [released.wait] * hangs, 0.1)
        assert [type(one) for one in late] == [TimeoutError] * hangs
        refused = await together(threads, [bool] * 2)
        assert [type(one) for one in refused] == [RewardError] * 2
        assert str(refused[0]).startswith("3 calls of reward functions hang in threads")
        released.set()
        while any(thread.running for thread in threads._hung):
            await asyncio.sleep(0.001)
        return await together(threads, [bool] * 2)

    assert asyncio.run(main()) == [False, False]


def test_a_call_that_is_cancelled_holds_up_no_other(threads: DaemonThreads) -> None:
    released = threading.Event()
    asked: list[int] = []

    async def main() -> Any:
        running = [asyncio.create_task(threads.run(released.wait, 60.0, "mine")) for _ in range(2)]
        while len(threads._busy) < 2 or not all(thread.running for thread in threads._busy):
            await asyncio.sleep(0.001)
        one = asyncio.create_task(threads.run(lambda: asked.append(1), 60.0, "mine"))
        await asyncio.sleep(0)
        one.cancel()  # before it has begun: it never does
        for task in running:
            task.cancel()
        await asyncio.gather(one, *running, return_exceptions=True)
        answer = await threads.run(lambda: len(asked), 60.0, "mine")
        released.set()
        return answer

    assert asyncio.run(main()) == 0


def test_threads_serve_one_loop_after_the_other(threads: DaemonThreads) -> None:
    """A loop that ends while calls wait leaves nothing behind for the next one."""

    async def left() -> None:
        asyncio.create_task(threads.run(lambda: time.sleep(0.05), 60.0, "mine"))  # noqa: RUF006
        await asyncio.sleep(0.01)

    for _ in range(2):
        asyncio.run(left())
        assert asyncio.run(together(threads, [lambda: 1, lambda: 2])) == [1, 2]
