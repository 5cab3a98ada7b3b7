"""timeline/attempt-1.json: what ran when, on the controller and on every device, in Chrome's trace format.

process "controller"       the phases of `Timers`; counters (prompt groups, staleness); publishes
process "device 3: actor"  the calls of one role's worker on one device

Each process of a run (attempt) writes a file of its own. Every span is a pair of async events with an id of
its own: spans may overlap, and the viewer lays them out. The file is a JSON array with one event per line
that is only ever appended to, so its closing bracket is left out, which the format allows. Times are
microseconds since the epoch on the clock of whoever did the work: the spans of a host are on that host's.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rondo.errors import DataError

Event = dict[str, Any]

CONTROLLER = "controller"


class Timeline:
    """Collects spans, marks and counters and writes those of a step when it ends.

    It is a CallWatcher (rondo.controller) and a PhaseWatcher (rondo.tracking.timers): hand it to both.
    `clock` (seconds since the epoch) and `ticks` (the timers' clock) are seams for tests.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int = 0,
        clock: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.path = Path(path)
        # The last step that is done.
        self.step = step
        # What the counter track "prompt groups" shows, read at every event.
        self.gauges: Callable[[], Mapping[str, float]] = dict
        # Worker methods that are not shown.
        self.ignored: frozenset[str] = frozenset()
        self._clock = clock
        self._offset = clock() - ticks()
        self._shown: Mapping[str, float] = {}
        self._pending: list[Event] = []  # what the step in progress has to write
        self._processes: dict[str, int] = {}  # name → pid in the file
        self._num_spans = 0

    def call_sent(self, role: str, rank: int, device: int, method: str) -> None:
        """See CallWatcher: the counters may have changed."""
        self._sample()

    def call_ended(
        self, role: str, rank: int, device: int, method: str, start: float, end: float, *, died: bool
    ) -> None:
        """See CallWatcher: a span of the role on the device."""
        if method not in self.ignored:
            self._span(f"device {device}: {role}", device + 1, role, method, start, end, {"rank": rank})
        self._sample()

    def phase(self, name: str, started: float, ended: float) -> None:
        """Adds a phase of the loop, in seconds of `ticks`."""
        self._span(CONTROLLER, 0, "loop", name, started + self._offset, ended + self._offset, {})
        self._sample()

    def step_started(self) -> None:
        """Writes what came before the first step (set-up, a first evaluation) under the step before."""
        self._write()

    def mark(self, name: str, **args: Any) -> None:
        """Adds an instant across all rows, now."""
        self._point(name, {"ph": "i", "s": "g", "args": args})

    def count(self, track: str, values: Mapping[str, float]) -> None:
        """Sets a counter track's values from now on."""
        self._point(track, {"ph": "C", "args": dict(values)})

    def end_step(self, step: int) -> None:
        """Appends the events since the last step; they carry `step`."""
        self.step = step
        self._write()

    def close(self) -> None:
        """Appends what came after the last step (its checkpoint, an evaluation); it carries that step."""
        self._write()

    def _sample(self) -> None:
        values = self.gauges()
        if values and values != self._shown:
            self._shown = dict(values)
            self.count("prompt groups", values)

    def _point(self, name: str, event: Event) -> None:
        pid = self._process(CONTROLLER, 0)
        self._pending.append({"name": name, "ts": _micro(self._clock()), "pid": pid, "tid": pid} | event)

    def _span(
        self, process: str, place: int, row: str, name: str, start: float, end: float, args: Event
    ) -> None:
        """A begin and an end with the same id; `place`: where the process stands among the others."""
        pid = self._process(process, place)
        self._num_spans += 1
        common = {"name": name, "cat": row, "id": self._num_spans, "pid": pid, "tid": pid}
        begin = common | {"ph": "b", "ts": _micro(start), "args": args}
        self._pending += [begin, common | {"ph": "e", "ts": max(_micro(start), _micro(end))}]

    def _process(self, name: str, place: int) -> int:
        """The process's number in this file; its name and place are written with its first event."""
        if name not in self._processes:
            pid = self._processes[name] = len(self._processes) + 1
            known = {"process_name": {"name": name}, "process_sort_index": {"sort_index": place}}
            for what, args in known.items():
                self._pending.append({"name": what, "ph": "M", "pid": pid, "tid": pid, "args": args})
        return self._processes[name]

    def _write(self) -> None:
        if not self._pending:
            return
        for event in self._pending:
            if event["ph"] in ("b", "i"):  # a counter's args are its curves: a step among them would be drawn
                event["args"] = event["args"] | {"step": self.step}
        lines = (json.dumps(event, separators=(",", ":"), allow_nan=False) for event in self._pending)
        self.path.parent.mkdir(exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            # The comma comes before an event, not after it: with a bracket behind it the file is JSON.
            file.write(("[\n" if file.tell() == 0 else ",\n") + ",\n".join(lines))
        self._pending = []


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


def _micro(seconds: float) -> int:
    return int(seconds * 1e6)
