"""Signals that end a command: Ctrl-C (SIGINT), what Slurm and Kubernetes send before they kill (SIGTERM), a
terminal that was closed (SIGHUP). All of them arrive as Python's KeyboardInterrupt, so that what is open is
closed and what was begun is removed, also where a task computes and keeps the event loop from turning; around
training, the first one is a request to save and stop.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CTRL_C, *_OTHERS = STOPPING
END_SECONDS = 15.0  # more than a cluster takes to close its workers
HELD_SECONDS = 2.0  # that a loop may take to turn once, before a task in it is ended from outside
_elsewhere: list[Callable[[], None]] = []  # what asks the loops of other threads to stop
_came: signal.Signals = _CTRL_C  # the last one; signals are the process's
_owns_process = False


def came() -> signal.Signals:
    """Returns the signal of the last KeyboardInterrupt."""
    return _came


def exit_code() -> int:
    """Returns a shell's exit code for a command that it ended: 130 after Ctrl-C, 143 after SIGTERM."""
    return 128 + _came


@contextmanager
def interrupting(*, owns_process: bool = False) -> Iterator[None]:
    """Lets the other signals do what Ctrl-C does, while inside. owns_process: the process ends with what is
    inside, `END_SECONDS` after the second signal at the latest (the first, while a task computes).
    """
    global _came, _owns_process
    _came = _CTRL_C
    _owns_process = owns_process
    waits = False

    def as_ctrl_c(number: int, frame: FrameType | None) -> None:
        nonlocal waits
        if waits:  # it is the second, or `again`, as the loop does not turn
            waits = False
            _end_in_time()
            raise KeyboardInterrupt
        handler = signal.getsignal(_CTRL_C)
        if not callable(handler):  # a shell's background job ignores Ctrl-C
            raise KeyboardInterrupt
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            handler(_CTRL_C, frame)
            return
        # asyncio's handler cancels the task that it runs. One that computes does not notice, and who sends
        # these signals sends them once.
        waits, turned = True, threading.Event()

        def in_turn() -> None:
            nonlocal waits
            turned.set()
            if waits:
                waits = False
                handler(_CTRL_C, None)

        def again() -> None:
            if not turned.wait(HELD_SECONDS) and loop.is_running():
                os.kill(os.getpid(), number)

        loop.call_soon_threadsafe(in_turn)
        threading.Thread(target=again, name="rondo-signal-again", daemon=True).start()

    with _handled(_OTHERS, as_ctrl_c):
        yield


@contextmanager
def exiting() -> Iterator[None]:
    """Goes around a program of the user's: one that another signal ended exits with `exit_code`, for which
    Python has no exception but SystemExit.
    """
    try:
        yield
    except KeyboardInterrupt:
        if _came == _CTRL_C:
            raise
        raise SystemExit(exit_code()) from None


@contextmanager
def caught(act: Callable[[], object]) -> Iterator[None]:
    """Lets the first signal inside call `act` on the event loop; the next one raises KeyboardInterrupt at
    once, also where code blocks the loop.
    """
    loop = asyncio.get_running_loop()
    asked = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            _end_in_time()
            raise KeyboardInterrupt
        asked = True
        loop.call_soon_threadsafe(act)

    if threading.current_thread() is threading.main_thread():
        with _handled(STOPPING, handler):
            yield
        return

    def ask() -> None:
        loop.call_soon_threadsafe(act)

    _elsewhere.append(ask)
    try:
        yield
    finally:
        _elsewhere.remove(ask)


def _end_in_time() -> None:
    """Ends the process if it does not end by itself in time: the user's code may swallow KeyboardInterrupt,
    or run in a thread that never returns.
    """

    def end() -> None:
        sys.stderr.write(f"rondo: not ended {END_SECONDS:.0f} s after the last {_came.name}: now it is\n")
        sys.stderr.flush()
        os._exit(exit_code())

    if _owns_process:
        timer = threading.Timer(END_SECONDS, end)
        timer.daemon = True
        timer.start()


def ask_elsewhere() -> bool:
    """Does what a first signal does for the loops in other threads that `caught` is around, as Python hands
    signals to the main thread only. Returns whether there is one.
    """
    for ask in tuple(_elsewhere):
        ask()
    return bool(_elsewhere)


@contextmanager
def given_back(numbers: Iterable[signal.Signals] = STOPPING) -> Iterator[Iterable[signal.Signals]]:
    """Gives signals back, in the end, to who had them before. Yields those that may be handled inside: none
    that this process was told to ignore (`nohup`), and none that a program around Python handles (None), to
    which Python could not give them back. Python hands signals to the main thread only: none in others.
    """
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {one: signal.getsignal(one) for one in numbers}
        before = {one: old for one, old in before.items() if old not in (signal.SIG_IGN, None)}
    try:
        yield tuple(before)
    finally:
        for one, old in before.items():
            signal.signal(one, old)


@contextmanager
def _handled(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Handles signals inside, as far as `given_back` lets them be handled."""

    def noted(number: int, frame: FrameType | None) -> None:
        global _came
        _came = signal.Signals(number)
        handler(number, frame)

    with given_back(numbers) as found:
        for one in found:
            signal.signal(one, noted)
        yield
