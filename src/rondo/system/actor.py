"""Processes of ours: an object in a process of its own, called as if it were here.

    handle = spawn(Class, who, environment)        the process, under a guard
    await handle.begin(*arguments)                 Class(*arguments), there
    await handle.call("method", *arguments)        or .result(seconds), from a thread

    ActorHandle ── Call ─▶ main (the process)      any thread sends; one writes, in order; one reads
                ◀─ Reply, or records of its own ──

What an operation raises is a CallFailedError here; ProcessLostError says that the process has died, and how.
A call may have a limit: a process that has not answered by then is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import importlib
import inspect
import itertools
import logging
import math
import os
import pickle
import queue
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rondo.core.errors import RondoError
from rondo.system import activity
from rondo.system.activity import Pulse
from rondo.system.border import alone, written
from rondo.system.forkserver import ForkServer
from rondo.system.frames import Frame, receive
from rondo.system.process import ChildProcess

CLOSE_SECONDS = 10.0  # for a process to end by itself; then it is killed
LOOK_SECONDS = 0.5  # at most, between two looks whether a call is over its limit
# What pickle raises for an object that cannot be written, or whose class cannot be found or rebuilt.
PICKLE_ERRORS = (pickle.PickleError, ImportError, AttributeError, TypeError, ValueError, RecursionError)
_BEGIN = "__init__"
_DROP = "drop"  # cancels the call whose number is its argument; neither of them gets a reply
_PULSE = "pulse"
_log = logging.getLogger(__name__)


# ---- what travels


@dataclass(frozen=True)
class Call:
    """One operation of the process. Its reply has the same number."""

    number: int
    """Counted by the caller's end of the link, so that replies may come in any order."""
    method: str
    """Of the actor; `__init__` comes first, `drop` cancels another call and gets no reply."""
    args: tuple[Any, ...] = ()
    """By position only."""


@dataclass(frozen=True)
class Failure:
    """Why a call gave nothing: an exception on its way to another process, or the end of that process."""

    message: str
    """Class and text."""
    traceback: str = ""
    """As Python writes it, with its causes; empty: there is none."""
    pickled: bytes | None = None
    """The exception, for another process; None: it cannot travel, or is not to."""
    at: float = 0.0
    """Seconds since the epoch, on the clock of its process."""
    echo: bool = False
    """It only reports a peer's failure."""
    died: bool = False
    """The process is gone."""
    outage: bool = False
    """No code raised it: a process died, or nobody moved any more."""
    error: BaseException | None = field(default=None, compare=False)
    """The exception itself, in its own process."""

    @staticmethod
    def of(error: BaseException) -> Failure:
        """Returns the record of an exception, which travels itself where its class is rondo's or Python's:
        others would import their modules.
        """
        pickled = None
        if type(error).__module__ in ("builtins", "rondo.core.errors"):
            with contextlib.suppress(Exception):  # of whatever its arguments do when they are pickled
                pickled = pickle.dumps(error)
        text = "".join(traceback.format_exception(error))
        message = f"{type(error).__name__}: {written(error)}"
        return Failure(message, text, pickled, time.time(), error=error)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "error": None}

    def cause(self) -> BaseException | None:
        """Returns the exception, or None where it could not travel."""
        if self.error is not None or self.pickled is None:
            return self.error
        try:
            cause: BaseException = pickle.loads(self.pickled)
        except PICKLE_ERRORS:  # an argument of it cannot be read here
            return None
        return cause


@dataclass(frozen=True)
class Reply:
    """The result of a call, or why there is none."""

    number: int
    """That of the call."""
    value: Any = None
    """What the method returned; None where there is a failure."""
    failure: Failure | None = None
    """None: the call returned."""


class Link:
    """One end of a socket pair. `send` may be called before `start`."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._connection = connection
        self._name = name
        # Frames to send; a number (of `socket.SHUT_…`) ends the writing.
        self._outbox: queue.SimpleQueue[Frame | int] = queue.SimpleQueue()

    def start(
        self,
        take: Callable[[list[Any]], None],
        end: Callable[[], None],
        look: Callable[[], None] | None = None,
    ) -> None:
        """Starts reading. The reading thread calls `take` with the records of each frame, `look` in between
        and in the middle of a frame that does not come to its end, at least every LOOK_SECONDS, and `end`
        once, when the other side is gone.
        """
        for target, args in ((self._write, ()), (self._read, (take, end, look))):
            threading.Thread(target=target, args=args, name=self._name, daemon=True).start()

    def send(self, *records: Any) -> None:
        """Queues one frame, from any thread; it is dropped when the other side is gone.

        Raises PICKLE_ERRORS.
        """
        self.put(Frame(records))

    def put(self, frame: Frame) -> None:
        """Sends a frame that is made already."""
        self._outbox.put(frame)

    def close(self, how: int = socket.SHUT_WR) -> None:
        """Ends the other side's stream, after all frames that were sent; with SHUT_RDWR also this side's."""
        self._outbox.put(how)

    def _write(self) -> None:
        try:
            while isinstance(frame := self._outbox.get(), Frame):
                frame.send(self._connection)
            self._connection.shutdown(frame)
        except OSError:  # the reading thread says it to everybody
            return

    def _read(
        self, take: Callable[[list[Any]], None], end: Callable[[], None], look: Callable[[], None] | None
    ) -> None:
        arrives = select.poll()
        arrives.register(self._connection, select.POLLIN)

        def wait() -> None:
            while look is not None and not arrives.poll(LOOK_SECONDS * 1000):
                look()

        try:
            while True:
                take(receive(self._connection, wait))
                if look is not None:
                    look()
        except EOFError:
            return
        finally:  # whatever ended it, nobody is answered any more
            end()
            self.close()
            self._connection.close()


# ---- here


class CallFailedError(RondoError):
    """The operation raised, in the process."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class ProcessLostError(RondoError):
    """The process has died, or was closed. tail: the last lines of its output. late: it was ended, over the
    limit of a call.
    """

    def __init__(self, message: str, tail: str, closed: bool, late: bool = False) -> None:
        super().__init__(message)
        self.tail = tail
        self.closed = closed
        self.late = late


class ActorFuture(Future[Any]):
    """What a call will have given. number: the call's. ends_at: its limit, on the clock of time.monotonic.

    Cancelling an `await` of it gives up the call, which is then cancelled in the process, too.
    """

    def __init__(self, number: int, ends_at: float, give_up: Callable[[int], None]) -> None:
        super().__init__()
        self.number = number
        self.ends_at = ends_at
        self._give_up = give_up

    def drop(self) -> None:
        """Gives up the call: the process cancels it, where it is a task there."""
        self.cancel()
        self._give_up(self.number)

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            return (yield from asyncio.wrap_future(self).__await__())
        except asyncio.CancelledError:
            self.drop()
            raise


class ActorHandle:
    """A process that serves an Actor. Made by `spawn`. take, stopped_seconds: see there."""

    def __init__(
        self,
        who: str,
        process: ChildProcess,
        link: Link,
        take: Callable[[Sequence[Any]], None] | None,
        stopped_seconds: float,
    ) -> None:
        self.who = who
        self.process = process
        self._link = link
        self._take_others = take
        # Guards what the threads share: the next four.
        self._lock = threading.Lock()
        self._calls: dict[int, ActorFuture] = {}
        self._limited: dict[int, ActorFuture] = {}  # those of the calls that have a limit
        self._lost: ProcessLostError | None = None
        self._when_lost: Callable[[ProcessLostError], None] | None = None
        self._numbers = itertools.count(1)
        self._closing = False
        self._late = False
        self._stopped_seconds = stopped_seconds
        self._was_stopped = False
        self._num_stopped = 0  # looks in a row that found it stopped
        self._looked_at = 0.0
        self._told = threading.Event()
        link.start(self._take, self._end, self._look)

    @property
    def lost(self) -> ProcessLostError | None:
        """Returns why the actor answers no more; None while it lives."""
        return self._lost

    def when_lost(self, tell: Callable[[ProcessLostError], None]) -> None:
        """Has `tell` called once, on some thread, when the process has died or was closed (at once, if it
        has).
        """
        with self._lock:
            self._when_lost = tell
            lost = self._lost
        if lost is not None:
            tell(lost)

    def begin(self, *args: Any, seconds: float = math.inf) -> ActorFuture:
        """Makes the first call: the process makes its actor of these arguments. The process ends where that
        raises.
        """
        return self.call(_BEGIN, *args, seconds=seconds)

    def pulse(self, stacks: bool = False) -> ActorFuture:
        """Asks what the process is doing, an `activity.Pulse`: whatever its event loop does."""
        return self.call(_PULSE, stacks)

    def call(self, method: str, *args: Any, seconds: float = math.inf) -> ActorFuture:
        """Sends a call. The answer ends with its value, CallFailedError or ProcessLostError. seconds: its
        limit, over which the process is ended, for all who wait, within LOOK_SECONDS more.

        Raises ProcessLostError, and PICKLE_ERRORS where the arguments cannot be sent.
        """
        answer = ActorFuture(next(self._numbers), time.monotonic() + seconds, self._drop)
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._calls[answer.number] = answer
            if seconds < math.inf:
                self._limited[answer.number] = answer
        answer.add_done_callback(lambda _: self._forget(answer.number))  # also of one given up
        try:
            self._link.send(Call(answer.number, method, args))
        except PICKLE_ERRORS:
            answer.cancel()
            raise
        return answer

    def _forget(self, number: int) -> None:
        self._calls.pop(number, None)
        self._limited.pop(number, None)

    def _look(self) -> None:
        if self._stopped_seconds < math.inf:
            self._look_whether_it_is_stopped()
        if self._late or not self._limited:
            return
        with self._lock:
            self._late = any(answer.ends_at < time.monotonic() for answer in self._limited.values())
        if self._late:
            _log.error("%s has not answered in time; ending it", self.who)
            self.process.kill()

    def _look_whether_it_is_stopped(self) -> None:
        now = time.monotonic()
        if now < self._looked_at + LOOK_SECONDS:
            return
        self._looked_at = now
        # Looks, not seconds: who was stopped with it, and goes on a moment earlier, does not end it.
        self._num_stopped = self._num_stopped + 1 if self.process.is_stopped() else 0
        if self._num_stopped * LOOK_SECONDS == self._stopped_seconds:
            self._was_stopped = True
            self.process.kill()

    def _drop(self, number: int) -> None:
        self._link.send(Call(next(self._numbers), _DROP, (number,)))

    def kill(self) -> None:
        """Ends the process and all its children at once."""
        self._closing = True
        self.process.kill()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Asks the process to end, and kills it and all its children after `seconds`. Returns when all
        futures of its calls are done.
        """
        self._closing = True
        self._link.close()
        if not self.process.wait(seconds if self._lost is None else 1.0):
            self.process.kill()
        self._told.wait(CLOSE_SECONDS)

    def _take(self, records: Sequence[Any]) -> None:
        others = [record for record in records if not isinstance(record, Reply)]
        if others and self._take_others is not None:
            self._take_others(others)
        for reply in records:
            if not isinstance(reply, Reply):
                continue
            answer = self._calls.pop(reply.number, None)
            if answer is None or not answer.set_running_or_notify_cancel():  # given up by its caller
                continue
            if reply.failure is None:
                answer.set_result(reply.value)
            else:
                answer.set_exception(CallFailedError(reply.failure))

    def _end(self) -> None:
        if not self.process.wait(0.5 if self._closing else CLOSE_SECONDS):
            self.process.kill()
        closing, tail = self._closing, self.process.tail()
        how = "was closed" if closing else f"died ({self.process.how_it_ended()})"
        if self._late:
            how = "was ended: it did not answer in time"
        if self._was_stopped:
            how = f"was ended: it was stopped (SIGSTOP) for {self._stopped_seconds:g} s"
        error = ProcessLostError(f"{self.who} {how}", tail, closing, self._late)
        with self._lock:
            self._lost = error
            answers = list(self._calls.values())
            self._calls.clear()
            tell = self._when_lost
        for answer in answers:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)
        if tell is not None:
            tell(error)
        self._told.set()


def spawn(
    actor: type[Actor],
    who: str,
    environment: Mapping[str, str],
    *,
    take: Callable[[Sequence[Any]], None] | None = None,
    forkserver: ForkServer | None = None,
    log: Path | None = None,
    python: str | None = None,
    stopped_seconds: float = math.inf,
) -> ActorHandle:
    """Starts a process, for `begin`. It ends with this one, and all that it has started with it.

    who: the subject of messages. environment: all its variables. take: is handed what comes besides replies,
    a frame's records at once and before the replies of that frame, on the reading thread. log: a file for
    what it prints. python: another environment's interpreter. stopped_seconds: it is ended once it was
    stopped (SIGSTOP) for so long, a multiple of LOOK_SECONDS. Raises OSError, StorageError.
    """
    assert actor.__module__ != "__main__", "its process could not import it"
    connection, theirs = socket.socketpair()
    command = ["rondo.system.actor_program", f"{actor.__module__}:{actor.__qualname__}"]
    with theirs:
        try:
            process = ChildProcess(who, command, theirs.fileno(), environment, forkserver, log, python)
        except BaseException:
            connection.close()
            raise
    return ActorHandle(who, process, Link(connection, f"rondo-{who}"), take, stopped_seconds)


# ---- in the process


class Actor:
    """What a process serves: a call is of one of its methods, by name.

    Where any is a coroutine function there is an event loop: calls of those are tasks on it, begun in the
    order of the calls, and calls of plain ones are made one after the other in one thread beside it. Where
    none is, all calls are made one after the other in the main thread, and there is no other thread.
    """

    fatal: ClassVar[tuple[type[Exception], ...]] = ()
    """Errors after which the process ends, instead of answering."""
    flush: Callable[[], None]
    """Sends what there is to say, where there is an event loop."""

    def said(self) -> Sequence[Any]:
        """Returns records that are to go before the replies of a frame, each once."""
        return ()

    def ended(self) -> None:
        """Runs when the host is gone."""

    def pulse(self, stacks: bool = False) -> Pulse:
        """Says what this process is doing. Where there is an event loop, on the reading thread, whatever that
        loop does; else in its turn.
        """
        return activity.pulse(stacks)


def main(name: str, connection: socket.socket) -> None:
    """Makes the actor that the first call wants, before there is an event loop, and serves it until the host
    is gone. name: "module:Class".
    """
    os.dup2(2, 1)  # what is printed goes to the log
    faulthandler.enable()  # a crash is told with the line of Python that it came from
    connection.set_inheritable(False)
    module, _, class_name = name.partition(":")
    try:
        (first,) = receive(connection)
    except EOFError:
        return
    try:
        actor: Actor = getattr(importlib.import_module(module), class_name)(*first.args)
    except Exception as error:
        _log.error("%s could not be made", class_name, exc_info=error)
        Frame([Reply(first.number, failure=Failure.of(error))]).send(connection)
        return
    Frame([Reply(first.number)]).send(connection)
    methods = [method for name, method in inspect.getmembers(type(actor)) if not name.startswith("_")]
    if any(map(inspect.iscoroutinefunction, methods)):
        asyncio.run(alone(_serve(actor, Link(connection, "rondo-link"))))
    else:
        _serve_in_turn(actor, connection)


async def _serve(actor: Actor, link: Link) -> None:
    """Runs each call as a task, or on the thread. Returns when the host is gone; calls that still run are
    cancelled.
    """
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    tasks: dict[int, asyncio.Task[None]] = {}
    plain = ThreadPoolExecutor(1, "rondo-plain")
    replies: list[Reply] = []  # of one turn of the loop: they go in one frame, behind what the actor says

    def flush() -> None:
        said, answered = actor.said(), list(replies)
        replies.clear()
        try:
            if said or answered:
                link.send(*said, *answered)
        except PICKLE_ERRORS:  # of one value: the others arrive
            if said:
                link.send(*said)
            for reply in answered:
                link.put(_frame(reply))

    async def answer(call: Call) -> None:
        try:
            method = getattr(actor, call.method)
            if inspect.iscoroutinefunction(method):
                result = Reply(call.number, await method(*call.args))
            else:
                result = Reply(call.number, await loop.run_in_executor(plain, method, *call.args))
        except actor.fatal as error:
            _log.error("this process ends: %s", error)
            flush()
            link.close(socket.SHUT_RDWR)
            return
        except Exception as error:
            result = Reply(call.number, failure=Failure.of(error))
        if not replies:
            loop.call_soon(flush)
        replies.append(result)

    def take(calls: Sequence[Call]) -> None:
        for call in calls:
            if call.method == _DROP:
                if call.args[0] in tasks:
                    tasks[call.args[0]].cancel()
                continue
            tasks[call.number] = loop.create_task(answer(call))
            tasks[call.number].add_done_callback(partial(forget, call.number))

    def forget(number: int, _: asyncio.Task[None]) -> None:
        del tasks[number]

    def read(calls: list[Any]) -> None:
        for call in calls:
            if call.method == _PULSE:
                link.put(_frame(_reply(actor, call)))
        loop.call_soon_threadsafe(take, [call for call in calls if call.method != _PULSE])

    actor.flush = flush

    def end() -> None:
        loop.call_soon_threadsafe(gone.set)

    link.start(read, end)
    try:
        await gone.wait()
    finally:
        for task in tasks.values():
            task.cancel()
        plain.shutdown(wait=False, cancel_futures=True)
        actor.ended()


def _serve_in_turn(actor: Actor, connection: socket.socket) -> None:
    while True:
        try:
            calls = receive(connection)
        except EOFError:
            return actor.ended()
        for call in calls:
            if call.method != _DROP:  # else it has been answered
                _frame(_reply(actor, call)).send(connection)


def _reply(actor: Actor, call: Call) -> Reply:
    try:
        return Reply(call.number, getattr(actor, call.method)(*call.args))
    except Exception as error:
        return Reply(call.number, failure=Failure.of(error))


def _frame(reply: Reply) -> Frame:
    """Returns the frame of a reply; where its value cannot be written, of the failure to do so."""
    try:
        return Frame([reply])
    except PICKLE_ERRORS as error:
        return Frame([Reply(reply.number, failure=Failure.of(error))])
