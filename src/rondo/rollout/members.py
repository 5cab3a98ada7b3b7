"""Which replicas a router has: they join, die, are replaced or given up, from any thread.

What a replica was running when it died falls under suspicion (`system/pool.py`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from rondo.core.errors import DeadlyRequestError, ReplicaLostError, RolloutError
from rondo.core.types import GenerateRequest
from rondo.rollout.protocol import RolloutEngine
from rondo.system.pool import Supervision, Supervisor

ENGINES = Supervision(restarts=3, deaths=3, forgiven=1)  # of one router, in a run
_LAST_LINES = 10  # of a dead engine's output, in the error of the request that it died of
_log = logging.getLogger(__name__)

# (name, why): a replica died that may be replaced. Returns whether another will take its place (`add` or
# `give_up` follows).
OnLost = Callable[[str, str], bool]


@dataclass(eq=False)
class Replica:
    """One engine, and what runs there."""

    name: str
    """What messages call it."""
    engine: RolloutEngine
    """The engine that it routes to."""
    running: set[RoutedCall] = field(default_factory=set)
    """The calls that run on it."""
    dead: str | None = None
    """Why it is dead; None: it lives."""
    coming: bool = False
    """It is dead, but another will take its place."""
    guilty: str | None = None
    """The id of the request that it died of."""
    busy_seconds: float = 0.0
    """How long it has had work, counted until `counted_at`."""
    counted_at: float = 0.0
    """When `busy_seconds` was last counted, on the clock of time.monotonic."""

    @property
    def runs_suspect(self) -> bool:
        """Says whether it runs a call that must run alone."""
        return len(self.running) == 1 and all(call.suspect for call in self.running)


@dataclass(eq=False)
class RoutedCall:
    """A generate call that waits for a replica, or runs on one."""

    request: GenerateRequest
    """What is to be generated."""
    deadline: float | None
    """When it must have ended, on its event loop's clock."""
    place: asyncio.Future[Replica | None] = field(init=False)
    """What it waits for (last); resolved with the replica, or None when it shall not run any more."""
    replica: Replica | None = None
    """The one that runs it."""
    cancelled: bool = False
    """The caller has cancelled it."""
    suspect: bool = False
    """It is to run alone."""


class Affinity:
    """Which replica had a key last, for the `remember` keys that were used last."""

    def __init__(self, remember: int) -> None:
        self._remember = remember
        self.names: OrderedDict[str, str] = OrderedDict()

    def put(self, key: str, name: str) -> None:
        """Notes which replica had the key last; the empty key belongs to none."""
        if not key:
            return
        self.names[key] = name
        self.names.move_to_end(key)
        if len(self.names) > self._remember:
            self.names.popitem(last=False)

    def forget(self, name: str) -> None:
        """Forgets a replica that is gone, and what it had cached."""
        self.names = OrderedDict((key, value) for key, value in self.names.items() if value != name)


class Members:
    """The replicas, and what is known of them. changed: called after every change, without the lock."""

    def __init__(self, remember: int, *, changed: Callable[[], None], on_lost: OnLost | None = None) -> None:
        # Guards everything here.
        self.lock = threading.RLock()
        # By name, the dead ones included.
        self.replicas: dict[str, Replica] = {}
        self.affinity = Affinity(remember)
        self.supervisor: Supervisor[str] = Supervisor(ENGINES, remember)
        # No request runs.
        self.paused = False
        # Replicas that died and are being replaced, since somebody set it to 0.
        self.restarts = 0
        self._changed = changed
        self._on_lost = on_lost

    def add(self, name: str, engine: RolloutEngine) -> None:
        """Adds a replica, or one in the place of a dead one. It gets requests when it has weights; the router
        looks at the next `resume`.
        """
        with self.lock:
            old = self.replicas.get(name)
            if old is not None and old.dead is None:
                raise ValueError(f"there is a replica {name!r} already")
            self.replicas[name] = Replica(name, engine)
        self._changed()

    def mark_dead(self, name: str, why: str, engine: RolloutEngine | None = None) -> None:
        """Notes a death: the replica gets no more requests; what it works on is re-issued when its own calls
        fail. engine: only if it is this one (its successor has the same name).
        """
        with self.lock:
            replica = self.replicas.get(name)
            if replica is None or replica.dead is not None or engine not in (None, replica.engine):
                return
            replica.dead = why
            self.affinity.forget(name)
            # nothing runs in a pause: whatever it died of, it was no request
            running = [] if self.paused else [call.request.request_id for call in replica.running]
            replica.guilty = self.supervisor.died(running)
            replica.coming = self._on_lost is not None and not self.supervisor.gives_up
        replaced = False
        try:
            # not under the lock: it takes locks of its own
            replaced = replica.coming and self._on_lost is not None and self._on_lost(name, why)
        finally:
            with self.lock:
                replica.coming &= replaced
                self.restarts += replaced
            then = "another is being started in its place" if replaced else "none takes its place"
            _log.warning("replica %s is lost: %s; %s; it ran %d requests", name, why, then, len(running))
            self._changed()

    def give_up(self, name: str, why: str) -> None:
        """Notes that nothing will take the place of a dead replica."""
        with self.lock:
            replica = self.replicas.get(name)
            if replica is not None and replica.coming:
                replica.coming = False
                replica.dead = why
        self._changed()

    @property
    def num_coming(self) -> int:
        """Counts dead replicas that are being replaced."""
        with self.lock:
            return sum(one.coming for one in self.replicas.values())

    def check_hope(self) -> None:
        """Raises RolloutError when no replica lives or is being replaced."""
        with self.lock:
            if all(one.dead is not None and not one.coming for one in self.replicas.values()):
                reasons = "; ".join(f"{one.name}: {one.dead}" for one in self.replicas.values())
                raise RolloutError(
                    f"no replica left ({reasons or 'none was added'}); what they wrote last is in the log"
                )


def deadly_error(request: GenerateRequest, num_deaths: int, error: ReplicaLostError) -> DeadlyRequestError:
    """Returns the error for a request that kills replicas. error: how the last one died."""
    made = 0 if request.prefix is None else len(request.prefix.token_ids)
    last = "\n".join(error.last_lines.splitlines()[-_LAST_LINES:])
    return DeadlyRequestError(
        f"request {request.request_id!r} ({len(request.token_ids)} prompt tokens, {made} made) is given up: "
        f"{num_deaths} replicas died while they were running it, the last one while it was running nothing "
        f"else: {error}; " + (f"it wrote last:\n{last}" if last else "it wrote nothing")
    )
