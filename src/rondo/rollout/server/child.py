"""What an engine's own process serves to its host: one engine.

the calls of EngineProcess ─┬─ generate: its tokens are collected, and sent together with those of other
                            │            requests: at once where somebody listens, else once a second, so
                            │            that a process that dies loses no more of them
                            ├─ begin, bucket, commit, parameter and the like: one thread, in their order
                            └─ the rest: the engine's own coroutines
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import torch

from rondo.core.errors import ReplicaLostError
from rondo.core.types import Completion, GenerateRequest, StepStats
from rondo.platform import Profiler, ProfileTurn
from rondo.rollout.build import build_engine
from rondo.rollout.protocol import WASTED_TOKENS, EngineSpec
from rondo.rollout.server.wire import Done, Ready, Tokens
from rondo.system.actor import Actor
from rondo.system.streams import log_to_stderr
from rondo.weights.bucket import SharedBucket, close_opened
from rondo.weights.checksum import checksum

TOKENS_SECONDS = 0.02  # new tokens wait at most this long for company
KEPT_SECONDS = 1.0  # those of requests that nobody listens to


class EngineServer(Actor):
    """Builds one engine, and serves it. Raises what `build_engine` raises."""

    fatal = (ReplicaLostError,)  # the engine cannot go on: neither does its process

    def __init__(self, spec: EngineSpec) -> None:
        log_to_stderr("%(levelname)s %(name)s: %(message)s")
        self._engine = build_engine(spec)
        self._profiler = Profiler(spec.device)
        # By the key of a call: what goes with the next frame, and what of the others is kept back.
        self._tokens: dict[int, list[Completion]] = {}
        self._kept: dict[int, list[Completion]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._kept_timer: asyncio.TimerHandle | None = None
        self._wasted_tokens = 0

    async def ready(self) -> Ready:
        """Says what was built."""
        engine = self._engine
        return Ready(os.getpid(), engine.describe(), engine.capabilities(), engine.version)

    async def generate(self, key: int, request: GenerateRequest, heard: bool) -> Done:
        """Generates; the tokens go beside the answer (`said`), under this key. heard: somebody listens to
        them as they come.
        """
        made = 0 if request.prefix is None else len(request.prefix.token_ids)
        loop = asyncio.get_running_loop()

        def on_tokens(part: Completion) -> None:
            nonlocal made
            made += len(part.token_ids)
            (self._tokens if heard else self._kept).setdefault(key, []).append(part)
            if heard and self._timer is None:
                self._timer = loop.call_later(TOKENS_SECONDS, self.flush)
            elif not heard and self._kept_timer is None:
                self._kept_timer = loop.call_later(KEPT_SECONDS, self._send_kept)

        try:
            whole = await self._engine.generate(request, on_tokens)
        except asyncio.CancelledError:
            self._kept.pop(key, None)
            self._wasted_tokens += made
            raise
        except Exception:  # with its error goes what it has made
            if key in self._kept:
                self._tokens.setdefault(key, []).extend(self._kept.pop(key))
            raise
        sent = made - sum(len(part.token_ids) for part in self._kept.pop(key, ()))
        if len(whole.token_ids) > sent:
            self._tokens.setdefault(key, []).append(whole.part(sent))
        return Done(whole.prompt_ids, whole.finish_reason, len(whole.token_ids), whole.routes)

    def said(self) -> Sequence[Tokens]:
        """Returns the tokens since the last frame."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        tokens, self._tokens = self._tokens, {}
        return [Tokens.of(tokens)] if tokens else []

    def _send_kept(self) -> None:
        self._kept_timer = None
        for key, parts in self._kept.items():
            self._tokens.setdefault(key, []).extend(parts)
        self._kept = {}
        self.flush()

    async def stats(self) -> StepStats:
        """Returns the engine's, with the tokens of calls that were cancelled."""
        stats: StepStats = await self._engine.stats()
        stats.sums[WASTED_TOKENS] = float(self._wasted_tokens)
        self._wasted_tokens = 0
        return stats

    def __getattr__(self, name: str) -> Any:
        """Answers all other calls as the engine does."""
        return getattr(self._engine, name)

    def ended(self) -> None:
        """Ends the engine."""
        self._engine.close()

    # ---- weights, as the engine's begin and commit: in one thread, in the order of the calls ----

    def bucket(self, bucket: SharedBucket) -> None:
        """Has the engine receive what is in a bucket."""
        whole = getattr(self._engine, "receive_bucket", None)
        if whole is not None:
            whole(bucket)
            return
        with bucket.tensors() as tensors:
            for name, tensor in tensors:
                self._engine.receive(name, tensor)

    def look(self, bucket: SharedBucket) -> list[dict[str, int]]:
        """Opens a bucket as `bucket` would, and loads nothing; returns the checksums by name, from each
        process that does. Raises WeightSyncError.
        """
        own = getattr(self._engine, "look", None)
        if own is not None:
            sums: list[dict[str, int]] = own(bucket)
            return sums
        with bucket.tensors() as tensors:
            return [{name: checksum(tensor) for name, tensor in tensors}]

    def turn_profile(self, change: ProfileTurn, name: str) -> None:
        """Ends and begins the profile of this process."""
        self._profiler.turn(change, name)

    def close_buckets(self) -> None:
        """Closes what is open of the memory that buckets are in."""
        close_opened()
        own = getattr(self._engine, "close_buckets", None)
        if own is not None:
            own()

    def parameter(self, name: str) -> torch.Tensor:
        """Returns a copy of what the engine computes with."""
        return self._engine.parameter(name).detach().cpu().clone()  # type: ignore[attr-defined,no-any-return]
