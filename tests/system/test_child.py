"""Calls to a real process: values, failures, death and closing."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rondo.core.errors import ConfigError, RondoError
from rondo.system.child import CallFailedError, Child, ProcessLostError
from rondo.system.link import Link
from tests.waiting import is_gone

ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = """
import asyncio, os, socket, sys
from rondo.core.errors import ConfigError
from rondo.system.link import Link, serve, serve_in_turn

class Odd(Exception):
    pass

def operate(call):
    if call.operation == "add":
        return sum(call.args)
    if call.operation == "config":
        error = ConfigError("no such key")
        error.key = "a.b"
        raise error
    if call.operation == "odd":
        raise Odd("of this process only")
    if call.operation == "lambda":
        return lambda: 1
    if call.operation == "exit":
        print("a last word", file=sys.stderr, flush=True)
        os._exit(call.args[0])
    return os.getpid()

async def main(connection):
    link = Link(connection, "x")
    dropped = []
    async def operate_here(call):
        if call.operation == "say":
            link.send(*call.args)
        elif call.operation == "leave":
            link.close(socket.SHUT_RDWR)
        elif call.operation == "wait":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                dropped.append(call.args)
                raise
        elif call.operation == "dropped":
            return dropped
        else:
            return operate(call)
    await serve(link, operate_here)

connection = socket.socket(fileno=int(sys.argv[2]))
if sys.argv[1] == "turn":
    serve_in_turn(connection, operate)
else:
    asyncio.run(main(connection))
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    (tmp_path / "program.py").write_text(_PROGRAM, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")])}
    started: list[Child] = []

    def child(kind: str, **options: Any) -> Child:
        started.append(Child("the test's process", ["program", kind], environment, **options))
        return started[-1]

    yield child
    for each in started:
        each.close()


def test_values_and_failures(start: Callable[..., Child]) -> None:
    child = start("turn")
    answers = [child.call("add", n, 10 * n) for n in range(50)]
    assert [answer.result(240) for answer in answers] == [11 * n for n in range(50)]
    with pytest.raises(CallFailedError, match="ConfigError: no such key") as error:
        child.call("config").result(240)
    cause = error.value.failure.cause()
    assert isinstance(cause, ConfigError)
    assert (str(cause), cause.key) == ("no such key", "a.b")
    with pytest.raises(CallFailedError, match="Odd: of this process only") as error:
        child.call("odd").result(240)
    assert error.value.failure.cause() is None
    assert 'raise Odd("of this process only")' in error.value.failure.traceback
    with pytest.raises(CallFailedError, match="lambda"):
        child.call("lambda").result(240)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        child.call("add", lambda: 1)
    assert child.call("add", 1, 2).result(240) == 3


def test_a_reply_that_nobody_waits_for_any_more_does_no_harm(start: Callable[..., Child]) -> None:
    child = start("turn")
    given_up = [child.call("add", n) for n in range(100)]
    assert all(answer.cancel() or answer.done() for answer in given_up)
    assert child.call("add", 1, 2).result(240) == 3
    assert child.lost is None
    assert not child._calls


def test_a_caller_that_gives_up_as_the_reply_is_read(start: Callable[..., Child]) -> None:
    child = start("turn")
    popped = threading.Event()
    answer = child.call("add", 1)
    answer._done_callbacks.clear()  # as if the reply had been taken from the list a moment before
    answer.cancel()
    answer.add_done_callback(lambda _: popped.set())
    assert popped.wait(240)
    assert child.call("add", 1, 2).result(240) == 3
    assert child.lost is None


def test_records_of_its_own_come_a_frame_at_once(start: Callable[..., Child]) -> None:
    taken: list[Any] = []
    came = threading.Event()

    def take(records: Any) -> None:
        taken.append(list(records))
        came.set()

    child = start("loop", take=take)
    assert child.call("add", 1, 2).result(240) == 3
    child.call("say", "a", 1)
    assert came.wait(240)
    assert taken == [["a", 1]]


@pytest.mark.parametrize("kind", ["turn", "loop"])
def test_death_is_told_to_all_who_wait_and_ask_later(start: Callable[..., Child], kind: str) -> None:
    ended: list[ProcessLostError] = []
    child = start(kind)
    child.when_lost(ended.append)
    answers = [child.call("exit", 5), child.call("add", 1)]
    for answer in answers:
        with pytest.raises(ProcessLostError, match=r"the test's process died .exit code 5") as error:
            answer.result(240)
        assert error.value.tail == "a last word"
        assert not error.value.closed
    with pytest.raises(ProcessLostError, match="exit code 5"):
        child.call("add", 1)
    assert [str(error) for error in ended] == [str(child.lost)]


def test_a_dropped_call_is_cancelled_and_leaves_nothing(start: Callable[..., Child]) -> None:
    child = start("loop")
    answers = [child.call("wait", n) for n in range(3)]
    assert child.call("dropped").result(240) == []  # by now, the calls before it have begun
    child.drop(answers[1])
    assert answers[1].cancelled()
    assert child.call("dropped").result(240) == [(1,)]
    assert list(child._calls) == [answers[0].number, answers[2].number]
    told: list[ProcessLostError] = []
    child.close()
    child.when_lost(told.append)  # at once, because it is too late
    assert told == [child.lost]


def test_a_killed_one_says_the_signal(start: Callable[..., Child]) -> None:
    child = start("turn")
    os.kill(child.call("pid").result(240), signal.SIGKILL)
    with pytest.raises(ProcessLostError, match=r"died .signal SIGKILL"):
        child.call("add", 1).result(240)


@pytest.mark.parametrize("kind", ["turn", "loop"])
def test_it_ends_when_it_is_closed(start: Callable[..., Child], kind: str) -> None:
    child = start(kind)
    pid = child.call("pid").result(240)
    child.close()
    assert is_gone(pid)
    assert child.process.how_it_ended() == "exit code 0"  # by itself
    with pytest.raises(ProcessLostError, match="was closed") as error:
        child.call("add", 1)
    assert error.value.closed


def test_it_leaves_by_itself(start: Callable[..., Child]) -> None:
    child = start("loop")
    with pytest.raises(ProcessLostError, match=r"died .exit code 0"):
        child.call("leave").result(240)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_cannot_be_read_ends_the_link_and_nobody_waits() -> None:
    here, there = socket.socketpair()
    ended = threading.Event()
    link = Link(here, "x")
    with there:
        there.sendall((3).to_bytes(8, "little") + bytes(4) + b"abc")
        link.start(lambda records: None, ended.set)
        assert ended.wait(240)


def test_the_errors_are_rondos() -> None:
    assert issubclass(ProcessLostError, RondoError)
    assert issubclass(CallFailedError, RondoError)
