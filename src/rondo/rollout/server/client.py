"""The host's side of an engine in its own process.

    generate, pause, … (any event loop)   ──▶ outbox ─▶ writing thread ══▶ child
    begin, receive, commit (any thread)   ──▶
    futures, on_tokens (their event loop) ◀── reading thread ◀══ child

The tokens of every request are kept here as they come, so that a request of a process that dies can go on
elsewhere (`ReplicaLostError.partial`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from rondo.errors import ReplicaLostError, RolloutError, WeightSyncError
from rondo.rollout.pending import News, Pending, deliver
from rondo.rollout.protocol import WASTED_TOKENS, Capabilities, EngineSpec, OnTokens
from rondo.rollout.server.process import ChildProcess
from rondo.rollout.server.wire import Answer, Call, Done, Ready, Tokens, error_of, frame, read
from rondo.types import Completion, GenerateRequest, StepStats
from rondo.weights.bucket import BucketWriter, Confirmation, SharedBucket

START_SECONDS = 900.0  # an engine may have to compile
ANSWER_SECONDS = 600.0  # an operation that takes longer hangs
GRACE_SECONDS = 5.0  # how far over its deadline a request may be before the host ends it by itself
CLOSE_SECONDS = 10.0
_log = logging.getLogger(__name__)


class _Stream(Pending):
    """A generate call that waits; its tokens are kept on its event loop."""

    def report(self, part: Completion) -> None:
        self.append(part.token_ids.tolist(), part.log_probs.tolist(), part.policy_versions.tolist())
        super().report(part)

    def settle(self, result: Completion | Done | BaseException) -> None:
        """A Done is checked against the tokens that have come; a lost engine's error gets them."""
        if isinstance(result, Done):
            result = self._whole(result)
        elif isinstance(result, ReplicaLostError):
            result = ReplicaLostError(str(result), self.completion("cancelled"), result.last_lines)
        super().settle(result)

    def _whole(self, done: Done) -> Completion | RolloutError:
        self.prompt_ids = done.prompt_ids
        whole = replace(self.completion(done.finish_reason), extras=done.extras)
        if len(whole.token_ids) == done.num_tokens:
            return whole
        return RolloutError(
            f"request {self.request.request_id!r}: {done.num_tokens} tokens were made, and "
            f"{len(whole.token_ids)} arrived; this is an error in rondo: please report it"
        )


class EngineProcess:
    """An engine in a process of its own; implements `RolloutEngine`.

    environment: all variables of the process. name: for messages. bucket_bytes: of weights in transit. The
    constructor returns when the engine is ready. Raises ConfigError or RolloutError with the engine's own
    message, or with the last lines of its output.
    """

    def __init__(
        self,
        spec: EngineSpec,
        environment: Mapping[str, str],
        *,
        name: str = "0",
        bucket_bytes: int = 256 << 20,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self.name, self._spec, self._bucket_bytes = name, spec, bucket_bytes
        self._lock = threading.Lock()  # guards what the threads share: the next six
        self._streams: dict[int, _Stream] = {}
        self._wasted_tokens = 0  # since the last `stats`, of calls that were cancelled
        self._calls: dict[int, Future[Any]] = {}
        self._lost: str | None = None
        self._closing = False
        self._when_lost: Callable[[str], None] | None = None
        self._built = False
        self._numbers = itertools.count(1)
        self._version = -1
        self._bucket_writer: BucketWriter | None = None
        self._connection, theirs = socket.socketpair()
        command = ["rondo.rollout.server", str(theirs.fileno())]
        with theirs:
            self._process = ChildProcess(f"engine-{name}", command, theirs.fileno(), environment)
        spec = replace(spec, folder=str(self._process.folder))
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        started: Future[Ready] = Future()
        self._calls[0] = started
        for target in (self._write, self._read):
            threading.Thread(target=target, name=f"rondo-engine-{name}", daemon=True).start()
        self._outbox.put(frame([spec]))
        self._ready = self._wait_until_ready(started, start_seconds)
        self._version = self._ready.version
        _log.info("engine process %d: %s", self.pid, self.describe())

    def _wait_until_ready(self, started: Future[Ready], seconds: float) -> Ready:
        try:
            ready = started.result(seconds)
        except BaseException as error:
            self._closing = True
            self._process.kill()
            if isinstance(error, TimeoutError):
                raise RolloutError(
                    f"{self._who()} was not ready within {seconds:.0f} s; its last lines:\n"
                    f"{self._process.tail()}"
                ) from error
            raise
        self._built = True
        return ready

    # ---- what it is ----

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._ready.pid

    @property
    def version(self) -> int:
        return self._version

    @property
    def lost(self) -> str | None:
        """Why it can serve no more; None: it lives."""
        return self._lost

    def capabilities(self) -> Capabilities:
        return self._ready.capabilities

    def describe(self) -> str:
        return f"{self._ready.description}, in its own process"

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """Have `tell(why)` called once, from some thread, when the process dies (at once, if it is dead), but
        not when it is closed.
        """
        with self._lock:
            self._when_lost, lost = tell, self._lost
        if lost is not None and not self._closing:
            tell(lost)

    # ---- requests ----

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """See `RolloutEngine.generate`. A request that the engine leaves unanswered is ended here, a few
        seconds after its deadline.
        """
        stream = _Stream(request, on_tokens)
        number = next(self._numbers)
        with self._lock:
            if self._lost is not None:
                raise ReplicaLostError(self._lost, request.prefix, self._process.tail())
            self._streams[number] = stream
            self._post(number, "generate", request)
        timer = None
        if request.deadline_seconds is not None:
            timer = stream.loop.call_later(
                request.deadline_seconds + GRACE_SECONDS, self._give_up, stream, request.request_id
            )
        try:
            return await stream.future
        except asyncio.CancelledError:
            self._post(next(self._numbers), "drop", number)
            self._wasted_tokens += len(stream.completion("cancelled").token_ids)
            raise
        finally:
            with self._lock:
                self._streams.pop(number, None)
            if timer is not None:
                timer.cancel()

    def _give_up(self, stream: _Stream, request_id: str) -> None:
        if not stream.future.done():
            _log.warning("%s does not end request %r, which is over its deadline", self._who(), request_id)
            self._post(next(self._numbers), "cancel", request_id)
            stream.settle(stream.completion("deadline"))

    async def cancel(self, request_id: str) -> None:
        if any(stream.request.request_id == request_id for stream in list(self._streams.values())):
            await self._ask("cancel", request_id)

    async def pause(self) -> None:
        await self._ask("pause")

    async def resume(self) -> None:
        await self._ask("resume")

    async def sleep(self) -> None:
        await self._ask("sleep")

    async def wake(self) -> None:
        await self._ask("wake")

    async def stats(self) -> StepStats:
        stats: StepStats = await self._ask("stats")
        wasted, self._wasted_tokens = self._wasted_tokens, 0
        stats.sums[WASTED_TOKENS] = float(wasted)  # here for every engine; the native one counts its own, too
        return stats

    # ---- weights: any one thread; never the one that reads ----

    def begin(self, version: int) -> None:
        if self._bucket_writer is not None:
            self._bucket_writer.close()
        self._bucket_writer = BucketWriter(self._bucket_bytes, self.send_bucket)
        self._wait(self._call("begin", version))
        self._version = -1  # serves nothing until the commit

    def receive(self, name: str, tensor: torch.Tensor) -> None:
        """Copied; travels with the bucket that it fills, so an error may come with a later call."""
        if self._bucket_writer is None:
            raise WeightSyncError(f"{name!r} arrived outside begin … commit")
        self._bucket_writer.add(name, tensor)

    def send_bucket(self, bucket: SharedBucket) -> Confirmation:
        """Between begin and commit, instead of `receive`: have the engine read a bucket. Returns what waits
        until it has; the sender keeps the memory until then. Raises WeightSyncError, ReplicaLostError.
        """
        answer = self._call("bucket", bucket)
        return lambda: self._wait(answer)

    def commit(self, version: int, checksums: Mapping[str, int] | None = None) -> None:
        writer, self._bucket_writer = self._bucket_writer, None
        if writer is not None:
            try:
                writer.finish()
            finally:
                writer.close()
        self._wait(self._call("commit", version, checksums))
        self._version = version

    def parameter(self, name: str) -> torch.Tensor:
        """A copy of what the engine computes with, where `capabilities().reads_back`."""
        tensor: torch.Tensor = self._wait(self._call("parameter", name))
        return tensor

    # ---- life ----

    def close(self) -> None:
        """End the process and all its children; who still waits gets a RolloutError."""
        self._closing = True
        if self._lost is None:
            self._post(next(self._numbers), "close")
        if not self._process.wait(CLOSE_SECONDS if self._lost is None else 1.0):
            self._process.kill()
        if self._bucket_writer is not None:
            self._bucket_writer.close()
            self._bucket_writer = None

    # ---- inside ----

    def _who(self) -> str:
        return f"the rollout engine's process {self.name} ({self._spec.engine})"

    def _post(self, number: int, operation: str, *args: Any) -> None:
        self._outbox.put(frame([Call(number, operation, args)]))

    def _call(self, operation: str, *args: Any) -> Future[Any]:
        number, answer = next(self._numbers), Future[Any]()
        with self._lock:
            if self._lost is not None:
                raise ReplicaLostError(self._lost, last_lines=self._process.tail())
            self._calls[number] = answer
            self._post(number, operation, *args)
        return answer

    def _wait(self, answer: Future[Any]) -> Any:
        try:
            return answer.result(ANSWER_SECONDS)
        except TimeoutError:
            self._hangs()
            return answer.result()

    async def _ask(self, operation: str, *args: Any) -> Any:
        answer = self._call(operation, *args)
        waiting = asyncio.shield(asyncio.wrap_future(answer))
        try:
            return await asyncio.wait_for(waiting, ANSWER_SECONDS)
        except TimeoutError:
            self._hangs()
            return await asyncio.shield(asyncio.wrap_future(answer))

    def _hangs(self) -> None:
        _log.error("%s has not answered for %.0f s; ending it", self._who(), ANSWER_SECONDS)
        self._process.kill()

    def _write(self) -> None:
        while (data := self._outbox.get()) is not None:
            try:
                self._connection.sendall(data)
            except OSError:  # the reading thread says it to everybody
                return

    def _read(self) -> None:
        try:
            while True:
                records = read(self._connection)
                self._take(records)
        except EOFError:
            return
        finally:  # whatever ended it, nobody is answered any more
            self._end()

    def _take(self, records: Iterable[Any]) -> None:
        """One frame: calls are answered here, streams on their event loops."""
        news: list[News] = []

        def note(number: int, part: Completion | None, end: Done | Exception | None) -> None:
            stream = self._streams.get(number)
            if stream is not None:  # else nobody waits any more
                news.append((stream, part, end))

        for record in records:
            if isinstance(record, Tokens):
                for number, part in record.parts():
                    note(number, part, None)
            elif isinstance(record, Done):
                note(record.number, None, record)
            elif isinstance(record, Ready):
                self._calls.pop(0).set_result(record)
            else:
                assert isinstance(record, Answer)
                error = None if record.error is None else error_of(record.error)
                call = self._calls.pop(record.number, None)
                if call is None:  # of a generate call, or of one that nobody waits for
                    note(record.number, None, error)
                elif error is None:
                    call.set_result(record.value)
                else:
                    call.set_exception(error)
        deliver(news)

    def _end(self) -> None:
        """The stream of records has ended: by `close`, or by death."""
        if not self._process.wait(0.5 if self._closing else CLOSE_SECONDS):
            self._process.kill()
        closing, tail = self._closing, self._process.tail()
        why = f"{self._who()} {'was closed' if closing else f'died ({self._process.how_it_ended()})'}"
        if not self._built:
            why += f" before it was ready; its last lines:\n{tail}"

        def error() -> RolloutError:
            return RolloutError(why) if closing else ReplicaLostError(why, last_lines=tail)

        with self._lock:
            self._lost = why
            streams, calls = list(self._streams.values()), list(self._calls.values())
            self._calls.clear()
            tell = self._when_lost
        self._outbox.put(None)
        self._connection.close()
        deliver((stream, None, error()) for stream in streams)
        for call in calls:
            call.set_exception(error())
        if not closing and self._built:
            _log.warning("%s; its last lines:\n%s", why, tail)
            if tell is not None:
                tell(why)
