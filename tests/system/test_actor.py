"""Calls to a real process: values, failures, death and closing."""

from __future__ import annotations

import asyncio
import math
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
from rondo.system import frames
from rondo.system.actor import Actor, ActorHandle, CallFailedError, Failure, Link, ProcessLostError, spawn
from tests.messages import full_text
from tests.waiting import is_gone

ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = """
import asyncio, os, signal, socket, sys, threading
from rondo.core.errors import ConfigError
from rondo.system import frames
from rondo.system.actor import Actor

class Odd(Exception):
    pass

class Ending(Exception):
    pass

class Turn(Actor):
    def __init__(self, *given):
        if given == ("wrong",):
            raise ConfigError("wrong, as asked")
        self.given = given

    def what(self):
        return self.given, threading.active_count()

    def add(self, *numbers):
        return sum(numbers)

    def config(self):
        error = ConfigError("no such key")
        error.key = "a.b"
        raise error

    def odd(self):
        raise Odd("of this process only")

    def function(self):
        return lambda: 1

    def exit(self, code):
        print("a last word", file=sys.stderr, flush=True)
        os._exit(code)

    def pid(self):
        return os.getpid()

    def sleep(self, seconds):
        threading.Event().wait(seconds)

    def stop_after(self, count):
        def send(frame, connection):
            connection.sendall((frames._HEADER.pack(len(frame.data), 0) + bytes(frame.data))[:count])
            os.kill(os.getpid(), signal.SIGSTOP)

        frames.Frame.send = send

class Loop(Turn):
    fatal = (Ending,)

    def __init__(self, *given):
        super().__init__(*given)
        self.records, self.dropped, self.made = [], [], []

    def said(self):
        records, self.records = self.records, []
        return records

    async def say(self, *records):
        self.records += records

    async def say_and_return_a_function(self, *records):
        self.records += records
        return lambda: 1

    async def end(self):
        raise Ending

    async def wait(self, n):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.dropped.append(n)
            raise

    async def waited(self):
        return self.dropped

    def make(self, n, seconds):
        threading.Event().wait(seconds)
        self.made.append((n, threading.current_thread().name))
        return list(self.made)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ActorHandle]]:
    (tmp_path / "program.py").write_text(_PROGRAM, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")])}
    started: list[ActorHandle] = []

    def child(kind: str, *args: Any, **options: Any) -> ActorHandle:
        served: Any = type(kind, (Actor,), {"__module__": "program"})  # by its name: it is not imported here
        started.append(spawn(served, "the test's process", environment, **options))
        started[-1].begin(*args)
        return started[-1]

    yield child
    for each in started:
        each.close()


def test_values_and_failures(start: Callable[..., ActorHandle]) -> None:
    child = start("Turn")
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
        child.call("function").result(240)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        child.call("add", lambda: 1)
    assert child.call("add", 1, 2).result(240) == 3


def test_a_reply_that_nobody_waits_for_any_more_does_no_harm(start: Callable[..., ActorHandle]) -> None:
    child = start("Turn")
    given_up = [child.call("add", n) for n in range(100)]
    assert all(answer.cancel() or answer.done() for answer in given_up)
    assert child.call("add", 1, 2).result(240) == 3
    assert child.lost is None
    assert not child._calls


def test_a_caller_that_gives_up_as_the_reply_is_read(start: Callable[..., ActorHandle]) -> None:
    child = start("Turn")
    popped = threading.Event()
    answer = child.call("add", 1)
    answer._done_callbacks.clear()  # as if the reply had been taken from the list a moment before
    answer.cancel()
    answer.add_done_callback(lambda _: popped.set())
    assert popped.wait(240)
    assert child.call("add", 1, 2).result(240) == 3
    assert child.lost is None


def test_records_of_its_own_come_a_frame_at_once(start: Callable[..., ActorHandle]) -> None:
    taken: list[Any] = []
    child = start("Loop", take=lambda records: taken.append(list(records)))
    assert child.call("add", 1, 2).result(240) == 3
    assert child.call("say", "a", 1).result(240) is None
    assert taken == [["a", 1]]  # before the reply


@pytest.mark.parametrize("kind", ["Turn", "Loop"])
def test_death_is_told_to_all_who_wait_and_ask_later(start: Callable[..., ActorHandle], kind: str) -> None:
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


def test_a_dropped_call_is_cancelled_and_leaves_nothing(start: Callable[..., ActorHandle]) -> None:
    child = start("Loop")
    answers = [child.call("wait", n) for n in range(3)]
    assert child.call("waited").result(240) == []  # by now, the calls before it have begun
    answers[1].drop()
    assert answers[1].cancelled()
    assert child.call("waited").result(240) == [1]
    assert list(child._calls) == [answers[0].number, answers[2].number]
    told: list[ProcessLostError] = []
    child.close()
    child.when_lost(told.append)  # at once, because it is too late
    assert told == [child.lost]


@pytest.mark.parametrize("kind", ["Turn", "Loop"])
def test_a_call_over_its_limit_ends_the_process(start: Callable[..., ActorHandle], kind: str) -> None:
    """All who wait are told; an answered call, or one without a limit, ends nothing."""
    child = start(kind)
    assert child.call("add", 1, 2, seconds=240).result(240) == 3
    assert not child._limited
    late, other = child.call("sleep", 600, seconds=0.2), child.call("sleep", 600)
    for answer in (late, other):
        with pytest.raises(ProcessLostError, match=full_text("was ended: it did not answer")) as error:
            answer.result(240)
        assert error.value.late
    assert child.process.wait(10)


@pytest.mark.parametrize("count", [5, frames._HEADER.size, frames._HEADER.size + 5])
@pytest.mark.parametrize(
    ("seconds", "stopped_seconds", "said"),
    [
        (1.0, math.inf, "it did not answer in time"),
        (math.inf, 1.0, r"it was stopped \(SIGSTOP\) for 1 s"),
    ],
)
def test_one_that_stops_in_the_middle_of_its_answer_is_ended(
    start: Callable[..., ActorHandle], count: int, seconds: float, stopped_seconds: float, said: str
) -> None:
    """Some bytes of the answer have come: in the header, behind it, and in the records."""
    child = start("Turn", stopped_seconds=stopped_seconds)
    assert child.call("add", 1, 2).result(240) == 3
    answer = child.call("stop_after", count, seconds=seconds)
    with pytest.raises(ProcessLostError, match=said):
        answer.result(60)


def test_a_call_that_is_given_up_has_no_limit_any_more(start: Callable[..., ActorHandle]) -> None:
    child = start("Loop")
    child.call("wait", 0, seconds=0.3).drop()
    assert not child._limited
    with pytest.raises(TimeoutError):
        child.call("wait", 1).result(1.5)  # longer than the limit and a look
    assert child.lost is None


def test_a_killed_one_says_the_signal(start: Callable[..., ActorHandle]) -> None:
    child = start("Turn")
    os.kill(child.call("pid").result(240), signal.SIGKILL)
    with pytest.raises(ProcessLostError, match=r"died .signal SIGKILL"):
        child.call("add", 1).result(240)


@pytest.mark.parametrize("kind", ["Turn", "Loop"])
def test_it_ends_when_it_is_closed(start: Callable[..., ActorHandle], kind: str) -> None:
    child = start(kind)
    pid = child.call("pid").result(240)
    child.close()
    assert is_gone(pid)
    assert child.process.how_it_ended() == "exit code 0"  # by itself
    with pytest.raises(ProcessLostError, match="was closed") as error:
        child.call("add", 1)
    assert error.value.closed


def test_what_is_fatal_ends_it(start: Callable[..., ActorHandle]) -> None:
    child = start("Loop")
    answers = [child.call("add", 1, 2), child.call("wait", 1)]
    assert answers[0].result(240) == 3
    with pytest.raises(ProcessLostError, match=r"died .exit code 0"):
        child.call("end").result(240)
    with pytest.raises(ProcessLostError, match=r"died .exit code 0"):
        answers[1].result(240)


@pytest.mark.parametrize("kind", ["Turn", "Loop"])
def test_what_it_is_made_of(start: Callable[..., ActorHandle], kind: str) -> None:
    given, threads = start(kind, 3, "a").call("what").result(240)
    assert given == (3, "a")
    assert kind == "Loop" or threads == 1  # what is served in turn may fork
    wrong = start(kind, "wrong")
    with pytest.raises(ProcessLostError):
        wrong.call("pid").result(240)
    assert "wrong, as asked" in wrong.process.tail()


def test_an_actor_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")])}
    (tmp_path / "program.py").write_text(_PROGRAM, encoding="utf-8")
    for name, args, said in (
        ("Turn", ("wrong",), "ConfigError: wrong, as asked"),
        ("NotThere", (), "AttributeError: module 'program' has no attribute 'NotThere'"),
    ):
        handle = spawn(type(name, (Actor,), {"__module__": "program"}), "it", environment)
        try:
            with pytest.raises(CallFailedError, match=said):
                handle.begin(*args).result(240)
            assert handle.process.wait(240)
        finally:
            handle.close()


def test_plain_methods_beside_coroutines_are_made_in_turn_in_one_thread(
    start: Callable[..., ActorHandle],
) -> None:
    child = start("Loop")
    slow, quick = child.call("make", 1, 0.2), child.call("make", 2, 0.0)
    assert child.call("waited").result(240) == []  # the loop goes on beside them
    (_, thread), (_, other) = quick.result(240)
    assert [number for number, _ in quick.result(240)] == [1, 2]
    assert [number for number, _ in slow.result(240)] == [1]
    assert thread == other != "MainThread"


@pytest.mark.parametrize("kind", ["Turn", "Loop"])
def test_a_pulse_is_of_its_process(start: Callable[..., ActorHandle], kind: str) -> None:
    child = start(kind)
    said = child.pulse(stacks=True).result(240)
    assert said.pid == child.call("pid").result(240)
    assert kind == "Turn" or "actor.py" in said.stacks


def test_a_value_that_cannot_travel_fails_alone(start: Callable[..., ActorHandle]) -> None:
    child = start("Loop")
    answers = [
        child.call(name, *args) for name, *args in (("add", 1), ("function",), ("say", "x"), ("add", 2))
    ]
    assert [answers[n].result(240) for n in (0, 2, 3)] == [1, None, 2]
    with pytest.raises(CallFailedError, match="lambda"):
        answers[1].result(240)


def test_records_arrive_beside_a_value_that_cannot_travel(start: Callable[..., ActorHandle]) -> None:
    taken: list[Any] = []
    child = start("Loop", take=lambda records: taken.append(list(records)))
    with pytest.raises(CallFailedError, match="lambda"):
        child.call("say_and_return_a_function", "a", 1).result(240)
    assert taken == [["a", 1]]


def test_whoever_awaits_it_and_is_cancelled_drops_it(start: Callable[..., ActorHandle]) -> None:
    child = start("Loop")
    answer = child.call("wait", 7)
    assert child.call("waited").result(240) == []  # by now, the call before it has begun

    async def give_up() -> None:
        async with asyncio.timeout(0.01):
            await answer

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    assert child.call("waited").result(240) == [7]
    assert not child._calls


def test_a_failure_keeps_its_exception_at_home() -> None:
    class OwnError(Exception):
        pass

    error = OwnError("x")
    failure = Failure.of(error)
    assert failure.cause() is error
    there = pickle.loads(pickle.dumps(failure))
    assert (there, there.cause(), there.error) == (failure, None, None)
    travelled = pickle.loads(pickle.dumps(Failure.of(ConfigError("no such key")))).cause()
    assert (type(travelled), str(travelled)) == (ConfigError, "no such key")


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
