"""What the reporter tells to whom: everything to metrics.jsonl, finite numbers to the trackers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rondo.cli.main import main
from rondo.config import load
from rondo.config.schema import Config, FunctionConfig, TrackingConfig
from rondo.controller import Cluster
from rondo.core.errors import TrainError
from rondo.core.types import StepStats
from rondo.tracking import Console, RunFolder, check_trackers, read_metrics
from rondo.trainers.commands.train import train
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


def test_prometheus_is_told_the_algorithm_and_needs_no_package(tmp_path: Path) -> None:
    tracking = TrackingConfig((FunctionConfig("prometheus"),), run_name="mine")
    check_trackers(tracking)
    with RunFolder(tmp_path / "run") as folder:
        Reporter(Config(tracking=tracking), folder, Console("off"), title="run").start_trackers()
    text = (tmp_path / "run" / "trackers" / "prometheus" / "rondo-mine.prom").read_text()
    assert 'rondo_run_status{run="mine",algorithm="grpo",status="running"} 1' in text.splitlines()


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


def nothing(prompt: Any, trajectory: Any) -> float:
    """A reward that is the same for all."""
    return 0.0


def test_a_run_says_that_it_learns_nothing_and_so_does_the_doctor(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, flat = tmp_path / "flat", [f"reward.functions=[{{name: {__name__}:nothing}}]"]
    train(load([str(recipe)], [f"trainer.run_dir={run}", "tracking.console=plain", *flat]))
    said = capsys.readouterr().out
    assert "no_signal: 100% of the rows have no advantage" in said
    assert "an answer: " in said
    assert "all rewards are 0.000" in said
    kept = json.loads((run / "summary.json").read_text())["checks"]
    assert [(one["check"], one["began"], one["step"]) for one in kept] == [
        ("no_signal", 1, 3),
        ("truncated", 1, 3),  # at 8 tokens
    ]
    for path in (run / "checkpoints", run / "export"):  # the second part works without the first
        path.rename(tmp_path / path.name)
    assert main(["doctor", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"saved": [], "checks": kept}
    assert main(["doctor", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("no_signal: 100% of the rows have no advantage")
    assert lines[1].startswith("  an answer of step 1: ")
    stopping = [f"trainer.run_dir={tmp_path / 'stopped'}", "tracking.checks.no_signal=stop"]
    with pytest.raises(TrainError, match="no_signal"):
        train(load([str(recipe)], [*flat, *stopping]))
