"""Where the time goes: exclusive wall seconds per phase, CPU seconds, peak memory, tokens per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol


class PhaseWatcher(Protocol):
    """Hears of the phases as they end, in seconds of the timers' clock."""

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
