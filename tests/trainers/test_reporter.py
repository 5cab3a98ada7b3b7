"""What the reporter tells to whom: everything to metrics.jsonl, finite numbers to the trackers."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rondo.config.schema import Config, FunctionConfig, TrackingConfig
from rondo.controller import Cluster
from rondo.core.types import StepStats
from rondo.tracking import Console, RunFolder, read_metrics
from rondo.trainers.loop.evaluation import EvaluationResult
from rondo.trainers.loop.report import Reporter

MINE = """
class Mine:
    where = 'nowhere'
    def __init__(self, context, *, prefix='p'):
        self.lines, self.prefix = context.folder.path / 'mine.txt', prefix
    def log(self, step, metrics):
        with self.lines.open('a') as f: f.write(f'{self.prefix} {step} {sorted(metrics)}\\n')
    def log_samples(self, step, samples): pass
    def finish(self, status):
        with self.lines.open('a') as f: f.write(status)
"""


def reporter_of(folder: RunFolder, **tracking: Any) -> Reporter:
    reporter = Reporter(Config(tracking=TrackingConfig(**tracking)), folder, Console("off"), title="run")
    reporter.watch(cast("Cluster", SimpleNamespace(call_watchers=[])))
    return reporter


@pytest.mark.parametrize("number", [0, 1])
def test_everything_is_in_metrics_jsonl_and_finite_numbers_go_to_trackers(
    tmp_path: Path, number: int
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    mine = FunctionConfig(f"{tmp_path / 'mine.py'}:Mine", {"prefix": "q"})
    metrics: dict[str, Any] = {"b": 1, "a": 2.0, "c": True, "d": None, "e": math.inf, "f": "x"}

    def stopped(reporter: Reporter) -> None:
        reporter.start_trackers()
        with reporter.running(total_steps=1, first_step=0, parameters=10):
            reporter.evaluation(3, EvaluationResult(metrics, ()))
            raise KeyboardInterrupt

    with RunFolder(tmp_path / "run") as folder, pytest.raises(KeyboardInterrupt):
        stopped(reporter_of(folder, trackers=(mine,) * number))
    assert read_metrics(tmp_path / "run") == [{"step": 3, **metrics, "e": None, "not_finite": {"e": "inf"}}]
    told = tmp_path / "run" / "mine.txt"
    assert told.exists() == bool(number)
    if number:
        assert told.read_text() == "q 3 ['a', 'b', 'c']\nstopped"


@pytest.mark.slow
def test_trained_tokens_are_counted_over_the_update_and_generated_ones_over_the_step(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        reporter = reporter_of(folder)
        with reporter.clock.phase("update_actor"):
            pass
        stats = StepStats(sums={"perf/trained_tokens": 60.0, "rollout/generated_tokens": 300.0})
        reporter.step(1, stats, {"extra": 0.5})
    (line,) = read_metrics(tmp_path / "run")
    assert line["perf/trained_tokens_per_s"] * line["timing/update_actor_s"] == pytest.approx(60)
    assert line["perf/generated_tokens_per_s"] * line["timing/step_s"] == pytest.approx(300)
    assert (line["extra"], line["rollout/generated_tokens"]) == (0.5, 300.0)
    assert "perf/trained_tokens" not in line
    assert "perf/row_tokens_per_s" not in line  # of supervised training
    assert reporter.clock.counts == {"trained": 60, "generated": 300}
