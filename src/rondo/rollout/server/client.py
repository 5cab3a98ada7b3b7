"""The host's side of an engine in its own process.

    generate, pause, … (any event loop)   ──▶ outbox ─▶ writing thread ══▶ child
    begin, receive, commit (any thread)   ──▶
    futures, on_tokens (their event loop) ◀── reading thread ◀══ child

The tokens of every request are kept here as they come (once a second, where nobody listens to them), so that
a request of a process that dies can go on elsewhere (`ReplicaLostError.partial`).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rondo.core.errors import ConfigError, ReplicaLostError, RolloutError, RondoError, WeightSyncError
from rondo.core.types import Completion, GenerateRequest, Hop, StepStats
from rondo.platform import ProfileTurn, named_in_environment, on_host, platform_of
from rondo.rollout.build import CLASSES, OWN, third_party
from rondo.rollout.images import sample_of
from rondo.rollout.interpreter import environment_of, interpreter
from rondo.rollout.protocol import Capabilities, EngineSpec, OnTokens
from rondo.rollout.requests import Pending, deliver
from rondo.rollout.server.child import EngineServer
from rondo.rollout.server.wire import Done, Ready, Tokens
from rondo.system.activity import Activity, progress
from rondo.system.actor import ActorFuture, CallFailedError, ProcessLostError, spawn
from rondo.system.forkserver import are_kept, fork_server
from rondo.system.process import import_path
from rondo.weights.bucket import BucketWriter, Confirmation, SharedBucket
from rondo.weights.checksum import checksum

START_SECONDS = 900.0  # an engine may have to compile
ANSWER_SECONDS = 600.0  # an operation that takes longer hangs
GRACE_SECONDS = 5.0  # how far over its deadline a request may be before the host ends it by itself
# Modules of third-party engines that take long to import.
IMPORTS = {"vllm": ("rondo.rollout.vllm.core",), "sglang": ("rondo.rollout.sglang.engine",)}
_log = logging.getLogger(__name__)


class _Stream(Pending):
    """A generate call that waits; its tokens are kept on its event loop."""

    def report(self, part: Completion) -> None:
        self.append(part.token_ids.tolist(), part.log_probs.tolist(), part.policy_versions.tolist())
        super().report(part)

    def settle(self, result: Completion | Done | BaseException) -> None:
        """Checks a Done against the tokens that have come; gives them to a lost engine's error."""
        if isinstance(result, Done):
            result = self._whole(result)
        elif isinstance(result, ReplicaLostError):
            result = ReplicaLostError(str(result), self.completion("cancelled"), result.last_lines)
        super().settle(result)

    def _whole(self, done: Done) -> Completion | RolloutError:
        self.prompt_ids = done.prompt_ids
        whole = replace(self.completion(done.finish_reason), routes=done.routes)
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
    shares: the device here whose memory the engine is to open for its weights, which is tried with a few
    bytes; None: they go through the host's memory, as they do where it cannot. must_share: ConfigError then.
    python: another environment's interpreter. preload: modules, besides the program's own, of the fork server
    that it comes from; None: it is executed.
    """

    def __init__(
        self,
        spec: EngineSpec,
        environment: Mapping[str, str],
        *,
        name: str = "0",
        bucket_bytes: int = 256 << 20,
        start_seconds: float = START_SECONDS,
        shares: torch.device | None = None,
        must_share: bool = False,
        python: str | None = None,
        preload: Sequence[str] | None = None,
    ) -> None:
        self.name = name
        self._bucket_bytes = bucket_bytes
        self._version = -1
        self._bucket_writer: BucketWriter | None = None
        # Generate calls that wait, by their keys; the threads share them under the lock.
        self._lock = threading.Lock()
        self._streams: dict[int, _Stream] = {}
        self._keys = itertools.count()
        modules = None if preload is None else [EngineServer.__module__, *preload]
        self._forkserver = None if modules is None else fork_server(modules, environment)
        who = f"the rollout engine's process {name} ({spec.engine})"
        start = partial(spawn, EngineServer, who, environment, take=self._take)
        try:
            self._child = start(forkserver=self._forkserver, python=python)
        except OSError as error:
            self._give_back()
            raise RolloutError(f"{who} cannot be started: {error}") from error
        self._ready = self._built(replace(spec, folder=str(self._child.process.folder)), start_seconds)
        self._version = self._ready.version
        # Where buckets of weights are, for it to open them; None: in the host's memory.
        self.shares: torch.device | None = None
        if shares is not None:
            try:
                self.shares = shares if self._opens(shares, must_share) else None
            except BaseException:
                self.close()
                raise
        _log.info("engine process %d: %s", self.pid, self.describe())

    def _built(self, spec: EngineSpec, seconds: float) -> Ready:
        try:
            with _errors_of_rondo(), Activity(f"starting {self._child.who}", bound=False):
                self._child.begin(spec, seconds=seconds).result()
                ready: Ready = self._child.call("ready", seconds=seconds).result()
        except BaseException as error:
            self._child.kill()
            self._give_back()
            tail = f"its last lines:\n{self._child.process.tail()}"
            if isinstance(error, ReplicaLostError):
                if self._child.lost is not None and self._child.lost.late:
                    why = f"{self._child.who} was not ready within {seconds:.0f} s; {tail}"
                    raise RolloutError(why) from error
                why = f"{error} before it was ready; {tail}"
                raise ReplicaLostError(why, None, error.last_lines) from error
            raise
        return ready

    # ---- what it is ----

    @property
    def pid(self) -> int:
        """Returns the engine's process id."""
        return self._ready.pid

    @property
    def version(self) -> int:
        return self._version

    @property
    def lost(self) -> str | None:
        """Says why it can serve no more; None: it lives."""
        return None if self._child.lost is None else str(self._child.lost)

    def capabilities(self) -> Capabilities:
        return self._ready.capabilities

    def describe(self) -> str:
        way = "" if self.shares is None else f", weights stay on {self.shares} on their way to it"
        return f"{self._ready.description}, in its own process{way}"

    def pulse(self) -> ActorFuture:
        """Asks for an `activity.Pulse` of its process, with all stacks. Raises ProcessLostError."""
        return self._child.pulse(stacks=True)

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """Has `tell(why)` called once, on some thread, when the process dies (at once, if it is dead), but
        not when it is closed.
        """

        def say(error: ProcessLostError) -> None:
            if not error.closed:
                _log.warning("%s; its last lines:\n%s", error, error.tail)
                tell(str(error))

        self._child.when_lost(say)

    # ---- requests ----

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Does as `RolloutEngine.generate`. A request that the engine leaves unanswered is ended here, a few
        seconds after its deadline.
        """
        stream, key = _Stream(request, on_tokens), next(self._keys)
        with self._lock:
            self._streams[key] = stream
        timer = None
        try:
            answer = self._child.call("generate", key, request, on_tokens is not None)
            answer.add_done_callback(partial(_settle, stream))
            if request.deadline_seconds is not None:
                seconds = request.deadline_seconds + GRACE_SECONDS
                timer = stream.loop.call_later(seconds, self._give_up, stream)
            try:
                return await stream.future
            except asyncio.CancelledError:
                answer.drop()
                raise
        except ProcessLostError as error:
            raise ReplicaLostError(str(error), request.prefix, error.tail) from error
        finally:
            with self._lock:
                del self._streams[key]
            if timer is not None:
                timer.cancel()

    def _give_up(self, stream: _Stream) -> None:
        if stream.future.done():
            return
        request_id = stream.request.request_id
        _log.warning("%s does not end request %r, which is over its deadline", self._child.who, request_id)
        with suppress(ProcessLostError):
            self._child.call("cancel", request_id)
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
        return stats

    # ---- weights: any one thread; never the one that reads ----

    def begin(self, version: int) -> None:
        self._forget_bucket()
        self._bucket_writer = BucketWriter(
            self._bucket_bytes, self.send_bucket, self.shares, self.close_buckets
        )
        self._wait(self._call("begin", version))
        self._version = -1  # serves nothing until the commit

    def receive(self, name: str, tensor: torch.Tensor) -> None:
        """Copies a tensor, which travels with the bucket that it fills; its error may come later."""
        if self._bucket_writer is None:
            raise WeightSyncError(f"{name!r} arrived outside begin … commit")
        self._bucket_writer.add(name, tensor)

    def send_bucket(self, bucket: SharedBucket) -> Confirmation:
        """Has the engine read a bucket: between begin and commit, instead of `receive`. Returns what waits
        until it has; the sender keeps the memory until then. Raises WeightSyncError, ReplicaLostError.
        """
        answer = self._call("bucket", bucket)
        return lambda: self._wait(answer)

    def turn_profile(self, change: ProfileTurn, name: str) -> None:
        """Ends and begins the profile of its process; see `Profiler`."""
        with suppress(ReplicaLostError):  # what it has done is gone
            self._wait(self._call("turn_profile", change, name))

    def close_buckets(self) -> None:
        """Has the engine close what it has open of the memory of buckets, after what it was sent before."""
        with suppress(ReplicaLostError):  # it has nothing open any more
            self._wait(self._call("close_buckets"))

    def commit(self, version: int, checksums: Mapping[str, int] | None = None) -> None:
        if self._bucket_writer is not None:
            try:
                self._bucket_writer.finish()
            finally:
                self._forget_bucket()
        self._wait(self._call("commit", version, checksums))
        self._version = version

    def parameter(self, name: str) -> torch.Tensor:
        """Returns a copy of what the engine computes with, where `capabilities().reads_back`."""
        tensor: torch.Tensor = self._wait(self._call("parameter", name))
        return tensor

    # ---- life ----

    def close(self) -> None:
        """Ends the process and all its children; calls that still wait get a RolloutError."""
        self._child.close()
        self._give_back()
        self._forget_bucket()

    # ---- inside ----

    def _opens(self, device: torch.device, must: bool) -> bool:
        """Says whether the engine can open memory of a device: has it read a few bytes there."""
        known = torch.arange(64, dtype=torch.uint8)
        seen: list[dict[str, int]] = []

        def send(bucket: SharedBucket) -> Confirmation:
            answer = self._call("look", bucket)
            return lambda: seen.extend(self._wait(answer))

        writer = BucketWriter(known.nbytes, send, device, self.close_buckets)
        try:
            writer.add("known", known)
            writer.finish()
            if all(sums == {"known": checksum(known)} for sums in seen):
                return True
            why = "it read other bytes there"
        except ReplicaLostError:
            raise
        except (RolloutError, WeightSyncError) as error:
            why = str(error)
        finally:
            writer.close()
        text = (
            f"the rollout engine's process cannot open memory of {device}: {why}. In a container, start it "
            "with --ipc=host; give trainer and engine the same whole device, no slice of one (MIG); or set "
            "rollout.weight_transport=host"
        )
        if must:
            raise ConfigError(text, key="rollout.weight_transport")
        _warn_once(f"weights go through the host's memory: {text}")
        return False

    def _give_back(self) -> None:
        if self._forkserver is not None:
            self._forkserver.give_back()
            self._forkserver = None

    def _forget_bucket(self) -> None:
        if self._bucket_writer is not None:
            self._bucket_writer.close()
            self._bucket_writer = None

    def _call(self, operation: str, *args: Any) -> ActorFuture:
        with _errors_of_rondo():
            return self._child.call(operation, *args, seconds=ANSWER_SECONDS)

    def _wait(self, answer: ActorFuture) -> Any:
        with _errors_of_rondo(), Activity(f"waiting for {self._child.who}", bound=False):
            return answer.result()

    async def _ask(self, operation: str, *args: Any) -> Any:
        with _errors_of_rondo():
            return await asyncio.wrap_future(self._call(operation, *args))

    def _take(self, records: Sequence[Tokens]) -> None:
        """Hands one frame's new tokens to the event loops of those who wait; on the reading thread."""
        progress()
        with self._lock:
            parts = [(self._streams.get(key), part) for record in records for key, part in record.parts()]
        deliver((stream, part, None) for stream, part in parts if stream is not None)


@functools.cache  # of several engines each says the same
def _warn_once(text: str) -> None:
    _log.warning(text)


def _settle(stream: _Stream, answer: Future[Done]) -> None:
    """Ends a generate call as its answer did, behind all of its tokens."""
    if answer.cancelled():  # by the caller, who does not wait any more
        return
    try:
        with _errors_of_rondo():
            end: Any = answer.result()
    except RondoError as error:
        end = error
    deliver([(stream, None, end)])


@contextmanager
def _errors_of_rondo() -> Iterator[None]:
    """Raises the engine's own error, if it is one of rondo's; ReplicaLostError where the process died, and
    RolloutError where it was closed.
    """
    try:
        yield
    except CallFailedError as error:
        cause = error.failure.cause()
        if isinstance(cause, RondoError):
            raise cause from error
        raise RolloutError(f"the engine raised {error}") from error
    except ProcessLostError as error:
        if error.closed:
            raise RolloutError(str(error)) from error
        raise ReplicaLostError(str(error), last_lines=error.tail) from error


def start_engine(
    spec: EngineSpec,
    *,
    name: str = "0",
    bucket_bytes: int = 256 << 20,
    accelerators: Sequence[str] = (),
    hop: Hop = "host",
) -> EngineProcess:
    """Starts the engine of `spec` in a process of its own; returns when it is ready. Raises ConfigError or
    RolloutError with the engine's own message.

    accelerators: the devices that it may use, by their ids (`Platform.visible_ids`); (): those of this
    process from spec.device on. hop: how weights get from here to it; by IPC they are on spec.device here.
    """
    shares = None if hop == "host" else torch.device(spec.device)
    if accelerators:  # the first of them is its first, whatever number that one has in this process
        spec = replace(spec, device=spec.device.partition(":")[0])
    spec, devices = visible_devices(spec, accelerators or platform_of(spec.device).visible_ids())
    own = {"OMP_NUM_THREADS": str(spec.threads)}
    if spec.engine in CLASSES:
        own = third_party(spec.engine).environment(spec)
    python, environment = None, {**os.environ, "PYTHONPATH": import_path()}
    if spec.python is not None:  # there, the engine is one of this environment
        python, environment = interpreter(spec.python).executable, environment_of(spec.python)
        spec = replace(spec, python=None, image_sample=sample_of(spec.source))
    environment |= {**own, **devices}
    return EngineProcess(
        spec,
        environment,
        name=name,
        bucket_bytes=bucket_bytes,
        shares=shares,
        must_share=hop == "ipc",
        python=python,
        preload=IMPORTS.get(spec.engine, ()) if _is_forked(spec, python) else None,
    )


def _is_forked(spec: EngineSpec, python: str | None) -> bool:
    """Says whether an engine is forked: where fork servers are kept. Nobody has tried what imports of
    third-party engines do with a GPU before a fork, so of these only those on CPUs are.
    """
    return are_kept() and python is None and (spec.engine in OWN or on_host(spec.device))


def visible_devices(spec: EngineSpec, here: Sequence[str]) -> tuple[EngineSpec, dict[str, str]]:
    """Says what an engine's process sees of this process's devices: its `tensor_parallel` ones from
    spec.device on, numbered from 0. here: their ids. Returns the process's spec and variables.

    Raises ConfigError when this process does not see them all.
    """
    platform, own = platform_of(spec.device), named_in_environment(platform_of(spec.device))
    if not platform.visible:
        return spec, own
    first, count = torch.device(spec.device).index or 0, spec.tensor_parallel
    if first + count > len(here):
        raise ConfigError(
            f"rollout.engine.tensor_parallel={count} from {spec.device} on, but this process sees "
            f"{len(here)} {platform.title}s ({', '.join(here)})"
        )
    own[platform.visible] = ",".join(here[first : first + count])
    return replace(spec, device=platform.device()), own
