"""Calls to a process, and its replies: what both ends of the socket pair have in common.

Child (host) ── Call ─▶ serve (the process)        any thread sends; one writes, in order; one reads
             ◀─ Reply, or records of its own ──
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import queue
import socket
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from rondo.system.border import written
from rondo.system.frames import Frame, receive

# What pickle raises for an object that cannot be written, or whose class cannot be found or rebuilt.
PICKLE_ERRORS = (pickle.PickleError, ImportError, AttributeError, TypeError, ValueError, RecursionError)
# The operation that cancels the call whose number is its argument; neither of them gets a reply.
DROP = "drop"


@dataclass(frozen=True)
class Call:
    """One operation of the process. Its reply has the same number."""

    number: int
    operation: str
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Failure:
    """An exception on its way to another process."""

    # Class and text.
    message: str
    traceback: str
    # The exception, pickled, where its class is rondo's or Python's: others would import their modules.
    pickled: bytes | None

    @staticmethod
    def of(error: BaseException) -> Failure:
        """Returns the record of an exception."""
        pickled = None
        if type(error).__module__ in ("builtins", "rondo.core.errors"):
            with contextlib.suppress(Exception):  # of whatever its arguments do when they are pickled
                pickled = pickle.dumps(error)
        text = "".join(traceback.format_exception(error))
        return Failure(f"{type(error).__name__}: {written(error)}", text, pickled)

    def cause(self) -> BaseException | None:
        """Returns the exception, or None where it could not travel."""
        if self.pickled is None:
            return None
        try:
            cause: BaseException = pickle.loads(self.pickled)
        except PICKLE_ERRORS:  # an argument of it cannot be read here
            return None
        return cause


@dataclass(frozen=True)
class Reply:
    """What a call gave, or why it gave nothing."""

    number: int
    value: Any = None
    failure: Failure | None = None


class Link:
    """One end of a socket pair. `send` may be called before `start`."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._connection = connection
        self._name = name
        # Frames to send; a number (of `socket.SHUT_…`) ends the writing.
        self._outbox: queue.SimpleQueue[Frame | int] = queue.SimpleQueue()

    def start(self, take: Callable[[list[Any]], None], end: Callable[[], None]) -> None:
        """Has `take` called with the records of each frame, and `end` once, when the other side is gone; both
        on the reading thread.
        """
        for target, args in ((self._write, ()), (self._read, (take, end))):
            threading.Thread(target=target, args=args, name=self._name, daemon=True).start()

    def send(self, *records: Any) -> None:
        """Sends one frame, behind those before it, from any thread; in vain when the other side is gone.

        Raises PICKLE_ERRORS.
        """
        self._outbox.put(Frame(records))

    def close(self, how: int = socket.SHUT_WR) -> None:
        """Behind what was sent, ends the other side's stream; with SHUT_RDWR, this side's, too."""
        self._outbox.put(how)

    def _write(self) -> None:
        try:
            while isinstance(frame := self._outbox.get(), Frame):
                frame.send(self._connection)
            self._connection.shutdown(frame)
        except OSError:  # the reading thread says it to everybody
            return

    def _read(self, take: Callable[[list[Any]], None], end: Callable[[], None]) -> None:
        try:
            while True:
                take(receive(self._connection))
        except EOFError:
            return
        finally:  # whatever ended it, nobody is answered any more
            end()
            self.close()
            self._connection.close()


async def serve(
    link: Link,
    operate: Callable[[Call], Awaitable[Any]],
    reply: Callable[[Reply], None] | None = None,
    *,
    at_once: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> None:
    """The process's side, on its event loop: each call is a task, started in the order of the calls; what
    `operate` returns or raises is its reply. Returns when the host is gone; what still runs is cancelled.

    reply: sends the replies; the default sends each at once. at_once: operations that are answered on the
    reading thread, whatever the event loop does.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    tasks: dict[int, asyncio.Task[None]] = {}
    send = reply or link.send

    async def answer(call: Call) -> None:
        try:
            result = Reply(call.number, await operate(call))
        except Exception as error:
            result = Reply(call.number, failure=Failure.of(error))
        send(result)

    def take(calls: Sequence[Call]) -> None:
        for call in calls:
            if call.operation == DROP:
                if call.args[0] in tasks:
                    tasks[call.args[0]].cancel()
                continue
            tasks[call.number] = loop.create_task(answer(call))
            tasks[call.number].add_done_callback(partial(forget, call.number))

    def forget(number: int, _: asyncio.Task[None]) -> None:
        del tasks[number]

    def read(calls: list[Any]) -> None:
        for call in calls:
            if call.operation in at_once:
                link.send(_reply(call, lambda call: at_once[call.operation](*call.args)))
        loop.call_soon_threadsafe(take, [call for call in calls if call.operation not in at_once])

    def end() -> None:
        loop.call_soon_threadsafe(ended.set)

    link.start(read, end)
    try:
        await ended.wait()
    finally:
        for task in tasks.values():
            task.cancel()


def serve_in_turn(connection: socket.socket, operate: Callable[[Call], Any]) -> None:
    """The process's side, one call after the other: what `operate` returns or raises is the reply; returns
    when the host is gone.
    """
    while True:
        try:
            calls = receive(connection)
        except EOFError:
            return
        for call in calls:
            try:
                frame = Frame([_reply(call, operate)])
            except PICKLE_ERRORS as error:
                frame = Frame([Reply(call.number, failure=Failure.of(error))])
            frame.send(connection)


def _reply(call: Call, operate: Callable[[Call], Any]) -> Reply:
    try:
        return Reply(call.number, operate(call))
    except Exception as error:
        return Reply(call.number, failure=Failure.of(error))
