"""vLLM as a RolloutEngine: asyncio outside, one step thread inside.

    generate() ──inbox──▶ step thread: build · drain inbox → step → stamp → drain inbox → …
       ▲                    (owns vLLM's engine; sleeps while paused, idle, or without weights)
       └──reply (loop.call_soon_threadsafe)── new tokens, completions
    begin, receive, commit: actions in the same inbox, between two steps; their caller waits for them

A step is over when it returns: pausing is not stepping, and the version that is served when a step starts is
that of its tokens. `_condition` guards the inbox and the flags; all else belongs to the step thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from rondo.core.errors import ReplicaLostError, RolloutError, RondoError, WeightSyncError
from rondo.core.types import Completion, FinishReason, GenerateRequest, StepStats
from rondo.rollout.adapters import Shelf
from rondo.rollout.protocol import EngineSpec, OnTokens
from rondo.rollout.requests import News, Pending, complete_as_it_is, deliver, so_far
from rondo.rollout.third_party_engine import ThirdPartyEngine
from rondo.rollout.vllm.options import ENGINE
from rondo.weights.bucket import SharedBucket

if TYPE_CHECKING:
    from rondo.rollout.vllm.core import VllmCore

_log = logging.getLogger(__name__)
_COLDEST = 0.01  # vLLM takes it for smaller temperatures, too


class VllmEngine(ThirdPartyEngine[Pending]):
    """One vLLM engine with its workers. The constructor blocks until it can receive weights.

    To be made in a process whose environment is `ENGINE.environment(spec)`. Raises ConfigError; RolloutError
    with vLLM's own message where it does not start.
    """

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec, ENGINE, _COLDEST)
        self._paused = False
        self._weights_awake = False
        self._base_open = False  # of the update that is under way
        self._lost = ""  # why the engine cannot go on at all; "" while it can
        self._condition = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._pending: dict[str, Pending] = {}  # by key, of the step thread
        self._numbers = itertools.count()
        self._stats = StepStats()
        self._core: VllmCore
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="rondo-vllm", daemon=True)
        self._thread.start()
        started.result()
        _log.info("%s", self.describe())

    def describe(self) -> str:
        """Writes `vLLM 0.32.0 rollout engine: cpu, tensor parallel 2, key/value cache 64.0 MiB`."""
        mebibytes = self._core.cache_bytes / (1 << 20)
        return (
            f"vLLM {self._capabilities.engine_version} rollout engine: {self._spec.device}, tensor parallel "
            f"{self._spec.tensor_parallel}, key/value cache {mebibytes:.1f} MiB"
        )

    # ---- requests ----

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Returns the completion of one request; on_tokens gets new tokens after every step.

        Raises RolloutError (an impossible request; no weights yet; asleep or closed), WeightSyncError (the
        last update failed), ReplicaLostError with the tokens so far (vLLM cannot go on), LostImageError where
        an image of it cannot be read any more.
        """
        self._check(request)
        matcher = self._stop_text.matcher(request)
        done = complete_as_it_is(request, matcher)
        if done is not None:
            return done
        pending = Pending(request, on_tokens, key=f"{next(self._numbers)}", matcher=matcher)
        self._in_flight[request.request_id] = pending
        try:
            if await pending.read_images(self._images):
                return pending.future.result()
            if not self._post(lambda: self._add(pending)):
                self._check_alive(request)
                raise RolloutError(f"request {request.request_id!r}: the rollout engine is closed")
            return await pending.future
        except asyncio.CancelledError:
            self._post(lambda: self._take_out(pending.key, "cancelled"))
            raise
        finally:
            del self._in_flight[request.request_id]

    async def cancel(self, request_id: str) -> None:
        """Has the pending generate call return what it has. Unknown (finished) requests are ignored."""
        pending = self._in_flight.get(request_id)
        if pending is None:
            return
        if pending.waits_for_images:
            pending.settle(so_far(pending.request, "cancelled"))
        else:
            self._post(lambda: self._take_out(pending.key, "cancelled"))

    async def pause(self) -> None:
        """Stops; when this returns no step is running. Requests keep their place."""
        with self._condition:
            self._paused = True
        await self._on_thread(lambda: None)

    async def resume(self) -> None:
        """Goes on after `pause`. After a failed update what waits here gets its WeightSyncError."""
        with self._condition:
            self._paused = False
            self._condition.notify()
        if self._weights.failure:
            self._post(lambda: self._fail(lambda _: WeightSyncError(self._weights.failure)))

    # ---- weights ----

    def begin(self, version: int) -> None:
        """Starts to receive `version`. Until `commit` nothing is generated. Raises WeightSyncError."""
        self._refuse_in_flight(f"begin({version})", WeightSyncError, held=self._paused)

        def start() -> None:
            self._weights.begin(version)
            if self._asleep and not self._weights_awake:
                self._core.wake("weights")
                self._weights_awake = True
            self._base_open = self._shelf is None
            if self._base_open:
                self._core.begin()

        self._update("begin", start)

    def receive_bucket(self, bucket: SharedBucket) -> None:
        """See ThirdPartyEngine.receive_bucket; after an error the update has failed."""

        def load() -> None:
            for entry in bucket.entries:
                self._weights.take(entry.name, entry.shape)
            base = self._without_factors(bucket)
            if base is None:
                return
            if not self._base_open:  # with adapters by themselves it comes only sometimes
                self._core.begin()
                self._base_open = True
            self._core.receive(base, self._parts_in(base))

        self._update("receive", load)

    def look(self, bucket: SharedBucket) -> list[dict[str, int]]:
        """See ThirdPartyEngine.look."""
        return self._core.look(bucket)

    def close_buckets(self) -> None:
        """See ThirdPartyEngine.close_buckets."""
        self._core.close_buckets()

    def commit(self, version: int, checksums: Mapping[str, int] | None = None) -> None:
        """Serves `version`, all of whose tensors are there. Raises WeightSyncError naming what is missing or
        differs.
        """
        if self._weights.arriving != version:
            self._weights.check(version)  # raises, but no update has failed: what was served is served on

        def change() -> None:
            if self._base_open:
                first, *others = self._core.sums()
                if any(other != first for other in others):
                    raise WeightSyncError("the tensor-parallel workers did not read the same bytes")
                self._weights.note(first)
            self._weights.check(version, checksums)
            if self._base_open:
                self._core.commit()
            if self._shelf is None:
                self._core.name_weights(version)
            else:
                self._serve_adapters(self._shelf, version)
            self._weights.finish(version)

        self._update("commit", change)

    # ---- life ----

    async def sleep(self) -> None:
        """Gives up the cache and the weights; paused or idle. It serves nothing until the next update."""
        self._refuse_sleep(held=self._paused)

        def change() -> None:
            if not self._asleep:
                self._core.sleep()
                self._asleep = True
                self._weights_awake = False  # with adapters by themselves they come back as they were

        await self._on_thread(change)

    async def wake(self) -> None:
        """Makes the cache again. What is in flight goes on after `resume`, if weights have come."""

        def change() -> None:
            if not self._asleep:
                return
            if self._weights_awake:
                self._core.wake("kv_cache")
            else:
                self._core.wake()
            if self._shelf is None and not self._weights_awake:
                self._weights.fail("vLLM gave its weights up when it went to sleep, and has got no others")
            self._asleep = False

        await self._on_thread(change)

    async def stats(self) -> StepStats:
        """Returns counters since the last call: tokens, steps, share of prompts found in the cache; queue,
        cache.
        """

        def take() -> StepStats:
            stats = self._stats
            self._stats = StepStats()
            running, waiting = self._core.counts()
            stats.add_max("perf/engine_running", running)
            stats.add_max("perf/engine_waiting", waiting)
            stats.add_max("rollout/cache_bytes", self._core.cache_bytes)
            return stats

        return await self._on_thread(take)

    def close(self) -> None:
        """Ends the workers; calls that still wait get a RolloutError. May be called twice."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()
        if self._images is not None:
            self._images.close()

    # ---- inside: the caller's side ----

    def _check(self, request: GenerateRequest) -> None:
        self._check_alive(request)
        super()._check(request)

    def _check_alive(self, request: GenerateRequest) -> None:
        if self._lost:
            who = f"request {request.request_id!r}"
            raise ReplicaLostError(f"{who}: vLLM stopped: {self._lost}", request.prefix)

    def _post(self, action: Callable[[], None]) -> bool:
        """Has `action` run on the step thread, between two steps; False: it is gone."""
        with self._condition:
            if self._closed or self._lost:
                return False
            self._inbox.append(action)
            self._condition.notify()
            return True

    def _call(self, function: Callable[[], Any]) -> Future[Any]:
        """Does as `_post`; the future carries the result or error. Raises RolloutError, ReplicaLostError."""
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:  # to those who wait for the future
                future.set_exception(error)

        if not self._post(run):
            if self._lost:
                raise ReplicaLostError(f"vLLM stopped: {self._lost}")
            raise RolloutError("the rollout engine is closed")
        return future

    async def _on_thread(self, function: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._call(function))

    def _update(self, what: str, function: Callable[[], None]) -> None:
        """Runs a part of an update. Whatever goes wrong, the engine then refuses to serve until another
        begins.
        """

        def run() -> None:
            try:
                function()
            except BaseException as error:
                message = str(error) if isinstance(error, RondoError) else f"vLLM: {error!r}"
                self._weights.fail(f"the update of the weights failed in {what}: {message}")
                raise

        try:
            self._call(run).result()
        except RondoError:
            raise
        except Exception as error:
            if self._core.worker_lost():
                raise ReplicaLostError(f"vLLM stopped in {what}: a worker process is gone") from error
            raise WeightSyncError(self._weights.failure or f"{what}: {error!r}") from error

    # ---- inside: the step thread ----

    def _run(self, started: Future[None]) -> None:
        try:
            self._build()
        except BaseException as error:  # to the constructor
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            while self._wait():
                self._step()
        except Exception as error:  # the documented boundary: what vLLM raises belongs to all who wait
            _log.exception("vLLM stopped")
            why = "a worker process is gone" if self._core.worker_lost() else repr(error)
            with self._condition:
                self._lost = why
        for action in self._inbox:  # what was posted too late
            action()
        self._fail(self._end)
        self._core.close()
        if self._shelf is not None:
            self._shelf.close()

    def _end(self, pending: Pending) -> RolloutError:
        if not self._lost:
            return RolloutError("the rollout engine was closed")
        return ReplicaLostError(f"vLLM stopped: {self._lost}", pending.completion("cancelled"))

    def _build(self) -> None:
        from rondo.rollout.vllm.core import VllmCore

        try:
            self._core = VllmCore(self._spec)
        except RondoError:
            raise
        except Exception as error:
            raise RolloutError(f"vLLM did not start: {_innermost(error)}") from error

    def _wait(self) -> bool:
        """Waits until there is a step to do, and does what was posted; False: closed."""
        while True:
            with self._condition:
                while not (self._inbox or self._closed or self._may_step()):
                    if not self._condition.wait(self._until_deadline()):
                        break
                if self._closed:
                    return False
            while self._inbox:  # one by one: when one of them ends the engine, `_run` does the others
                self._inbox.popleft()()
            self._expire()
            with self._condition:
                if not self._inbox and self._may_step():
                    return True

    def _may_step(self) -> bool:
        return bool(self._pending) and self._weights.complete and not (self._paused or self._asleep)

    def _step(self) -> None:
        news: list[News] = []
        steps = self._core.step()
        self._stats.add_sum("perf/decode_steps", 1)
        self._stats.add_mean("perf/batch_occupancy", len(steps))
        for step in steps:
            pending = self._pending.get(step.key)
            if pending is None:
                continue
            if not pending.token_ids and step.token_ids:
                asked = pending.request.token_ids
                pending.prompt_ids = np.array(step.prompt_ids[: len(asked)], np.int32)
                if not np.array_equal(pending.prompt_ids, asked):
                    self._core.abort([pending.key])
                    self._forget(pending)
                    news.append((pending, None, _another_prompt(pending)))
                    continue
                known = len(step.prompt_ids)
                self._stats.add_mean("rollout/cache_hit_rate", step.cached, known)
                self._stats.add_sum("perf/prefill_tokens", known - step.cached)
                self._stats.add_sum("perf/shared_prefill_tokens", step.cached)
            versions = [self._version_of(pending)] * len(step.token_ids)
            stopped = pending.append_to_stop(step.token_ids, step.log_probs, versions)
            self._stats.add_sum("perf/decoded_tokens", len(step.token_ids))
            whole: Completion | RolloutError | None = None
            if stopped and not step.finished:
                self._core.abort([pending.key])
            if stopped or step.finished:
                self._forget(pending)
                whole = self._differing_stamps(pending, step.versions) or pending.completion(
                    "stop" if stopped or step.finished == "stop" else "length"
                )
            news.append((pending, pending.news(), whole))
        deliver(news)

    def _add(self, pending: Pending) -> None:
        if pending.future.cancelled():
            return
        self._pending[pending.key] = pending  # also where vLLM stops: then it fails with the others
        if self._closed or self._lost:
            return
        self._begin_with(pending)
        try:
            self._core.add(pending.key, pending.request, pending.adapters, pending.shown)
        except ValueError as error:  # vLLM refuses this request, and goes on
            self._forget(pending)
            refusal = RolloutError(f"request {pending.request.request_id!r}: vLLM refuses it: {error}")
            deliver([(pending, None, refusal)])

    def _take_out(self, key: str, reason: FinishReason) -> None:
        pending = self._pending.get(key)
        if pending is not None:
            if not self._lost:
                self._core.abort([key])
            self._forget(pending)
            deliver([(pending, pending.news(), pending.completion(reason))])

    def _forget(self, pending: Pending) -> None:
        """Notes that a request has ended, and drops adapters that none uses any more."""
        del self._pending[pending.key]
        if self._shelf is not None and pending.adapters is not None:
            for served in self._shelf.end(pending.adapters):
                if not self._lost:
                    self._core.drop_adapters(served)

    def _serve_adapters(self, shelf: Shelf, version: int) -> None:
        """Gives what has come to new requests, and to those of which nothing is made yet."""
        served = shelf.write(version)
        self._core.load_adapters(served)
        for unused in shelf.serve(served):
            self._core.drop_adapters(unused)
        for pending in [one for one in self._pending.values() if not one.token_ids]:
            self._core.abort([pending.key])
            self._forget(pending)
            pending.key = f"{next(self._numbers)}"
            self._add(pending)

    def _expire(self) -> None:
        now = time.monotonic()
        late = [key for key, one in self._pending.items() if one.deadline is not None and one.deadline <= now]
        for key in late:
            self._take_out(key, "deadline")

    def _until_deadline(self) -> float | None:
        deadlines = [one.deadline for one in self._pending.values() if one.deadline is not None]
        return max(min(deadlines) - time.monotonic(), 0.0) if deadlines else None

    def _fail(self, error_of: Callable[[Pending], RondoError]) -> None:
        pending = list(self._pending.values())
        if not self._lost and not self._closed:
            self._core.abort([one.key for one in pending])
        for one in pending:
            self._forget(one)
        deliver((one, one.news(), error_of(one)) for one in pending)


def _another_prompt(pending: Pending) -> RolloutError:
    asked, read = pending.request.token_ids, pending.prompt_ids
    return RolloutError(
        f"request {pending.request.request_id!r}: vLLM read another prompt than it was given, of {len(read)} "
        f"tokens {read.tolist()[:20]}… in place of {len(asked)}; report it"
    )


def _innermost(error: BaseException) -> str:
    """Returns what went wrong, which vLLM wraps in "see root cause above"."""
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
