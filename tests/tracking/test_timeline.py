"""The timeline: what is written, read back; spans, steps, kills and resumes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rondo.core.errors import DataError
from rondo.tracking import Clock, RunFolder, Timeline, run_folder
from rondo.tracking.timeline import Span, read_timeline


class Hand:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def clock_at(path: Path, gauges: dict[str, float] | None = None) -> tuple[Clock, Hand]:
    """Returns a clock that began at second 1000 of the epoch, and its hand."""
    hand = Hand()
    clock = Clock(Timeline(path), lambda: gauges or {}, now=hand, cpu=lambda: 0.0, epoch=lambda: 1000.0)
    return clock, hand


def call(clock: Clock, role: str, rank: int, device: int, method: str, start: float, end: float) -> None:
    clock.call_sent(role, rank, device, method)
    clock.call_ended(role, rank, device, method, start, end, died=False)


def phase(clock: Clock, hand: Hand, name: str, start: float, end: float) -> None:
    hand.now = start
    with clock.phase(name):
        hand.now = end


def spans(path: Path) -> list[dict[str, Any]]:
    """The begins, each with the `dur` that its end gives it and the name of its process."""
    events = read_timeline(path)
    ends = {event["id"]: event for event in events if event["ph"] == "e"}
    begins = [event for event in events if event["ph"] == "b"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert len(begins) == len(ends)
    for begin in begins:
        end = ends[begin["id"]]
        assert all(begin[key] == end[key] for key in ("name", "cat", "pid", "tid"))
    return [b | {"dur": ends[b["id"]]["ts"] - b["ts"], "process": processes[b["pid"]]} for b in begins]


def test_spans_marks_and_counters_are_what_was_told(tmp_path: Path) -> None:
    path = tmp_path / "timeline" / "attempt-1"
    clock, hand = clock_at(path, {"in flight": 2, "ready": 1})
    call(clock, "actor", 1, 3, "update_actor", 1001.0, 1001.5)
    call(clock, "rollout", 0, 0, "restarted", 1001.0, 1001.5)  # a long poll is not shown
    phase(clock, hand, "update_actor", 0.9, 1.6)
    hand.now = 2.0
    clock.mark("publish", {"version": 7})
    clock.mark("staleness", {"mean": 0.5, "max": 1}, is_counter=True)
    clock.end_step(7)
    assert [(e["process"], e["cat"], e["name"], e["ts"], e["dur"], e["args"]) for e in spans(path)] == [
        ("device 3: actor", "actor", "update_actor", 1001_000_000, 500_000, {"rank": 1, "step": 7}),
        ("controller", "loop", "update_actor", 1000_900_000, 700_000, {"step": 7}),
    ]
    events = read_timeline(path)
    (mark,) = [e for e in events if e["ph"] == "i"]
    assert (mark["name"], mark["ts"], mark["args"]) == ("publish", 1002_000_000, {"version": 7, "step": 7})
    counters = [(e["name"], e["args"]) for e in events if e["ph"] == "C"]
    assert counters == [  # the first once: it did not change
        ("prompt groups", {"in flight": 2, "ready": 1}),
        ("staleness", {"mean": 0.5, "max": 1}),
    ]
    places = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert [places[e["pid"]] for e in spans(path)] == [4, 0]  # the controller on top, then by device


def test_every_event_has_what_the_format_asks_for(tmp_path: Path) -> None:
    path = tmp_path / "timeline"
    clock, hand = clock_at(path)
    for start, end in ((0, 4), (1, 2), (2, 3), (3, 6), (5, 4)):  # they overlap; the last would be negative
        call(clock, "rollout", 0, 0, "run_group", 1000 + start, 1000 + end)
    clock.end_step(1)
    call(clock, "rollout", 0, 0, "run_group", 1000.5, 1007)  # began a step ago
    phase(clock, hand, "outer", 0.0, 9.0)
    phase(clock, hand, "inner", 1.0, 2.0)
    clock.mark("publish", {"version": 1})
    clock.end_step(2)
    text = (path / "step-000000.json").read_text()
    whole = json.loads(text + "]")  # but for the bracket, which may be left out
    assert whole == read_timeline(path)
    for event in whole:
        assert {"name", "ph", "pid", "tid"} <= event.keys()
        assert ("ts" in event) == (event["ph"] != "M")
        assert ("id" in event) == ("cat" in event) == (event["ph"] in "be")
    named = [event["pid"] for event in whole if event["name"] == "process_name"]
    assert sorted(named) == sorted({event["pid"] for event in whole})  # once each
    order = [(event["id"], event["ph"]) for event in whole if event["ph"] in "be"]
    assert order == [(number, ph) for number in range(1, 9) for ph in "be"]  # an id of its own for every span
    assert [event["dur"] for event in spans(path)] == [
        seconds * 1_000_000 for seconds in (4, 1, 1, 3, 0, 6.5, 9, 1)
    ]


def test_phases_add_up_to_their_metrics(tmp_path: Path) -> None:
    path = tmp_path / "attempt-1"
    clock, hand = clock_at(path)
    with clock.phase("evaluate"):  # before the first step
        hand.now += 5.0
    clock.start_step()
    metrics = {}
    for step in (1, 2):
        for seconds in (0.25, 0.5):
            with clock.phase("update_actor"):
                hand.now += seconds * step
            hand.now += 1.0
        metrics[step] = clock.end_step(step)
    for step in (1, 2):
        mine = [e for e in spans(path) if e["args"]["step"] == step]
        assert {e["name"] for e in mine} == {"update_actor"}
        assert sum(e["dur"] for e in mine) == pytest.approx(metrics[step]["timing/update_actor_s"] * 1e6)
    first = spans(path)[0]
    assert (first["name"], first["args"]["step"]) == ("evaluate", 0)


def test_a_file_that_a_kill_cut_off_is_read_less_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "attempt-1" / "step-000000.json"
    timeline = Timeline(path.parent)
    for step in range(1, 4):
        timeline.write(step, [Span("update_actor", step, step + 0.5)])
        assert len(json.loads(path.read_text() + "]")) == 2 + 2 * step  # whole after every step
    text, events = path.read_text(), read_timeline(path)
    for kept in range(text.rindex("\n") + 1, len(text)):  # anywhere in the last line
        path.write_text(text[:kept])
        assert read_timeline(path) == read_timeline(path.parent) == events[:-1]
    path.write_text("{}")
    with pytest.raises(DataError, match="no timeline"):
        read_timeline(path)
    path.write_text('[\n{"name":"a"},\nbroken\n{"name":"b"}\n]\n')
    with pytest.raises(DataError, match=r"step-000000.json:3"):
        read_timeline(path)


def test_every_hundred_steps_have_a_file_that_is_whole_by_itself(tmp_path: Path) -> None:
    clock, hand = clock_at(tmp_path)
    written: list[str] = []
    clock._timeline._wrote = lambda path: written.append(path.name)
    for step in (0, 99, 100, 101, 345, 1_000_000):  # 345: a program that counts in its own way
        call(clock, "actor", 0, 1, "update_actor", 1000 + step, 1001 + step)
        phase(clock, hand, "update_actor", step, step + 1)
        clock.end_step(step)
    names = ["step-000000.json", "step-000100.json", "step-000300.json", "step-1000000.json"]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    assert written == [names[number] for number in (0, 0, 1, 1, 2, 3)]
    found = {name: spans(tmp_path / name) for name in names}  # each names its processes, and ends its spans
    assert {name: [e["args"]["step"] for e in of] for name, of in found.items()} == {
        "step-000000.json": [0, 0, 99, 99],
        "step-000100.json": [100, 100, 101, 101],
        "step-000300.json": [345, 345],
        "step-1000000.json": [1_000_000, 1_000_000],
    }
    for name in names:
        assert {span["process"] for span in found[name]} == {"controller", "device 1: actor"}
        events = json.loads((tmp_path / name).read_text() + "]")
        assert events == read_timeline(tmp_path / name)
        named = [event["pid"] for event in events if event["name"] == "process_name"]
        assert sorted(named) == [1, 2]
    assert spans(tmp_path) == [span for name in names for span in found[name]]  # ids are the attempt's
    whole = (tmp_path / names[1]).read_text()
    (tmp_path / names[1]).write_text(whole[:-5])  # no kill does that: the file is not the last
    with pytest.raises(DataError, match=r"step-000100.json:\d+: not an event"):
        read_timeline(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no timeline"):
        read_timeline(tmp_path / "empty")


def test_a_step_of_many_events_is_written_in_pieces(tmp_path: Path) -> None:
    timeline, number = Timeline(tmp_path), 3000
    timeline.write(1, [Span("run_group", i, i + 0.5, "rollout", 0, 0) for i in range(number)])
    found = spans(tmp_path)
    assert [(span["ts"], span["dur"]) for span in found] == [(i * 1_000_000, 500_000) for i in range(number)]
    assert json.loads((tmp_path / "step-000000.json").read_text() + "]") == read_timeline(tmp_path)


def test_what_was_written_is_on_disk_before_a_checkpoint_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(run_folder, "sync_path", lambda path: synced.append(path.name))
    with RunFolder(tmp_path / "run") as folder:
        timeline = Timeline(folder.timeline_dir, folder.wrote_timeline)
        for step in (1, 99, 100):
            timeline.write(step, [Span("generate", step, step + 0.5)])
        folder.sync()
        assert synced == ["run", "timeline", "attempt-1", "step-000000.json", "step-000100.json"]
        synced.clear()
        timeline.write(101, [Span("generate", 1.0, 1.5)])
        folder.sync()  # not those of before
        assert synced == ["run", "timeline", "attempt-1", "step-000100.json"]


def test_the_file_of_an_older_rondo_is_read(tmp_path: Path) -> None:
    Timeline(tmp_path / "new").write(3, [Span("generate", 1.0, 2.0)])
    events = read_timeline(tmp_path / "new")
    assert [event["ph"] for event in events] == ["M", "M", "b", "e"]
    (tmp_path / "new" / "step-000000.json").rename(tmp_path / "attempt-1.json")
    assert read_timeline(tmp_path / "attempt-1.json") == events


def test_every_attempt_has_a_file_of_its_own_and_keeps_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with RunFolder(run) as folder:
        folder.begin("")
        (run / "checkpoints" / "step-00000002").mkdir()
        timeline = Timeline(folder.timeline_dir)
        for step in (1, 2, 3):
            timeline.write(step, [Span("generate", step, step + 0.5)])
            folder.append_metrics(step, {"reward": 0.5})
    first = (run / "timeline" / "attempt-1" / "step-000000.json").read_text()
    with RunFolder(run) as folder:
        assert (folder.attempt, folder.resume_step) == (2, 2)
        clock = Clock(Timeline(folder.timeline_dir))
        with clock.phase("load"):  # set-up, before the metrics are cut
            assert folder.discard_beyond(2) == 1
        clock.step = 2
        clock.start_step()
        with clock.phase("generate"):
            pass
        clock.end_step(3)
        folder.sync()
    # with the step that was done again
    assert (run / "timeline" / "attempt-1" / "step-000000.json").read_text() == first
    again = spans(run / "timeline" / "attempt-2")
    assert [(e["name"], e["args"]["step"]) for e in again] == [("load", 2), ("generate", 3)]
    (run / "run.lock").unlink()  # and with it the count of attempts
    shutil.rmtree(run / "discarded")
    with RunFolder(run) as folder:
        assert folder.timeline_dir == run / "timeline" / "attempt-1-2"


def test_a_run_that_starts_anew_takes_the_old_timeline_away(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with RunFolder(run) as folder:
        folder.begin("")
        Timeline(folder.timeline_dir).write(1, [Span("generate", 0.0, 1.0)])
    with RunFolder(run) as folder:
        folder.begin("")
        assert not (run / "timeline").exists()
        assert (run / "discarded" / "1" / "timeline" / "attempt-1" / "step-000000.json").exists()
