"""`rondo doctor RUN`: whether what a run has saved is whole, what is wrong with its metrics, and where it
begins to differ from another run. Files are read and compared with their manifests; no model is built, and
nothing is written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from rondo.checkpoint.checked import faults_in, num_bytes, read_manifest
from rondo.checkpoint.controller_state import taking_over
from rondo.checkpoint.store import CheckpointStore, Grown
from rondo.config import load
from rondo.core.errors import CheckpointError, DataError, StorageError
from rondo.system.streams import clean_text, drawn_on
from rondo.system.urls import Place
from rondo.tracking.checks import CHECKS, Health
from rondo.tracking.metrics import each_metrics
from rondo.tracking.sums import compared
from rondo.tracking.text import CleanConsole, shorten
from rondo.tracking.trajectories import read_trajectories


@dataclass
class Saved:
    """A folder that a run has saved."""

    folder: str
    """The folder's path."""
    num_bytes: int = 0
    """The size of its files together."""
    num_files: int = 0
    """How many files it has."""
    faults: list[str] = field(default_factory=list)
    """One for each file that is damaged or missing."""

    remedy: str = ""
    """What would help where there are faults."""


def run(folder: Path, *, as_json: bool, against: str | None = None) -> int:
    """Prints each checkpoint and export of the run, as it is checked, then what its metrics say, then where
    it differs from the run `against`; 0 when all that was saved is whole, else 1.

    Raises CheckpointError where the run has saved and logged nothing, DataError for runs that cannot be
    compared.
    """
    difference = None if against is None else compared(folder, against)
    saved = []
    for one in examine(folder):
        saved.append(one)
        if not as_json:
            _print(one)
    health = diagnosed(folder)
    if health is None and not saved:
        raise CheckpointError(
            f"{folder}: no checkpoint, no export and no metrics in it; is it the folder of a run?"
        )
    found = health.found if health is not None else []
    if as_json:
        said = {"saved": list(map(asdict, saved)), "checks": list(map(asdict, found))}
        print(json.dumps(said | ({} if difference is None else {"against": asdict(difference)}), indent=2))
        return 1 if any(one.faults for one in saved) else 0
    if health is not None:
        _print_found(folder, health)
    if difference is not None:
        print(f"{folder} against {against}: {difference.line()}", flush=True)
    return 1 if any(one.faults for one in saved) else 0


def diagnosed(folder: Path) -> Health | None:
    """Looks at all metrics of a run, which may go on; None: there are none. Every check looks, also one that
    the run's recipe switches off.
    """
    if not (folder / "metrics.jsonl").exists():
        return None
    health = Health()
    for line in each_metrics(folder):
        health.add(line)
    return health


def _print_found(folder: Path, health: Health) -> None:
    """Prints what was found, and an answer of the step where rows had no advantage."""
    for one in health.found:
        print(one.line(), flush=True)
        if one.check == "no_signal":
            with suppress(DataError):  # of that step no rollouts were kept
                (shown,) = read_trajectories(folder, step=one.began, number=1)
                print(
                    f"  an answer of step {one.began}: {clean_text(shorten(shown.said, 200))!r}", flush=True
                )
    if not health.found:
        print(f"{folder}: nothing stands out in its metrics ({len(CHECKS)} checks)", flush=True)


def examine(folder: Path) -> Iterator[Saved]:
    """Reads all checkpoints and exports of a run, those of its warm start first."""
    for run_folder in (folder / "warm_start", folder):
        config = run_folder / "config.yaml"
        place = load([str(config)]).config.checkpoint.path if config.exists() else None
        store = CheckpointStore(place or run_folder / "checkpoints")
        valid = None
        for step in store.steps():
            saved = _examined(store, store.path_of(step), step)
            if saved.faults:
                saved.remedy = store.way_out(step, valid)
            else:
                valid = step
            yield saved
        if valid is not None:
            yield from _metrics(store, valid)
        for export in (run_folder / "export", *sorted((run_folder / "exports").glob("*"))):
            if export.is_dir():
                saved = _examined(store, export, None)
                if saved.faults:
                    which = "" if export.parent == run_folder else f" --model {export.name}"
                    saved.remedy = f"To write the model again: `rondo export{which} {run_folder} FOLDER`"
                yield saved


def _metrics(store: CheckpointStore, step: int) -> Iterator[Saved]:
    """Reads the metrics that lie beside the checkpoints, where the newest that is valid has any."""
    checkpoint = store.listed(step)
    with taking_over(checkpoint):
        grown = Grown.of(checkpoint)
    if grown is None:
        return
    saved = Saved(str(store.metrics), grown.num_bytes)
    try:
        saved.num_files = sum(1 for _ in grown.parts(store.metrics))
    except (CheckpointError, StorageError) as error:
        saved.faults.append(str(error))
        saved.remedy = "Put it back. Without it, the run goes on in its own folder, if that has all metrics"
    yield saved


def _examined(store: CheckpointStore, folder: Place, step: int | None) -> Saved:
    """Reads the files of a checkpoint (step None: of an export), with a bar on a terminal."""
    try:
        files = read_manifest(folder)[1] if step is None else store.listed(step).files
    except CheckpointError as error:
        return Saved(str(folder), faults=[str(error)])
    size = sum(map(num_bytes, files.values()))
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = CleanConsole(file=drawn_on(sys.stderr))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(str(folder), total=size)
        faults = faults_in(folder, files, lambda count: bar.advance(task, count))
    return Saved(str(folder), size, len(files), faults)


def _print(saved: Saved) -> None:
    state = "damaged" if saved.faults else "ok"
    print(f"{saved.folder}: {state}, {saved.num_files} files of {saved.num_bytes / 1e6:.1f} MB", flush=True)
    for fault in saved.faults:
        print(f"  {fault}", flush=True)
    if saved.remedy:
        print(f"  {saved.remedy}", flush=True)
