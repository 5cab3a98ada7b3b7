"""What hangs is told, with who waits for whom, and what is slow in one line; a hang is ended where it can
never end by itself, and nowhere else.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

from rondo.config import load
from rondo.config.schema import ClusterConfig
from rondo.controller import Cluster, Worker, WorkerContext, WorkerGroup, dispatch, distributed, start_cluster
from rondo.controller.calls import HostHandle
from rondo.controller.hangs import Seen, SentCall, describe, describe_work, is_hopeless, slow, waiting_for
from rondo.controller.watch import _Host
from rondo.core.errors import ConfigError, WorkerError
from rondo.system.activity import Activity, Deed, Pulse, progress, pulse
from tests.controller.conftest import BACKENDS, Run
from tests.messages import full_text
from tests.waiting import wait_for

HANG_SECONDS = 3.0  # on a busy machine a process was seen to stand still for more than two


class Hangs(Worker):
    """Rank `late` waits at a gate that only `open_gate` opens. Who is to wait closes it first: it may have
    been opened behind the last one, who had gone.
    """

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.gate = threading.Event()

    def _meet(self) -> None:
        dist.all_reduce(torch.ones(1), group=self.context.device_mesh().get_group("dp"))

    @dispatch("broadcast")
    def never_meets(self, late: int) -> None:
        if self.context.rank != late:
            self._meet()

    @dispatch("broadcast")
    def never_adds(self, late: int) -> None:
        """As layers along parallel axes meet: in an operator of a DTensor."""
        if self.context.rank != late:
            mesh = self.context.device_mesh()
            part = DTensor.from_local(torch.ones(1), mesh, [Partial()], run_check=False)
            (part.redistribute(placements=[Replicate()]).to_local() + 1).item()

    @dispatch("broadcast")
    def meets_late(self, late: int) -> None:
        if self.context.rank == late:
            self.gate.wait()
        self._meet()

    @dispatch("broadcast")
    async def holds_its_loop(self, late: int) -> None:
        """Beside the turn, so that a call in turn cannot begin there: for several times as long as may be."""
        if self.context.rank == late:
            time.sleep(3 * HANG_SECONDS)

    @dispatch("broadcast")
    def compiles(self, late: int) -> str:
        """What may take any time: its peers wait for it in a collective."""
        self.gate.clear()
        if self.context.rank == late:
            with Activity("compiling", bound=False):
                self.gate.wait()
        self._meet()
        return "compiled"

    def _compute(self, until: threading.Event) -> None:
        while not until.is_set():
            sum(range(1000))

    @dispatch("broadcast")
    def computes(self, busy: int) -> None:
        self.gate.clear()
        if self.context.rank == busy:
            self._compute(self.gate)

    @dispatch("broadcast")
    def computes_and_meets(self, busy: int) -> None:
        self.computes(busy)
        self._meet()

    @dispatch("broadcast")
    def waits(self) -> str:
        self.gate.clear()
        with Activity("waiting at the gate"):
            self.gate.wait()
        return "through"

    @dispatch("broadcast")
    def waits_beside_another_thread(self) -> str:
        """Which computes meanwhile."""
        over = threading.Event()
        threading.Thread(target=self._compute, args=(over,)).start()
        try:
            return self.waits()
        finally:
            over.set()

    @dispatch("broadcast")
    async def answers_late(self) -> str:
        self.gate.clear()
        while not self.gate.is_set():
            await asyncio.sleep(0.01)
        return "answered"

    @dispatch("broadcast")
    async def open_gate(self) -> None:
        self.gate.set()

    @dispatch("broadcast")
    def counts(self, times: int) -> None:
        """Counts: ten times for as long as nothing may move."""
        for _ in range(times):
            time.sleep(HANG_SECONDS / 10)
            progress(of=times)

    @dispatch("broadcast")
    def holds_the_lock(self, late: int) -> None:
        """Python's own; a call of C code that does not give it back. Its peers count for as long: were they
        still, too, either could be seen first, that nothing moves or that it does not answer.
        """
        if self.context.rank == late:
            ctypes.PyDLL(None).usleep(int(4 * HANG_SECONDS * 1e6))
        else:
            self.counts(40)

    @dispatch("broadcast")
    def sends_too_much(self) -> None:
        """To rank 1: as pipeline stages that disagree about a size, of which gloo ends one by a signal."""
        group = self.context.device_mesh().get_group("dp")
        if self.context.rank == 0:
            dist.send(torch.ones(4), 1, group)
        else:
            dist.recv(torch.ones(2), 0, group)
        self.gate.wait()

    @dispatch("broadcast")
    async def decodes(self, times: int) -> None:
        """As `counts`, on the event loop, where nobody says that he counts for a call."""
        for _ in range(times):
            await asyncio.sleep(HANG_SECONDS / 10)
            threading.Thread(target=progress).start()


def told(records: list[logging.LogRecord]) -> list[str]:
    """What the watch has logged. Without what it says of new hosts that take their time to import this module
    (on a busy machine more than HANG_SECONDS), and without an end of what was told before the test began.
    """
    said: list[str] = []
    of_the_test = False
    for record in records:
        if record.name == "rondo.controller.watch":
            message = record.getMessage()
            if "it moves again" not in message:
                of_the_test = not re.search(r"waits for hangs.__init__|works: \w+\[\d\].__init__", message)
            if of_the_test:
                said.append(message)
    return said


def wait_until_it_moves(caplog: pytest.LogCaptureFixture) -> None:
    """Until the watch has seen that what it told is over: what it says later belongs to the next test."""
    wait_for("the end of the hang", lambda: "it moves again" in told(caplog.records)[-1], 20)


@pytest.fixture(scope="module", params=["process", pytest.param("ray", marks=pytest.mark.slow)])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        request.getfixturevalue("ray_instance")
    return str(request.param)


def start(run: Run, backend: str, logs: Path | None = None, devices: int = 2) -> Cluster:
    config = ClusterConfig(BACKENDS[backend], devices=devices, device="cpu", threads=1)
    cluster: Cluster = run(start_cluster(replace(config, hang_seconds=HANG_SECONDS), logs))
    return cluster


@pytest.fixture
def fresh(run: Run, backend: str, tmp_path: Path) -> Iterator[WorkerGroup]:
    """Two ranks of a cluster that a test may break."""
    cluster = start(run, backend, tmp_path)
    yield run(cluster.create_group("hangs", Hangs))
    run(cluster.shutdown())


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the hosts of `group`."""
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def group(run: Run, backend: str, logs: Path) -> Iterator[WorkerGroup]:
    """Two ranks of a cluster that tests leave whole."""
    cluster = start(run, backend, logs)
    yield run(cluster.create_group("hangs", Hangs))
    run(cluster.shutdown())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "how", "doing"),
    [
        (Hangs.never_meets, "all_reduce", "in no call"),
        (Hangs.never_adds, "wait_tensor", "in no call"),
        (Hangs.meets_late, "all_reduce", r"hangs\[1\]\.meets_late"),
    ],
)
def test_a_rank_that_never_enters_a_collective(
    fresh: WorkerGroup,
    run: Run,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    method: object,
    how: str,
    doing: str,
) -> None:
    with pytest.raises(WorkerError, match=rf"waits in {how} for host 1 \({doing}\)") as caught:
        run(fresh.call(method, 1))
    assert caught.value.died
    assert caught.value.is_outage
    assert (caught.value.role, caught.value.rank) == ("hangs", 0)
    assert f"cluster.hang_seconds); the stacks are in {tmp_path}" not in str(caught.value)
    assert str(caught.value).endswith(f"the stacks are in {tmp_path / 'controller.log'}")
    report, end = told(caplog.records)
    assert "The controller waits for hangs." in report
    assert report.index("--- stacks of host 0") < report.index("--- stacks of host 1")
    assert re.search(rf" {how}: (work.wait\(\)|return torch.ops.*)\n", report)  # host 0's
    assert "stacks of the controller" in report
    assert re.search(
        r"flight record.*\n  group \d rondo_dp: 1 begun\n    1: gloo:all_reduce of \['Float'\]", report
    )
    assert "These calls fail" in end


@pytest.mark.slow
def test_what_moves_is_no_hang(group: WorkerGroup, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run(group.call(Hangs.counts, 30))
    run(group.call(Hangs.decodes, 30))
    assert told(caplog.records) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [Hangs.waits, Hangs.waits_beside_another_thread, Hangs.answers_late, Hangs.compiles]
)
def test_what_has_no_bound_is_told_once_and_goes_on(
    group: WorkerGroup, run: Run, caplog: pytest.LogCaptureFixture, method: object
) -> None:
    arguments = (1,) if method is Hangs.compiles else ()

    async def wait_and_open() -> str:
        call = asyncio.ensure_future(group.call(method, *arguments))
        while not told(caplog.records) and not call.done():
            await asyncio.sleep(0.05)
        await asyncio.sleep(2 * HANG_SECONDS)  # long enough to be told twice, or ended
        await group.call(Hangs.open_gate)
        return str(await call)

    assert run(wait_and_open()) in ("through", "answered", "compiled")
    wait_until_it_moves(caplog)
    report, end = told(caplog.records)
    assert f"hangs[0].{method.__name__}" in report  # type: ignore[attr-defined]
    assert f"hangs[1].{method.__name__}" in report  # type: ignore[attr-defined]
    assert "it moves again" in end


def compute(
    group: WorkerGroup, run: Run, caplog: pytest.LogCaptureFixture, method: object, messages: int
) -> None:
    """Rank 1 computes until that many messages are told, then for as long as another one would take."""

    async def wait_and_open() -> None:
        call = asyncio.ensure_future(group.call(method, 1))
        while len(told(caplog.records)) < messages and not call.done():
            await asyncio.sleep(0.05)
        await asyncio.sleep(2 * HANG_SECONDS)
        said = told(caplog.records)
        await group.call_rank(1, Hangs.open_gate)
        await call
        assert len(said) == messages

    run(wait_and_open())


SLOW_LINE = (
    r"host 1 works: hangs\[1\]\.computes, since \d+ s; nothing was counted for \d s \(cluster.hang_seconds\)"
)


@pytest.mark.slow
def test_what_computes_gets_one_line(group: WorkerGroup, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    compute(group, run, caplog, Hangs.computes, 1)
    run(group.call(Hangs.counts, 10))  # until the watch has seen that it is over, of which nothing is told
    (line,) = told(caplog.records)
    assert re.fullmatch(SLOW_LINE, line)
    assert "stacks" not in caplog.text


@pytest.mark.slow
def test_what_computes_for_five_times_as_long_tells_its_stacks_once(
    group: WorkerGroup, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    compute(group, run, caplog, Hangs.computes, 2)
    wait_until_it_moves(caplog)
    line, report, end = told(caplog.records)
    assert re.fullmatch(SLOW_LINE, line)
    assert re.match(r"nothing has moved for \d\d s", report)
    assert re.search(r"test_hangs.py:\d+ _compute: ", report)
    assert re.fullmatch(r"it moves again, after \d\d s", end)


@pytest.mark.slow
def test_what_computes_while_another_rank_waits_for_it_tells_its_stacks_at_once(
    group: WorkerGroup, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    compute(group, run, caplog, Hangs.computes_and_meets, 1)
    wait_until_it_moves(caplog)
    report, _ = told(caplog.records)
    assert re.match(r"nothing has moved for \d s", report)
    assert "waits in all_reduce for host 1 (hangs[1].computes_and_meets)" in report
    assert re.search(r"test_hangs.py:\d+ _compute: ", report)


@pytest.mark.slow
def test_a_call_that_cannot_begin_yet_is_no_end(
    group: WorkerGroup, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """Its peers wait in a collective for a rank whose event loop is held."""

    async def both() -> None:
        held = asyncio.ensure_future(group.call(Hangs.holds_its_loop, 1))
        await asyncio.sleep(0.5)  # until it holds it
        await group.call(Hangs.never_meets, -1)
        await held

    run(both())
    wait_until_it_moves(caplog)


def test_a_stopped_host_is_named(group: WorkerGroup, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def stop() -> None:
        pids = await group.call(Worker.process_id)
        call = asyncio.ensure_future(group.call(Hangs.counts, 20))  # for longer than what is told takes
        os.kill(pids[1], signal.SIGSTOP)
        while not told(caplog.records) and not call.done():
            await asyncio.sleep(0.05)
        os.kill(pids[1], signal.SIGCONT)
        await call

    run(stop())
    wait_until_it_moves(caplog)
    report = told(caplog.records)[0]
    assert report.startswith("host 1 did not answer for")
    assert "it is stopped" in report


@pytest.mark.slow
def test_a_host_that_holds_the_gil_writes_its_stacks(
    group: WorkerGroup, run: Run, logs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(group.call(Hangs.holds_the_lock, 1))
    wait_until_it_moves(caplog)
    report = told(caplog.records)[0]
    assert report.startswith("host 1 did not answer for")
    assert "may hold Python's lock (GIL); the last it said: " in report
    assert f"at the end of {logs / 'host-1.log'}" in report
    log = logs / "host-1.log"
    wait_for("the stacks", lambda: "in holds_the_lock" in log.read_text())
    assert "in holds_the_lock" not in (logs / "host-0.log").read_text()


@pytest.mark.slow
def test_a_stopped_host_that_others_wait_for_ends_the_call(
    fresh: WorkerGroup, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def stop() -> None:
        pids = await fresh.call(Worker.process_id)
        os.kill(pids[1], signal.SIGSTOP)
        await fresh.call(Hangs.meets_late, 2)

    with pytest.raises(WorkerError, match=full_text("waits in all_reduce for host 1")):
        run(stop())


@pytest.mark.slow
def test_a_stopped_host_that_nobody_waits_for_in_a_collective_is_given_up(
    run: Run, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In an episode, say, which may take any time. Until then nobody waits for what it has used."""
    config = ClusterConfig(BACKENDS[backend], devices=2, device="cpu", threads=1, timeout_seconds=8.0)
    cluster: Cluster = run(start_cluster(replace(config, hang_seconds=HANG_SECONDS)))
    group = run(cluster.create_group("hangs", Hangs))

    async def stop() -> None:
        pids = await group.call(Worker.process_id)
        call = asyncio.ensure_future(group.call(Hangs.answers_late))
        await group.call_rank(1, Worker.process_id)
        os.kill(pids[1], signal.SIGSTOP)
        assert (await cluster.cpu_seconds()).keys() == {0}
        await call

    with pytest.raises(WorkerError, match=full_text("hangs[1].answers_late failed")) as caught:
        run(stop())
    assert caught.value.died
    assert caught.value.is_outage
    run(cluster.shutdown())


@pytest.mark.slow
def test_a_local_call_is_told(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    cluster = start(run, "local", devices=1)
    group = run(cluster.create_group("hangs", Hangs))

    async def wait_and_open() -> None:
        call = asyncio.ensure_future(group.call(Hangs.waits))
        while not told(caplog.records) and not call.done():
            await asyncio.sleep(0.05)
        await group.call(Hangs.open_gate)
        assert await call == "through"

    run(wait_and_open())
    wait_until_it_moves(caplog)
    run(cluster.shutdown())
    (report, *_) = told(caplog.records)
    assert "hangs[0].waits > waiting at the gate" in report
    assert report.count("--- stacks") == 1  # the controller is the host


@pytest.mark.slow
def test_a_dead_host_names_its_log(fresh: WorkerGroup, run: Run, tmp_path: Path) -> None:
    async def die() -> None:
        pids = await fresh.call(Worker.process_id)
        os.kill(pids[1], signal.SIGKILL)
        await fresh.call(Hangs.counts, 30)

    with pytest.raises(WorkerError, match=re.escape(f"its log is {tmp_path / 'host-1.log'}")):
        run(die())


@pytest.mark.slow
def test_a_rank_that_is_sent_more_than_it_expects_is_named(
    fresh: WorkerGroup, run: Run, backend: str
) -> None:
    died = r"host process 1 died \(signal SIGABRT\)" if backend == "process" else "its host process .* died"
    with pytest.raises(WorkerError, match=died) as caught:
        run(fresh.call(Hangs.sends_too_much))
    assert (caught.value.role, caught.value.rank, caught.value.method) == ("hangs", 1, "sends_too_much")
    assert caught.value.is_outage


@pytest.mark.parametrize("settings", [{"hang_seconds": None}, {"inline": True}])
def test_nobody_watches_where_nothing_is_a_hang(run: Run, settings: dict[str, Any]) -> None:
    cluster = run(start_cluster(ClusterConfig(device="cpu", threads=1, **settings)))
    run(cluster.shutdown())
    assert cluster.call_watchers == []


@pytest.mark.parametrize("value", ["0", "-1", "often"])
def test_seconds_are_above_0(value: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.hang_seconds"):
        load(["grpo"], [f"cluster.hang_seconds={value}"])


# ---- words and verdicts, without processes ----

TRAINING = Deed(("actor[0].update_actor", "forward 3 of 7"), 63.4, True, None, "", False)
MEETING = replace(TRAINING, collective="all_reduce")
COMPILING = replace(TRAINING, path=("actor[0].__init__",), bound=False)
JOINING = replace(TRAINING, path=("actor[0].join a mesh",), bound=True)
EPISODE = Deed(("rollout[0].run_group",), 80.0, False, None, "", False, times=8)
CALL = SentCall("actor", 0, "update_actor", 63.4)


def seen(*deeds: Deed, silent: float | None = None, state: str = "", works: bool = False) -> Seen:
    return Seen(0, 7, frozenset({"actor"}), (CALL,), deeds, silent, state, works)


def computing(*deeds: Deed, device: int = 0) -> Seen:
    return replace(seen(*deeds, works=True), device=device, computes=True)


@pytest.mark.parametrize(
    ("processes", "hopeless"),
    [
        ([seen(MEETING), seen()], True),  # the other one has returned
        ([seen(MEETING), seen(EPISODE, works=True)], False),  # a scorer keeps it from its part
        ([seen(MEETING), replace(seen(works=True), calls=())], True),
        ([seen(MEETING), replace(seen(EPISODE), owes=True)], False),  # its call is still on the way
        ([seen(MEETING), seen(TRAINING)], True),  # sleeps in whatever
        ([seen(MEETING), seen(TRAINING, works=True)], False),
        ([seen(MEETING), seen(COMPILING)], False),
        ([seen(MEETING), seen(replace(COMPILING, collective="barrier"))], True),
        ([seen(MEETING), seen(MEETING)], True),  # in two different ones
        ([seen(JOINING), seen(silent=70.0, state="T")], True),
        ([seen(MEETING), seen(TRAINING, silent=70.0, state="R", works=True)], False),
        ([seen(MEETING), seen(COMPILING, silent=70.0)], False),
        ([seen(MEETING), seen(COMPILING, silent=70.0, state="T")], True),
        ([seen(MEETING), seen(replace(COMPILING, collective="barrier"), silent=70.0)], True),
        ([seen(TRAINING), seen(TRAINING)], False),  # nothing here has a known bound
        ([seen(TRAINING, silent=70.0)], False),
        ([seen(EPISODE)], False),
        ([seen(EPISODE, MEETING), seen(EPISODE)], True),
    ],
)
def test_what_can_never_end_by_itself(processes: list[Seen], hopeless: bool) -> None:
    assert is_hopeless(processes) is hopeless


@pytest.mark.parametrize(
    ("processes", "who"),
    [
        ([computing(TRAINING)], [0]),
        ([computing(TRAINING), computing(TRAINING, device=1)], [0, 1]),
        ([computing(TRAINING), replace(seen(), calls=())], [0]),  # its part is done
        ([computing(TRAINING), seen(EPISODE)], [0]),  # which waits for the trainer
        ([computing(COMPILING)], [0]),
        ([computing(EPISODE)], [0]),  # nothing is in turn
        ([computing(TRAINING), replace(computing(device=1), owes=True)], [0, 1]),
        ([computing(TRAINING), replace(seen(), owes=True)], []),
        ([computing(EPISODE), seen(EPISODE)], []),
        ([seen(TRAINING, works=True)], []),  # it has worked, and sleeps now
        ([computing(TRAINING), seen(TRAINING)], []),
        ([computing(TRAINING), seen(MEETING)], []),  # a peer waits
        ([computing(TRAINING), computing(MEETING)], []),  # and spins
        ([computing(MEETING), computing(MEETING)], []),
        ([computing(MEETING)], []),
        ([computing(JOINING)], []),
        ([replace(computing(TRAINING), silent_seconds=70.0, state="R")], []),
        ([computing(TRAINING), seen(EPISODE, silent=70.0)], []),
    ],
)
def test_who_is_only_slow(processes: list[Seen], who: list[int]) -> None:
    assert [one.device for one in slow(processes, 4.9, "cpu")] == who
    assert slow(processes, 5.0, "cpu") == []
    assert slow(processes, 1.0, "cuda") == []


def test_words() -> None:
    other = replace(seen(TRAINING), device=1)
    mine = seen(EPISODE, MEETING)
    assert waiting_for([mine, mine]) == "actor.update_actor (2 calls, rank 0; since 63 s)"
    assert describe(mine, [mine, other]) == (
        "host 0 (pid 7): 8 x rollout[0].run_group, since 80 s; actor[0].update_actor > forward 3 of 7, since "
        "63 s, waits in all_reduce for host 1 (forward 3 of 7)"
    )
    assert describe(seen(silent=61.0, state="S"), []) == (
        "host 0 (pid 7) has not answered for 61 s: something in it may hold Python's lock (GIL); the last it "
        "said: nothing to do"
    )


def test_words_of_who_is_slow() -> None:
    both = [computing(TRAINING), computing(COMPILING, device=1)]
    assert describe_work(both) == (
        "host 0 works: actor[0].update_actor > forward 3 of 7, since 63 s; host 1 works: actor[0].__init__, "
        "since 63 s"
    )


def test_to_write_stacks_down_is_no_work() -> None:
    host = _Host(HostHandle(0))
    quiet = Pulse(7, (0, 0), 1.0, ())
    host.hear(quiet, 1.0)
    host.hear(replace(quiet, cpu_seconds=1.01), 6.0)
    assert host.worked == 1.0  # the first pulse: what it used before is not known
    host.hear(replace(quiet, cpu_seconds=3.0, stacks="thread MainThread"), 11.0)
    host.hear(replace(quiet, cpu_seconds=4.0), 16.0)  # its engines' stacks
    assert host.worked == 1.0
    host.hear(replace(quiet, cpu_seconds=5.0), 21.0)
    assert host.worked == 21.0


def test_a_call_in_turn_computes_where_its_thread_has_lately() -> None:
    host = _Host(HostHandle(0))

    def hear(now: float, process: float, thread: float | None = None) -> None:
        deeds = () if thread is None else (replace(TRAINING, cpu_seconds=thread),)
        host.hear(Pulse(7, (0, 0), process, deeds), now)

    def facts(now: float) -> tuple[bool, bool]:
        one = host.seen(now, 50.0)
        return one.works, one.computes

    hear(1.0, 1.0, 1.0)
    hear(46.0, 1.0, 1.0)
    hear(51.0, 2.0, 1.6)
    assert [facts(now) for now in (51.0, 75.0, 76.0)] == [(True, True), (True, True), (True, False)]
    assert facts(101.0) == (False, False)
    hear(102.0, 20.0, 1.6)  # others of the process compute
    assert facts(103.0) == (True, False)
    hear(107.0, 30.0)  # nothing is in turn
    assert facts(108.0) == (True, True)


def test_what_computes_and_answers_late_is_silent_after_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of it is enough for one that computes nothing. Here the kernel's word is what the test says."""
    host = _Host(HostHandle(0))
    host.hear(Pulse(7, (0, 0), 1.0, (replace(TRAINING, cpu_seconds=1.0),)), 1.0)
    host.answer = Future()
    host.handle.here = True
    kernel: list[tuple[str, float]] = []
    monkeypatch.setattr("rondo.controller.watch.state_of", lambda pid: kernel[-1])

    def facts(now: float, cpu_seconds: float) -> tuple[float | None, bool]:
        kernel.append(("R", cpu_seconds))
        host.listen(now)
        one = host.seen(now, 50.0)
        return one.silent_seconds, one.computes

    assert facts(25.0, 1.0) == (None, True)  # its thread has lately
    assert facts(27.0, 11.0) == (None, True)
    assert facts(50.0, 12.0) == (None, True)
    assert facts(51.0, 13.0) == (50.0, True)
    assert facts(74.0, 13.0) == (73.0, True)
    assert facts(76.0, 13.0) == (75.0, False)
    host.heard = 50.0
    assert facts(77.0, 13.0) == (27.0, False)


def test_a_pulse_says_where_everybody_is() -> None:
    before = pulse().moves
    with Activity("outer", in_turn=True, bound=False), Activity("inner", in_bytes=True):
        progress(3 << 20, of=8 << 20)
        (deed,) = [deed for deed in pulse().deeds if deed.path[0] == "outer"]
        assert deed.path == ("outer", "inner 3 of 8 MiB")
        assert (deed.in_turn, deed.bound) == (True, False)
    after = pulse(stacks=True)
    assert after.moves == (before[0], before[1] + 5)  # two begun, two ended, one count
    assert "outer" not in str(after.deeds)


def test_a_pulse_names_where_a_pipeline_stage_waits_for_its_card() -> None:
    """For all that was begun there: in a function of torch's that Megatron's calls."""
    over = threading.Event()
    names: dict[str, Any] = {"over": over, "sleep": time.sleep}
    for place, code in (
        ("torch/cuda/__init__.py", "def synchronize():\n    while not over.is_set(): sleep(0.001)"),
        ("megatron/core/pipeline_parallel/p2p_communication.py", "def _communicate(): synchronize()"),
    ):
        exec(compile(code, f"/site-packages/{place}", "exec"), names)

    def wait_for_the_card() -> None:
        with Activity("a stage", in_turn=True):
            names["_communicate"]()

    thread = threading.Thread(target=wait_for_the_card)
    thread.start()
    stage = ("a stage",), "_communicate"
    wait_for("the stage", lambda: stage in [(deed.path, deed.collective) for deed in pulse().deeds])
    over.set()
    thread.join()


@pytest.mark.parametrize("stacks", [False, True])
def test_a_pulse_keeps_nothing_of_what_it_saw(stacks: bool) -> None:
    looked = threading.Event()
    theirs, seen = list[weakref.ref[torch.Tensor]](), threading.Event()

    def compute() -> None:
        tensor = torch.zeros(4)
        theirs.append(weakref.ref(tensor))
        seen.set()
        assert looked.wait(60)

    gc.disable()
    try:
        thread = threading.Thread(target=compute)
        thread.start()
        assert seen.wait(60)
        pulse(stacks)
        looked.set()
        thread.join()
        # What looks at all threads meanwhile (a watch of another test's) has its frames for a moment, too.
        wait_for("the end of the tensor", lambda: theirs[0]() is None)
    finally:
        gc.enable()


def test_messages_of_nccl_whose_end_nobody_records_are_not_said_to_be_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def entry(name: str, number: int, *, p2p: bool, retired: bool = False) -> dict[str, Any]:
        kinds = {"is_p2p": p2p, "retired": retired, "profiling_name": name, "input_sizes": [[4]]}
        numbers = {"p2p_seq_id": number, "collective_seq_id": number, "time_created_ns": time.time_ns()}
        return {"process_group": ["mine", "mine"], "input_dtypes": ["Byte"], **kinds, **numbers}

    entries = [entry("nccl:send 0->1", 7, p2p=True), entry("nccl:coalesced", 8, p2p=True)]
    entries += [entry("nccl:all_gather", 9, p2p=False), entry("gloo:send", 5, p2p=True)]
    entries += [entry("nccl:all_gather", 6, p2p=False, retired=True)]
    record = json.dumps({"entries": entries})
    monkeypatch.setattr(distributed, "_FLIGHT_RECORDS", ("_of_a_build_for_cuda",))
    monkeypatch.setattr(distributed.c10d, "_of_a_build_for_cuda", lambda **options: record, raising=False)
    _, group, *opened = distributed.flight_record().splitlines()
    assert group == "  group mine mine: 9 begun"
    assert [line.split(" of ")[0].strip() for line in opened] == ["9: nccl:all_gather", "5: gloo:send"]
