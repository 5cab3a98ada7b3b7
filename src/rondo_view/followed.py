"""What a run logs, read on as it grows: curves for a page, what the run is, and what is wrong with it."""

from __future__ import annotations

import json
import threading
from array import array
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rondo.core.errors import DataError
from rondo.tracking.checks import Health
from rondo.tracking.runs import Logged, record_of

_POINTS = 2000  # of a curve, at most: a screen has no more


class Followed:
    """The metrics of one run. Any thread may ask. run: its folder; name: as the user named it."""

    def __init__(self, run: Path, name: str) -> None:
        self._run = run
        self._name = name
        self._path = run / "metrics.jsonl"
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._at = 0
        self._file: tuple[int, int] | None = None
        self._health, self._logged = Health(), Logged()
        self._curves: dict[str, tuple[array[int], array[float]]] = defaultdict(
            lambda: (array("q"), array("d"))
        )

    def state(self) -> dict[str, Any]:
        """Returns what the run is, and what stands out in its metrics. Raises DataError, ConfigError."""
        with self._lock:
            self._read()
            record = asdict(record_of(self._run, self._logged)) | {"run": self._name}
            return record | {"checks": [one.line() for one in self._health.found]}

    def names(self) -> list[str]:
        """Returns the names of all metrics that are numbers."""
        with self._lock:
            self._read()
            return sorted(self._curves)

    def curve(self, name: str) -> dict[str, list[float]]:
        """Returns steps and values of a metric; of a long one the least and the most of each stretch."""
        with self._lock:
            steps, values = self._curves[name] if name in self._curves else (array("q"), array("d"))
            shown = _thinned(values)
            return {"steps": [steps[at] for at in shown], "values": [values[at] for at in shown]}

    def _read(self) -> None:
        """Reads on. A run that went back to a checkpoint has a file that is another one, or shorter."""
        try:
            with self._path.open("rb") as file:
                found = file.seek(0, 2), (Path(file.name).stat().st_dev, Path(file.name).stat().st_ino)
                if self._file not in (None, found[1]) or found[0] < self._at:
                    self._begin()
                self._file = found[1]
                file.seek(self._at)
                text = file.read()
        except FileNotFoundError:
            self._begin()
            return
        for line in text.split(b"\n")[:-1]:  # what is behind the last newline is being written
            try:
                self._add(json.loads(line))
            except (ValueError, TypeError, KeyError) as error:
                raise DataError(f"{self._path}: not a line of metrics: {line[:100]!r}; remove it") from error
            self._at += len(line) + 1

    def _add(self, line: Mapping[str, Any]) -> None:
        step = int(line["step"])
        self._logged.add(line)
        self._health.add(line)
        for name, value in line.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and name != "step":
                steps, values = self._curves[name]
                if steps and steps[-1] == step:  # of lines of one step the last one counts
                    values[-1] = value
                else:
                    steps.append(step)
                    values.append(value)


def _thinned(values: array[float]) -> list[int]:
    """Returns the places of a curve's points that are drawn: no peak is lost."""
    if len(values) <= _POINTS:
        return list(range(len(values)))
    stretch = -(-2 * len(values) // _POINTS)
    places: set[int] = {0, len(values) - 1}
    for first in range(0, len(values), stretch):
        inside = range(first, min(first + stretch, len(values)))
        places |= {min(inside, key=values.__getitem__), max(inside, key=values.__getitem__)}
    return sorted(places)
