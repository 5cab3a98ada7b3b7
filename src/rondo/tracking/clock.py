"""What happens in a run, and when: phases of its loop, calls of its workers, CPU time of its hosts.

phase ─────────────────────┐            ┌─▶ end_step: timing/…, perf/… of the step
call_sent, call_ended ─────┼──▶ Clock ──┼─▶ shares, state: totals of the run
count_cpu, mark ───────────┘            └─▶ the timeline's file, step by step
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from rondo.system.usage import CpuSeconds, checks_cpu_seconds
from rondo.tracking.timeline import Instant, Span, Timeline

# The role that generates; all others train, or serve those that do. What follows are its worker's methods.
ROLLOUT = "rollout"
SIDES = ("trainer", "rollout")
GENERATING = ("run_group", "continue_group", "run_unscored", "evaluate")
PAUSE, RESUME = "pause", "resume"
# Wait for something to happen: not shown in the timeline.
LONG_POLLS = ("restarted",)


class Clock:
    """The one record of a run's time, from when it is made. A CallWatcher (rondo.controller).

    timeline: what is written when a step ends. gauges: the values of the timeline's counter "prompt groups",
    read at every phase and call. now, cpu, checks and epoch are seams for tests: seconds of the controller's
    clock, of this process's CPU time, of what went of that into checks, and since 1970.
    """

    def __init__(
        self,
        timeline: Timeline,
        gauges: Callable[[], Mapping[str, float]] = dict,
        *,
        now: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.process_time,
        checks: Callable[[], float] = checks_cpu_seconds,
        epoch: Callable[[], float] = time.time,
    ) -> None:
        # The last step that is done: what happens before the first one carries its number.
        self.step = 0
        # Totals of the run, those of earlier attempts included: exclusive seconds by phase, tokens by kind.
        self.wall_seconds = 0.0
        self.cpu_seconds = 0.0
        self.checks_cpu_seconds = 0.0
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.counts: Counter[str] = Counter()
        self._timeline = timeline
        self._gauges = gauges
        self._now = now
        self._cpu = cpu
        self._checks = checks
        self._epoch = epoch() - now()
        self._marked = now()
        self._cpu_marked = cpu()
        self._checks_marked = checks()
        self._hosts: dict[int, CpuSeconds] = {}  # the most that was seen, by device
        self._phase: ContextVar[_Phase | None] = ContextVar("phase", default=None)
        self._busy: dict[tuple[str, int], _Busy] = {}  # by side and device
        self._shown: Mapping[str, float] = {}  # the gauges, as the timeline has them
        # Of the step in progress: when it began, its exclusive seconds by phase, its part of the timeline.
        self._started = self._marked
        self._started_cpu = 0.0
        self._started_checks = 0.0
        self._phases: defaultdict[str, float] = defaultdict(float)
        self._events: list[Span | Instant] = []

    # ---- what happens ----

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time inside to `name`, less that of phases nested in it. Works around `await` too.

        Each asyncio task has its own nesting; phases of tasks that overlap each count in full, so their
        shares can add up to more than 1.
        """
        outer = self._phase.get()
        inner = _Phase(self._now())
        self._phase.set(inner)
        try:
            yield
        finally:
            self._phase.set(outer)
            ended = self._now()
            whole = ended - inner.started
            if outer is not None:
                outer.nested += whole
            own = max(0.0, whole - inner.nested)
            self._phases[name] += own
            self.seconds[name] += own
            self._events.append(Span(name, self._epoch + inner.started, self._epoch + ended))
            self._sample()

    def call_sent(self, role: str, rank: int, device: int, method: str) -> None:
        """Notes that a call went out; see CallWatcher."""
        busy = self._busy_on(role, device)
        if role != ROLLOUT or method in GENERATING:
            busy.running += 1
        elif method == RESUME:
            busy.held = False
        self._sample()

    def call_ended(
        self, role: str, rank: int, device: int, method: str, start: float, end: float, *, died: bool
    ) -> None:
        """Notes that a call came back, or that its host died; see CallWatcher."""
        busy = self._busy_on(role, device)
        if role != ROLLOUT or method in GENERATING:
            busy.running -= 1
        elif method == PAUSE:
            busy.held = True
        if died:
            now = self._now()
            for (_, its_device), other in self._busy.items():
                if its_device == device and other.died is None:
                    other.until(now)
                    other.died = now
        if method not in LONG_POLLS:
            self._events.append(Span(method, start, end, role, rank, device))
        self._sample()

    def count_cpu(self, used: Mapping[int, CpuSeconds]) -> None:
        """Adds the CPU time that hosts have used since the last call; the first call sets where they stand.

        used: by device, see `Cluster.cpu_seconds`. This process counts by itself.
        """
        for device, seconds in used.items():
            before = self._hosts.get(device, seconds)
            # Less: a process has just ended, see `Usage`.
            most = self._hosts[device] = CpuSeconds(*map(max, seconds, before))
            self.cpu_seconds += most.all - before.all
            self.checks_cpu_seconds += most.checks - before.checks

    def mark(self, name: str, values: Mapping[str, Any], *, is_counter: bool = False) -> None:
        """Adds an instant across all rows of the timeline, now; or the values of a counter from now on."""
        self._events.append(Instant(name, self._epoch + self._now(), values, is_counter))

    # ---- what becomes of it ----

    def start_step(self) -> None:
        """Begins the first step here: what came before (loading, a first evaluation) is in no step's metrics.

        Later steps begin where the last one ended, so that nothing between two steps goes uncounted.
        """
        self.end_step(self.step)

    def end_step(self, step: int, **tokens: int) -> dict[str, float]:
        """Closes the step, writes its timeline and returns its metrics: `timing/<phase>_s`, `timing/step_s`,
        `timing/cpu_s`, of which `perf/checks_cpu_seconds` went into checks and checksums, and for each
        keyword (`generated=…`, `trained=…`, in tokens) `perf/<name>_tokens_per_s` over the step's wall time.
        And, where there is such a device, `perf/trainer_busy_share`, mean over the devices of the roles that
        train, of the time with a call of theirs running, and `perf/rollout_busy_share`, mean over the
        rollout's devices, of the time with an episode in flight and its engine not paused.

        The shares are on the controller's clock, from when a call is sent until its answer is here: what a
        call waits in its host counts to the one before it, and the way there and back (about a millisecond)
        to the call.
        """
        now = self._read()
        wall = now - self._started
        metrics = {f"timing/{name}_s": seconds for name, seconds in self._phases.items()}
        metrics["timing/step_s"] = wall
        metrics["timing/cpu_s"] = self.cpu_seconds - self._started_cpu
        metrics["perf/checks_cpu_seconds"] = self.checks_cpu_seconds - self._started_checks
        for name, count in tokens.items():
            self.counts[name] += count
            metrics[f"perf/{name}_tokens_per_s"] = count / wall if wall > 0 else 0.0
        for side in SIDES:
            devices = [busy for (its_side, _), busy in self._busy.items() if its_side == side]
            seconds = sum(busy.until(now) for busy in devices)
            ends = [now if busy.died is None else busy.died for busy in devices]
            alive = sum(max(0.0, end - self._started) for end in ends)  # a device counts while its host lives
            if alive > 0:
                metrics[f"perf/{side}_busy_share"] = seconds / alive
        self.step = step
        self.close()
        self._started = now
        self._started_cpu, self._started_checks = self.cpu_seconds, self.checks_cpu_seconds
        self._phases.clear()
        for busy in self._busy.values():
            busy.seconds = 0.0
        return metrics

    def close(self) -> None:
        """Writes the spans after the last step (its checkpoint, an evaluation), under that step's number."""
        self._timeline.write(self.step, self._events)
        self._events = []

    def shares(self) -> dict[str, float]:
        """Returns each phase's share of the wall time so far, largest first; then `other`, in no phase."""
        self._read()
        if self.wall_seconds <= 0:
            return {}
        ranked = sorted(self.seconds.items(), key=lambda item: -item[1])
        shares = {name: seconds / self.wall_seconds for name, seconds in ranked}
        return shares | {"other": max(0.0, 1.0 - sum(shares.values()))}

    def state(self) -> dict[str, Any]:
        """Returns the totals for a checkpoint (JSON)."""
        self._read()
        return {
            "wall_seconds": self.wall_seconds,
            "cpu_seconds": self.cpu_seconds,
            "checks_cpu_seconds": self.checks_cpu_seconds,
            "seconds": dict(self.seconds),
            "counts": dict(self.counts),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Adds the totals of the run that this one goes on with."""
        self.wall_seconds += float(state["wall_seconds"])
        cpu, checks = float(state["cpu_seconds"]), float(state.get("checks_cpu_seconds", 0.0))
        self.cpu_seconds += cpu
        self._started_cpu += cpu
        self.checks_cpu_seconds += checks
        self._started_checks += checks
        for name, value in state["seconds"].items():
            self.seconds[name] += float(value)
        self.counts.update(state["counts"])  # adds

    def _read(self) -> float:
        """Brings the totals up to now; returns now."""
        now, cpu, checks = self._now(), self._cpu(), self._checks()
        self.wall_seconds += now - self._marked
        self.cpu_seconds += cpu - self._cpu_marked
        self.checks_cpu_seconds += checks - self._checks_marked
        self._marked, self._cpu_marked, self._checks_marked = now, cpu, checks
        return now

    def _sample(self) -> None:
        """Reads the gauges; the timeline has them where they change."""
        values = self._gauges()
        if values and values != self._shown:
            self._shown = dict(values)
            self.mark("prompt groups", self._shown, is_counter=True)

    def _busy_on(self, role: str, device: int) -> _Busy:
        """Returns what the role's side does on a device, counted up to now."""
        side = "rollout" if role == ROLLOUT else "trainer"
        busy = self._busy.setdefault((side, device), _Busy())
        busy.until(self._now())
        return busy


@dataclass
class _Phase:
    """A phase that is open: when it began, and how long phases in it took."""

    started: float
    nested: float = 0.0


@dataclass
class _Busy:
    """How long one side has been busy on one device: with a call running, and its engine not held."""

    running: int = 0
    held: bool = False
    died: float | None = None
    """When its host was found dead."""
    seconds: float = 0.0
    """Busy seconds of the step in progress, counted up to `counted`."""
    counted: float = 0.0

    def until(self, now: float) -> float:
        """Counts up to now; returns the step's seconds."""
        if self.running and not self.held and self.died is None:
            self.seconds += now - self.counted
        self.counted = now
        return self.seconds
