"""Signals as requests to stop: the first, the second, those that are ignored."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator

import pytest

from rondo.system import signals
from rondo.system.signals import STOPPING, caught, exit_code, exiting, interrupting


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", STOPPING)
def test_the_first_signal_asks_and_the_second_ends_a_loop_that_does_not_turn(number: signal.Signals) -> None:
    asked: list[str] = []

    async def stubborn() -> None:
        with caught(lambda: asked.append("to stop")):
            send(number)
            await asyncio.sleep(0)
            assert asked == ["to stop"]
            send(number)  # raises here: no await is between
            asked.append("not reached")

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(stubborn())
    assert asked == ["to stop"]
    assert exit_code() == 128 + number
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_request_that_the_loop_cannot_hear_does_not_stand_in_the_way_of_the_second_signal() -> None:
    async def stubborn() -> None:
        with caught(lambda: None):
            send(signal.SIGTERM)
            send(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(stubborn())
    assert exit_code() == 130


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_before_training_they_are_ctrl_c_with_another_exit_code(number: signal.Signals, code: int) -> None:
    with interrupting(), pytest.raises(KeyboardInterrupt):
        send(number)
    assert exit_code() == code
    with pytest.raises(SystemExit) as ended, exiting():
        raise KeyboardInterrupt
    assert ended.value.code == code
    with interrupting():
        assert exit_code() == 130  # of another command of this process


def test_the_first_of_them_ends_a_task_that_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is open around it is closed, with awaits."""
    monkeypatch.setattr(signals, "HELD_SECONDS", 0.01)
    closed: list[str] = []

    @contextlib.asynccontextmanager
    async def engine() -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.sleep(0)
            closed.append("engine")

    async def compute() -> None:
        async with engine():
            send(signal.SIGTERM)
            while True:
                pass

    with interrupting(), pytest.raises(KeyboardInterrupt):
        asyncio.run(compute())
    assert closed == ["engine"]
    assert exit_code() == 143


def test_a_task_that_notices_the_first_is_cancelled_and_not_disturbed_while_it_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long that takes, and in one turn of the loop."""
    monkeypatch.setattr(signals, "HELD_SECONDS", 0.01)
    told: list[str] = []

    async def work() -> None:
        try:
            send(signal.SIGTERM)
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            time.sleep(0.1)
            told.append("closed")
            raise

    with interrupting(), pytest.raises(KeyboardInterrupt):
        asyncio.run(work())
    assert told == ["closed"]
    assert exit_code() == 143


def test_an_ignored_signal_stays_ignored() -> None:
    async def nohup() -> None:
        with caught(lambda: pytest.fail("asked to stop")):
            send(signal.SIGHUP)
            await asyncio.sleep(0)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupting():
            asyncio.run(nohup())
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_that_a_program_around_python_handles_stays_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python says None of such a handler, and cannot set it: what asks is replaced here."""
    asked, found = signal.getsignal, signal.getsignal(signal.SIGHUP)
    monkeypatch.setattr(signal, "getsignal", lambda one: None if one == signal.SIGHUP else asked(one))
    with interrupting():
        assert asked(signal.SIGHUP) is found
        assert asked(signal.SIGTERM) is not signal.SIG_DFL
