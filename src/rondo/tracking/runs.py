"""Runs as their folders show them, whoever wrote these and however far they came: for `rondo runs` and
`rondo compare`. Files are read, and no model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rondo.config.printing import leaves
from rondo.config.tree import read_file
from rondo.core.errors import DataError
from rondo.system.storage import entries_of
from rondo.system.urls import is_url
from rondo.tracking.lock import is_held, read_holder
from rondo.tracking.metrics import NOT_FINITE, each_metrics
from rondo.tracking.shown import Kind

_MARKS = ("config.yaml", "metrics.jsonl", "run.lock")


@dataclass(frozen=True)
class RunRecord:
    """One run."""

    run: str
    """Its folder, as it was named."""
    kind: Kind | None
    """What it trains by; None: it has not come so far as to say it."""
    state: str
    """running, ended, stopped (by Ctrl-C or a signal), failed (and by which error), or broken off: it ended
    without a word, or an older rondo did not keep it."""
    step: int
    """How many steps it has done."""
    total_steps: int | None
    """How many it has in all; None: nothing says it."""
    seconds: float
    """Its wall time up to the last of them, or its end, over all attempts."""
    began: float
    """When its newest attempt began, in seconds since the epoch."""
    metrics: Mapping[str, Any]
    """The last value of each, or those of one step; "nan", "inf" or "-inf" where it was not finite."""


class Logged:
    """What the lines of a run's metrics come to. Add them in order. step: whose are asked for; None: the last
    of each.
    """

    def __init__(self, step: int | None = None) -> None:
        self._step = step
        self.last: dict[str, Any] = {}
        """The last value of each metric, "nan", "inf" or "-inf" where it was not finite; and `step`."""
        self.seconds = 0.0
        """What the steps took together."""

    def add(self, line: Mapping[str, Any]) -> None:
        """Takes a line in."""
        self.seconds += line.get("timing/step_s") or 0.0
        if self._step in (None, line["step"]):
            self.last |= line | line.get(NOT_FINITE, {})


def local_folder(name: str | os.PathLike[str]) -> Path:
    """Returns a folder that is there. Raises DataError; of a URL it says which line copies it."""
    if is_url(str(name)):
        copy = f"runs/{str(name).rstrip('/').rpartition('/')[2]}"
        line = f"fs, path = fsspec.url_to_fs('{name}'); fs.get(path, '{copy}', recursive=True)"
        told = f'Copy it, and name {copy}:\n  python -c "import fsspec; {line}"'
        raise DataError(f"{name}: runs are read from folders of this machine. {told}")
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder; a run's is what trainer.run_dir says (runs/…)")
    return folder


def runs_in(name: str | os.PathLike[str]) -> tuple[list[Path], list[Path]]:
    """Returns the runs in a folder, or itself where it is one; and the folders in it that are none. Raises
    DataError where it is not there.
    """
    folder = local_folder(name)
    inside = [one for one in entries_of(folder) if one.is_dir() and not one.name.startswith(".")]
    found = [folder] if _is_run(folder) else inside
    return [one for one in found if _is_run(one)], [one for one in found if not _is_run(one)]


def _run_folder(name: str | os.PathLike[str]) -> Path:
    folder = local_folder(name)
    if not _is_run(folder):
        raise DataError(f"{folder}: not the folder of a run: it has none of {', '.join(_MARKS)}")
    return folder


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _MARKS)


def read_run(name: str | os.PathLike[str], step: int | None = None) -> RunRecord:
    """Reads a run, which may go on meanwhile. step: whose metrics are asked for; None: the last of each.
    Raises DataError naming the file; ConfigError for a config.yaml that is damaged.
    """
    folder = _run_folder(name)
    logged = Logged(step)
    for line in each_metrics(folder) if (folder / "metrics.jsonl").is_file() else ():
        logged.add(line)
    if step is not None and not logged.last:
        raise DataError(f"{folder}: metrics.jsonl has no step {step}")
    return record_of(name, logged)


def record_of(name: str | os.PathLike[str], logged: Logged) -> RunRecord:
    """Returns what a run is by its other files and what it has logged. Raises as `read_run`."""
    folder = _run_folder(name)
    held = is_held(folder / "run.lock")  # asked before what a run writes as it ends
    holder, ended, config = read_holder(folder / "run.lock"), _summary(folder), folder / "config.yaml"
    last = {key: value for key, value in logged.last.items() if key not in ("step", NOT_FINITE)}
    total = holder.get("total_steps")
    if total is None and config.is_file():
        total = settings_of(folder).get("trainer.total_steps")
    # An error may come behind the summary.
    state = "running" if held else holder.get("state") or ("ended" if ended else "broken off")
    kind = holder.get("kind") or _kind(last, str(ended.get("algorithm")))
    began = holder.get("started") or (config if config.is_file() else folder).stat().st_mtime
    seconds = ended.get("wall_seconds", logged.seconds)
    return RunRecord(str(name), kind, state, logged.last.get("step", 0), total, seconds, began, last)


def _kind(metrics: Mapping[str, Any], algorithm: str) -> Kind | None:
    """Returns what a run of an older rondo is by what it logged. algorithm: of its summary."""
    if "pair/loss" in metrics:
        return "reward_model" if algorithm.startswith("reward model") else "preference"
    return "sft" if "sft/loss" in metrics else "rl" if metrics else None


def _summary(folder: Path) -> dict[str, Any]:
    """Returns what the run came to; empty: it has not ended. Raises DataError."""
    path = folder / "summary.json"
    try:
        return dict(json.loads(path.read_bytes())) if path.is_file() else {}
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: damaged ({error}); copy it again, or remove it") from error


def settings_of(run: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns every leaf of a run's config.yaml by its key, also of a rondo with other keys. Raises
    ConfigError naming the file.
    """
    return dict(leaves(read_file(str(local_folder(run) / "config.yaml"), 0).plain(), lists=True))
