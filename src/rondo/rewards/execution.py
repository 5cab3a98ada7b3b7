"""Running reward functions that may hang: daemon threads that are left behind, and processes that are killed.

Neither blocks the event loop, and neither keeps the program from ending.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
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
_SHORT_SECONDS = 0.0002  # what to wake a thread, and the loop after it, costs at most
_LATELY = 16  # calls of a function
_LONG_SHARE = 0.25  # of those: from here on all are taken for long
_LOOK_SECONDS = 0.01  # between looks while calls wait
_TELL_SECONDS = 0.005  # as long as Python lets a thread run while another one waits


class ScorerCrashError(Exception):
    """A reward function raised in its process, or the process died; the text carries the traceback."""


class LimitError(TimeoutError):
    """A reward function's process used up its time or memory."""


@dataclass(eq=False, slots=True)
class _Call:
    """A call that waits for a thread, runs in one, or has ended."""

    function: Callable[[], Any]
    timeout: float
    who: str
    answer: asyncio.Future[Any]
    is_short: bool
    """Whether most of the last calls of `who` were."""
    result: Any = None
    error: Exception | None = None


class _Thread:
    """A daemon thread that runs calls, one after the other, while there are some."""

    def __init__(self, calls: DaemonThreads) -> None:
        self.running: _Call | None = None
        self.began = 0.0  # that call, on the clock of time.monotonic
        self.is_left = False  # nobody waits for that call: the thread ends when it comes back
        self.bell: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: there are calls; False: the end
        threading.Thread(target=self._work, args=(calls,), name="rondo-reward", daemon=True).start()

    def _work(self, calls: DaemonThreads) -> None:
        while self.bell.get():
            while (call := calls.next(self)) is not None:
                try:
                    with contained():
                        call.result = call.function()
                except Exception as error:  # the boundary: it travels to the one who waits for the result
                    call.error = error
                calls.ended(self, call)


class DaemonThreads:
    """Blocking calls with a time limit, at most `threads` at a time.

    ```
    run() ─▶ waiting ── a thread takes one after the other ─▶ done ─▶ the loop, all that are done at once
    ```

    To wake a thread, and the loop when it has ended, costs more than most functions do. So calls that were
    short lately (`_SHORT_SECONDS`) share one thread, which is woken once for all that have come until then;
    each other call gets a thread of its own. Where some still wait at the next look (`_LOOK_SECONDS`) another
    thread helps; all do where a call has run since the last look, and so is not short.

    A call that is over its limit keeps its thread, which is waited for no longer, and another thread takes
    its place. With `max_hung` of those the next call raises RewardError: they take processor time forever.
    """

    def __init__(self, threads: int, max_hung: int = 16) -> None:
        self._threads = threads
        self._max_hung = max_hung
        self._long_share: dict[str, float] = {}  # of the last calls, by `who`
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_starting = self._is_telling = False
        self._timer: asyncio.TimerHandle | None = None
        self._told_at = 0.0
        self._done: deque[_Call] = deque()
        self._lock = threading.Lock()  # guards the rest, and what the threads have
        self._waiting: deque[_Call] = deque()
        self._long_waiting = 0
        self._busy: set[_Thread] = set()
        self._idle: list[_Thread] = []
        self._hung: set[_Thread] = set()

    async def run(self, function: Callable[[], Any], timeout: float, who: str) -> Any:
        """Returns `function()`. Raises TimeoutError after `timeout` seconds of running; waiting for a thread
        does not count. who: whose calls take about as long as this one.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # another asyncio.run: nothing that the last one had to do is done
            self._loop = loop
            self._is_starting = self._is_telling = False
            self._timer = None
        is_short = self._long_share.get(who, 1.0) < _LONG_SHARE
        call = _Call(function, timeout, who, loop.create_future(), is_short)
        with self._lock:
            self._waiting.append(call)
            self._long_waiting += not is_short
        if not self._is_starting:
            self._is_starting = True
            loop.call_soon(self._start)
        try:
            return await call.answer
        except asyncio.CancelledError:
            with self._lock:
                self._leave(thread for thread in self._busy if thread.running is call)
            raise

    def close(self) -> None:
        with self._lock:
            for thread in self._idle:
                thread.bell.put(False)
            self._idle.clear()

    # ---- on the event loop ----

    def _start(self) -> None:
        """Wakes as many threads as the calls that wait want."""
        self._is_starting = False
        with self._lock:
            running = [thread.running for thread in self._busy]
            num_long = self._long_waiting + sum(call is not None and not call.is_short for call in running)
            has_short = len(self._waiting) > self._long_waiting
            self._wake(num_long + has_short - len(self._busy))
            self._look_within(_LOOK_SECONDS)

    def _wake(self, count: int) -> None:
        """Wakes `count` threads, as far as there may be so many; or refuses the calls that wait."""
        self._hung = {thread for thread in self._hung if thread.running is not None}
        try:
            if self._waiting and len(self._hung) >= self._max_hung:
                raise RewardError(
                    f"{len(self._hung)} calls of reward functions hang in threads that cannot be stopped. "
                    "Set reward.isolation=process, or mark the function @reward_function(run_in='process'): "
                    "processes are killed at the time limit"
                )
            for _ in range(min(count, len(self._waiting), self._threads - len(self._busy))):
                thread = self._idle.pop() if self._idle else _Thread(self)
                self._busy.add(thread)
                thread.bell.put(True)
        except (RewardError, RuntimeError) as error:  # the latter: no thread can be started
            refused = [call.answer for call in self._waiting if not call.answer.done()]
            self._waiting.clear()
            self._long_waiting = 0
            for answer in refused:
                answer.set_exception(type(error)(str(error)))

    def _look_within(self, seconds: float) -> None:
        assert self._loop is not None
        at = self._loop.time() + seconds
        if self._timer is None or self._timer.when() > at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(at, self._look)

    def _look(self) -> None:
        """Ends calls that are over their limits, and has another thread help where some still wait."""
        self._timer = None
        self._tell()
        now = time.monotonic()
        with self._lock:
            running = [(thread, thread.running) for thread in self._busy if thread.running is not None]
            late = {thread: call for thread, call in running if now - thread.began >= call.timeout}
            self._leave(late)
            is_held_up = any(now - thread.began >= _LOOK_SECONDS for thread, _ in running)
            self._wake(len(self._waiting) if is_held_up else 1)
            ends = [thread.began + call.timeout - now for thread, call in running if thread not in late]
            if self._busy:
                self._look_within(min([*ends, _LOOK_SECONDS] if self._waiting or not ends else ends))
        for call in late.values():
            if not call.answer.done():
                call.answer.set_exception(TimeoutError())

    def _leave(self, threads: Iterable[_Thread]) -> None:
        """Waits no longer for what these do."""
        for thread in list(threads):
            thread.is_left = True
            self._busy.remove(thread)
            self._hung.add(thread)

    def _tell(self) -> None:
        """Answers the calls that have ended."""
        self._is_telling = False
        self._told_at = time.monotonic()
        while self._done:
            call = self._done.popleft()
            if call.answer.done():  # over its limit, or cancelled
                continue
            if call.error is None:
                call.answer.set_result(call.result)
            else:
                call.answer.set_exception(call.error)

    # ---- in a thread ----

    def next(self, thread: _Thread) -> _Call | None:
        """Returns the call that a thread runs next; None: it waits for the bell."""
        with self._lock:
            thread.running = None
            while self._waiting and not thread.is_left:
                call = self._waiting.popleft()
                self._long_waiting -= not call.is_short
                if not call.answer.done():  # else it was cancelled
                    thread.running, thread.began = call, time.monotonic()
                    return call
            if thread.is_left:
                thread.bell.put(False)
            else:
                self._busy.remove(thread)
                self._idle.append(thread)
        self._ask_to_tell()
        return None

    def ended(self, thread: _Thread, call: _Call) -> None:
        """Takes a call that has ended. The loop is told of several at once, if they are short."""
        now = time.monotonic()
        is_long = now - thread.began >= _SHORT_SECONDS
        share = self._long_share.get(call.who, 1.0)
        self._long_share[call.who] = share + (is_long - share) / _LATELY
        self._done.append(call)
        if is_long or now - self._told_at >= _TELL_SECONDS:
            self._ask_to_tell()

    def _ask_to_tell(self) -> None:
        # In this order, and `_tell` clears the mark before it looks: what is done is told.
        if self._done and not self._is_telling and self._loop is not None:
            self._is_telling = True
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._tell)


class _NotAloneError(Exception):
    """The process ended while several calls ran in it: which of them is to blame is not known."""


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
        """Says whether the process takes no more calls."""
        return self._was_ended or self.child.lost is not None

    def end(self) -> None:
        """Ends the process at once."""
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
