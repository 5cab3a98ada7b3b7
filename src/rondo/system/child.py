"""The host's side of a process that answers calls."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rondo.core.errors import RondoError
from rondo.system.forkserver import ForkServer
from rondo.system.link import DROP, PICKLE_ERRORS, Call, Failure, Link, Reply
from rondo.system.process import ChildProcess

CLOSE_SECONDS = 10.0  # for a process to end by itself; then it is killed
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


class Answer(Future[Any]):
    """What a call will have given. number: the call's."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class Child:
    """`python -m COMMAND…`, which serves calls on a socket; see `link` for what travels.

    who: the subject of messages. take: is handed what comes besides replies, a frame's records at once and
    before the replies of that frame, on the reading thread. log: a file for what it prints. python: another
    environment's interpreter.
    """

    def __init__(
        self,
        who: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        take: Callable[[Sequence[Any]], None] = lambda records: None,
        forkserver: ForkServer | None = None,
        log: Path | None = None,
        python: str | None = None,
    ) -> None:
        self.who = who
        self._take_others = take
        # Guards what the threads share: the next three.
        self._lock = threading.Lock()
        self._calls: dict[int, Answer] = {}
        self._lost: ProcessLostError | None = None
        self._when_lost: Callable[[ProcessLostError], None] | None = None
        self._numbers = itertools.count(1)
        self._closing = False
        self._told = threading.Event()
        connection, theirs = socket.socketpair()
        with theirs:
            self.process = ChildProcess(who, command, theirs.fileno(), environment, forkserver, log, python)
        self._link = Link(connection, f"rondo-{who}")
        self._link.start(self._take, self._end)

    @property
    def lost(self) -> ProcessLostError | None:
        """Says why it answers no more; None while it lives."""
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

    def call(self, operation: str, *args: Any) -> Answer:
        """Sends a call. The answer ends with its value, CallFailedError or ProcessLostError.

        Raises ProcessLostError, and PICKLE_ERRORS where the arguments cannot be sent.
        """
        answer = Answer(next(self._numbers))
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._calls[answer.number] = answer
        answer.add_done_callback(lambda _: self._calls.pop(answer.number, None))  # also of one given up
        try:
            self._link.send(Call(answer.number, operation, args))
        except PICKLE_ERRORS:
            answer.cancel()
            raise
        return answer

    def drop(self, answer: Answer) -> None:
        """Gives up a call: the process cancels it, where it serves calls as tasks (`link.serve`)."""
        answer.cancel()
        self._link.send(Call(next(self._numbers), DROP, (answer.number,)))

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
        others = [record for record in records if not isinstance(record, Reply)]
        if others:
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
        why = f"{self.who} {'was closed' if closing else f'died ({self.process.how_it_ended()})'}"
        error = ProcessLostError(why, tail, closing)
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
