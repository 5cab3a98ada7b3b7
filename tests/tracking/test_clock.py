"""The clock on hands that the test moves: exclusive times, busy shares, CPU seconds; usage of known work."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rondo.system.usage import (
    CpuSeconds,
    TeamClock,
    checks_cpu_seconds,
    children_cpu_seconds,
    counted_checks,
    process_usage,
    state_of,
)
from rondo.tracking import Clock, Timeline


class Hand:
    """Seconds that stand still until they are moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


Start = Callable[[], tuple[Clock, Hand, Hand]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Makes a clock, and the hands of its time and of this process's CPU time: an eighth is checks'."""

    def make() -> tuple[Clock, Hand, Hand]:
        now, cpu = Hand(), Hand()
        timeline = Timeline(tmp_path / "attempt-1")
        return Clock(timeline, now=now, cpu=cpu, checks=lambda: cpu.now / 8), now, cpu

    return make


def test_nested_phases_are_exclusive(start: Start) -> None:
    clock, now, cpu = start()
    now.now = 100.0  # loading
    clock.start_step()
    with clock.phase("update"):
        now.now += 3
        with clock.phase("transfer"):
            now.now += 2
            with clock.phase("update"):
                now.now += 1
        now.now += 4
    now.now += 5
    cpu.now += 8
    assert clock.end_step(1, generated=300, trained=60) == {
        "timing/update_s": 8.0,
        "timing/transfer_s": 2.0,
        "timing/step_s": 15.0,
        "timing/cpu_s": 8.0,
        "perf/checks_cpu_seconds": 1.0,
        "perf/generated_tokens_per_s": 20.0,
        "perf/trained_tokens_per_s": 4.0,
    }
    now.now += 1
    assert clock.end_step(2, generated=10)["timing/step_s"] == 1.0
    assert clock.counts == {"generated": 310, "trained": 60}
    assert clock.shares() == pytest.approx({"update": 8 / 116, "transfer": 2 / 116, "other": 106 / 116})


def test_time_before_the_first_step_is_in_no_step(start: Start) -> None:
    clock, now, _ = start()
    with clock.phase("evaluate"):
        now.now += 7
    clock.start_step()
    with clock.phase("generate"):
        now.now += 1
    metrics = clock.end_step(1)
    assert {name: value for name, value in metrics.items() if value} == {
        "timing/generate_s": 1.0,
        "timing/step_s": 1.0,
    }
    assert clock.seconds == {"evaluate": 7.0, "generate": 1.0}


def test_tasks_that_overlap_do_not_mix_their_nesting(start: Start) -> None:
    clock, now, _ = start()

    async def work(name: str, first: asyncio.Event, then: asyncio.Event) -> None:
        with clock.phase(name):
            then.set()
            await first.wait()

    async def both() -> None:
        a, b, end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        one = asyncio.create_task(work("reference", end, a))
        await a.wait()
        now.now += 1
        two = asyncio.create_task(work("critic", end, b))
        await b.wait()
        now.now += 2
        end.set()
        await asyncio.gather(one, two)

    asyncio.run(both())
    assert clock.seconds == {"reference": 3.0, "critic": 2.0}


def test_totals_go_on_after_a_resume(start: Start) -> None:
    clock, now, _ = start()
    with clock.phase("generate"):
        now.now += 4
    clock.end_step(1, generated=5)
    later, now, _ = start()
    later.load_state(clock.state())
    with later.phase("generate"):
        now.now += 6
    assert later.end_step(2, generated=7)["timing/generate_s"] == 6.0
    assert later.state() == {
        "wall_seconds": 10.0,
        "cpu_seconds": 0.0,
        "checks_cpu_seconds": 0.0,
        "seconds": {"generate": 10.0},
        "counts": {"generated": 12},
    }


def test_a_phase_that_raises_is_counted(start: Start) -> None:
    clock, now, _ = start()

    def fail() -> None:
        with clock.phase("update"):
            now.now += 2
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert clock.seconds == {"update": 2.0}


def busy(clock: Clock, step: int) -> dict[str, float]:
    metrics = clock.end_step(step)
    return {name: value for name, value in metrics.items() if name.endswith("_busy_share")}


def test_busy_shares_of_a_step_by_hand(start: Start) -> None:
    clock, now, _ = start()

    def at(seconds: float, what: str, role: str, device: int, method: str) -> None:
        now.now = seconds
        if what == "begin":
            clock.call_sent(role, 0, device, method)
        else:
            clock.call_ended(role, 0, device, method, 0.0, 0.0, died=False)

    at(0, "begin", "rollout", 1, "run_group")  # two overlap: 0-6 busy
    at(1, "begin", "rollout", 1, "run_group")
    at(2, "begin", "actor", 0, "update_actor")
    at(3, "begin", "critic", 0, "update_critic")  # same device: 2-5 counts once
    at(4, "end", "actor", 0, "update_actor")
    at(5, "end", "critic", 0, "update_critic")
    at(5, "end", "rollout", 1, "run_group")
    at(6, "end", "rollout", 1, "pause")  # one is in flight, but its engine stands still until 8
    at(8, "begin", "rollout", 1, "resume")
    at(8, "end", "rollout", 1, "resume")
    now.now = 10.0
    assert busy(clock, 1) == pytest.approx({"perf/trainer_busy_share": 0.3, "perf/rollout_busy_share": 0.8})
    at(11, "end", "rollout", 1, "run_group")  # began in the step before
    at(11, "begin", "rollout", 1, "statistics")  # no episode
    now.now = 14.0
    assert busy(clock, 2) == pytest.approx({"perf/trainer_busy_share": 0.0, "perf/rollout_busy_share": 0.25})


def test_busy_shares_are_means_over_devices_and_count_nothing_before_the_first_step(start: Start) -> None:
    clock, now, _ = start()
    for device in (0, 1):
        clock.call_sent("actor", device, device, "num_parameters")
        clock.call_ended("actor", device, device, "num_parameters", 0.0, 0.0, died=False)
    clock.call_sent("actor", 0, 0, "update_actor")
    now.now = 100.0
    clock.start_step()
    now.now = 104.0
    assert busy(clock, 1) == {"perf/trainer_busy_share": 0.5}


def test_a_device_counts_while_its_host_lives(start: Start) -> None:
    clock, now, _ = start()
    for device in (0, 1):
        clock.call_sent("rollout", device, device, "run_group")
    now.now = 4.0
    clock.call_ended("rollout", 1, 1, "run_group", 0.0, 0.0, died=True)
    now.now = 5.0
    clock.call_ended("rollout", 0, 0, "run_group", 0.0, 0.0, died=False)
    now.now = 12.0
    assert busy(clock, 1) == {"perf/rollout_busy_share": (5 + 4) / (12 + 4)}
    clock.call_sent("rollout", 0, 0, "run_group")
    now.now = 16.0
    assert busy(clock, 2) == {"perf/rollout_busy_share": 1.0}
    clock.call_ended("rollout", 0, 0, "run_group", 0.0, 0.0, died=True)
    now.now = 17.0
    assert busy(clock, 3) == {}


def test_hosts_count_from_their_first_number_on_and_never_backwards(start: Start) -> None:
    clock, _, cpu = start()
    clock.count_cpu({0: CpuSeconds(10.0, 1.0), 1: CpuSeconds(7.0, 0.0)})  # imports
    assert clock.cpu_seconds == 0.0
    clock.count_cpu({0: CpuSeconds(13.0, 1.5), 1: CpuSeconds(7.5, 0.0)})  # a first evaluation: in no step
    clock.start_step()
    assert (clock.cpu_seconds, clock.checks_cpu_seconds) == (3.5, 0.5)
    clock.count_cpu({0: CpuSeconds(15.0, 1.75), 1: CpuSeconds(9.5, 0.125)})
    cpu.now += 1.0  # of this process
    step = clock.end_step(1)
    assert (step["timing/cpu_s"], step["perf/checks_cpu_seconds"]) == (5.0, 0.25 + 0.125 + 0.125)
    # An engine has just ended, and its time is not in its parent's yet; 1 is dead.
    clock.count_cpu({0: CpuSeconds(14.5, 1.75)})
    assert clock.end_step(2)["timing/cpu_s"] == 0.0
    clock.count_cpu({0: CpuSeconds(19.0, 2.0)})
    assert clock.end_step(3)["timing/cpu_s"] == 4.0
    assert (clock.cpu_seconds, clock.checks_cpu_seconds) == (12.5, 1.25)


def test_checks_count_the_time_of_their_own_thread() -> None:
    before, alone = checks_cpu_seconds(), time.thread_time()
    done = threading.Event()

    def beside() -> None:
        while not done.is_set():
            pass

    thread = threading.Thread(target=beside)
    thread.start()
    with counted_checks():
        began = time.thread_time()
        while time.thread_time() < began + 0.1:
            pass
    done.set()
    thread.join()
    assert 0.1 <= checks_cpu_seconds() - before <= time.thread_time() - alone


def test_cpu_seconds_and_peak_memory_of_this_process_and_its_children() -> None:
    start = time.process_time()
    before = process_usage()
    while time.process_time() < start + 0.2:
        pass
    after = process_usage()
    whole = time.process_time() - start  # other threads' too
    assert 0.17 < after.cpu_seconds - before.cpu_seconds < whole + 0.03
    assert after.peak_memory_bytes > 50 * 2**20
    code = "import sys, time; b = bytearray(300 << 20)\n"
    code += "while time.process_time() < 0.4: pass\n"
    code += "print(flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    alive = process_usage(children=True)
    assert alive.cpu_seconds - process_usage().cpu_seconds >= 0.37
    assert alive.peak_memory_bytes - process_usage().peak_memory_bytes > 300 * 2**20
    before_its_end = children_cpu_seconds()
    child.communicate()
    ended = process_usage(children=True)
    assert ended.cpu_seconds >= alive.cpu_seconds
    assert children_cpu_seconds() >= before_its_end >= 0.37


def test_a_teams_clock_is_the_sum_of_its_threads_clocks_and_of_no_other() -> None:
    """A thread and the two that it starts are counted, one of them ended; what its starter does meanwhile is
    not.
    """
    counted: dict[str, float] = {}
    burnt, ends, stop = threading.Barrier(3), threading.Event(), threading.Event()

    def busy(name: str, until: threading.Event) -> None:
        while time.thread_time() < 0.1:
            pass
        counted[name] = time.thread_time()
        burnt.wait()
        until.wait()

    def team() -> None:
        clock = TeamClock()
        threads = [threading.Thread(target=busy, args=args) for args in (("stays", stop), ("ends", ends))]
        for thread in threads:
            thread.start()
        burnt.wait()
        clock.seconds()  # what has ended is known up to the last look
        ends.set()
        threads[1].join()
        counted["own"] = time.thread_time()
        counted["reported"] = clock.seconds()
        stop.set()

    runner = threading.Thread(target=team)
    runner.start()
    while runner.is_alive():  # busy beside them
        pass
    reported = counted.pop("reported")
    # Nothing is missing; what is more is the waiting, and far from what this thread has used.
    assert sum(counted.values()) <= reported <= sum(counted.values()) + 0.05


@pytest.mark.slow
def test_a_teams_clock_counts_the_threads_of_a_library() -> None:
    used: list[float] = []
    tasks = Path("/proc/self/task")

    def name_of(thread: str) -> str:
        try:
            return (tasks / thread / "comm").read_text().strip()
        except OSError:  # it has just ended
            return ""

    def multiply() -> None:
        clock, me = TeamClock(), str(threading.get_native_id())
        torch.set_num_threads(2)
        matrix = torch.ones(600, 600)
        # Looking at the clock takes time of its own, more where other tests have left many threads: the
        # process is measured around it and this thread within it.
        process, first, own, others = time.process_time(), clock.seconds(), time.thread_time(), 0.0
        while others < 0.15:  # on a busy machine the second one comes late, and this one spins meanwhile
            matrix @ matrix
            team = [
                thread for thread in os.listdir(tasks) if name_of(thread) == f"team-{me}" and thread != me
            ]
            others = sum(state_of(f"self/task/{thread}")[1] for thread in team)
        own = time.thread_time() - own
        used.extend((clock.seconds() - first, time.process_time() - process, own, others))

    thread = threading.Thread(target=multiply)
    thread.start()
    thread.join()
    reported, process, own, others = used
    # The second thread has the team's name and is counted (the kernel's ticks are a hundredth of a second),
    # and nothing twice. Other threads of this process may have run, too.
    assert own + others - 0.02 < reported < process + 0.02
