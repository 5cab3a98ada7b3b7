"""timeline/attempt-1.json: what ran when, on the controller and on every device, in Chrome's trace format.

process "controller"       the phases of the loop; counters (prompt groups, staleness); publishes
process "device 3: actor"  the calls of one role's worker on one device

Each process of a run (attempt) writes a file of its own. Every span is a pair of async events with an id of
its own: spans may overlap, and the viewer lays them out. The file is a JSON array with one event per line
that is only ever appended to, so its closing bracket is left out, which the format allows. Times are
microseconds since the epoch on the clock of the machine that did the work: a host's spans are on that host's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rondo.core.errors import DataError
from rondo.system.storage import AppendedFile, make_folder

# A line of the file.
Event = dict[str, Any]


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
    """The file of one process of a run; it is made with the first event."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._processes: dict[str, int] = {}  # name → pid in the file
        self._num_spans = 0

    def write(self, step: int, events: Sequence[Span | Instant]) -> None:
        """Appends what happened in a step; spans and instants carry it."""
        if not events:
            return
        lines: list[Event] = []
        for event in events:
            process, place = "controller", 0
            if isinstance(event, Span) and event.device is not None:
                process, place = f"device {event.device}: {event.role}", event.device + 1
            if process not in self._processes:  # it is named, and put in its place, before its first event
                pid = self._processes[process] = len(self._processes) + 1
                for name, args in (("name", {"name": process}), ("sort_index", {"sort_index": place})):
                    lines.append({"name": f"process_{name}", "ph": "M", "pid": pid, "tid": pid, "args": args})
            pid = self._processes[process]
            common: Event = {"name": event.name, "pid": pid, "tid": pid}
            if isinstance(event, Span):
                self._num_spans += 1
                common |= {"cat": event.role, "id": self._num_spans}
                start = int(event.start * 1e6)
                rank = {"rank": event.rank} if place else {}
                lines.append(common | {"ph": "b", "ts": start, "args": {**rank, "step": step}})
                lines.append(common | {"ph": "e", "ts": max(start, int(event.end * 1e6))})
            elif event.is_counter:  # its args are its curves: a step among them would be drawn
                lines.append(common | {"ph": "C", "ts": int(event.at * 1e6), "args": dict(event.values)})
            else:
                args = {**event.values, "step": step}
                lines.append(common | {"ph": "i", "s": "g", "ts": int(event.at * 1e6), "args": args})
        texts = [json.dumps(line, separators=(",", ":"), allow_nan=False) for line in lines]
        # The comma comes before an event, not after it: with a bracket behind it the file is JSON.
        begin = ",\n" if self.path.exists() else "[\n"
        make_folder(self.path.parent)
        with closing(AppendedFile(self.path)) as file:
            file.append((begin + ",\n".join(texts)).encode())


def read_timeline(path: str | os.PathLike[str]) -> list[Event]:
    """Returns the events of a timeline's file, in its order, less a last line that a kill cut off.

    Raises DataError for a file that is missing, or no timeline.
    """
    path = Path(path)
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
            if number <= len(lines):
                raise DataError(f"{path}:{number}: not an event; remove the line") from error
    return events
