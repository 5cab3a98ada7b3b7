"""Where the time goes: exclusive wall seconds per phase, CPU seconds, peak memory, tokens per second."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """cpu_seconds: user + system of all threads. peak_memory_bytes: largest resident size so far.

    With children, the peak is the sum of every process's own peak: pages that processes share count several
    times.
    """

    cpu_seconds: float
    peak_memory_bytes: int


def process_usage(children: bool = False) -> Usage:
    """Of this process, and with `children` also of its descendants, live (from /proc) and ended (as the
    kernel adds them)."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    cpu = own.ru_utime + own.ru_stime
    peak = own.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if children:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu += ended.ru_utime + ended.ru_stime
        for pid in _descendants(os.getpid()):
            child = _proc_usage(pid)
            cpu, peak = cpu + child.cpu_seconds, peak + child.peak_memory_bytes
    return Usage(cpu, peak)


def _descendants(root: int) -> list[int]:
    parents: dict[int, int] = {}
    folder = Path("/proc")
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.name.isdigit() and (fields := _stat_fields(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
    found, frontier = [], {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        found += sorted(frontier)
    return found


def _stat_fields(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on (the name before may hold spaces); empty when the
    process is gone."""
    try:
        return (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(") ")[2]
            .split()
        )
    except OSError:
        return []


def _proc_usage(pid: int) -> Usage:
    fields = _stat_fields(pid)
    if not fields:
        return Usage(0.0, 0)
    cpu = sum(int(ticks) for ticks in fields[11:15]) / _TICKS  # utime, stime and those of ended children
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Usage(cpu, 0)
    peak = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), 0)
    return Usage(cpu, peak * 1024)


class PhaseWatcher(Protocol):
    """Is told of the phases as they end, in seconds of the timers' clock."""

    def phase(self, name: str, started: float, ended: float) -> None: ...

    def step_started(self) -> None:
        """The first step begins here."""


@dataclass
class _Open:
    name: str
    started: float
    nested: float = 0.0


@dataclass
class Timers:
    """Exclusive wall time per phase, for the step and for the run.

    A phase inside a phase takes its time from the outer one. Each asyncio task has its own nesting; phases
    of tasks that overlap each count in full, so their shares can add up to more than 1. `shares` counts
    what no phase covers as `other`. clock and cpu are seams for tests (seconds). watchers: are told of every
    phase.
    """

    clock: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.process_time
    watchers: list[PhaseWatcher] = field(default_factory=list, init=False)
    wall_seconds: float = field(default=0.0, init=False)
    cpu_seconds: float = field(default=0.0, init=False)
    seconds: dict[str, float] = field(default_factory=dict, init=False)
    counts: dict[str, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._current: ContextVar[_Open | None] = ContextVar("phase", default=None)
        self._step: dict[str, float] = {}
        self._stepping = False
        self._step_started = self._marked = self.clock()
        self._cpu_marked = self.cpu()
        self._step_cpu = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside to `name`, less that of phases nested in it. Works around `await` too."""
        outer = self._current.get()
        inner = _Open(name, self.clock())
        self._current.set(inner)
        try:
            yield
        finally:
            self._current.set(outer)
            ended = self.clock()
            whole = ended - inner.started
            for watcher in self.watchers:
                watcher.phase(name, inner.started, ended)
            if outer is not None:
                outer.nested += whole
            own = max(0.0, whole - inner.nested)
            self._step[name] = self._step.get(name, 0.0) + own
            self.seconds[name] = self.seconds.get(name, 0.0) + own

    def start_step(self) -> None:
        """Begin the first step here: what came before (loading, a first evaluation) is in no step's metrics.

        Later steps begin where the last one ended, so that nothing between two steps goes uncounted.
        """
        if not self._stepping:
            self._stepping = True
            for watcher in self.watchers:
                watcher.step_started()
            self._step = {}
            self._step_started = self.clock()
            self._mark(self._step_started)
            self._step_cpu = self.cpu_seconds

    def end_step(self, **tokens: int) -> dict[str, float]:
        """Close the step: its `timing/<phase>_s`, `timing/step_s` and `timing/cpu_s`, and for each keyword
        (`generated=…`, `trained=…`, in tokens) `perf/<name>_tokens_per_s` over the step's wall time."""
        now = self.clock()
        self._mark(now)
        wall = now - self._step_started
        cpu = self.cpu_seconds - self._step_cpu
        metrics = {f"timing/{name}_s": seconds for name, seconds in self._step.items()}
        metrics["timing/step_s"] = wall
        metrics["timing/cpu_s"] = cpu
        for name, count in tokens.items():
            self.counts[name] = self.counts.get(name, 0) + count
            metrics[f"perf/{name}_tokens_per_s"] = count / wall if wall > 0 else 0.0
        self._step = {}
        self._step_started, self._step_cpu = now, self.cpu_seconds
        return metrics

    def shares(self) -> dict[str, float]:
        """Each phase's share of the wall time so far, largest first, then `other`."""
        self._mark(self.clock())
        if self.wall_seconds <= 0:
            return {}
        ranked = sorted(self.seconds.items(), key=lambda item: -item[1])
        shares = {name: seconds / self.wall_seconds for name, seconds in ranked}
        return shares | {"other": max(0.0, 1.0 - sum(shares.values()))}

    def _mark(self, now: float) -> None:
        cpu = self.cpu()
        self.wall_seconds += now - self._marked
        self.cpu_seconds += cpu - self._cpu_marked
        self._marked, self._cpu_marked = now, cpu

    def state(self) -> dict[str, Any]:
        """Totals for a checkpoint (JSON)."""
        self._mark(self.clock())
        return {
            "wall_seconds": self.wall_seconds,
            "cpu_seconds": self.cpu_seconds,
            "seconds": dict(self.seconds),
            "counts": dict(self.counts),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Add the totals of the run that this one goes on with."""
        self.wall_seconds += float(state["wall_seconds"])
        self.cpu_seconds += float(state["cpu_seconds"])
        self._step_cpu += float(state["cpu_seconds"])
        for name, value in state["seconds"].items():
            self.seconds[name] = self.seconds.get(name, 0.0) + float(value)
        for name, value in state["counts"].items():
            self.counts[name] = self.counts.get(name, 0) + int(value)
