"""The timeline and the busy shares of real runs, against what metrics.jsonl says of the same steps."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rondo.controller.local import LocalCluster
from rondo.system.usage import CpuSeconds
from rondo.tracking.timeline import read_timeline
from tests.trainers.conftest import inline

SETTINGS = (
    "checkpoint.every=2",
    "trainer.evaluation={before: true, after: false, every: null, samples: 0}",
    "trainer.max_staleness=1",
)


def events_of(run: Path, kind: str, attempt: int = 1) -> list[dict[str, Any]]:
    events = read_timeline(run / "timeline" / f"attempt-{attempt}")
    return [event for event in events if event["ph"] == kind]


def spans_of(run: Path, attempt: int = 1) -> list[dict[str, Any]]:
    """The begins, each with its `dur`, which is not negative, and the name of its process."""
    ends = {event["id"]: event["ts"] for event in events_of(run, "e", attempt)}
    named = {e["pid"]: e["args"] for e in events_of(run, "M", attempt) if e["name"] == "process_name"}
    begins = events_of(run, "b", attempt)
    assert len(begins) == len(ends)
    spans = [b | {"dur": ends[b["id"]] - b["ts"], "process": named[b["pid"]]["name"]} for b in begins]
    assert all(span["dur"] >= 0 for span in spans)
    return spans


def logged(run: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}


@pytest.mark.slow
def test_a_run_and_what_it_goes_on_with(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    inline("train", str(recipe), *SETTINGS, f"trainer.run_dir={run}")
    spans, lines = spans_of(run), logged(run)
    assert {"controller", "device 0: actor", "device 0: rollout"} <= {e["process"] for e in spans}
    for step in (1, 2, 3):
        mine = [e for e in spans if e["args"]["step"] == step]
        for phase in ("update_actor", "publish", "advantages"):
            seconds = sum(e["dur"] for e in mine if e["name"] == phase and "rank" not in e["args"]) / 1e6
            assert seconds == pytest.approx(lines[step][f"timing/{phase}_s"], abs=1e-5), (step, phase)
        (update,) = [e for e in mine if e["name"] == "update_actor" and "rank" in e["args"]]
        (phase_span,) = [e for e in mine if e["name"] == "update_actor" and "rank" not in e["args"]]
        assert phase_span["ts"] <= update["ts"]  # the host is busy inside the loop's phase
        assert update["ts"] + update["dur"] <= phase_span["ts"] + phase_span["dur"] + 2
        assert 0 < lines[step]["perf/trainer_busy_share"] <= 1
        assert 0 <= lines[step]["perf/rollout_busy_share"] <= 1
        busy = lines[step]["perf/trainer_busy_share"] * lines[step]["timing/step_s"]
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

    first = (run / "timeline" / "attempt-1" / "step-000000.json").read_text()
    shutil.rmtree(run / "checkpoints" / "step-00000003")
    (run / "summary.json").unlink()
    inline("train", str(recipe), *SETTINGS, f"trainer.run_dir={run}")  # the last step once more
    assert (run / "timeline" / "attempt-1" / "step-000000.json").read_text() == first
    again = spans_of(run, attempt=2)
    assert {e["args"]["step"] for e in again} == {2, 3}  # set-up carries the step that is done
    (phase_span,) = [e for e in again if e["name"] == "update_actor" and "rank" not in e["args"]]
    assert phase_span["dur"] / 1e6 == pytest.approx(logged(run)[3]["timing/update_actor_s"], abs=1e-5)


def test_a_supervised_run_has_a_timeline_and_counts_hosts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hundreds = itertools.count(0, 100)

    async def cpu_seconds(self: LocalCluster) -> dict[int, CpuSeconds]:
        return {0: CpuSeconds(float(next(hundreds)), 0.0)}

    monkeypatch.setattr(LocalCluster, "cpu_seconds", cpu_seconds)
    run = tmp_path / "sft"
    sft = "quickstart_sft"
    tiny = ("data.train.0.options.size=4", "data.batch_size=4", "actor.optimizer.schedule.warmup_steps=0")
    quiet = ("tracking={console: 'off', plot: false, trackers: []}", "cluster.threads=1")
    inline("sft", sft, *tiny, *quiet, "trainer.total_steps=2", f"trainer.run_dir={run}")
    updates = [e for e in spans_of(run) if e["name"] == "update_actor" and "rank" in e["args"]]
    assert [e["args"]["step"] for e in updates] == [1, 2]
    for line in logged(run).values():
        assert 100 < line["timing/cpu_s"] < 200
        assert 0 < line["perf/trainer_busy_share"] <= 1
        assert "perf/rollout_busy_share" not in line
    assert 300 < json.loads((run / "summary.json").read_text())["cpu_seconds"] < 400  # once after the last
