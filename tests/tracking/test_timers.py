"""Timers on a clock that the test moves: exact exclusive times; process usage against known work."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest

from rondo.tracking import Timers
from rondo.usage import children_cpu_seconds, process_usage


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_nested_phases_are_exclusive() -> None:
    clock, cpu = Clock(), Clock()
    timers = Timers(clock, cpu)
    clock.now = 100.0  # loading
    timers.start_step()
    with timers.phase("update"):
        clock.now += 3
        with timers.phase("transfer"):
            clock.now += 2
            with timers.phase("update"):
                clock.now += 1
        clock.now += 4
    clock.now += 5
    cpu.now += 8
    assert timers.end_step(generated=300, trained=60) == {
        "timing/update_s": 8.0,
        "timing/transfer_s": 2.0,
        "timing/step_s": 15.0,
        "timing/cpu_s": 8.0,
        "perf/generated_tokens_per_s": 20.0,
        "perf/trained_tokens_per_s": 4.0,
    }
    timers.start_step()
    clock.now += 1
    assert timers.end_step(generated=10)["timing/step_s"] == 1.0
    assert timers.counts == {"generated": 310, "trained": 60}
    assert timers.shares() == pytest.approx({"update": 8 / 116, "transfer": 2 / 116, "other": 106 / 116})


def test_time_before_the_first_step_is_in_no_step() -> None:
    clock = Clock()
    timers = Timers(clock, Clock())
    with timers.phase("evaluate"):
        clock.now += 7
    timers.start_step()
    with timers.phase("generate"):
        clock.now += 1
    assert timers.end_step() == {"timing/generate_s": 1.0, "timing/step_s": 1.0, "timing/cpu_s": 0.0}
    assert timers.seconds == {"evaluate": 7.0, "generate": 1.0}


def test_tasks_that_overlap_do_not_mix_their_nesting() -> None:
    clock = Clock()
    timers = Timers(clock, Clock())

    async def work(name: str, first: asyncio.Event, then: asyncio.Event) -> None:
        with timers.phase(name):
            then.set()
            await first.wait()

    async def both() -> None:
        a, b, end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        one = asyncio.create_task(work("reference", end, a))
        await a.wait()
        clock.now += 1
        two = asyncio.create_task(work("critic", end, b))
        await b.wait()
        clock.now += 2
        end.set()
        await asyncio.gather(one, two)

    asyncio.run(both())
    assert timers.seconds == {"reference": 3.0, "critic": 2.0}


def test_totals_go_on_after_a_resume() -> None:
    clock = Clock()
    timers = Timers(clock, Clock())
    with timers.phase("generate"):
        clock.now += 4
    timers.end_step(generated=5)
    later = Timers(clock, Clock())
    later.load_state(timers.state())
    with later.phase("generate"):
        clock.now += 6
    assert later.end_step(generated=7)["timing/generate_s"] == 6.0
    assert later.state() == {
        "wall_seconds": 10.0,
        "cpu_seconds": 0.0,
        "seconds": {"generate": 10.0},
        "counts": {"generated": 12},
    }


def test_a_phase_that_raises_is_counted() -> None:
    clock = Clock()
    timers = Timers(clock, Clock())

    def fail() -> None:
        with timers.phase("update"):
            clock.now += 2
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert timers.seconds == {"update": 2.0}


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
