"""The asyncio side of an engine in this process: requests, pauses, weights and life, around a `Decoder`.

    generate() ──inbox──▶ _serve(): a burst on the one decode thread
       ▲                    drain the inbox → step → step → …
       └──deliver (loop.call_soon_threadsafe)── who finished
    weights (begin, receive, commit; set_version) and sleep: only while the engine is paused or idle

A burst goes on until nothing is left to do or the engine is paused; joins, cancellations and pauses take
effect at the next token boundary. The decoder belongs to the decode thread: whatever changes it (weights,
sleep) runs there, between bursts. `_lock` guards the inbox, `_serving` and `_closed`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic

import torch

from rondo.core.errors import ConfigError, RolloutError, WeightSyncError
from rondo.core.types import Completion, GenerateRequest, StepStats
from rondo.models.family import why_blind
from rondo.platform import give_back, on_host, platform_of
from rondo.rollout.decoder import Decoder, PendingT
from rondo.rollout.images import RequestImages
from rondo.rollout.protocol import Capabilities, EngineSpec, OnTokens
from rondo.rollout.requests import (
    StopText,
    check_ready,
    check_request,
    complete_as_it_is,
    deliver,
    so_far,
)
from rondo.rollout.weights import WeightStore
from rondo.system.activity import progress
from rondo.system.usage import TeamClock

# on_tokens is called after both, so that it costs little: a callback crosses threads.
TOKENS_SECONDS, TOKENS_STEPS = 0.02, 8
_log = logging.getLogger(__name__)


class InProcessEngine(Generic[PendingT]):
    """The part of a `RolloutEngine` that does not compute. Subclasses build the model and its decoder, and
    say what they are (`capabilities`, `describe`).
    """

    def __init__(
        self,
        spec: EngineSpec,
        weights: WeightStore,
        decoder: Decoder[PendingT],
        *,
        vocab_size: int,
        # That of the spec, with its number.
        device: torch.device,
        # The transformers config of the spec's source.
        model_config: Any,
        # Why it is given no images, though the model reads some.
        blind: str = "",
    ) -> None:
        self.max_context = spec.max_context
        self._blind = why_blind(model_config) or blind
        self._images = None if self._blind else RequestImages(spec.source, model_config, spec.image_sample)
        self._weights = weights
        self._stop_text = StopText(spec.tokenizer)
        self._decoder = decoder
        self._device = device
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._inbox: deque[Callable[[], None]] = deque()
        self._in_flight: dict[str, PendingT] = {}
        self._serving = self._paused = self._closed = False
        self._next_report = 0.0  # on the clock of time.monotonic
        self._steps_untold = 0  # since the last report
        self._executor = ThreadPoolExecutor(1, "rondo-decode", self._prepare_thread, (spec.threads, device))
        if weights.complete:
            decoder.weights_changed()
        _log.info("%s", self.describe())

    def describe(self) -> str:
        """Returns one line for the log: which engine, and what is worth knowing of how it runs here."""
        raise NotImplementedError

    def capabilities(self) -> Capabilities:
        raise NotImplementedError

    # ---- requests ----

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Returns the completion of one request. Cancelling the task frees its slot at the next token
        boundary. on_tokens gets new tokens every few steps (TOKENS_STEPS).

        Raises RolloutError: an impossible request, no weights yet, engine asleep or closed, or an error while
        decoding. LostImageError where an image of it cannot be read any more.
        """
        self._check(request)
        matcher = self._stop_text.matcher(request)
        done = complete_as_it_is(request, matcher)
        if done is not None:
            return done
        call = self._decoder.sequence(request, on_tokens, matcher)
        timer = None
        self._in_flight[request.request_id] = call
        try:
            if await call.read_images(self._images):
                return call.future.result()
            if call.deadline is not None:  # every step looks, but a paused engine makes none
                seconds = max(0.0, call.deadline - time.monotonic())
                timer = call.loop.call_later(seconds, self._post, lambda: deliver(self._decoder.expire()))
            if not self._post(lambda: self._decoder.add(call)):
                raise RolloutError(f"request {request.request_id!r}: the rollout engine is closed")
            return await call.future
        except asyncio.CancelledError:
            self._post(lambda: self._decoder.give_up(request.request_id))
            raise
        finally:
            if timer is not None:
                timer.cancel()
            # A cancelled call may end after another of the same id has begun: it removes only itself.
            if self._in_flight.get(request.request_id) is call:
                del self._in_flight[request.request_id]

    def _check(self, request: GenerateRequest) -> None:
        """Raises RolloutError where the engine, or any engine, cannot serve the request."""
        check_ready(
            request,
            closed=self._closed,
            asleep=self._decoder.asleep,
            version=self._weights.version,
            in_flight=self._in_flight,
        )
        check_request(request, max_context=self.max_context, vocab_size=self._vocab_size, blind=self._blind)
        if self._images is not None:
            self._images.check(request)

    async def cancel(self, request_id: str) -> None:
        """Makes the pending generate call return what it has so far. Ignores unknown (finished) requests."""
        call = self._in_flight.get(request_id)
        if call is None:
            return
        if call.waits_for_images:
            call.settle(so_far(call.request, "cancelled"))
        else:
            self._post(lambda: deliver(self._decoder.cancel(request_id)))

    async def pause(self) -> None:
        """Stops at the next token boundary; when this returns nothing decodes. Requests keep their place."""
        self._paused = True
        # An empty task of the one decode thread runs only after the burst that is under way has ended.
        await asyncio.wrap_future(self._executor.submit(lambda: None))

    async def resume(self) -> None:
        """Goes on after `pause`."""
        self._paused = False
        self._post()

    # ---- weights ----

    def parameters(self) -> dict[str, torch.Tensor]:
        """Returns checkpoint name → the tensor that the decoder reads (tied names included)."""
        return dict(self._weights.tensors)

    def parameter(self, name: str) -> torch.Tensor:
        """Returns the weight of this name as it was received: without its adapter, where adapters are sent by
        themselves. Raises WeightSyncError for a name that the model does not have.
        """
        return self._weights.received(name)

    @property
    def version(self) -> int:
        """Returns the policy version that new tokens are stamped with; -1 before the first commit."""
        return self._weights.version

    def set_version(self, version: int) -> None:
        """Says that the tensors now hold `version`; for shared storage only, after every change of it."""
        if not self._weights.shared:
            raise WeightSyncError("this engine has its own storage: send weights with begin, receive, commit")

        def change() -> None:
            self._weights.version = version  # nothing arrives in shared storage: it is complete as it is
            self._decoder.weights_changed()

        self._between_bursts("set_version", change)

    def begin(self, version: int) -> None:
        """Starts to receive `version`. Until `commit` nothing decodes. Raises WeightSyncError."""
        self._between_bursts("begin", lambda: self._weights.begin(version))

    def receive(self, name: str, tensor: torch.Tensor) -> None:
        """Copies one tensor, by its checkpoint name, into the decoder's storage. Raises WeightSyncError."""
        self._weights.receive(name, tensor)

    def commit(self, version: int, checksums: Mapping[str, int] | None = None) -> None:
        """Serves `version`, of which all tensors are there. checksums: what they must be
        (`rondo.weights.checksum`). Raises WeightSyncError naming what did not arrive or differs.
        """

        def change() -> None:
            self._weights.commit(version, checksums)
            self._decoder.weights_changed()

        # Requests in flight are no error here: they came after `begin`, wait, and go on by the post.
        self._executor.submit(change).result()
        self._post()

    # ---- life ----

    async def sleep(self) -> None:
        """Frees the cache; the engine must be paused or idle. Requests go on after `wake` and `resume`."""
        if not self._decoder.asleep:
            self._between_bursts("sleep", self._decoder.sleep)
            give_back(self._device)

    async def wake(self) -> None:
        """Makes the cache again."""
        if self._decoder.asleep:
            self._executor.submit(self._decoder.wake).result()
            self._post()

    async def stats(self) -> StepStats:
        """Returns rollout/… and perf/…: tokens, steps, occupancy, CPU-seconds since the last call; the
        cache's bytes.
        """
        taken: Future[StepStats] = Future()

        def take() -> None:  # on the decode thread, which counts
            if taken.set_running_or_notify_cancel():
                taken.set_result(self._decoder.stats())

        return await asyncio.wrap_future(taken) if self._post(take) else self._decoder.stats()

    def close(self) -> None:
        """Stops the decode thread and frees the cache; callers that still wait get a RolloutError."""
        self._paused = True
        with self._lock:
            self._closed = True
        # Only then: the burst that ends empties the inbox, and what came after it is done here.
        self._executor.shutdown(wait=True)
        for action in self._inbox:  # what was posted too late
            action()
        self._fail(RolloutError("the rollout engine was closed"))
        if self._images is not None:
            self._images.close()
        self._decoder.sleep()

    # ---- inside ----

    def _post(self, *actions: Callable[[], None]) -> bool:
        """Has the decode thread run `actions` at the next token boundary (at once when idle), and then decode
        what there is. Returns False when the engine is closed.
        """
        with self._lock:
            if self._closed:
                return False
            self._inbox.extend(actions)
            if not self._serving:
                self._serving = True
                self._executor.submit(self._serve)
            return True

    def _serve(self) -> None:
        """Runs one burst, on the decode thread."""
        try:
            while self._drain():
                progress()
                deliver(self._decoder.step(self._weights.version))
                if self._decoder.streams:
                    self._report_if_due()
            if self._decoder.streams:
                self._report()
        except (
            Exception
        ) as error:  # the documented boundary: whatever decoding raises belongs to all who wait
            _log.exception("decoding failed")
            failure = (
                error if isinstance(error, RolloutError) else RolloutError(f"decoding failed: {error!r}")
            )
            try:
                self._fail(failure, cause=error)
                self._decoder.reset()
            finally:
                with self._lock:
                    self._serving = False
                self._post()  # what has come meanwhile

    def _drain(self) -> bool:
        """Runs the actions that were posted; False ends the burst."""
        while True:
            with self._lock:
                actions = list(self._inbox)
                self._inbox.clear()
                if not actions:  # under the lock: who posts now sees whether a burst goes on
                    ready = self._weights.complete and not self._paused and not self._decoder.asleep
                    self._serving = ready and bool(self._decoder.sequences())
                    return self._serving
            for action in actions:
                action()

    def _report_if_due(self) -> None:
        self._steps_untold += 1
        if self._steps_untold >= TOKENS_STEPS and time.monotonic() >= self._next_report:
            self._report()

    def _report(self) -> None:
        """Hands the callers that want it the new tokens of what is running: one callback per event loop."""
        self._next_report = time.monotonic() + TOKENS_SECONDS
        self._steps_untold = 0
        deliver(self._decoder.progress())

    def _fail(self, failure: RolloutError, cause: BaseException | None = None) -> None:
        for call in self._decoder.sequences():
            error = RolloutError(str(failure))  # one each: a traceback grows with every raise
            error.__cause__ = cause
            deliver([(call, None, error)])

    def _between_bursts(self, what: str, change: Callable[[], None]) -> None:
        """Runs `change` on the decode thread. Requests in flight are an error unless the engine is paused."""
        if self._in_flight and not self._paused:
            raise WeightSyncError(
                f"{what}: {len(self._in_flight)} requests are in flight; await pause() first, or wait"
            )
        self._executor.submit(change).result()

    def _prepare_thread(self, threads: int, device: torch.device) -> None:
        """Runs on the decode thread before all else: threads that this one starts count as its own, where
        they compute.
        """
        if threads > 1 and on_host(device):
            self._decoder.cpu_clock = TeamClock().seconds
        torch.set_num_threads(threads)
        platform_of(device).use(device)


def check_sizes(spec: EngineSpec) -> None:
    """Raises ConfigError for a size below 1."""
    if min(spec.max_concurrent, spec.max_context, spec.threads) < 1:
        raise ConfigError("max_concurrent, max_context and threads must be at least 1")


def as_torch(dtype: str, device: str) -> tuple[torch.dtype, torch.device]:
    """Returns torch's dtype and device, the device with its number where it has one, since torch does not
    make "cuda" alone a thread's current device.
    """
    found = torch.device(device)
    if found.index is None and not on_host(found):
        found = torch.device(found.type, platform_of(found).current())
    return getattr(torch, dtype), found
