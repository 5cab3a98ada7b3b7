"""Which replicas a router has: they join, die, are replaced or given up, from any thread.

What a replica was running when it died falls under suspicion (`Suspects`, below: no clock, no engine).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rondo.core.errors import DeadlyRequestError, ReplicaLostError, RolloutError
from rondo.core.types import GenerateRequest
from rondo.rollout.protocol import RolloutEngine

_log = logging.getLogger(__name__)

# (name, why): a replica died. Returns whether another will take its place (`add` or `give_up` follows).
OnLost = Callable[[str, str], bool]


@dataclass(eq=False)
class Replica:
    """One engine, and what runs there."""

    name: str
    engine: RolloutEngine
    running: set[Entry] = field(default_factory=set)
    # Why it is dead; None: it lives.
    dead: str | None = None
    # It is dead, but another will take its place.
    coming: bool = False
    # How long it has had work, counted until `counted_at` (time.monotonic).
    busy_seconds: float = 0.0
    counted_at: float = 0.0


@dataclass(eq=False)
class Entry:
    """A generate call."""

    request: GenerateRequest
    # On its event loop's clock.
    deadline: float | None
    # What it waits for (last); resolved with the replica, or None when it shall not run any more.
    place: asyncio.Future[Replica | None] = field(init=False)
    # The one that runs it.
    replica: Replica | None = None
    cancelled: bool = False
    # See `Suspects.company`.
    company: int | None = None
    # A replica died of it.
    guilty: bool = False


class Affinity:
    """Which replica had a key last, for the `remember` keys that were used last."""

    def __init__(self, remember: int) -> None:
        self._remember = remember
        self.names: OrderedDict[str, str] = OrderedDict()

    def put(self, key: str, name: str) -> None:
        """Notes it; the empty key belongs to no replica."""
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
        self.suspects = Suspects(remember)
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
            replica.coming = self._on_lost is not None
            self.affinity.forget(name)
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
        """Suspects, or finds guilty, what a replica was running when it died."""
        if self.suspects.died([entry.request.request_id for entry in running]):
            next(iter(running)).guilty = True
            return
        suspects = sum(self.suspects.company(entry.request.request_id) is not None for entry in running)
        if suspects:
            _log.warning("%d requests that it was running go into quarantine", suspects)

    @property
    def num_explained(self) -> int:
        """Counts deaths of replicas that were the fault of one request each, or of the same."""
        with self.lock:
            return self.suspects.num_explained

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


# ---- which requests are suspected of ending replicas: pure decisions over small records ----


SUSPECT_DEATHS = 2  # of replicas that were running a request: now it is a suspect
SUSPECTS_TOGETHER = 8  # on one replica; after another death each runs alone
LAST_LINES = 10  # of a dead engine's output, in the error of the request that it died of


class Suspects:
    """Which requests were running on replicas when those died. Most of them are innocent: nobody knows which
    of a replica's requests it died of, until it has died of one that was alone.

    The `remember` requests that saw a death last are known, also when they are issued anew meanwhile. deaths:
    request id → the numbers of the deaths that it saw.
    """

    def __init__(self, remember: int) -> None:
        self._remember = remember
        self.deaths: OrderedDict[str, list[int]] = OrderedDict()
        self._num_deaths = 0
        self._explained: set[int] = set()

    @property
    def num_explained(self) -> int:
        """Counts deaths that some request was found to be the cause of."""
        return len(self._explained)

    def num_deaths(self, request_id: str) -> int:
        """Counts deaths of replicas that were running this request."""
        return len(self.deaths.get(request_id, ()))

    def company(self, request_id: str) -> int | None:
        """Says how many suspects may run on its replica, itself included; None: it is no suspect."""
        deaths = self.num_deaths(request_id)
        if deaths < SUSPECT_DEATHS:
            return None
        return SUSPECTS_TOGETHER if deaths == SUSPECT_DEATHS else 1

    def died(self, running: Sequence[str]) -> bool:
        """Notes that a replica died while it was running these requests. Returns whether that was the fault
        of the only one: it had been a suspect already. Then all the deaths that it saw are explained.
        """
        self._num_deaths += 1
        for request_id in running:
            self.deaths.setdefault(request_id, []).append(self._num_deaths)
            self.deaths.move_to_end(request_id)
        guilty = len(running) == 1 and len(self.deaths[running[0]]) > SUSPECT_DEATHS
        if guilty:
            self._explained.update(self.deaths[running[0]])
        while len(self.deaths) > self._remember:
            self.deaths.popitem(last=False)
        return guilty

    def ended(self, request_id: str) -> None:
        """Clears a request that a replica answered, and lives."""
        self.deaths.pop(request_id, None)


def deadly_error(request: GenerateRequest, num_deaths: int, error: ReplicaLostError) -> DeadlyRequestError:
    """Returns the error of a request that replicas die of. error: how the last one did."""
    made = 0 if request.prefix is None else len(request.prefix.token_ids)
    last = "\n".join(error.last_lines.splitlines()[-LAST_LINES:])
    return DeadlyRequestError(
        f"request {request.request_id!r} ({len(request.token_ids)} prompt tokens, {made} made) is given up: "
        f"{num_deaths} replicas died while they were running it, the last one while it was running nothing "
        f"else: {error}; " + (f"it wrote last:\n{last}" if last else "it wrote nothing")
    )
