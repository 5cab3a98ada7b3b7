"""curves.png: how the run went, drawn from metrics.jsonl."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rondo.core.errors import ConfigError, DataError
from rondo.system.storage import replacing
from rondo.tracking import shown
from rondo.tracking.metrics import each_metrics, series

_RATES = (("generated", shown.GENERATED_RATE), ("trained", shown.TRAINED_RATE), ("rows", shown.ROW_RATE))
# (title, [(label, metric names)], logarithmic where it spans a lot); a panel without data is left out
PANELS: Sequence[tuple[str, Sequence[tuple[str, tuple[str, ...]]], bool]] = (
    ("reward", [("train", shown.REWARD)], False),
    ("loss", [("train", shown.LOSS)], False),
    ("response length, tokens", [("train", shown.RESPONSE_LENGTH)], False),
    ("KL", [("to the reference", shown.REFERENCE_KL), ("of the update", shown.UPDATE_KL)], False),
    ("entropy, nats", [("entropy", shown.ENTROPY)], False),
    ("gradient norm", [("gradient norm", shown.GRAD_NORM)], True),
    ("log-prob gap, sampler to trainer", [("gap", shown.LOG_PROB_GAP)], True),
    ("tokens per second", _RATES, False),
    ("staleness, versions", [("mean", shown.STALENESS), ("most", ("buffer/staleness_max",))], False),
    (
        "busy share of the step",
        [("trainer", ("perf/trainer_busy_share",)), ("rollout", ("perf/rollout_busy_share",))],
        False,
    ),
)
_ASYNCHRONOUS = ("staleness, versions", "busy share of the step")  # shown where anything was stale
EVALS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "reward": {"greedy": ("eval/greedy/reward",), "sampled": ("eval/sampled/reward",)},
    "loss": {"held out": ("eval/sft/loss", "eval/pair/loss")},
    "response length, tokens": {"greedy": ("eval/greedy/response_length",)},
}
_DRAWN = {"step"}.union(
    *(names for _, curves, _ in PANELS for _, names in curves),
    *(names for marks in EVALS.values() for names in marks.values()),
)
_LINES = ("#2457a8", "#c2571a", "#2e7d4f")
_MARKS = ("#c2571a", "#2e7d4f")


def matplotlib_available() -> bool:
    """Says whether `plot_curves` can draw; the caller skips the picture when it was not asked for by name."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_curves(run_dir: str | os.PathLike[str]) -> Path:
    """Draws run_dir/metrics.jsonl into run_dir/curves.png; returns its path. Raises as `figure_of_curves`."""
    path = Path(run_dir) / "curves.png"
    figure = figure_of_curves(run_dir)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return path


def figure_of_curves(run_dir: str | os.PathLike[str]) -> Any:
    """Returns a matplotlib figure of run_dir/metrics.jsonl.

    Raises ConfigError when matplotlib is missing, DataError when there is nothing to draw.
    """
    lines = [{name: line[name] for name in _DRAWN & line.keys()} for line in each_metrics(run_dir)]
    stale = any(series(lines, shown.STALENESS)[1])
    panels = [
        (title, curves, log)
        for title, all_curves, log in PANELS
        if (curves := [(label, n) for label, n in all_curves if _has_course(lines, n)])
        and (stale or title not in _ASYNCHRONOUS)
    ]
    if not panels:
        raise DataError(f"{run_dir}: metrics.jsonl has no metric to draw yet")
    try:
        figure_module = importlib.import_module("matplotlib.figure")
        canvas_module = importlib.import_module("matplotlib.backends.backend_agg")
    except ImportError as error:
        remedy = 'Install it (pip install "rondo-rl[plots]") or set tracking.plot=false'
        raise ConfigError(f"tracking.plot: curves.png needs matplotlib: {error}. {remedy}") from error
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = figure_module.Figure(figsize=(5.4 * columns, 2.5 * rows), layout="constrained")
    canvas_module.FigureCanvasAgg(figure)
    for number, (title, curves, log) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, number + 1)
        _draw(axes, lines, title, curves, log)
        if number >= len(panels) - columns:
            axes.set_xlabel("step")
    return figure


def _has_course(lines: Sequence[Mapping[str, Any]], metric: tuple[str, ...]) -> bool:
    """Says whether there is anything to draw. With one optimizer step for each batch the KL of the update is
    0 by construction: a flat line that says nothing.
    """
    values = series(lines, metric)[1]
    return any(values) if metric == shown.UPDATE_KL else bool(values)


def _draw(axes: Any, lines: Sequence[Mapping[str, Any]], title: str, curves: Any, log: bool) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    drawn: list[float] = []
    for (label, metric), colour in zip(curves, _LINES, strict=False):
        steps, values = series(lines, metric)
        if not steps:
            continue
        drawn += values
        smooth = _smoothed(values)
        if smooth is None:
            marker = "." if len(steps) < 20 else None
            axes.plot(steps, values, color=colour, linewidth=1.4, label=label, marker=marker)
        else:
            axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.3)
            axes.plot(steps, smooth, color=colour, linewidth=1.6, label=label)
    num_marked = 0
    for (label, metric), colour in zip(EVALS.get(title, {}).items(), _MARKS, strict=False):
        steps, values = series(lines, metric)
        if steps:
            style = {"marker": "o", "markersize": 4, "linewidth": 1.0, "linestyle": "--"}
            axes.plot(steps, values, color=colour, label=f"eval, {label}", **style)
            num_marked += 1
    if log and min(drawn) > 0 and max(drawn) > 30 * min(drawn):
        axes.set_yscale("log")
    elif title not in ("reward", "loss", "KL"):
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", labelsize=8)
    if len(curves) + num_marked > 1 and axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8, frameon=False)


def _smoothed(values: Sequence[float]) -> list[float] | None:
    """Returns the running mean over about a twentieth of the run; None when the run is too short for one."""
    half = len(values) // 40
    if half < 1:
        return None
    import numpy as np  # `rondo show` begins with this package, and needs none of it
    from numpy.lib.stride_tricks import sliding_window_view

    # Not by differences of running sums: behind one huge value, or one that is no number, they are wrong.
    windows = sliding_window_view(np.pad(np.asarray(values, float), half), 2 * half + 1)
    at = np.arange(len(values))
    counts = np.minimum(at + half + 1, len(values)) - np.maximum(at - half, 0)
    return (windows.sum(axis=1) / counts).tolist()  # type: ignore[no-any-return]
