"""timeline.json and the busy shares of real runs, against what metrics.jsonl says of the same steps."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rondo.tracking.timeline import read_timeline, step_of
from rondo.trainers.loop.busy import Occupancy
from tests.trainers.conftest import inline

SETTINGS = (
    "checkpoint.every=2",
    "trainer.evaluation={before: true, after: false, every: null, samples: 0}",
    "trainer.max_staleness=1",
)


def events_of(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_timeline(run / "timeline.json") if event["ph"] == kind]


def threads(run: Path) -> dict[int, str]:
    """tid → `process/thread`."""
    named = events_of(run, "M")
    processes = {e["pid"]: e["args"]["name"] for e in named if e["name"] == "process_name"}
    return {
        e["tid"]: f"{processes[e['pid']]}/{e['args']['name']}" for e in named if e["name"] == "thread_name"
    }


def logged(run: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}


def check_rows(run: Path) -> None:
    """Spans are not negative; on a device's row they do not overlap, on the loop's they nest."""
    rows: dict[int, list[tuple[int, int]]] = {}
    for event in events_of(run, "X"):
        assert event["dur"] >= 0
        rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    names = threads(run)
    assert set(rows) == set(names)
    for tid, spans in rows.items():
        spans.sort(key=lambda span: (span[0], -span[1]))
        for (start, end), (later, ends) in itertools.combinations(spans, 2):
            nested = names[tid].startswith("controller") and ends <= end
            assert start <= later
            assert later >= end or nested, names[tid]


def test_a_run_and_what_it_goes_on_with(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    windows: list[float] = []  # seconds of what came before the first step, and of each step
    original = Occupancy.shares

    def shares(self: Occupancy) -> dict[str, float]:
        since = self._since
        found = original(self)
        windows.append(self._since - since)
        return found

    monkeypatch.setattr(Occupancy, "shares", shares)
    inline("train", str(recipe), *SETTINGS, f"trainer.run_dir={run}")
    json.loads((run / "timeline.json").read_text())
    check_rows(run)
    assert {"controller/loop", "device 0/actor", "device 0/rollout"} <= set(threads(run).values())
    spans, lines = events_of(run, "X"), logged(run)
    for step in (1, 2, 3):
        mine = [e for e in spans if step_of(e) == step]
        for phase in ("update_actor", "publish", "advantages"):
            seconds = sum(e["dur"] for e in mine if e["name"] == phase and "rank" not in e["args"]) / 1e6
            assert seconds == pytest.approx(lines[step][f"timing/{phase}_s"], abs=1e-5), (step, phase)
        (update,) = [e for e in mine if e["name"] == "update_actor" and "rank" in e["args"]]
        (phase_span,) = [e for e in mine if e["name"] == "update_actor" and "rank" not in e["args"]]
        assert phase_span["ts"] <= update["ts"]  # the host is busy inside the loop's phase
        assert update["ts"] + update["dur"] <= phase_span["ts"] + phase_span["dur"] + 2
        assert 0 < lines[step]["perf/trainer_busy_share"] <= 1
        assert 0 <= lines[step]["perf/rollout_busy_share"] <= 1
        busy = lines[step]["perf/trainer_busy_share"] * windows[step]
        assert busy >= update["dur"] / 1e6 - 1e-5  # the controller waits for as long as the host works
    assert lines[1]["perf/rollout_busy_share"] > 0  # later ones may find all that they need ready
    assert sum(e["name"] == "run_group" for e in spans) == 12
    marks = [(e["name"], e["args"]["version"]) for e in events_of(run, "i")]
    assert marks == [("publish", 1), ("publish", 2), ("publish", 3)]
    counts = [e["args"] for e in events_of(run, "C") if e["name"] == "prompt groups"]
    assert max(c["in flight"] for c in counts) <= 8  # max_staleness=1 admits two batches of 4
    assert counts[-1] == {"in flight": 0, "ready": 0}
    stale = [e["args"]["max"] for e in events_of(run, "C") if e["name"] == "staleness"]
    assert stale == [lines[step]["buffer/staleness_max"] for step in (1, 2, 3)]

    before = read_timeline(run / "timeline.json")
    shutil.rmtree(run / "checkpoints" / "step-00000003")
    (run / "summary.json").unlink()
    inline("train", str(recipe), *SETTINGS, f"trainer.run_dir={run}")  # the last step once more
    check_rows(run)
    after = read_timeline(run / "timeline.json")
    kept = [e for e in before if step_of(e) is None or step_of(e) <= 2]
    assert after[: len(kept)] == kept
    fresh = [e for e in after[len(kept) :] if e["ph"] == "X"]
    assert {e["args"]["attempt"] for e in fresh} == {2}
    assert {step_of(e) for e in fresh} == {2, 3}  # set-up carries the step that is done
    gone = read_timeline(run / "discarded" / "1" / "timeline.json")
    assert [e for e in gone if e["ph"] != "M"] == [e for e in before if step_of(e) == 3]


def test_a_supervised_run_has_a_timeline_too(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "sft"
    sft = "quickstart_sft"
    tiny = ("data.train.0.options.size=4", "data.batch_size=4", "actor.optimizer.schedule.warmup_steps=0")
    quiet = ("tracking={console: 'off', plot: false, trackers: []}", "cluster.threads=1")
    inline("sft", sft, *tiny, *quiet, "trainer.total_steps=2", f"trainer.run_dir={run}")
    check_rows(run)
    updates = [e for e in events_of(run, "X") if e["name"] == "update_actor" and "rank" in e["args"]]
    assert [step_of(e) for e in updates] == [1, 2]
