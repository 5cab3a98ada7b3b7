"""Running reward functions that may hang: daemon threads that are left behind, and processes that are killed.

Neither blocks the event loop, and neither keeps the program from ending.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rondo.errors import ConfigError, DataError, RewardError
from rondo.transport.child import CallFailedError, Child, ProcessLostError

_START_SECONDS = 120.0  # for a process to import the user's reward function
_GRACE_SECONDS = 2.0  # a process ends itself at the time limit; after this much more it is killed


class ScorerCrashError(Exception):
    """A reward function raised in its process, or the process died; the text carries the traceback."""


class LimitError(TimeoutError):
    """A reward function's process used up its time or memory."""


class _Thread:
    """One daemon thread that runs calls one after the other."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="rondo-reward", daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((call, future))
        return future

    def finish(self) -> None:
        """Ends the thread when it comes back from its call."""
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)


class DaemonThreads:
    """Blocking calls with a time limit, at most `threads` at a time.

    A call that is over its limit keeps its thread, which is waited for no longer, and another thread takes
    its place. With `max_hung` of those the next call raises RewardError: they take processor time forever.
    """

    def __init__(self, threads: int, max_hung: int = 16) -> None:
        self._slots = asyncio.Semaphore(threads)
        self._max_hung = max_hung
        self._idle: list[_Thread] = []
        self._hung: set[Future[Any]] = set()

    async def run(self, call: Callable[[], Any], timeout: float) -> Any:
        """Returns `call()`. Raises TimeoutError after `timeout` seconds of running; waiting for a thread does
        not count.
        """
        async with self._slots:
            self._hung = {future for future in self._hung if not future.done()}
            if len(self._hung) >= self._max_hung:
                raise RewardError(
                    f"{len(self._hung)} calls of reward functions hang in threads that cannot be stopped. "
                    "Mark the function @reward_function(run_in='process'), which is killed at the time limit"
                )
            thread = self._idle.pop() if self._idle else _Thread()
            future = thread.submit(call)
            try:
                return await asyncio.wait_for(asyncio.wrap_future(future), timeout)
            finally:
                if future.done() and not future.cancelled():
                    self._idle.append(thread)
                else:
                    self._hung.add(future)
                    thread.finish()

    def close(self) -> None:
        for thread in self._idle:
            thread.finish()
        self._idle.clear()


def _start(spec: str) -> Child:
    """Starts a process (`rondo.rewards.worker`) for one reward function."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return Child("the reward function's process", ["rondo.rewards.worker"], environment)


class ProcessPool:
    """Calls of one reward function in processes that are killed at the time limit; started when first
    needed.
    """

    def __init__(self, spec: str, processes: int) -> None:
        self._spec = spec
        self._slots = asyncio.Semaphore(processes)
        self._idle: list[Child] = []
        self._busy: set[Child] = set()

    async def run(self, args: tuple[Any, ...], options: dict[str, Any], timeout: float) -> Any:
        """Returns the function's result. Raises TimeoutError after `timeout` seconds, and ScorerCrashError
        with the process's traceback.

        Waiting for a process, starting it and importing the function's module do not count as time.
        """
        async with self._slots:
            process = self._idle.pop() if self._idle else None
            started = process is None
            process = process or _start(self._spec)
            self._busy.add(process)
            try:
                if started:
                    await _answer(process.call("load", self._spec), _START_SECONDS)
                value = await _answer(process.call("score", args, options, timeout), timeout + _GRACE_SECONDS)
            except CallFailedError as error:
                self._idle.append(process)
                raise _error_of(error) from None
            except ProcessLostError as error:
                how = process.process.how_it_ended()
                if how == "signal SIGALRM":
                    raise LimitError("the reward function was over its time limit") from error
                raise ScorerCrashError(f"{error}; it may have run out of memory") from error
            except BaseException:  # cancelled, too: a process that is busy is of no more use
                process.kill()
                raise
            finally:
                self._busy.discard(process)
            self._idle.append(process)
            return value

    def close(self) -> None:
        for process in [*self._idle, *self._busy]:
            process.kill()
        self._idle.clear()


async def _answer(answer: Future[Any], timeout: float) -> Any:
    return await asyncio.wait_for(asyncio.wrap_future(answer), timeout)


def _error_of(error: CallFailedError) -> Exception:
    cause = error.failure.cause()
    if isinstance(cause, ConfigError | DataError):
        return cause
    if isinstance(cause, MemoryError):
        return LimitError("the reward function was over its memory limit")
    return ScorerCrashError(error.failure.traceback)
