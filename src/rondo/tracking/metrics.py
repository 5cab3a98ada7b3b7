"""The numbers of a run in its folder: metrics.jsonl, a line per step, and summary.json, what the run came to.
Written and read.
"""

from __future__ import annotations

import functools
import json
import math
import numbers
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import rondo
from rondo.core.errors import DataError
from rondo.tracking.clock import Clock
from rondo.tracking.shown import REWARD, Found, find

# Key of a metrics line: {metric: "nan" | "inf" | "-inf"} for values that are null in it.
NOT_FINITE = "not_finite"


def metrics_line(step: int, metrics: Mapping[str, Any]) -> str:
    """Returns one JSON line. NaN and infinities are null, and named under `not_finite`.

    Raises DataError on another type.
    """
    record: dict[str, Any] = {"step": int(step)}
    odd: dict[str, str] = {}
    for name, value in metrics.items():
        if name in ("step", NOT_FINITE):
            raise DataError(
                f"a metric cannot be called {name!r}: the line of metrics.jsonl uses that key itself"
            )
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            value = int(value) if isinstance(value, numbers.Integral) else float(value)
        elif value is not None and not isinstance(value, bool | str):
            raise DataError(f"metric {name!r} is a {type(value).__name__}; log a number, a string or None")
        if isinstance(value, float) and not math.isfinite(value):
            odd[name] = str(value)
            value = None
        record[name] = value
    if odd:
        record[NOT_FINITE] = odd
    return json.dumps(record, allow_nan=False)


def parse_metrics(path: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yields (line with its newline, record) of every line; the record is None for a line that holds no
    metrics.
    """
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            try:
                record = json.loads(line) if line.endswith("\n") else None
            except ValueError:
                record = None
            is_metrics = isinstance(record, dict) and isinstance(record.get("step"), int)
            yield line, record if is_metrics else None


def read_metrics(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the lines of `metrics.jsonl`, in order. Raises as `each_metrics`."""
    return list(each_metrics(run_dir))


def each_metrics(run_dir: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yields the lines of `metrics.jsonl`, in order. A last line cut off by a kill is left out.

    Raises DataError naming the file when it is missing, and the line when one in the middle is broken.
    """
    path = Path(run_dir) / "metrics.jsonl"
    if not path.is_file():
        raise DataError(f"{path}: no such file; {run_dir} is not the folder of a run that logged anything")
    broken = False
    for number, (_, record) in enumerate(parse_metrics(path)):
        if broken:
            raise DataError(
                f"{path}:{number}: not a metrics line (a JSON object with an integer `step`); remove it"
            )
        if record is None:
            broken = True
        else:
            yield record


def series(lines: Sequence[Mapping[str, Any]], metric: tuple[str, ...]) -> tuple[list[int], list[float]]:
    """Returns (steps, values) in ascending order; of lines of the same step the last counts."""
    found = {line["step"]: value for line in lines if (value := find(line, metric)) is not None}
    steps = sorted(found)
    return steps, [found[step] for step in steps]


PACKAGES = ("torch", "transformers", "numpy", "pyarrow", "ray")
WINDOW = 0.05  # of the steps, at least one: what reward_first and reward_last are means over


def build_summary(
    metrics: Sequence[Mapping[str, Any]],
    clock: Clock,
    *,
    algorithm: str,
    steps: int,
    eval_before: Mapping[str, float] | None,
    eval_after: Mapping[str, float] | None,
    best: Mapping[str, Any] | None,
    peak_memory_bytes: int,
    found: Sequence[Found] = (),
) -> dict[str, Any]:
    """Returns the content of summary.json.

    metrics: the lines of metrics.jsonl. algorithm: what the run is called. best: metric, step and value of
    the best evaluation, where one is looked for. found: what is wrong with the metrics. reward_first and
    reward_last are means of `reward/mean` over the first and the last 5 % of the steps that have it, at least
    one. Times and tokens are the run's, over all its attempts; tokens as handed to
    `Clock.end_step(generated=…, trained=…)`. phase_shares: of the wall time. No paths of this machine.
    """
    rewards = series(metrics, REWARD)[1]
    window = max(1, round(WINDOW * len(rewards)))
    shares = clock.shares()  # first: it brings the clock's other totals up to now
    return {
        "algorithm": algorithm,
        "reward_first": _mean(rewards[:window]),
        "reward_last": _mean(rewards[-window:]),
        "reward_window_steps": window if rewards else 0,
        "eval_before": eval_before,
        "eval_after": eval_after,
        "best": best,
        "checks": [asdict(one) for one in found],
        "steps": steps,
        "wall_seconds": clock.wall_seconds,
        "cpu_seconds": clock.cpu_seconds,
        "checks_cpu_seconds": clock.checks_cpu_seconds,
        "generated_tokens": clock.counts.get("generated", 0),
        "trained_tokens": clock.counts.get("trained", 0),
        "peak_memory_bytes": peak_memory_bytes,
        "phase_shares": shares,
        "versions": versions(),
        "git_commit": git_commit(),
    }


@functools.cache
def versions() -> Mapping[str, str]:
    """Returns the versions of rondo, Python, and the packages that numbers depend on, where installed."""
    found = {"rondo": rondo.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """Returns the commit of rondo's own source tree, with `+` when tracked files differ from it; None when
    not in one.
    """
    root = Path(rondo.__file__).parents[2]
    if not (root / ".git").exists():
        return None
    # No tag is looked for, so that it says the commit itself.
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
