"""How busy the devices were: shares of a step's time in which a host trained, or had episodes to generate.

On the controller's clock, from when a call is sent until its answer is here: what a call waits in its host
counts to the one before it, and the way there and back (about a millisecond) to the call.
"""

from __future__ import annotations

import time
from collections.abc import Callable

GENERATING = ("run_group", "continue_group", "run_unscored", "evaluate")
PAUSE, RESUME = "pause", "resume"


class Occupancy:
    """A CallWatcher of a run's cluster and a PhaseWatcher of its timers. rollout: the role that generates;
    all others train, or serve those that do.
    """

    def __init__(self, rollout: str = "rollout", clock: Callable[[], float] = time.perf_counter) -> None:
        self._rollout, self._clock = rollout, clock
        self._since = clock()
        self._trainers: dict[int, _Busy] = {}
        self._generators: dict[int, _Busy] = {}

    def call_sent(self, role: str, rank: int, device: int, method: str) -> None:
        """See CallWatcher."""
        now = self._clock()
        if role != self._rollout:
            self._trainers.setdefault(device, _Busy()).begin(now)
        elif method in GENERATING:
            self._generators.setdefault(device, _Busy()).begin(now)
        elif method == RESUME:
            self._generators.setdefault(device, _Busy()).let_go(now)

    def call_ended(
        self, role: str, rank: int, device: int, method: str, start: float, end: float, *, died: bool
    ) -> None:
        """See CallWatcher."""
        now = self._clock()
        if role != self._rollout:
            self._trainers[device].end(now)
        elif method in GENERATING:
            self._generators[device].end(now)
        elif method == PAUSE:
            self._generators.setdefault(device, _Busy()).hold(now)
        if died:
            for busy in (self._trainers.get(device), self._generators.get(device)):
                if busy is not None:
                    busy.leave(now)

    def phase(self, name: str, started: float, ended: float) -> None:
        """See PhaseWatcher; what a phase is called says nothing here."""

    def step_started(self) -> None:
        """See PhaseWatcher: what was before counts to no step."""
        self.shares()

    def shares(self) -> dict[str, float]:
        """Since the last call: `perf/trainer_busy_share`, mean over the devices of the roles that train, of
        the time with a call of theirs running; `perf/rollout_busy_share`, mean over the rollout's devices, of
        the time with an episode in flight and its engine not paused. A device counts while its host lives.
        Each only where there is such a device.
        """
        now = self._clock()
        since, self._since = self._since, now
        shares = {}
        for name, devices in (("trainer", self._trainers), ("rollout", self._generators)):
            alive = sum(device.alive(since, now) for device in devices.values())
            busy = sum(device.take(now) for device in devices.values())
            if alive > 0:
                shares[f"perf/{name}_busy_share"] = busy / alive
        return shares


class _Busy:
    """Seconds with at least one call running, and not held, until the host dies."""

    def __init__(self) -> None:
        self._running, self._held = 0, False
        self._seconds, self._from = 0.0, 0.0
        self._left: float | None = None

    def begin(self, now: float) -> None:
        self._count(now)
        self._running += 1

    def end(self, now: float) -> None:
        self._count(now)
        self._running -= 1

    def hold(self, now: float) -> None:
        self._count(now)
        self._held = True

    def let_go(self, now: float) -> None:
        self._count(now)
        self._held = False

    def leave(self, now: float) -> None:
        """Its host is dead, from now on at the latest."""
        self._count(now)
        self._left = now if self._left is None else self._left

    def alive(self, since: float, now: float) -> float:
        """Seconds of its life between the two."""
        return max(0.0, (now if self._left is None else self._left) - since)

    def take(self, now: float) -> float:
        self._count(now)
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _count(self, now: float) -> None:
        if self._running and not self._held and self._left is None:
            self._seconds += now - self._from
        self._from = now
