"""timeline.json: what is written, read back; rows, steps, kills and resumes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from rondo.errors import DataError
from rondo.tracking.run_folder import RunFolder
from rondo.tracking.timeline import Timeline, append_events, read_timeline, split_events, step_of
from rondo.tracking.timers import Timers


class Clock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def timeline(path: Path, **options: Any) -> tuple[Timeline, Clock]:
    """On a wall clock that is 1000 s ahead of the ticks, which stand still."""
    clock = Clock(1000.0)
    return Timeline(path, clock=clock, ticks=lambda: 0.0, **options), clock


def spans(path: Path) -> list[dict[str, Any]]:
    return [event for event in read_timeline(path) if event["ph"] == "X"]


def names(path: Path, kind: str) -> dict[int, str]:
    events = [e for e in read_timeline(path) if e["name"] == kind]
    return {e["tid"] if kind == "thread_name" else e["pid"]: e["args"]["name"] for e in events}


def test_spans_marks_and_counters_are_what_was_told(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    line, clock = timeline(path)
    line.gauges = lambda: {"in flight": 2, "ready": 1}
    line.record("actor", 1, 3, "update_actor", 1001.0, 1001.5)
    line.phase("update_actor", 0.9, 1.6)  # of the ticks: 1000.9 to 1001.6
    clock.now = 1002.0
    line.mark("publish", version=7)
    line.count("staleness", {"mean": 0.5, "max": 1})
    line.end_step(7)
    whole = json.loads(path.read_text())
    assert whole == read_timeline(path)
    assert [(e["name"], e["ts"], e["dur"], e["args"]) for e in spans(path)] == [
        ("update_actor", 1000_900_000, 700_000, {"step": 7}),
        ("update_actor", 1001_000_000, 500_000, {"rank": 1, "step": 7}),
    ]
    loop, device = spans(path)
    assert names(path, "process_name") == {loop["pid"]: "controller", device["pid"]: "device 3"}
    assert names(path, "thread_name") == {loop["tid"]: "loop", device["tid"]: "actor"}
    (mark,) = [e for e in whole if e["ph"] == "i"]
    assert (mark["name"], mark["ts"], mark["args"]) == ("publish", 1002_000_000, {"version": 7, "step": 7})
    counters = {e["name"]: e for e in whole if e["ph"] == "C"}
    assert counters["prompt groups"]["args"] == {"in flight": 2, "ready": 1}  # once: it did not change
    assert counters["staleness"]["args"] == {"mean": 0.5, "max": 1}
    assert {step_of(e) for e in whole if e["ph"] != "M"} == {7}


def test_calls_that_overlap_lie_on_different_rows_and_phases_nest(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    line, _ = timeline(path)
    for start, end in ((0, 4), (1, 2), (2, 3), (3, 6), (4, 5)):
        line.record("rollout", 0, 0, "run_group", 1000 + start, 1000 + end)
    line.end_step(1)
    line.record("rollout", 0, 0, "run_group", 1000.5, 1007)  # began a step ago
    line.phase("outer", 0.0, 9.0)
    line.phase("inner", 1.0, 2.0)
    line.phase("other task", 8.0, 10.0)
    line.end_step(2)
    rows = names(path, "thread_name")
    on: dict[str, list[tuple[float, float]]] = {}
    for event in spans(path):
        row = rows[event["tid"]]
        on.setdefault(row, []).append((event["ts"] / 1e6 - 1000, (event["ts"] + event["dur"]) / 1e6 - 1000))
    assert on["rollout"] == [(0, 4), (4, 5)]
    assert on["rollout (2)"] == [(1, 2), (2, 3), (3, 6)]
    assert on["rollout (3)"] == [(0.5, 7)]
    assert on["loop"] == [(0, 9), (1, 2)]
    assert on["loop (2)"] == [(8, 10)]
    for intervals in (on["rollout"], on["rollout (2)"]):
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(intervals)))


def test_phases_of_the_timers_add_up_to_their_metrics(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    ticks = Clock()
    line = Timeline(path, clock=lambda: 1000.0 + ticks.now, ticks=ticks)
    timers = Timers(ticks, Clock())
    timers.watchers.append(line)
    with timers.phase("evaluate"):  # before the first step
        ticks.now += 5.0
    timers.start_step()
    metrics = {}
    for step in (1, 2):
        for seconds in (0.25, 0.5):
            with timers.phase("update_actor"):
                ticks.now += seconds * step
            ticks.now += 1.0
        metrics[step] = timers.end_step()
        line.end_step(step)
    for step in (1, 2):
        mine = [e for e in spans(path) if e["args"]["step"] == step]
        assert {e["name"] for e in mine} == {"update_actor"}
        assert sum(e["dur"] for e in mine) == pytest.approx(metrics[step]["timing/update_actor_s"] * 1e6)
    first = spans(path)[0]
    assert (first["name"], first["args"]["step"]) == ("evaluate", 0)


def test_whole_after_every_step_and_readable_when_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    line, _ = timeline(path)
    for step in range(1, 4):
        line.record("actor", 0, 0, "update_actor", 1000.0 + step, 1000.5 + step)
        line.end_step(step)
        assert len([e for e in json.loads(path.read_text()) if e["ph"] == "X"]) == step
    text = path.read_text()
    for kept in range(len(text) - 40, len(text)):  # wherever a kill cuts it
        path.write_text(text[:kept])
        found = spans(path)
        assert len(found) in (2, 3)
        append_events(path, [{"name": "later", "ph": "X", "ts": 0, "dur": 1, "pid": 1, "tid": 1, "args": {}}])
        assert [e["name"] for e in json.loads(path.read_text())][-1] == "later"
        assert len(spans(path)) == len(found) + 1
    path.write_text("{}")
    with pytest.raises(DataError, match="no timeline"):
        read_timeline(path)
    path.write_text('[\n{"name":"a"},\nbroken\n{"name":"b"}\n]\n')
    with pytest.raises(DataError, match=r"timeline.json:3"):
        read_timeline(path)


def test_a_resumed_run_goes_on_in_the_same_rows_and_what_lay_beyond_moves(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with RunFolder(run) as folder:
        (run / "checkpoints" / "step-00000002").mkdir()
        line = folder.open_timeline()
        for step in (1, 2, 3):
            line.record("actor", 0, 0, "update_actor", 1000.0 + step, 1000.5 + step)
            line.record("rollout", 0, 1, "run_group", 1000.0 + step, 1000.5 + step)
            folder.append_metrics(step, {"reward": 0.5})
            line.end_step(step)
    with RunFolder(run) as folder:
        assert (folder.attempt, folder.resume_step) == (2, 2)
        line = folder.open_timeline()
        line.record("actor", 0, 0, "load", 2000.0, 2001.0)  # set-up, before the metrics are cut
        assert folder.discard_beyond(2) == 1
        line.step = 2
        line.step_started()
        line.record("rollout", 0, 1, "run_group", 2003.0, 2004.0)
        line.end_step(3)
    path = run / "timeline.json"
    assert [(e["name"], e["args"]["step"], e["args"].get("attempt")) for e in spans(path)] == [
        *[(name, step, None) for step in (1, 2) for name in ("update_actor", "run_group")],
        ("load", 2, 2),
        ("run_group", 3, 2),
    ]
    (mark,) = [e for e in read_timeline(path) if e["ph"] == "i"]
    assert mark["name"] == "attempt 2"
    threads = {
        (e["pid"], e["args"]["name"]): e["tid"] for e in read_timeline(path) if e["name"] == "thread_name"
    }
    assert len(threads) == len({e["tid"] for e in spans(path)}) == 2  # no second row for a role
    gone = run / "discarded" / "1" / "timeline.json"
    assert [(e["name"], e["args"]["step"]) for e in spans(gone)] == [("update_actor", 3), ("run_group", 3)]
    assert set(names(gone, "thread_name").values()) == {"actor", "rollout"}
    assert split_events(path, 3)[1] == []


def test_a_run_that_starts_anew_takes_the_old_timeline_away(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with RunFolder(run) as folder:
        line = folder.open_timeline()
        line.phase("generate", 0.0, 1.0)
        line.end_step(1)
    with RunFolder(run):
        assert not (run / "timeline.json").exists()
        assert (run / "discarded" / "1" / "timeline.json").exists()
