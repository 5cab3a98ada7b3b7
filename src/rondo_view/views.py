"""What the page asks for, as plain values: a function for each view. Runs are named as the list names them,
so that an address names no other file.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rondo.core.errors import DataError, RondoError
from rondo.system.storage import entries_of
from rondo.tracking.pictures import looked_at
from rondo.tracking.runs import runs_in, settings_of
from rondo.tracking.shown import FIELDS
from rondo.tracking.timeline import STEPS, read_timeline
from rondo.tracking.trajectories import ShownTrajectory, answers_of, files_of, trajectories_of
from rondo_view.followed import Followed
from rondo_view.index import FILTERS, Index
from rondo_view.trajectory import rows_of, schema_of, selected

Query = Mapping[str, Sequence[str]]
_PAGE = 50  # trajectories of a list
_MOST = 64  # of a group, side by side


class Views:
    """Runs to look at. folders: each a run, or a folder that holds runs."""

    def __init__(self, folders: Sequence[str]) -> None:
        """Raises DataError where one is not there, or none of them has a run."""
        self._folders = folders
        self._lock = threading.Lock()
        self._followed: dict[str, Followed] = {}
        self._indexes: dict[str, Index] = {}
        self._paths: dict[str, Path] = {}
        if not self._look():
            raise DataError(f"{', '.join(folders)}: there is no run in it; `rondo runs FOLDER` says what is")
        self.of: Mapping[str, Callable[[Query], Any]] = {
            "runs": self.runs,
            "curves": self.curves,
            "settings": self.settings,
            "rollouts": self.rollouts,
            "trajectory": self.trajectory,
            "group": self.group,
            "timeline": self.timeline,
            "evaluations": self.evaluations,
        }
        """By the name that an address has for it."""

    def _look(self) -> dict[str, Path]:
        """Looks which runs there are, those that have come since among them."""
        found: dict[str, Path] = {}
        for folder in self._folders:
            for path in runs_in(folder)[0]:
                found[str(path)] = path
        self._paths = found
        return found

    def _run(self, query: Query) -> Path:
        return self._named(_one(query, "run"))

    def _named(self, name: str) -> Path:
        if name not in self._paths:
            raise DataError(f"{name}: not one of the runs here ({', '.join(list(self._paths)[:8])})")
        return self._paths[name]

    def _follow(self, name: str) -> Followed:
        with self._lock:
            if name not in self._followed:
                self._followed[name] = Followed(self._named(name), name)
            return self._followed[name]

    def _index(self, run: Path) -> Index:
        with self._lock:
            if str(run) not in self._indexes:
                self._indexes[str(run)] = Index(run)
            return self._indexes[str(run)]

    # ---- the views

    def runs(self, query: Query) -> Any:
        """All runs, the newest first: what `rondo runs` says, and the checks that `rondo doctor` makes."""
        told: list[dict[str, Any]] = []
        for name in self._look():
            try:
                told.append(self._follow(name).state())
            except RondoError as error:
                told.append({"run": name, "state": "cannot be read", "wrong": str(error), "began": 0.0})
        return sorted(told, key=lambda one: -one["began"])

    def curves(self, query: Query) -> Any:
        """Metrics of several runs: those that are asked for (`metric`), else the console's; all names."""
        runs = {name: self._follow(name) for name in query.get("run", ())}
        names = {run: one.names() for run, one in runs.items()}
        there = sorted({name for found in names.values() for name in found})
        asked = query.get("metric")
        curves = {
            name: {run: one.curve(name) for run, one in runs.items() if name in names[run]}
            for name in asked or _usual(there)
        }
        if not asked:  # what is 0 throughout says nothing
            curves = {
                n: found for n, found in curves.items() if any(any(one["values"]) for one in found.values())
            }
        return {"names": there, "curves": curves}

    def settings(self, query: Query) -> Any:
        """Keys whose values differ between runs; of one run all that it has."""
        of_runs = [settings_of(self._named(name)) for name in query.get("run", ())]
        keys = dict.fromkeys(key for settings in of_runs for key in settings)
        rows = {key: [settings.get(key, "-") for settings in of_runs] for key in keys}
        return {key: row for key, row in rows.items() if len(row) == 1 or any(one != row[0] for one in row)}

    def rollouts(self, query: Query) -> Any:
        """A run's trajectories that are like that (`FILTERS`), in an order (`ORDERS`), a page of them."""
        index = self._index(self._run(query))
        index.keep_up(wait=0.7)
        found = index.search(
            _filters(query), _one(query, "order", "newest"), _number(query, "first", 0), _PAGE
        )
        return found | {"state": index.state(), "page": _PAGE}

    def trajectory(self, query: Query) -> Any:
        """A trajectory, with its rows and tokens."""
        file, step = self._file(query, "rollouts")
        name = _one(query, "id")
        return _plain(_trajectory(file, step, name)) | {"of_rows": rows_of(self._run(query), file, name)}

    def group(self, query: Query) -> Any:
        """The answers to one prompt in a step, the best first."""
        file, step = self._file(query, "rollouts")
        prompt = _one(query, "prompt")
        found = [one for one in trajectories_of(file, step) if one.prompt_id == prompt]
        found.sort(key=lambda one: (one.outcome != "scored", -one.reward, one.sample_index))
        return {"answers": [_plain(one) for one in found[:_MOST]], "total": len(found)}

    def timeline(self, query: Query) -> Any:
        """What the controller and each device did in a step: process, name, start and end in seconds."""
        run, step = self._run(query), _number(query, "step")
        name = f"step-{step // STEPS * STEPS:06d}.json"
        found = [path / name for path in entries_of(run / "timeline") if (path / name).is_file()]
        if not found:
            raise DataError(f"{run}: has no timeline of step {step} (tracking.timeline writes it)")
        newest = max(found, key=lambda path: int(path.parent.name.removeprefix("attempt-").partition("-")[0]))
        return {"spans": list(_spans(read_timeline(newest), step))}

    def evaluations(self, query: Query) -> Any:
        """The answers of two evaluations beside each other: of a run's step, and of `other_step` of
        `other_run` (default: the same run, its first evaluation).
        """
        run = self._run(query)
        other = self._named(_one(query, "other_run", str(run)))
        steps, other_steps = sorted(files_of(run, "evaluations")), sorted(files_of(other, "evaluations"))
        if not steps or not other_steps:
            raise DataError(f"{run if not steps else other}: has no evaluations (trainer.evaluation)")
        chosen, against = _number(query, "step", steps[-1]), _number(query, "other_step", other_steps[0])
        right = _answers(run, chosen)
        left = _answers(other, against)
        pairs = [(left.get(key), right.get(key)) for key in {**left, **right}]
        changed = [(a, b) for a, b in pairs if a is None or b is None or a.reward != b.reward]
        asked = changed if _one(query, "changed", "") else pairs
        first = _number(query, "first", 0)
        page = [[one and _plain(one) for one in pair] for pair in asked[first : first + _PAGE]]
        return {
            "steps": steps, "other_steps": other_steps, "step": chosen, "other_step": against,
            "pairs": page, "total": len(asked), "changed": len(changed), "page": _PAGE,
        }  # fmt: skip

    # ---- what is no JSON

    def image(self, query: Query) -> bytes:
        """Returns an image of a trajectory, small, as PNG. Raises DataError where it cannot be shown."""
        file, step = self._file(query, "rollouts")
        images = _trajectory(file, step, _one(query, "id")).images
        number = _number(query, "number")
        if not 0 <= number < len(images):
            raise DataError(f"{file}: there is no image {number} of that trajectory")
        (picture,) = looked_at(images[number : number + 1])
        if not picture.png:
            raise DataError(picture.missing)
        return picture.png

    def export(self, query: Query, folder: str) -> Path:
        """Writes all rows of the trajectories that are like that into a file of the folder, as JSON lines or
        Parquet (`format`); returns the file. Raises DataError.
        """
        run = self._run(query)
        kind = _one(query, "format", "jsonl")
        if kind not in ("jsonl", "parquet"):
            raise DataError(f"format={kind}: there are jsonl and parquet")
        chosen = self._index(run).chosen(_filters(query))
        files = files_of(run, "rollouts")
        if gone := [step for step in chosen if step not in files]:
            raise DataError(f"{run}: the rollouts of step {gone[0]} are gone")
        path = Path(folder) / f"rollouts.{kind}"
        tables = (selected(files[step], ids) for step, ids in chosen.items())
        if kind == "parquet":
            schema = pa.unify_schemas([schema_of(files[step]) for step in chosen] or [pa.schema([])])
            with pq.ParquetWriter(path, schema) as writer:
                for table in tables:
                    writer.write_table(
                        pa.concat_tables([schema.empty_table(), table], promote_options="default")
                    )
        else:
            with path.open("w", encoding="utf-8") as out:
                for table in tables:
                    out.writelines(json.dumps(finite(row)) + "\n" for row in table.to_pylist())
        return path

    def _file(self, query: Query, what: Any) -> tuple[Path, int]:
        run, step = self._run(query), _number(query, "step")
        files = files_of(run, what)
        if step not in files:
            raise DataError(f"{run}: has no {what} of step {step}; they are gone, or were never kept")
        return files[step], step


def _one(query: Query, name: str, otherwise: str | None = None) -> str:
    values = query.get(name) or ([] if otherwise is None else [otherwise])
    if len(values) != 1:
        raise DataError(f"the address has {len(values)} values of {name}; it needs one")
    return values[0]


def _number(query: Query, name: str, otherwise: int | None = None) -> int:
    text = _one(query, name, None if otherwise is None else str(otherwise))
    try:
        return int(text)
    except ValueError as error:
        raise DataError(f"{name}={text}: must be a whole number") from error


def _filters(query: Query) -> dict[str, str]:
    return {name: _one(query, name) for name in FILTERS if query.get(name, [""])[0] != ""}


def _usual(there: Sequence[str]) -> list[str]:
    """Returns the metrics that the console shows, of those that are there, evaluations behind the rewards."""
    fields = [names for kind in FIELDS.values() for _, _, names in kind]
    shown = dict.fromkeys(name for names in fields for name in names if name in there)
    evaluated = [name for name in there if name.startswith("eval/") and name.endswith(("/reward", "/loss"))]
    first = [name for name in shown if name.startswith("reward/") or name.endswith("/loss")][:1]
    return [*first, *evaluated, *(name for name in shown if name not in first)]


def _plain(shown: ShownTrajectory) -> dict[str, Any]:
    images = [{"path": one.path, "tokens": one.n_tokens, "turn": one.turn} for one in shown.images]
    return asdict(shown) | {"images": images}


def _trajectory(file: Path, step: int, name: str) -> ShownTrajectory:
    for one in trajectories_of(file, step):
        if one.trajectory_id == name:
            return one
    raise DataError(f"{file}: has no trajectory {name}")


def _answers(run: Path, step: int) -> dict[tuple[str, int], ShownTrajectory]:
    files = files_of(run, "evaluations")
    if step not in files:
        raise DataError(
            f"{run}: has no evaluation of step {step}; there are {', '.join(map(str, sorted(files)))}"
        )
    return {(one.prompt_id, one.sample_index): one for one in answers_of(files[step], step)}


def _spans(events: Sequence[Mapping[str, Any]], step: int) -> Iterator[dict[str, Any]]:
    """Yields the spans of a step, from the first one's start on."""
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    ends = {(e["pid"], e["id"]): e["ts"] for e in events if e["ph"] == "e"}
    begun = [e for e in events if e["ph"] == "b" and e["args"].get("step") == step]
    first = min((e["ts"] for e in begun), default=0)
    for event in begun:
        end = ends.get((event["pid"], event["id"]))  # none: it goes on, or a kill ended it
        if end is not None:
            start, stop = (event["ts"] - first) / 1e6, (end - first) / 1e6
            yield {"process": names.get(event["pid"], ""), "name": event["name"], "start": start, "end": stop}


def finite(value: Any) -> Any:
    """Returns a value with null in the place of numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, list | tuple) else value
