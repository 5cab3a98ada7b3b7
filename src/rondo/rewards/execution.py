"""Running reward functions that may hang: daemon threads that are left behind, and processes that are killed.

Neither blocks the event loop, and neither keeps the program from ending.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rondo.core.errors import ConfigError, DataError, RewardError
from rondo.rewards.marks import SPENT
from rondo.rewards.worker import Coroutines, Function
from rondo.system.actor import CallFailedError, ProcessLostError, spawn
from rondo.system.border import contained
from rondo.system.pool import Pool, Pooled, Supervision, begun
from rondo.system.process import import_path

_START_SECONDS = 120.0  # for a process to import the user's reward function
_GRACE_SECONDS = 2.0  # a process ends itself at the time limit; after this much more it is killed
SUPERVISION = Supervision(restarts=None, deaths=1)
_CPU_SHARE = 0.5  # of the time limit; where calls have limits of CPU time, these strike before the clock


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
                with contained():
                    future.set_result(call())
            except Exception as error:
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
                    "Set reward.isolation=process, or mark the function @reward_function(run_in='process'): "
                    "processes are killed at the time limit"
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


class _NotAloneError(Exception):
    """The process ended with several calls in it: whose fault it was is not known."""


class _Process(Pooled):
    """A process (`worker`) for one reward function, and the calls that run in it."""

    def __init__(self, spec: str, serves: type[Coroutines | Function]) -> None:
        super().__init__()
        own = {"PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment = {**os.environ, **own}
        self.child = spawn(serves, "the reward function's process", environment)
        self.loading = begun(self._load(spec))
        self._was_ended = False

    async def _load(self, spec: str) -> None:
        try:
            await self.child.begin(spec, seconds=_START_SECONDS)
        except ProcessLostError as error:
            if not error.late:
                raise
            raise ScorerCrashError(f"{spec} was not imported within {_START_SECONDS:g} s") from error

    @property
    def ended(self) -> bool:
        """Says whether it can be asked no more."""
        return self._was_ended or self.child.lost is not None

    def end(self) -> None:
        """Ends it at once."""
        self._was_ended = True
        self.child.kill()


class ProcessPool(Pool[_Process]):
    """Calls of one reward function in processes that are killed at the time limit; started when first
    needed, and anew where one has died.

    at_once: calls in one process at a time, of a coroutine function. limited: whether the function has a
    `reference` (see `Marks`).
    """

    def __init__(self, spec: str, processes: int, at_once: int = 1, limited: bool = False) -> None:
        serves = Function if at_once == 1 else Coroutines
        super().__init__(processes, lambda number, before: _Process(spec, serves), SUPERVISION, at_once)
        self._in_turn = at_once == 1
        self._limited = limited

    async def run(self, args: tuple[Any, ...], options: dict[str, Any], timeout: float) -> Any:
        """Returns the function's result. Raises TimeoutError after `timeout` seconds, ScorerCrashError with
        the process's traceback, and DataError where reading a row spends the CPU time that responses have.

        Waiting for a process, starting it and importing the function's module do not count as time. Calls
        that were in one process when it died are each made again by themselves: then it is known whose fault
        it is.
        """
        call = object()
        while True:
            async with self.place(call) as process:
                try:
                    return await self._score(call, process, args, options, timeout)
                except _NotAloneError:
                    continue

    async def _score(
        self,
        call: object,
        process: _Process,
        args: tuple[Any, ...],
        options: dict[str, Any],
        timeout: float,
    ) -> Any:
        try:
            await asyncio.shield(process.loading)
            answer = process.child.call("score", args, options, timeout, timeout * _CPU_SHARE)
            async with asyncio.timeout(timeout + _GRACE_SECONDS):
                return await answer
        except CallFailedError as error:
            raise _error_of(error) from None
        except (ProcessLostError, TimeoutError) as error:
            guilty = self.died(process, process.running)
            process.end()
            if guilty is not call:
                raise _NotAloneError from error
            ended = process.child.process.how_it_ended()
            if self._limited and ended == "signal SIGPROF":
                return SPENT
            if self._limited and ended == "signal SIGVTALRM":
                raise DataError(
                    f"prompt {args[0].prompt_id}: reading its row, without any response, took more than "
                    f"{timeout * _CPU_SHARE:g} s of processor time. Write its answer in another form, leave "
                    "the row out, or raise reward.timeout_seconds"
                ) from error
            if isinstance(error, TimeoutError) or ended == "signal SIGALRM":
                raise LimitError("the reward function was over its time limit") from error
            raise ScorerCrashError(f"{error.tail}\n{error}, maybe for want of memory") from error
        except asyncio.CancelledError:
            if self._in_turn:  # busy, and so of no more use
                process.end()
            raise


def _error_of(error: CallFailedError) -> Exception:
    cause = error.failure.cause()
    if isinstance(cause, ConfigError | DataError | RewardError | TimeoutError):
        return cause
    if isinstance(cause, MemoryError):
        return LimitError("the reward function was over its memory limit")
    return ScorerCrashError(error.failure.traceback)
