"""The event loop that a command runs in, and a watch over it: code of the user's must not end or hold it."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from rondo.core.errors import TrainError, without_libraries, without_rondo
from rondo.data import looking
from rondo.system.border import EscapeError, alone, contained, described, in_thread, place
from rondo.system.signals import ask_elsewhere, given_back

T = TypeVar("T")
_LOOK_SECONDS = 0.5

_log = logging.getLogger(__name__)


def run_loop(main: Coroutine[Any, Any, T], hang_seconds: float | None) -> T:
    """Runs `main` to its end, as `asyncio.run` does, watched by a LoopWatch. hang_seconds: see there. Raises
    TrainError where a task that nobody awaits, and that code of the user's started, would end the program
    (`sys.exit`).
    """
    try:
        # A loop that such a task ends gives Ctrl-C back before what runs in it does, which then restores the
        # loop's handler.
        with contained(), given_back():
            watched = _watched(main, hang_seconds)
            return _in_a_thread(watched) if _has_a_loop() else asyncio.run(watched)
    except EscapeError as error:
        raise TrainError(f"a task that code of yours started raised {described(error)}") from error


def _has_a_loop() -> bool:
    """Says whether an event loop runs in this thread already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _in_a_thread(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` in a thread of its own. The first Ctrl-C here asks it to stop, the second one waits for it
    no longer.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(asyncio.run(main))
        except BaseException as error:
            done.set_exception(error)

    run_in_context = partial(contextvars.copy_context().run, run)  # a notebook's cell, which shows the output
    threading.Thread(target=run_in_context, name="rondo-run", daemon=True).start()
    asked = False
    while True:
        try:
            return done.result()
        except KeyboardInterrupt:
            if asked or done.done() or not ask_elsewhere():
                raise
            asked = True


async def _watched(main: Coroutine[Any, Any, T], hang_seconds: float | None) -> T:
    with LoopWatch(hang_seconds):
        return await alone(main)


class _NotWantedError(Exception):
    """Ends a thread whose result nobody waits for any more."""


async def read_beside(read: Callable[[], T], tell: Callable[[str], None] = lambda so_far: None) -> T:
    """Returns what `read` does, in a thread of its own: the loop turns meanwhile, so that a signal ends this
    at once, and the thread when it looks next. tell: hears how far it is.
    """
    so_far, ended = "", False

    def look(now: str) -> None:
        nonlocal so_far
        if ended:
            raise _NotWantedError
        so_far = now

    def call() -> T:
        with looking(look):
            return read()

    found = asyncio.wrap_future(in_thread(partial(contextvars.copy_context().run, call), "data"))
    try:
        while not found.done():
            await asyncio.wait([found], timeout=_LOOK_SECONDS)
            tell(so_far)
        return found.result()
    finally:
        ended = True
        found.cancel()


class LoopWatch:
    """Says, from a thread of its own, when code of the user's has kept the running event loop from turning
    for `seconds` (cluster.hang_seconds; None: never): a coroutine that blocks, or a scorer marked
    run_in='loop'. A context manager.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds or 0.0
        self._loop = asyncio.get_running_loop()
        self._loops_thread = threading.get_ident()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rondo-loop-watch", daemon=True)

    def __enter__(self) -> None:
        if self._seconds:
            self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._closing.set()

    def _watch(self) -> None:
        while not self._closing.wait(self._seconds / 4):
            turned = threading.Event()
            asked = time.monotonic()
            try:
                self._loop.call_soon_threadsafe(turned.set)
            except RuntimeError:  # it is closed
                return
            if turned.wait(self._seconds) or self._closing.is_set() or not (where := self._held_by()):
                continue
            _log.warning(
                "%s has kept the event loop from turning for %.0f s, and the run stands still; Ctrl-C twice "
                "ends it. A coroutine must await whatever takes time; reward.isolation=process has scorers "
                "outside of this process, with a time limit",
                where,
                time.monotonic() - asked,
            )
            while not turned.wait(1.0) and not self._closing.is_set():
                pass
            if turned.is_set():
                _log.warning("the event loop turns again, after %.0f s", time.monotonic() - asked)

    def _held_by(self) -> str:
        """Returns function, file and line of the user's code that the loop's thread is in; empty: none."""
        frame = sys._current_frames().get(self._loops_thread)
        stack = traceback.extract_stack(frame)
        starts = [number for number, one in enumerate(stack) if one.name == "run_forever"]
        own = without_libraries(without_rondo(stack[starts[-1] :])) if starts else []
        return f"{own[-1].name} ({place(own[-1])})" if own else ""
