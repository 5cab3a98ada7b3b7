"""timeline.json: what ran when, on the controller and on every device, in Chrome's trace format.

process "controller" ── thread "loop": the phases of `Timers`; counters (prompt groups, staleness); publishes
process "device 3"  ── one thread per role that stands there; calls that overlap go on further threads

The file is a JSON array with one event per line, whole after every step. Times are microseconds since the
epoch on the clock of whoever did the work: the spans of a host are on that host's clock.
"""

from __future__ import annotations

import bisect
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rondo.errors import DataError

Event = dict[str, Any]
Interval = tuple[int, int]

_HEAD, _TAIL = "[\n", "\n]\n"
_CONTROLLER = 1  # process id of the controller in the file; that of device d is d + 2
_FLUSHES_KEPT = 8  # how far back, in steps, a row remembers what lies on it
_ENDS = ("}", "},")


class Timeline:
    """Collects spans, marks and counters and writes those of a step when it ends.

    A CallRecorder (rondo.controller) and a PhaseWatcher (timers): hand it to both. step: the last one that is
    done. attempt: of the run folder; from the second on, events carry it. gauges: what the counter track
    "prompt groups" shows, read at every event. ignored: methods that are not shown. clock (seconds since the
    epoch) and ticks (the timers' clock) are seams for tests.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int = 0,
        attempt: int = 1,
        clock: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.path, self._attempt, self._clock = Path(path), attempt, clock
        self._offset = clock() - ticks()
        self.step = step
        self.gauges: Callable[[], Mapping[str, float]] = dict
        self.ignored: frozenset[str] = frozenset()
        self._shown: Mapping[str, float] = {}
        self._pending: list[tuple[int, str, str, int, int, Event]] = []  # pid, row, name, start, end, args
        self._points: list[Event] = []
        self._threads: dict[tuple[int, str], int] = {}  # (pid, thread name) → tid
        self._processes: set[int] = set()
        self._rows: dict[tuple[int, str], _Rows] = {}
        self._opened = False
        if attempt > 1:
            self.mark(f"attempt {attempt}")

    def submitted(self, role: str, rank: int, device: int, method: str) -> None:
        """See CallRecorder: the counters may have changed."""
        self._sample()

    def record(self, role: str, rank: int, device: int, method: str, start: float, end: float) -> None:
        """See CallRecorder: a span on the row of the role."""
        if method not in self.ignored:
            self._span(device + 2, role, method, start, end, {"rank": rank})
        self._sample()

    def phase(self, name: str, started: float, ended: float) -> None:
        """A phase of the loop, in seconds of `ticks`."""
        self._span(_CONTROLLER, "loop", name, started + self._offset, ended + self._offset, {})
        self._sample()

    def step_started(self) -> None:
        """The first step begins: what came before (set-up, a first evaluation) carries the step before."""
        self._write(self.step)

    def mark(self, name: str, **args: Any) -> None:
        """An instant across all rows, now."""
        at = _micro(self._clock())
        self._points.append(
            {"name": name, "ph": "i", "s": "g", "ts": at, "pid": _CONTROLLER, "tid": 0, "args": args}
        )

    def count(self, track: str, values: Mapping[str, float]) -> None:
        """A counter track's values from now on."""
        at = _micro(self._clock())
        self._points.append(
            {"name": track, "ph": "C", "ts": at, "pid": _CONTROLLER, "tid": 0, "args": dict(values)}
        )

    def end_step(self, step: int) -> None:
        """Append the events since the last step; they carry `step`."""
        self._write(step)
        self.step = step

    def close(self) -> None:
        """Append what came after the last step (its checkpoint, an evaluation); it carries that step."""
        self._write(self.step)

    def _sample(self) -> None:
        values = self.gauges()
        if values and values != self._shown:
            self._shown = dict(values)
            self.count("prompt groups", values)

    def _span(self, pid: int, row: str, name: str, start: float, end: float, args: Event) -> None:
        self._pending.append((pid, row, name, _micro(start), max(_micro(start), _micro(end)), args))

    def _write(self, step: int) -> None:
        if not self._pending and not self._points:
            return
        if not self._opened:
            self._threads = _known_threads(self.path)
            self._processes = {pid for pid, _ in self._threads}
            self._opened = True
        events: list[Event] = []
        for pid, row, name, start, end, args in sorted(self._pending, key=lambda x: (x[3], -x[4])):
            tid = self._thread(pid, row, start, end, events)
            span = {"name": name, "ph": "X", "ts": start, "dur": end - start, "pid": pid, "tid": tid}
            events.append(span | {"args": self._labelled(args, step)})
        for point in self._points:
            if point["ph"] == "C":  # each of its args is a curve
                events.append(point | {"step": step})
            else:
                events.append(point | {"args": self._labelled(point["args"], step)})
        self._pending, self._points = [], []
        for rows in self._rows.values():
            rows.forget()
        append_events(self.path, events)

    def _labelled(self, args: Event, step: int) -> Event:
        return args | {"step": step} | ({"attempt": self._attempt} if self._attempt > 1 else {})

    def _thread(self, pid: int, row: str, start: int, end: int, events: list[Event]) -> int:
        """The thread on which the span lies; what names it is appended to `events` where it is new."""
        rows = self._rows.setdefault((pid, row), _Rows(nesting=pid == _CONTROLLER))
        lane = rows.place(start, end)
        name = row if lane == 0 else f"{row} ({lane + 1})"
        if pid not in self._processes:
            self._processes.add(pid)
            process = "controller" if pid == _CONTROLLER else f"device {pid - 2}"
            events.append(_named(pid, 0, "process_name", name=process))
            events.append(_named(pid, 0, "process_sort_index", sort_index=pid))
        if (pid, name) not in self._threads:
            self._threads[pid, name] = max(self._threads.values(), default=0) + 1
            events.append(_named(pid, self._threads[pid, name], "thread_name", name=name))
        return self._threads[pid, name]


class _Rows:
    """The rows of one role on one device: spans that overlap lie on different ones.

    nesting: a span may lie inside another of its row (phases do, calls that only overlap do not).
    """

    def __init__(self, nesting: bool) -> None:
        self._nesting = nesting
        self._ends: list[int] = []  # of each row that does not nest: its last span's
        self._lanes: list[list[Interval]] = []  # of each row that nests: its spans, rising
        self._marks: list[int] = []  # the latest end at each of the last writes
        self._latest = 0

    def place(self, start: int, end: int) -> int:
        """The number of the first row that has room. Rows that do not nest take a span after their last one
        only: there may be a thousand at once, and each is asked for each span.
        """
        if not self._nesting:
            for number, last in enumerate(self._ends):
                if last <= start:
                    self._ends[number] = end
                    return number
            self._ends.append(end)
            return len(self._ends) - 1
        self._latest = max(self._latest, end)
        for number, lane in enumerate(self._lanes):
            if not any(s < start < e < end or start < s < end < e for s, e in lane):
                bisect.insort(lane, (start, end))
                return number
        self._lanes.append([(start, end)])
        return len(self._lanes) - 1

    def forget(self) -> None:
        """Called at each write: forget what ended many writes ago."""
        self._marks.append(self._latest)
        if len(self._marks) > _FLUSHES_KEPT:
            horizon = self._marks.pop(0)
            self._lanes = [[x for x in lane if x[1] > horizon] for lane in self._lanes]


def read_timeline(path: str | os.PathLike[str]) -> list[Event]:
    """The events of a timeline.json, in the order of the file. A file without its closing bracket (killed
    while it was written) is read, less a last line that was cut off.

    Raises DataError for a file that is missing, or no timeline.
    """
    return [event for _, event in _parsed(Path(path)) if event is not None]


def step_of(event: Mapping[str, Any]) -> int | None:
    """The step that an event belongs to; None for one that names a process or thread."""
    step = event.get("step", event.get("args", {}).get("step"))
    return step if isinstance(step, int) else None


def append_events(path: Path, events: Iterable[Event]) -> None:
    """Append to the array in the file, which is made if it is not there; the file is whole afterwards."""
    lines = ",\n".join(json.dumps(event, separators=(",", ":"), allow_nan=False) for event in events)
    if not lines:
        return
    if not path.exists() or path.stat().st_size <= len(_HEAD) + len(_TAIL):
        path.write_text(_HEAD + lines + _TAIL, encoding="utf-8")
        return
    with path.open("r+b") as file:
        file.seek(-len(_TAIL), os.SEEK_END)
        if file.read() != _TAIL.encode():  # cut off by a kill: begin again with the lines that are whole
            whole = [event for _, event in _parsed(path) if event is not None]
            file.seek(0)
            file.truncate()
            kept = ",\n".join(json.dumps(event, separators=(",", ":")) for event in whole)
            file.write((_HEAD + kept + _TAIL).encode())
        file.seek(-len(_TAIL), os.SEEK_END)
        file.write((",\n" + lines + _TAIL).encode())


def split_events(path: Path, step: int) -> tuple[list[Event], list[Event]]:
    """(events of steps up to `step`, later ones); names of processes and threads are in both, and only there
    if nothing is later."""
    kept: list[Event] = []
    late: list[Event] = []
    names: list[Event] = []
    for _, event in _parsed(path):
        if event is None:
            continue
        found = step_of(event)
        if found is None:
            kept.append(event)
            names.append(event)
        else:
            (kept if found <= step else late).append(event)
    return kept, [*names, *late] if late else []


def _parsed(path: Path) -> list[tuple[str, Event | None]]:
    """(line, event) of every line that holds one; the event of a last line that was cut off is None."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; a run writes it when its first step ends")
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    if lines[0] != "[":
        raise DataError(f"{path}: does not begin with a line '[': it is no timeline of a run")
    lines = [line for line in lines[1:] if line not in ("]", "")]
    parsed: list[tuple[str, Event | None]] = []
    for number, line in enumerate(lines):
        try:
            event = json.loads(line.removesuffix(",")) if line.endswith(_ENDS) else None
        except ValueError:
            event = None
        if event is None and number < len(lines) - 1:
            raise DataError(f"{path}:{number + 2}: not an event; remove the line")
        parsed.append((line, event))
    return parsed


def _known_threads(path: Path) -> dict[tuple[int, str], int]:
    """The threads that the file names already, so that a resumed run goes on in the same rows."""
    if not path.exists():
        return {}
    events = read_timeline(path)
    return {(e["pid"], e["args"]["name"]): e["tid"] for e in events if e["name"] == "thread_name"}


def _named(pid: int, tid: int, what: str, **args: Any) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _micro(seconds: float) -> int:
    return int(seconds * 1e6)
