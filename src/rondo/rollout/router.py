"""The router: which replica gets a request, and what becomes of it when that replica dies.

    generate ─▶ a replica with room? ─ yes ─▶ engine.generate ─┬─▶ completion
        ▲              │ no: the queue: suspects, urgent, rest │
        └──────────────┴── ReplicaLostError: the tokens so far become the prefix

Requests wait in the queue while the router is paused, while every replica is full, and while replicas that
died are being replaced or have no weights yet. Requests that a replica was running when it died are suspects
(`system/pool.py`): each runs alone, on one replica that is theirs meanwhile. Tokens pass through untouched.

Requests belong to one event loop; replicas may come and go from any thread (`members`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rondo.core.errors import ReplicaLostError, RolloutError
from rondo.core.types import Completion, GenerateRequest, StepStats
from rondo.rollout.members import Members, OnLost, Replica, RoutedCall, deadly_error
from rondo.rollout.protocol import OnTokens, RolloutEngine
from rondo.rollout.requests import complete_as_it_is, so_far

REMEMBER = 4096  # affinity keys, and requests that were running when a replica died
_log = logging.getLogger(__name__)


def choose(in_flight: Mapping[str, int], limit: int, preferred: str | None = None) -> str | None:
    """Chooses the replica for a request; None: wait.

    in_flight: how many requests each has that can take one; limit: how many it may have. preferred: the one
    that has the request's prefix in the cache. It is the least loaded with room, the first of equals; or the
    preferred one, while that is at most a quarter of `limit` busier.
    """
    least = min(in_flight, key=in_flight.__getitem__, default=None)
    if least is None or in_flight[least] >= limit:
        return None
    if preferred is not None and preferred in in_flight:
        busy = in_flight[preferred]
        if busy < limit and busy <= in_flight[least] + max(1, limit // 4):
            return preferred
    return least


class Router:
    """Routes requests over named engines of one model; its `generate` is an engine's.

    limit: requests in flight on one replica at most. on_lost: told once for every replica that dies, from any
    thread. members: which replicas there are.
    """

    def __init__(
        self,
        engines: Mapping[str, RolloutEngine],
        *,
        limit: int,
        on_lost: OnLost | None = None,
        remember: int = REMEMBER,
    ) -> None:
        self._limit = limit
        self._queues: dict[str, deque[RoutedCall]] = {kind: deque() for kind in ("suspect", "urgent", "rest")}
        self._active: dict[str, RoutedCall] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._in_flight = 0
        # Since the last `statistics`.
        self._most_in_flight = 0
        self._longest_queue = 0
        self._reissued = 0
        self.members = Members(remember, changed=self._wake, on_lost=on_lost)
        self._replicas = self.members.replicas
        self._affinity = self.members.affinity
        self._supervisor = self.members.supervisor
        for name, engine in engines.items():
            self.members.add(name, engine)

    def engines(self) -> dict[str, RolloutEngine]:
        """Returns the engines that live, by name."""
        with self.members.lock:
            return {name: one.engine for name, one in self._replicas.items() if one.dead is None}

    def load(self) -> tuple[int, int]:
        """Returns how many requests are in an engine, and how many wait for one."""
        with self.members.lock:
            return self._in_flight, sum(map(len, self._queues.values()))

    # ---- requests ----

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Does as `RolloutEngine.generate`, on whichever replica; the deadline covers waiting and being re-
        issued.

        Raises RolloutError when no replica is left, DeadlyRequestError when replicas die of it.
        """
        self._loop = asyncio.get_running_loop()
        if request.request_id in self._active:
            raise RolloutError(f"request {request.request_id!r} is in flight already; ids must be unique")
        seconds = request.deadline_seconds
        call = RoutedCall(request, None if seconds is None else self._loop.time() + seconds)
        self._active[request.request_id] = call
        try:
            while True:
                replica = await self._place(call)
                if replica is None:
                    return so_far(call.request, "cancelled" if call.cancelled else "deadline")
                done = await self._run(call, replica, on_tokens)
                if done is not None:
                    return done
        finally:
            del self._active[request.request_id]

    async def cancel(self, request_id: str) -> None:
        """Has the pending generate call return what it has. Unknown ids are ignored."""
        call = self._active.get(request_id)
        if call is None:
            return
        call.cancelled = True
        replica = call.replica
        if replica is not None:
            try:
                await replica.engine.cancel(request_id)
            except ReplicaLostError as error:  # then the call itself ends, with what it has
                self.members.mark_dead(replica.name, str(error), replica.engine)
        elif not call.place.done():
            call.place.set_result(None)

    async def _place(self, call: RoutedCall) -> Replica | None:
        """Returns the replica that will run it, counted there; None: cancelled, or the deadline has come."""
        place = call.place = asyncio.get_running_loop().create_future()
        with self.members.lock:
            call.suspect = self._supervisor.is_suspect(call.request.request_id)
        kind = "urgent" if call.request.urgent else "rest"
        queue = self._queues["suspect" if call.suspect else kind]
        queue.append(call)
        if len(queue) == 1:
            self._pump()
        else:  # those before it have no place either
            self._count_waiting()
        try:
            if call.deadline is None:
                return await place
            async with asyncio.timeout_at(call.deadline):
                return await place
        except (TimeoutError, asyncio.CancelledError) as error:
            if place.done() and not place.cancelled() and place.exception() is None:
                replica = place.result()
                if replica is not None:  # it had just got one
                    self._leave(call, replica)
            if isinstance(error, asyncio.CancelledError):
                raise
            return None
        finally:
            if place.cancelled() or place.exception() is not None or place.result() is None:
                with contextlib.suppress(ValueError):  # it is out of the queue
                    queue.remove(call)
                self._pump()  # others may have waited behind it

    async def _run(self, call: RoutedCall, replica: Replica, on_tokens: OnTokens | None) -> Completion | None:
        """Runs a call on a replica. None: the replica died, and the call's request has the tokens so far as
        its prefix.
        """
        request = call.request
        if call.deadline is not None:
            left = call.deadline - asyncio.get_running_loop().time()
            request = dataclasses.replace(request, deadline_seconds=max(0.001, left))
        call.replica = replica
        try:
            if call.cancelled:  # between getting its place and this
                return so_far(request, "cancelled")
            done = await replica.engine.generate(request, on_tokens)
            if done.finish_reason in ("stop", "length"):
                with self.members.lock:
                    self._supervisor.ended(request.request_id)
            return done
        except ReplicaLostError as error:
            return self._after_death(call, replica, error)
        finally:
            call.replica = None
            self._leave(call, replica)

    def _after_death(self, call: RoutedCall, replica: Replica, error: ReplicaLostError) -> Completion | None:
        """Says what becomes of a request whose replica died. None: it goes on elsewhere."""
        self.members.mark_dead(replica.name, str(error), replica.engine)
        if isinstance(error.partial, Completion):
            call.request = dataclasses.replace(call.request, prefix=error.partial)
        if call.cancelled:
            return so_far(call.request, "cancelled")
        whole = complete_as_it_is(call.request)
        if whole is None and replica.guilty == call.request.request_id:
            deadly = deadly_error(call.request, self._supervisor.num_deaths(replica.guilty), error)
            _log.error("%s", deadly)
            raise deadly from error
        self._reissued += whole is None
        return whole

    # ---- life of all replicas ----

    async def pause(self) -> None:
        """Stops every engine at a token boundary; new requests wait in the queue."""
        self._clock()
        self.members.paused = True
        await self._everywhere("pause")

    async def resume(self) -> None:
        """Goes on, also with replicas that have got weights meanwhile."""
        await self._everywhere("resume")
        self._clock()
        self.members.paused = False
        self._pump()

    async def sleep(self) -> None:
        await self._everywhere("sleep")

    async def wake(self) -> None:
        await self._everywhere("wake")

    async def statistics(self) -> StepStats:
        """Returns counters since the last call: the engines' own, and rollout/tokens_per_second (of an
        engine, in the time in which it had work), queue_length and in_flight (the highest), reissued,
        engine_restarts.
        """
        self._clock()
        parts = await self._everywhere("stats")
        total = StepStats().merge(*parts.values())
        for name, part in parts.items():
            replica = self._replicas[name]
            seconds = replica.busy_seconds
            replica.busy_seconds = 0.0
            tokens = part.sums.get("perf/decoded_tokens", 0.0)
            if tokens and seconds:
                total.add_mean("rollout/tokens_per_second", tokens, seconds)
                total.add_min("rollout/tokens_per_second_min", tokens / seconds)
                total.add_max("rollout/tokens_per_second_max", tokens / seconds)
        with self.members.lock:
            total.add_max("rollout/queue_length", float(self._longest_queue))
            total.add_max("rollout/in_flight", float(self._most_in_flight))
            total.add_sum("rollout/reissued", float(self._reissued))
            total.add_sum("rollout/engine_restarts", float(self.members.restarts))
            self._longest_queue = 0
            self._most_in_flight = self._in_flight
            self._reissued = 0
            self.members.restarts = 0
        return total

    async def _everywhere(self, operation: str) -> dict[str, Any]:
        """Returns the results of the engines that live, by name; one that dies of it is marked dead."""
        self._loop = asyncio.get_running_loop()
        engines = self.engines()
        calls = (getattr(engine, operation)() for engine in engines.values())
        results = dict(zip(engines, await asyncio.gather(*calls, return_exceptions=True), strict=True))
        for name, result in list(results.items()):
            if isinstance(result, ReplicaLostError):
                self.members.mark_dead(name, str(result), engines[name])
                del results[name]
        for result in results.values():
            if isinstance(result, BaseException):
                raise result
        return results

    # ---- the queues: on the event loop's thread, but for _wake ----

    def _wake(self) -> None:
        """Has `_pump` run on the event loop; from any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._pump)

    def _pump(self) -> None:
        """Places the calls at the front of the queues, or fails them with a RolloutError when no replica is
        left.
        """
        with self.members.lock:
            if not any(self._queues.values()):
                return  # nobody waits
            serving = [one for one in self._replicas.values() if one.dead is None and one.engine.version >= 0]
            if not serving:
                self._tell_the_hopeless()
            if not self.members.paused:
                own = self._seat_suspect(serving)
                in_flight = {one.name: len(one.running) for one in serving if one is not own}
                for queue in (self._queues["urgent"], self._queues["rest"]):
                    while queue:
                        call = queue[0]
                        if not call.place.done():  # else it was cancelled, or its time is up
                            had_it_last = self._affinity.names.get(call.request.affinity)
                            name = choose(in_flight, self._limit, had_it_last)
                            if name is None:
                                break
                            self._seat(call, self._replicas[name])
                            in_flight[name] += 1
                        queue.popleft()
            self._count_waiting()

    def _count_waiting(self) -> None:
        with self.members.lock:
            self._longest_queue = max(self._longest_queue, sum(map(len, self._queues.values())))

    def _tell_the_hopeless(self) -> None:
        """Fails the waiting calls, unless a replica is being started or waits for weights."""
        try:
            self.members.check_hope()
        except RolloutError as error:
            for queue in self._queues.values():
                while call := _first(queue):
                    call.place.set_exception(RolloutError(str(error)))

    def _seat_suspect(self, serving: list[Replica]) -> Replica | None:
        """Seats the next suspect. Returns the replica that is kept for suspects while there are any: the
        least loaded one, once it has answered the calls that it had. The other replicas go on with all other
        calls.
        """
        queue = self._queues["suspect"]
        own = next((one for one in serving if one.runs_suspect), None)
        if not queue:
            return own
        cleared = [call for call in queue if not self._supervisor.is_suspect(call.request.request_id)]
        for call in cleared:
            call.suspect = False
            queue.remove(call)
        self._queues["rest"].extendleft(reversed(cleared))
        suspect = _first(queue)
        if own is None and suspect is not None:
            own = min(serving, key=lambda one: len(one.running), default=None)
            if own is not None and not own.running:
                self._seat(suspect, own)
                queue.popleft()
        return own

    def _seat(self, call: RoutedCall, replica: Replica) -> None:
        """Gives a waiting request its place, counted there."""
        self._affinity.put(call.request.affinity, replica.name)
        self._clock()
        replica.running.add(call)
        self._in_flight += 1
        self._most_in_flight = max(self._most_in_flight, self._in_flight)
        call.place.set_result(replica)

    def _leave(self, call: RoutedCall, replica: Replica) -> None:
        with self.members.lock:
            self._clock()
            replica.running.remove(call)
            self._in_flight -= 1
        self._pump()

    def _clock(self) -> None:
        """Counts the time in which replicas had work; to be called before anything changes that."""
        now = time.monotonic()
        with self.members.lock:
            for one in self._replicas.values():
                if one.running and not self.members.paused:
                    one.busy_seconds += now - one.counted_at
                one.counted_at = now


def _first(queue: deque[RoutedCall]) -> RoutedCall | None:
    """Returns the first call that still waits; drops those before it that do not."""
    while queue and queue[0].place.done():
        queue.popleft()
    return queue[0] if queue else None
