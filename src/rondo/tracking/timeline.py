"""timeline/attempt-1/step-000100.json: what ran when in steps 100 to 199, on the controller and on every
device, in Chrome's trace format.

process "controller"       the phases of the loop; counters (prompt groups, staleness); publishes
process "device 3: actor"  the calls of one role's worker on one device

Each process of a run (attempt) has a folder of its own, with a file for every hundred steps, which is whole
by itself. Every span is a pair of async events with an id of its own: spans may overlap, and the viewer lays
them out. A file is a JSON array with one event per line that is only ever appended to, so its closing bracket
is left out, which the format allows. Times are microseconds since the epoch on the clock of the machine that
did the work: a host's spans are on that host's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rondo.core.errors import DataError
from rondo.system.storage import AppendedFile, entries_of, make_folder

# A line of a file.
Event = dict[str, Any]
STEPS = 100  # of a file
_PIECE = 1024  # events that are written at once
_FILE = re.compile(r"step-(\d{6,})\.json")


@dataclass(frozen=True, slots=True)
class Span:
    """A phase of the loop, or a call of a role's worker."""

    name: str
    """What is done."""
    start: float
    """When it began, in seconds since the epoch."""
    end: float
    """When it ended, in seconds since the epoch."""
    role: str = "loop"
    """The role whose worker does it; `loop`: a phase of the loop."""
    rank: int = 0
    """The worker's rank in its role."""
    device: int | None = None
    """The worker's device; None: the controller."""


@dataclass(frozen=True, slots=True)
class Instant:
    """What the controller saw at one moment, or the values of a counter from then on."""

    name: str
    """What was seen."""
    at: float
    """The moment, in seconds since the epoch."""
    values: Mapping[str, Any]
    """What was seen of it, by name."""
    is_counter: bool = False
    """Whether these are the values of a counter from then on."""


class Timeline:
    """The files of one process of a run; each is made with its first event."""

    def __init__(
        self, folder: str | os.PathLike[str], wrote: Callable[[Path], None] = lambda path: None
    ) -> None:
        """Begins no file yet. wrote: is called with each file that was appended to."""
        self.folder = Path(folder)
        self._wrote = wrote
        self._path: Path | None = None  # the file that was written last
        self._named: set[str] = set()  # processes that it has
        self._processes: dict[str, int] = {}  # name → pid in all files
        self._num_spans = 0

    def write(self, step: int, events: Sequence[Span | Instant]) -> None:
        """Appends what happened in a step; spans and instants carry it."""
        if not events:
            return
        path = self.folder / f"step-{step // STEPS * STEPS:06d}.json"
        if path != self._path:
            self._path, self._named = path, set()
        make_folder(self.folder)
        with closing(AppendedFile(path)) as file:
            for first in range(0, len(events), _PIECE):
                piece = events[first : first + _PIECE]
                lines = [
                    json.dumps(line, separators=(",", ":"), allow_nan=False)
                    for event in piece
                    for line in self._lines(step, event)
                ]
                # The comma comes before an event, not after it: with a bracket behind it the file is JSON.
                begin = ",\n" if path.exists() else "[\n"
                file.append((begin + ",\n".join(lines)).encode())
        self._wrote(path)

    def _lines(self, step: int, event: Span | Instant) -> Iterator[Event]:
        process, place = "controller", 0
        if isinstance(event, Span) and event.device is not None:
            process, place = f"device {event.device}: {event.role}", event.device + 1
        pid = self._processes.setdefault(process, len(self._processes) + 1)
        if process not in self._named:  # it is named, and put in its place, before its first event
            self._named.add(process)
            for name, args in (("name", {"name": process}), ("sort_index", {"sort_index": place})):
                yield {"name": f"process_{name}", "ph": "M", "pid": pid, "tid": pid, "args": args}
        common: Event = {"name": event.name, "pid": pid, "tid": pid}
        if isinstance(event, Span):
            self._num_spans += 1
            common |= {"cat": event.role, "id": self._num_spans}
            start = int(event.start * 1e6)
            rank = {"rank": event.rank} if place else {}
            yield common | {"ph": "b", "ts": start, "args": {**rank, "step": step}}
            yield common | {"ph": "e", "ts": max(start, int(event.end * 1e6))}
        elif event.is_counter:  # its args are its curves: a step among them would be drawn
            yield common | {"ph": "C", "ts": int(event.at * 1e6), "args": dict(event.values)}
        else:
            args = {**event.values, "step": step}
            yield common | {"ph": "i", "s": "g", "ts": int(event.at * 1e6), "args": args}


def read_timeline(path: str | os.PathLike[str]) -> list[Event]:
    """Returns the events of a file of a timeline, or of an attempt's folder, in their order, less a last line
    that a kill cut off. An older rondo wrote one file for each attempt, which is read too.

    Raises DataError for what is missing, or no timeline.
    """
    path = Path(path)
    if not path.is_dir():
        return _read(path, may_be_cut=True)
    files = {int(match[1]): file for file in entries_of(path) if (match := _FILE.fullmatch(file.name))}
    if not files:
        raise DataError(f"{path}: has no timeline (step-000000.json, step-{STEPS:06d}.json, …)")
    return [e for step in sorted(files) for e in _read(files[step], may_be_cut=step == max(files))]


def _read(path: Path, *, may_be_cut: bool) -> list[Event]:
    if not path.is_file():
        raise DataError(f"{path}: no such file; a run writes it when its first step begins")
    first, *lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    if first != "[":
        raise DataError(f"{path}: does not begin with a line '[': it is no timeline of a run")
    events: list[Event] = []
    for number, line in enumerate(lines, 2):
        try:
            events.append(json.loads(line.removesuffix(",")))
        except ValueError as error:
            if number <= len(lines) or not may_be_cut:
                raise DataError(f"{path}:{number}: not an event; remove the line") from error
    return events
