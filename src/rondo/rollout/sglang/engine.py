"""SGLang as a `RolloutEngine`: requests, pauses, versions and weights around `launch.SglangCore`.

    caller's loop ── generate ──▶ a task on the engine's own loop (a thread) ──▶ SglangCore ──▶ SGLang
          ▲   ◀── on_tokens ────────────┘
    weights thread ── begin, receive_bucket, commit ──▶ the same loop

SGLang is paused as long as there is a reason (`_holds`): the caller said pause, weights are missing or
arriving, or the engine sleeps. A new request waits for the last reason to go before SGLang hears of it. A
pause returns when every token that was computed has been stamped with the version that made it; only then do
weights change.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np

from rondo.core.errors import RolloutError, WeightSyncError
from rondo.core.types import Completion, FinishReason, GenerateRequest, StepStats
from rondo.rollout.adapters import Served, Shelf
from rondo.rollout.protocol import EngineSpec, OnTokens
from rondo.rollout.requests import Pending, complete_as_it_is, deliver
from rondo.rollout.sglang.launch import SglangCore, SglangStep
from rondo.rollout.sglang.options import ENGINE
from rondo.rollout.third_party_engine import ThirdPartyEngine
from rondo.weights.bucket import SharedBucket

_COLDEST = 1e-6  # SGLang takes smaller temperatures for 0
_Hold = Literal["paused", "weights", "asleep"]
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Job(Pending):
    """A generate call here."""

    task: asyncio.Task[None] | None = None
    """The task that reads its answer from SGLang."""
    ended_by: FinishReason | None = None
    """Who wanted it ended: "cancelled" or "deadline"."""
    finished: FinishReason | None = None
    """Why it has ended."""
    started: bool = False
    """Its first tokens have come."""


class SglangEngine(ThirdPartyEngine[_Job]):
    """Implements `RolloutEngine`; to be made in a process of its own, whose children are all the engine's.

    The constructor blocks until SGLang can take requests. Raises ConfigError.
    """

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec, ENGINE, _COLDEST)
        self._core = SglangCore(spec)
        self._loop = asyncio.new_event_loop()
        self._gate = asyncio.Event()  # no holds
        self._change = asyncio.Lock()  # of holds
        self._holds: set[_Hold] = set()
        self._num_jobs = 0
        self._ahead: dict[bytes, asyncio.Event] = {}  # prompts that are not in the cache yet
        self._unused: list[Served] = []  # adapters, for the next update to drop
        self._base_open = False  # of the update that is under way
        self._stats = StepStats()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rondo-sglang", daemon=True)
        self._thread.start()
        self._wait(self._hold("weights"))
        _log.info("%s", self.describe())

    # ---- what it is ----

    def describe(self) -> str:
        """Writes one line: SGLang's version, workers, and the size of its cache."""
        spec = self._spec
        return (
            f"SGLang {self._capabilities.engine_version}: {spec.tensor_parallel} worker(s) on {spec.device}, "
            f"{spec.dtype}, cache for {self._core.cache_tokens} tokens"
        )

    # ---- requests ----

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Returns the completion of one request. Cancelling the task frees its place.

        Raises RolloutError: an impossible request, no weights yet, engine asleep or closed, or SGLang's own.
        """
        self._check(request)
        matcher = self._stop_text.matcher(request)
        done = complete_as_it_is(request, matcher)
        if done is not None:
            return done
        self._num_jobs += 1
        # Keys are of one length, because SGLang aborts by their beginnings.
        job = _Job(request, on_tokens, key=f"{self._num_jobs:016x}", matcher=matcher)
        self._in_flight[request.request_id] = job
        try:
            job.settle(await self._on_loop(self._run(job)))
            return await job.future
        finally:
            del self._in_flight[request.request_id]

    async def cancel(self, request_id: str) -> None:
        """Has the pending generate call return what it has. Unknown (finished) requests are ignored."""

        async def end() -> None:
            if request_id in self._in_flight:
                self._end(self._in_flight[request_id], "cancelled")

        await self._on_loop(end())

    async def pause(self) -> None:
        """Stops at the next token boundary; when this returns nothing decodes. Requests keep their place."""
        await self._on_loop(self._hold("paused"))

    async def resume(self) -> None:
        """Goes on after `pause`."""
        await self._on_loop(self._release("paused"))

    async def sleep(self) -> None:
        """Gives the cache back; the engine must be paused or idle. Raises RolloutError on a CPU."""
        self._refuse_sleep(held=bool(self._holds))

        async def lie_down() -> None:
            if not self._asleep:
                self._asleep = True
                await self._hold("asleep")
                await self._core.sleep()

        await self._on_loop(lie_down())

    async def wake(self) -> None:
        """Makes the cache again."""

        async def get_up() -> None:
            if self._asleep:
                await self._core.wake()
                self._asleep = False
                await self._release("asleep")

        await self._on_loop(get_up())

    async def stats(self) -> StepStats:
        """Returns perf/…: tokens decoded, prefilled, and found in the cache since the last call."""

        async def take() -> StepStats:
            stats = self._stats
            self._stats = StepStats()
            return stats

        return await self._on_loop(take())

    def close(self) -> None:
        """Ends SGLang's processes; calls that still wait get a RolloutError. May be called twice."""
        if self._closed:
            return
        self._closed = True

        async def stop() -> None:
            waiting = [job.task for job in list(self._in_flight.values()) if job.task is not None]
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

        self._wait(stop())
        self._core.close()
        if self._shelf is not None:
            self._shelf.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    # ---- weights ----

    def begin(self, version: int) -> None:
        """Starts to receive `version`. Until `commit` nothing decodes. Raises WeightSyncError."""
        self._refuse_in_flight(f"begin({version})", WeightSyncError, held=bool(self._holds))
        self._wait(self._hold("weights"))
        self._base_open = self._shelf is None
        if self._base_open:
            self._wait(self._core.begin(first=self.version < 0))
        self._weights.begin(version)

    def receive_bucket(self, bucket: SharedBucket) -> None:
        """See ThirdPartyEngine.receive_bucket. SGLang knows one of a tied parameter's names only."""
        names = [self._weights.take(entry.name, entry.shape) for entry in bucket.entries]
        entries = tuple(replace(entry, name=name) for entry, name in zip(bucket.entries, names, strict=True))
        canonical = self._without_factors(replace(bucket, entries=entries))
        if canonical is None:
            return
        if not self._base_open:  # with adapters by themselves it comes only sometimes
            self._wait(self._core.begin(first=self.version < 0))
            self._base_open = True
        self._weights.note(self._wait(self._core.load(canonical, self._parts_in(canonical))))

    def look(self, bucket: SharedBucket) -> list[dict[str, int]]:
        """See ThirdPartyEngine.look."""
        return self._wait(self._core.look(bucket))

    def close_buckets(self) -> None:
        """See ThirdPartyEngine.close_buckets."""
        self._wait(self._core.close_buckets())

    def commit(self, version: int, checksums: Mapping[str, int] | None = None) -> None:
        """Serves `version`, all of whose tensors are there. Raises WeightSyncError naming what is missing or
        differs.
        """
        self._weights.check(version, checksums)
        unset = self._wait(self._core.unset()) if self.version < 0 else []
        if unset:
            raise WeightSyncError(
                f"commit({version}): {len(unset)} parameters of SGLang's own got nothing from the model's "
                f"tensors ({', '.join(unset[:4])}): rondo cannot send this model to SGLang; use "
                "rollout.engine=native, transformers or vllm"
            )
        if self._base_open:
            self._wait(self._core.end())
        if self._shelf is None:
            self._wait(self._core.name_weights(version))
        else:
            self._wait(self._serve_adapters(self._shelf, version))
        self._weights.finish(version)
        self._wait(self._release("weights"))

    # ---- inside: on the engine's loop ----

    async def _serve_adapters(self, shelf: Shelf, version: int) -> None:
        """Gives what has come to new requests, and drops what none uses any more."""
        served = shelf.write(version)
        await self._core.load_adapters(served)
        unused = [*self._unused, *shelf.serve(served)]
        self._unused = []
        for one in unused:
            await self._core.drop_adapters(one)

    async def _run(self, job: _Job) -> Completion:
        job.task = asyncio.create_task(self._consume(job))
        seconds, timer = job.request.deadline_seconds, None
        if seconds is not None:
            timer = self._loop.call_later(seconds, self._end, job, "deadline")
        try:
            await job.task
        except asyncio.CancelledError:
            if self._closed:
                raise RolloutError("the rollout engine was closed") from None
            if job.ended_by is None:
                raise
            job.finished = job.ended_by
        finally:
            if timer is not None:
                timer.cancel()
        assert job.finished is not None
        return job.completion(job.finished)

    async def _consume(self, job: _Job) -> None:
        """Runs a request. Of those with one prompt one goes ahead; the others wait for it to be cached."""
        await self._gate.wait()
        prompt = np.asarray(job.request.token_ids, np.int32).tobytes()
        while prompt in self._ahead:
            await self._ahead[prompt].wait()
        known = self._ahead[prompt] = asyncio.Event()
        self._begin_with(job)
        try:
            async for step in self._core.generate(job.key, job.request, job.adapters):
                self._count(job, step)
                if step.routes is not None:
                    self._see_routes(job, step.routes)
                if job.finished is not None:  # by a stop string: what still comes was made too much
                    continue
                job.prompt_ids = np.array(step.prompt_ids[: len(job.request.token_ids)], np.int32)
                versions = [self._version_of(job)] * len(step.token_ids)
                stopped = job.append_to_stop(step.token_ids, step.log_probs, versions)
                deliver([(job, job.news(), None)])
                if stopped:
                    job.finished = "stop"
                    self._core.abort(job.key)
                elif step.finished:
                    job.finished = self._why(job, step)
                    if differ := self._differing_stamps(job, step.versions):
                        raise differ
                self._let_follow(prompt, known)
        except ValueError as error:  # what SGLang refuses
            who = f"request {job.request.request_id!r}"
            raise RolloutError(f"{who}: SGLang refused it: {error}") from error
        finally:
            self._let_follow(prompt, known)
            if self._shelf is not None and job.adapters is not None:
                self._unused += self._shelf.end(job.adapters)
        if job.finished is None:
            raise RolloutError(f"request {job.request.request_id!r}: SGLang gave no end of it")

    def _let_follow(self, prompt: bytes, known: asyncio.Event) -> None:
        if not known.is_set():
            del self._ahead[prompt]
            known.set()

    def _why(self, job: _Job, step: SglangStep) -> FinishReason:
        if step.finished == "stop":
            return "stop"
        if step.finished == "abort":
            if job.ended_by is None:
                raise RolloutError(f"request {job.request.request_id!r}: SGLang gave it up: {step.message}")
            return job.ended_by
        prefix = job.request.prefix
        wanted = job.request.sampling.max_tokens - (0 if prefix is None else len(prefix.token_ids))
        if len(job.token_ids) != wanted:
            raise RolloutError(
                f"request {job.request.request_id!r}: SGLang stopped after {len(job.token_ids)} of {wanted} "
                "tokens; its cache is too small for the request (rollout.engine.max_total_tokens)"
            )
        return "length"

    def _end(self, job: _Job, reason: FinishReason) -> None:
        """Has a request return what it has."""
        if job.finished is None and job.ended_by is None and job.task is not None:
            job.ended_by = reason
            if job.started:
                self._core.abort(job.key)
            else:
                job.task.cancel()

    async def _hold(self, reason: _Hold) -> None:
        async with self._change:
            self._gate.clear()
            if not self._holds:
                await self._core.pause()
            self._holds.add(reason)

    async def _release(self, reason: _Hold) -> None:
        async with self._change:
            if reason not in self._holds:
                return
            self._holds.discard(reason)
            if not self._holds:
                await self._core.resume()
                self._gate.set()

    def _count(self, job: _Job, step: SglangStep) -> None:
        self._stats.add_sum("perf/decoded_tokens", len(step.token_ids))
        if not job.started:
            job.started = True
            prefix = job.request.prefix
            known = len(job.request.token_ids) + (0 if prefix is None else len(prefix.token_ids))
            self._stats.add_sum("perf/prefill_tokens", known - step.cached)
            self._stats.add_sum("perf/shared_prefill_tokens", step.cached)

    async def _on_loop(self, work: Coroutine[Any, Any, _T]) -> _T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
