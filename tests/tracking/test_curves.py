"""curves.png from a metrics file, and summary.json's numbers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rondo
from rondo.core.errors import ConfigError, DataError
from rondo.tracking import Clock, RunFolder, Timeline, build_summary, curves, plot_curves
from rondo.tracking.curves import PANELS, _smoothed
from rondo.tracking.metrics import git_commit, series


def test_a_picture_with_every_panel_that_has_data(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with RunFolder(tmp_path / "run") as folder:
        folder.append_metrics(0, {"eval/greedy/reward": 0.1})
        for step in range(1, 60):
            odd = float("nan") if step == 7 else 0.5
            folder.append_metrics(
                step, {"reward/mean": step / 60, "actor/grad_norm": odd, "actor/kl_loss": 0.0}
            )
    path = plot_curves(tmp_path / "run")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.name == "curves.png"
    assert path.stat().st_size > 10_000


def test_panels_of_asynchronous_runs_are_left_out_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[str] = []
    monkeypatch.setattr(curves, "_draw", lambda axes, lines, title, *rest: drawn.append(title))
    for staleness in (0.0, 1.5):
        with RunFolder(tmp_path / f"run{staleness}") as folder:
            line = {"buffer/staleness_mean": staleness, "buffer/staleness_max": 2 * staleness}
            busy = {"perf/trainer_busy_share": 0.5, "perf/rollout_busy_share": 0.75}
            folder.append_metrics(1, {"reward/mean": 0.5} | line | busy)
        plot_curves(tmp_path / f"run{staleness}")
    assert drawn == ["reward", "reward", "staleness, versions", "busy share of the step"]


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"actor/ppo_kl": 0.0}, []),  # one optimizer step for each batch
        ({"actor/ppo_kl": 0.1}, ["of the update"]),
        ({"actor/kl_loss": 0.0, "actor/ppo_kl": 0.0}, ["to the reference"]),
        ({"actor/kl_loss": 0.2, "actor/ppo_kl": 0.1}, ["to the reference", "of the update"]),
    ],
)
def test_a_kl_that_is_nothing_but_zero_by_construction_is_not_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metrics: dict[str, float], expected: list[str]
) -> None:
    pytest.importorskip("matplotlib")
    drawn: dict[str, list[str]] = {}

    def note(axes: object, lines: object, title: str, curves: list[tuple[str, object]], log: bool) -> None:
        drawn[title] = [label for label, _ in curves]

    monkeypatch.setattr(curves, "_draw", note)
    with RunFolder(tmp_path / "run") as folder:
        folder.append_metrics(1, {"reward/mean": 0.5, **metrics})
    plot_curves(tmp_path / "run")
    assert drawn.get("KL", []) == expected


def test_missing_matplotlib_and_nothing_to_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.append_metrics(1, {"other": 1.0})
        with pytest.raises(DataError, match="no metric to draw"):
            plot_curves(tmp_path / "run")
        folder.append_metrics(2, {"reward/mean": 1.0})
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"tracking.plot.*rondo-rl\[plots\]"):
        plot_curves(tmp_path / "run")


@pytest.mark.slow
def test_importing_tracking_imports_no_tracker_no_matplotlib_and_no_torch() -> None:
    code = "import sys, rondo.tracking; print(sorted({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(re.findall(r"'(\w+)'", done.stdout))
    assert not loaded & {"matplotlib", "wandb", "tensorboard", "mlflow", "swanlab", "ray", "transformers"}
    assert not loaded & {"torch", "numpy", "pyarrow"}  # `rondo show` begins with it


def test_series_takes_the_last_line_of_a_step_and_the_first_name_that_is_there() -> None:
    lines = [
        {"step": 2, "actor/ppo_kl": 2.0},
        {"step": 1, "actor/ppo_kl": 1.0, "actor/kl_loss": 8.0},
        {"step": 2, "actor/ppo_kl": 3.0},
        {"step": 3},
    ]
    reference, update = next(curves for title, curves, _ in PANELS if title == "KL")
    assert (reference[0], series(lines, reference[1])) == ("to the reference", ([1], [8.0]))
    assert (update[0], series(lines, update[1])) == ("of the update", ([1, 2], [1.0, 3.0]))
    gap = ("rollout/log_prob_gap_mean", "rollout/log_prob_gap")
    assert series([{"step": 1, gap[1]: 2.0}, {"step": 2, gap[0]: 1.0, gap[1]: 5.0}], gap) == (
        [1, 2],
        [2.0, 1.0],
    )
    assert _smoothed([1.0] * 30) is None
    assert _smoothed([float(i) for i in range(40)])[:3] == [0.5, 1.0, 2.0]  # type: ignore[index]


def test_the_summary(tmp_path: Path) -> None:
    now = [0.0]
    clock = Clock(Timeline(tmp_path / "attempt-1"), now=lambda: now[0], cpu=lambda: now[0] / 2)
    with clock.phase("generate"):
        now[0] = 30.0
    clock.end_step(40, generated=1000, trained=900)
    now[0] = 40.0
    lines = [{"step": 0, "eval/greedy/reward": 0.1}]
    lines += [{"step": step, "reward/mean": float(step)} for step in range(1, 41)]
    before = {"greedy/reward": 0.1}
    summary = build_summary(
        lines,
        clock,
        algorithm="grpo",
        steps=40,
        eval_before=before,
        eval_after=None,
        best=None,
        peak_memory_bytes=5,
    )
    expected = {
        "algorithm": "grpo",
        "reward_first": 1.5,  # 5 % of 40 steps: 2
        "reward_last": 39.5,
        "reward_window_steps": 2,
        "eval_before": {"greedy/reward": 0.1},
        "eval_after": None,
        "best": None,
        "steps": 40,
        "wall_seconds": 40.0,
        "cpu_seconds": 20.0,
        "checks_cpu_seconds": 0.0,
        "generated_tokens": 1000,
        "trained_tokens": 900,
        "peak_memory_bytes": 5,
        "phase_shares": {"generate": 0.75, "other": 0.25},
    }
    assert {key: summary[key] for key in expected} == expected
    assert summary["versions"]["rondo"] == rondo.__version__
    assert "torch" in summary["versions"]
    assert str(Path.home()) + "/" not in json.dumps(summary)


def test_the_summary_of_a_run_without_rewards(tmp_path: Path) -> None:
    clock = Clock(Timeline(tmp_path / "attempt-1"))
    summary = build_summary(
        [],
        clock,
        algorithm="grpo",
        steps=0,
        eval_before=None,
        eval_after=None,
        best=None,
        peak_memory_bytes=5,
    )
    assert (summary["reward_first"], summary["reward_last"], summary["reward_window_steps"]) == (
        None,
        None,
        0,
    )
    commit = git_commit()
    assert commit is None or re.fullmatch(r"[0-9a-f]{40}\+?", commit)
