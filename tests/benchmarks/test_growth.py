"""Rondo's own work grows with its size and not faster: counted in lines of Python that run and in bytes."""

from __future__ import annotations

import sys
import threading
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

import growth


def steps_of(work: Callable[[], object]) -> int:
    """Counts the lines that run: a loop counts each time round."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    threading.settrace(trace)  # of threads that the work begins
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        threading.settrace(before)  # type: ignore[arg-type]
    return count


def bytes_of(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dimension", [one for one in growth.DIMENSIONS if one is not growth.steps_of_a_run])
@pytest.mark.parametrize("measure", [steps_of, bytes_of])
def test_no_dimension_grows_faster_than_its_size(
    dimension: Callable[[int], Callable[[], object]], measure: Callable[[Callable[[], object]], int]
) -> None:
    sizes = [64, 256]
    dimension(16)()  # what is made once is not of a size
    # The smaller of two: at some point the interpreter's own table of names grows by megabytes.
    costs = [min(measure(dimension(size)) for _ in range(1 + (measure is bytes_of))) for size in sizes]
    assert growth.exponent(sizes, costs) <= 1.1, costs


def test_what_grows_with_the_square_is_seen() -> None:
    def search(size: int) -> Callable[[], object]:
        names = list(range(size))
        return lambda: [[other for other in names if other == name] for name in names]

    sizes = [64, 256]
    assert growth.exponent(sizes, [steps_of(search(size)) for size in sizes]) > 1.8


@pytest.mark.parametrize("drops", [0, 4096])
def test_a_checkpoint_knows_only_how_many_groups_were_dropped(drops: int) -> None:
    assert len(growth.checkpoint_after_drops(drops)()) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("older", [False, True])
def test_a_journal_is_read_in_bounded_memory(older: bool) -> None:
    growth.resume_of_a_journal(16, older=older)()  # what is made once is not the journal's
    assert bytes_of(growth.resume_of_a_journal(4096, older=older)) < 1 << 16


def test_of_a_journal_that_is_gone_on_with_the_last_line_is_read() -> None:
    short, long = (steps_of(growth.resume_of_a_journal(groups)) for groups in (16, 4096))
    assert short == long


def test_a_replay_reads_its_journal_in_bounded_memory() -> None:
    growth.replay_of_a_journal(16)()  # what is made once is not the journal's
    assert bytes_of(growth.replay_of_a_journal(2048)) < 1 << 17


def test_a_timeline_has_files_of_one_size_and_is_written_in_bounded_memory() -> None:
    steps = growth.timeline_of_a_run(1000)
    sizes = steps()
    assert len(sizes) == 10
    assert max(sizes) < 1.1 * min(sizes)
    assert bytes_of(steps) < 1 << 17


def test_every_metric_is_sent_once() -> None:
    sent, there = growth.metrics_elsewhere(64)()
    assert sent == there


def test_only_the_newest_rollouts_are_there() -> None:
    kept = growth.rollouts_that_are_kept(20)()
    assert sorted(path.name for path in kept) == [f"step-{step:06d}.parquet" for step in (17, 18, 19, 20)]


def test_metrics_are_gone_on_with_in_bounded_memory() -> None:
    resume = growth.resume_of_metrics(2048)
    assert resume() == 4
    assert bytes_of(resume) < 1 << 17
