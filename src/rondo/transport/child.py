"""The host's side of a process that answers calls."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from rondo.errors import RondoError
from rondo.transport.forkserver import ForkServer
from rondo.transport.link import PICKLE_ERRORS, Call, Failure, Link, Reply
from rondo.transport.process import ChildProcess

CLOSE_SECONDS = 10.0
_log = logging.getLogger(__name__)


class CallFailedError(RondoError):
    """The operation raised, in the process."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class ProcessLostError(RondoError):
    """The process has died, or was closed. tail: the last lines of its output."""

    def __init__(self, message: str, tail: str, closed: bool) -> None:
        super().__init__(message)
        self.tail = tail
        self.closed = closed


class Child:
    """`python -m COMMAND…`, which serves calls on a socket; see `link` for what travels.

    who: the subject of messages. take: is handed what comes besides the replies of `call`, a frame's
    records at once, on the reading thread. on_end: is called once, on that thread, with the error of all
    who wait from then on.
    """

    def __init__(
        self,
        who: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        take: Callable[[Sequence[Any]], None] = lambda records: None,
        on_end: Callable[[ProcessLostError], None] = lambda error: None,
        forkserver: ForkServer | None = None,
    ) -> None:
        self.who = who
        self._take_others = take
        self._on_end = on_end
        # Guards what the threads share: the next three.
        self._lock = threading.Lock()
        self._calls: dict[int, Future[Any]] = {}
        self._lost: ProcessLostError | None = None
        self._numbers = itertools.count(1)
        self._closing = False
        self._told = threading.Event()
        connection, theirs = socket.socketpair()
        with theirs:
            self.process = ChildProcess(who, command, theirs.fileno(), environment, forkserver)
        self._link = Link(connection, f"rondo-{who}")
        self._link.start(self._take, self._end)

    @property
    def lost(self) -> ProcessLostError | None:
        """Why it answers no more; None: it lives."""
        return self._lost

    def call(self, operation: str, *args: Any) -> Future[Any]:
        """Sends a call. The future ends with its value, CallFailedError or ProcessLostError.

        Raises ProcessLostError, and PICKLE_ERRORS where the arguments cannot be sent.
        """
        return self.numbered_call(operation, *args)[1]

    def numbered_call(self, operation: str, *args: Any) -> tuple[int, Future[Any]]:
        """Sends a call as `call` does; its number is there for a later call that is about this one."""
        number, answer = self.number(), Future[Any]()
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._calls[number] = answer
        answer.add_done_callback(lambda _: self._calls.pop(number, None))  # also of a caller that gave up
        try:
            self._link.send(Call(number, operation, args))
        except PICKLE_ERRORS:
            answer.cancel()
            raise
        return number, answer

    def number(self) -> int:
        """Returns the number of a call to come, for `send`."""
        return next(self._numbers)

    def send(self, call: Call) -> None:
        """Sends a call that does not wait here: `take` gets whatever comes for its number."""
        self._link.send(call)

    def kill(self) -> None:
        """Ends the process and all its children at once."""
        self._closing = True
        self.process.kill()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Has the process end by itself, and kills it, and all its children, after `seconds`; returns when
        all who waited have been told.
        """
        self._closing = True
        self._link.close()
        if not self.process.wait(seconds if self._lost is None else 1.0):
            self.process.kill()
        self._told.wait(CLOSE_SECONDS)

    def _take(self, records: Sequence[Any]) -> None:
        others = []
        for record in records:
            call = self._calls.pop(record.number, None) if isinstance(record, Reply) else None
            if call is None:
                others.append(record)
            elif not call.set_running_or_notify_cancel():  # given up by its caller, just before this reply
                continue
            elif record.failure is None:
                call.set_result(record.value)
            else:
                call.set_exception(CallFailedError(record.failure))
        if others:
            self._take_others(others)

    def _end(self) -> None:
        if not self.process.wait(0.5 if self._closing else CLOSE_SECONDS):
            self.process.kill()
        closing, tail = self._closing, self.process.tail()
        why = f"{self.who} {'was closed' if closing else f'died ({self.process.how_it_ended()})'}"
        error = ProcessLostError(why, tail, closing)
        with self._lock:
            self._lost = error
            calls = list(self._calls.values())
            self._calls.clear()
        self._on_end(error)
        for call in calls:
            if call.set_running_or_notify_cancel():
                call.set_exception(error)
        self._told.set()
