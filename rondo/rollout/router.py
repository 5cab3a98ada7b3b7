"""The router: which replica gets a request, and what becomes of it when that replica dies.

    generate ─▶ a replica with room? ─ yes ─▶ engine.generate ─┬─▶ completion
        ▲              │ no: the queue, in order               │
        └──────────────┴── ReplicaLostError: the tokens so far become the prefix

Requests wait in the queue while the router is paused, while every replica is full, and while replicas that
died are being replaced or have no weights yet. Decisions are in `routing`; tokens pass through untouched.

Requests belong to one event loop; replicas may come and go from any thread (`_lock` guards their table).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rondo.errors import ReplicaLostError, RolloutError
from rondo.rollout.protocol import OnTokens, RolloutEngine
from rondo.rollout.requests import complete_as_it_is, so_far
from rondo.rollout.routing import Affinity, Load, choose
from rondo.types import Completion, GenerateRequest, StepStats

REMEMBER = 4096  # affinity keys
_log = logging.getLogger(__name__)

# (name, why): a replica died. Returns whether another will take its place (`replace` or `give_up` follows).
OnLost = Callable[[str, str], bool]


@dataclass(eq=False)
class _Replica:
    """dead: why; coming: dead, but another will take its place. drained: somebody waits for it to be idle."""

    name: str
    engine: RolloutEngine
    in_flight: int = 0
    dead: str | None = None
    coming: bool = False
    drained: asyncio.Future[None] | None = None
    busy_seconds: float = 0.0
    counted_at: float = 0.0

    def serves(self) -> bool:
        return self.dead is None and self.drained is None and self.engine.version >= 0


@dataclass(eq=False)
class _Entry:
    """A generate call. place: resolved with its replica, or None when it shall not run any more."""

    request: GenerateRequest
    deadline: float | None
    replica: _Replica | None = None
    place: asyncio.Future[_Replica | None] | None = None
    cancelled: bool = False


@dataclass
class _Counters:
    """Since the last `statistics`."""

    reissued: int = 0
    queue_length: int = 0
    in_flight: int = 0


class Router:
    """Routes requests over named engines of one model; its `generate` is an engine's.

    limit: requests in flight on one replica at most. max_queue: of the callers that ask to be refused rather
    than wait (`bounded`). on_lost: told once for every replica that dies, from any thread.
    """

    def __init__(
        self,
        engines: Mapping[str, RolloutEngine],
        *,
        limit: int,
        max_queue: int = 1024,
        on_lost: OnLost | None = None,
        remember: int = REMEMBER,
    ) -> None:
        self._limit, self._max_queue, self._on_lost = limit, max_queue, on_lost
        self._lock = threading.RLock()
        self._replicas: dict[str, _Replica] = {}
        self._affinity = Affinity(remember)
        self._queue: deque[_Entry] = deque()
        self._active: dict[str, _Entry] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._paused = False
        self._counters = _Counters()
        for name, engine in engines.items():
            self.add(name, engine)

    # ---- replicas: from any thread ----

    def engines(self) -> dict[str, RolloutEngine]:
        """Those that live, by name."""
        with self._lock:
            return {name: one.engine for name, one in self._replicas.items() if one.dead is None}

    def add(self, name: str, engine: RolloutEngine) -> None:
        """One more replica, or one in the place of a dead one. It gets requests when it has weights; the
        router looks at the next `resume`.
        """
        with self._lock:
            old = self._replicas.get(name)
            if old is not None and old.dead is None:
                raise ValueError(f"there is a replica {name!r} already")
            self._replicas[name] = _Replica(name, engine)
        self._wake()

    def mark_dead(self, name: str, why: str, engine: RolloutEngine | None = None) -> None:
        """It gets no more requests; what it works on is re-issued when its own calls fail. engine: only if it
        is this one (its successor has the same name).
        """
        with self._lock:
            replica = self._replicas.get(name)
            if replica is None or replica.dead is not None or engine not in (None, replica.engine):
                return
            replica.dead = why
            replica.coming = self._on_lost is not None and replica.drained is None
            self._affinity.forget(name)
        # not under the lock: it takes locks of its own
        if replica.coming and self._on_lost is not None and not self._on_lost(name, why):
            replica.coming = False
        then = "another is being started in its place" if replica.coming else "none takes its place"
        _log.warning("replica %s is lost: %s; %s", name, why, then)
        self._wake()

    def give_up(self, name: str, why: str) -> None:
        """Nothing will take the place of a dead replica."""
        with self._lock:
            self._replicas[name].coming, self._replicas[name].dead = False, why
        self._wake()

    @property
    def num_coming(self) -> int:
        """Dead replicas that are being replaced."""
        with self._lock:
            return sum(one.coming for one in self._replicas.values())

    def check_hope(self) -> None:
        """Raises RolloutError when no replica lives or is being replaced."""
        with self._lock:
            if all(one.dead is not None and not one.coming for one in self._replicas.values()):
                reasons = "; ".join(f"{one.name}: {one.dead}" for one in self._replicas.values())
                raise RolloutError(
                    f"no replica left ({reasons or 'none was added'}); what they wrote last is in the log"
                )

    async def remove(self, name: str) -> RolloutEngine:
        """Take a replica out when it has answered what it works on; the engine is the caller's to close."""
        with self._lock:
            replica = self._replicas[name]
            replica.drained = asyncio.get_running_loop().create_future()
        if replica.in_flight:
            await replica.drained
        with self._lock:
            del self._replicas[name]
            self._affinity.forget(name)
        self._pump()
        return replica.engine

    # ---- requests ----

    async def generate(
        self, request: GenerateRequest, on_tokens: OnTokens | None = None, *, bounded: bool = False
    ) -> Completion:
        """As `RolloutEngine.generate`, on whichever replica; the deadline covers waiting and being re-issued.

        bounded: RolloutError at once when the queue is full. RolloutError when no replica is left.
        """
        self._loop = asyncio.get_running_loop()
        if request.request_id in self._active:
            raise RolloutError(f"request {request.request_id!r} is in flight already; ids must be unique")
        deadline = request.deadline_seconds
        entry = _Entry(request, None if deadline is None else time.monotonic() + deadline)
        self._active[request.request_id] = entry
        try:
            if bounded:
                self._refuse_when_full(request)
            while True:
                replica = await self._place(entry)
                if replica is None:
                    return so_far(entry.request, "cancelled" if entry.cancelled else "deadline")
                done = await self._run(entry, replica, on_tokens)
                if done is not None:
                    return done
        finally:
            del self._active[request.request_id]

    async def cancel(self, request_id: str) -> None:
        """The pending generate call returns what it has. Unknown ids are ignored."""
        entry = self._active.get(request_id)
        if entry is None:
            return
        entry.cancelled, replica = True, entry.replica
        if replica is not None:
            try:
                await replica.engine.cancel(request_id)
            except ReplicaLostError as error:  # then the call itself ends, with what it has
                self.mark_dead(replica.name, str(error), replica.engine)
        elif entry.place is not None and not entry.place.done():
            entry.place.set_result(None)

    def _refuse_when_full(self, request: GenerateRequest) -> None:
        if len(self._queue) >= self._max_queue:
            raise RolloutError(
                f"request {request.request_id!r} is refused: {len(self._queue)} requests wait already; try "
                "again later"
            )

    async def _place(self, entry: _Entry) -> _Replica | None:
        """The replica that will run it, counted there; None: cancelled, or the deadline has come."""
        place = entry.place = asyncio.get_running_loop().create_future()
        self._queue.append(entry)
        self._pump()
        try:
            async with asyncio.timeout(_left(entry)):
                return await place
        except (TimeoutError, asyncio.CancelledError) as error:
            if place.cancelled():
                if entry in self._queue:
                    self._queue.remove(entry)
            elif place.exception() is None and (replica := place.result()) is not None:
                self._count(replica, -1)  # it had just got one
                self._pump()
            if isinstance(error, asyncio.CancelledError):
                raise
            return None
        finally:
            entry.place = None

    async def _run(self, entry: _Entry, replica: _Replica, on_tokens: OnTokens | None) -> Completion | None:
        """None: the replica died, and the entry's request has the tokens so far as its prefix."""
        request = dataclasses.replace(entry.request, deadline_seconds=_left(entry))
        entry.replica = replica
        try:
            if entry.cancelled:  # between getting its place and this
                return so_far(entry.request, "cancelled")
            return await replica.engine.generate(request, on_tokens)
        except ReplicaLostError as error:
            self.mark_dead(replica.name, str(error), replica.engine)
            if isinstance(error.partial, Completion):
                entry.request = dataclasses.replace(entry.request, prefix=error.partial)
            if entry.cancelled:
                return so_far(entry.request, "cancelled")
            self._counters.reissued += 1
            return complete_as_it_is(entry.request)
        finally:
            entry.replica = None
            self._count(replica, -1)
            self._pump()

    # ---- life of all replicas ----

    async def pause(self) -> None:
        """Every engine stops at a token boundary; new requests wait in the queue."""
        self._clock()
        self._paused = True
        await self._everywhere("pause")

    async def resume(self) -> None:
        """Go on, also with replicas that have got weights meanwhile."""
        await self._everywhere("resume")
        self._clock()
        self._paused = False
        self._pump()

    async def sleep(self) -> None:
        await self._everywhere("sleep")

    async def wake(self) -> None:
        await self._everywhere("wake")

    async def statistics(self) -> StepStats:
        """Counters since the last call: the engines' own, and rollout/tokens_per_second (of an engine, in the
        time in which it had work), queue_length and in_flight (the highest), reissued.
        """
        self._clock()
        parts = await self._everywhere("stats")
        total = StepStats.merged(parts.values())
        for name, part in parts.items():
            replica = self._replicas.get(name)
            if replica is None:  # taken out meanwhile
                continue
            seconds, replica.busy_seconds = replica.busy_seconds, 0.0
            tokens = part.sums.get("perf/decoded_tokens", 0.0)
            if tokens and seconds:
                total.add_mean("rollout/tokens_per_second", tokens, seconds)
                total.add_min("rollout/tokens_per_second_min", tokens / seconds)
                total.add_max("rollout/tokens_per_second_max", tokens / seconds)
        counters, self._counters = self._counters, _Counters(in_flight=self._in_flight())
        total.add_max("rollout/queue_length", float(counters.queue_length))
        total.add_max("rollout/in_flight", float(counters.in_flight))
        total.add_sum("rollout/reissued", float(counters.reissued))
        return total

    async def _everywhere(self, operation: str) -> dict[str, Any]:
        """The results of the engines that live, by name; one that dies of it is marked dead."""

        async def one(name: str, engine: RolloutEngine) -> tuple[str, Any] | None:
            try:
                return name, await getattr(engine, operation)()
            except ReplicaLostError as error:
                self.mark_dead(name, str(error), engine)
                return None

        self._loop = asyncio.get_running_loop()
        done = await asyncio.gather(*(one(name, engine) for name, engine in self.engines().items()))
        return dict(result for result in done if result is not None)

    # ---- inside: the event loop's thread, but for _wake ----

    def _wake(self) -> None:
        """From any thread: have the queue looked at."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._pump)

    def _pump(self) -> None:
        """Give those at the front of the queue their places."""
        with self._lock:
            while self._queue and (self._queue[0].place is None or self._queue[0].place.done()):
                self._queue.popleft()
            self._fail_all_without_hope()
            while self._queue and (name := self._choose(self._queue[0])) is not None:
                entry, replica = self._queue.popleft(), self._replicas[name]
                if entry.place is None or entry.place.done():
                    continue
                self._affinity.put(entry.request.affinity, name)
                self._count(replica, 1)
                entry.place.set_result(replica)
            self._counters.queue_length = max(self._counters.queue_length, len(self._queue))

    def _choose(self, entry: _Entry) -> str | None:
        if self._paused:
            return None
        loads = [
            Load(one.name, one.in_flight, self._limit) for one in self._replicas.values() if one.serves()
        ]
        return choose(loads, self._affinity.get(entry.request.affinity))

    def _fail_all_without_hope(self) -> None:
        try:
            self.check_hope()
        except RolloutError as error:
            while self._queue:
                place = self._queue.popleft().place
                if place is not None and not place.done():
                    place.set_exception(RolloutError(str(error)))

    def _in_flight(self) -> int:
        with self._lock:
            return sum(one.in_flight for one in self._replicas.values())

    def _count(self, replica: _Replica, change: int) -> None:
        self._clock()
        replica.in_flight += change
        self._counters.in_flight = max(self._counters.in_flight, self._in_flight())
        if replica.drained is not None and replica.in_flight == 0 and not replica.drained.done():
            replica.drained.set_result(None)

    def _clock(self) -> None:
        """Count the time in which replicas had work. Call it before anything changes that."""
        now = time.monotonic()
        with self._lock:
            for one in self._replicas.values():
                if one.in_flight and not self._paused:
                    one.busy_seconds += now - one.counted_at
                one.counted_at = now


def _left(entry: _Entry) -> float | None:
    """Seconds to the deadline, above 0; None: there is none."""
    return None if entry.deadline is None else max(0.001, entry.deadline - time.monotonic())
