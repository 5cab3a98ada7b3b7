"""Which replicas a router has: they join, die, are replaced or given up, from any thread.

What a replica was running when it died falls under suspicion (`quarantine`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from rondo.errors import RolloutError
from rondo.rollout.protocol import RolloutEngine
from rondo.rollout.quarantine import Suspects
from rondo.types import GenerateRequest

_log = logging.getLogger(__name__)

# (name, why): a replica died. Returns whether another will take its place (`add` or `give_up` follows).
OnLost = Callable[[str, str], bool]


@dataclass(eq=False)
class Replica:
    """running: in flight here. dead: why; coming: dead, but another will take its place."""

    name: str
    engine: RolloutEngine
    running: set[Entry] = field(default_factory=set)
    dead: str | None = None
    coming: bool = False
    busy_seconds: float = 0.0
    counted_at: float = 0.0

    def admits(self, suspect: Entry, limit: int) -> bool:
        """Suspects of one kind may run together."""
        assert suspect.company is not None
        alike = all(one.company == suspect.company for one in self.running)
        return alike and len(self.running) < min(suspect.company, limit)


@dataclass(eq=False)
class Entry:
    """A generate call. deadline: on its event loop's clock. place: what it waits for (last); resolved with
    the replica, or None when it shall not run any more. replica: runs it. company: see `Suspects.company`.
    guilty: a replica died of it.
    """

    request: GenerateRequest
    deadline: float | None
    place: asyncio.Future[Replica | None] = field(init=False)
    replica: Replica | None = None
    cancelled: bool = False
    company: int | None = None
    guilty: bool = False


class Members:
    """lock: guards everything here, and `suspects`. replicas: by name, the dead ones included. paused: no
    request runs. restarts: replicas that died and are being replaced, since somebody set it to 0.

    forget: a replica's name is nobody's any more. changed: called after every change, without the lock.
    """

    def __init__(
        self,
        suspects: Suspects,
        *,
        forget: Callable[[str], None],
        changed: Callable[[], None],
        on_lost: OnLost | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.replicas: dict[str, Replica] = {}
        self.paused = False
        self.restarts = 0
        self._suspects = suspects
        self._forget = forget
        self._changed = changed
        self._on_lost = on_lost

    def add(self, name: str, engine: RolloutEngine) -> None:
        """One more replica, or one in the place of a dead one. It gets requests when it has weights; the
        router looks at the next `resume`.
        """
        with self.lock:
            old = self.replicas.get(name)
            if old is not None and old.dead is None:
                raise ValueError(f"there is a replica {name!r} already")
            self.replicas[name] = Replica(name, engine)
        self._changed()

    def mark_dead(self, name: str, why: str, engine: RolloutEngine | None = None) -> None:
        """It gets no more requests; what it works on is re-issued when its own calls fail. engine: only if it
        is this one (its successor has the same name).
        """
        with self.lock:
            replica = self.replicas.get(name)
            if replica is None or replica.dead is not None or engine not in (None, replica.engine):
                return
            replica.dead = why
            replica.coming = self._on_lost is not None
            self._forget(name)
            if not self.paused:  # nothing runs in a pause: whatever it died of, it was no request
                self._blame(replica.running)
        replaced = False
        try:
            # not under the lock: it takes locks of its own
            replaced = self._on_lost is not None and self._on_lost(name, why)
        finally:
            with self.lock:
                replica.coming &= replaced
                self.restarts += replaced
            then = "another is being started in its place" if replaced else "none takes its place"
            _log.warning("replica %s is lost: %s; %s", name, why, then)
            self._changed()

    def _blame(self, running: set[Entry]) -> None:
        """A replica died while it was running these."""
        if self._suspects.died([entry.request.request_id for entry in running]):
            next(iter(running)).guilty = True
            return
        suspects = sum(self._suspects.company(entry.request.request_id) is not None for entry in running)
        if suspects:
            _log.warning("%d requests that it was running go into quarantine", suspects)

    @property
    def num_explained(self) -> int:
        """Deaths of replicas that were the fault of one request each, or of the same."""
        with self.lock:
            return self._suspects.num_explained

    def give_up(self, name: str, why: str) -> None:
        """Nothing will take the place of a dead replica."""
        with self.lock:
            replica = self.replicas.get(name)
            if replica is not None and replica.coming:
                replica.coming, replica.dead = False, why
        self._changed()

    @property
    def num_coming(self) -> int:
        """Dead replicas that are being replaced."""
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
