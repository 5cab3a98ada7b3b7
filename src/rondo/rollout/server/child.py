"""What an engine's own process serves to its host: one engine.

the calls of EngineProcess ─┬─ generate: its tokens are collected, and sent a few hundred times a second
                            │            at most, all requests' together
                            ├─ begin, bucket, commit, parameter: one thread, in their order
                            └─ the rest: the engine's own coroutines
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import torch

from rondo.core.errors import ReplicaLostError
from rondo.core.types import Completion, GenerateRequest
from rondo.rollout.build import build_engine
from rondo.rollout.protocol import EngineSpec
from rondo.rollout.server.wire import Done, Ready, Tokens
from rondo.system.actor import Actor
from rondo.system.streams import log_to_stderr
from rondo.weights.bucket import SharedBucket

TOKENS_SECONDS = 0.02  # new tokens wait at most this long for company


class EngineServer(Actor):
    """Builds one engine, and serves it. Raises what `build_engine` raises."""

    fatal = (ReplicaLostError,)  # the engine cannot go on: neither does its process

    def __init__(self, spec: EngineSpec) -> None:
        log_to_stderr("%(levelname)s %(name)s: %(message)s")
        self._engine = build_engine(spec)
        self._tokens: dict[int, list[Completion]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def ready(self) -> Ready:
        """Says what was built."""
        engine = self._engine
        return Ready(os.getpid(), engine.describe(), engine.capabilities(), engine.version)

    async def generate(self, key: int, request: GenerateRequest) -> Done:
        """Generates; the tokens go beside the answer (`said`), under this key."""
        sent = 0 if request.prefix is None else len(request.prefix.token_ids)

        def on_tokens(part: Completion) -> None:
            nonlocal sent
            sent += len(part.token_ids)
            self._tokens.setdefault(key, []).append(part)
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(TOKENS_SECONDS, self.flush)

        whole = await self._engine.generate(request, on_tokens)
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

    def parameter(self, name: str) -> torch.Tensor:
        """Returns a copy of what the engine computes with."""
        return self._engine.parameter(name).detach().cpu().clone()  # type: ignore[attr-defined,no-any-return]
