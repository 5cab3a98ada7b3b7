"""`python -m rondo.rollout.server.child SOCKET`: builds one engine and serves it to the host.

    Server.operate: a task for each Call ─┬─ generate: its tokens are collected, and sent a few hundred times
                                          │            a second at most, all requests' together
                                          ├─ begin, bucket, commit, parameter: the one weights thread, in
                                          │            their order
                                          └─ the rest: the engine's own coroutines
When the host's end of the socket closes, the process ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from rondo.core.errors import ReplicaLostError
from rondo.core.types import Completion, GenerateRequest
from rondo.rollout.build import build_engine
from rondo.rollout.protocol import RolloutEngine
from rondo.rollout.server.wire import Done, Ready, Tokens
from rondo.system.activity import pulse
from rondo.system.frames import Frame, receive
from rondo.system.link import Call, Failure, Link, Reply, serve
from rondo.system.streams import log_to_stderr
from rondo.weights.bucket import SharedBucket

TOKENS_SECONDS = 0.02  # new tokens wait at most this long for company
_log = logging.getLogger(__name__)


class Server:
    """Serves `engine`."""

    def __init__(self, engine: RolloutEngine, link: Link) -> None:
        self._engine = engine
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._weights = ThreadPoolExecutor(1, "rondo-weights")
        self._tokens: dict[int, list[Completion]] = {}
        self._replies: list[Reply] = []
        self._timer: asyncio.TimerHandle | None = None

    async def operate(self, call: Call) -> Any:
        """Does what the host asks for."""
        try:
            match call.operation:
                case "generate":
                    return await self._generate(call.number, *call.args)
                case "begin" | "commit":
                    return await self._in_order(getattr(self._engine, call.operation), *call.args)
                case "bucket":
                    return await self._in_order(self._bucket, *call.args)
                case "parameter":
                    return await self._in_order(self._parameter, *call.args)
                case "cancel" | "pause" | "resume" | "sleep" | "wake" | "stats":
                    return await getattr(self._engine, call.operation)(*call.args)
                case other:
                    raise AssertionError(other)
        except ReplicaLostError as error:
            self._leave(error)
            raise

    def reply(self, reply: Reply) -> None:
        """Sends a reply, with what else is ready in this turn of the loop."""
        if not self._replies:
            self._loop.call_soon(self._flush)
        self._replies.append(reply)

    def close(self) -> None:
        """Ends the engine."""
        self._weights.shutdown(wait=False, cancel_futures=True)
        self._engine.close()

    async def _generate(self, number: int, request: GenerateRequest) -> Done:
        sent = 0 if request.prefix is None else len(request.prefix.token_ids)

        def on_tokens(part: Completion) -> None:
            nonlocal sent
            sent += len(part.token_ids)
            self._tokens.setdefault(number, []).append(part)
            if self._timer is None:
                self._timer = self._loop.call_later(TOKENS_SECONDS, self._flush)

        whole = await self._engine.generate(request, on_tokens)
        if len(whole.token_ids) > sent:
            self._tokens.setdefault(number, []).append(whole.part(sent))
        return Done(whole.prompt_ids, whole.finish_reason, len(whole.token_ids), whole.routes)

    def _leave(self, error: ReplicaLostError) -> None:
        """The engine cannot go on: neither does its process. What it made has been sent, or is sent now."""
        _log.error("this engine's process ends: %s", error)
        self._flush()
        self._link.close(socket.SHUT_RDWR)  # ends `serve`

    # ---- weights ----

    async def _in_order(self, operation: Callable[..., Any], *args: Any) -> Any:
        """Runs a synchronous operation on the weights thread."""
        return await self._loop.run_in_executor(self._weights, operation, *args)

    def _bucket(self, bucket: SharedBucket) -> None:
        whole = getattr(self._engine, "receive_bucket", None)
        if whole is not None:
            whole(bucket)
            return
        with bucket.tensors() as tensors:
            for name, tensor in tensors:
                self._engine.receive(name, tensor)

    def _parameter(self, name: str) -> torch.Tensor:
        return self._engine.parameter(name).detach().cpu().clone()  # type: ignore[attr-defined,no-any-return]

    # ---- sending ----

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        records = [*([Tokens.of(self._tokens)] if self._tokens else []), *self._replies]
        self._tokens = {}
        self._replies = []
        if records:
            self._link.send(*records)


def main(descriptor: int) -> None:
    """Builds the engine that the first call wants, before there is an event loop, and serves it."""
    os.dup2(2, 1)  # what engines print goes to the log
    log_to_stderr("%(levelname)s %(name)s: %(message)s")
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    (build,) = receive(connection)
    try:
        engine = build_engine(*build.args)
    except Exception as error:
        _log.error("the engine could not be built", exc_info=error)
        Frame([Reply(build.number, failure=Failure.of(error))]).send(connection)
        return
    ready = Ready(os.getpid(), engine.describe(), engine.capabilities(), engine.version)
    Frame([Reply(build.number, ready)]).send(connection)
    asyncio.run(_serve(engine, connection))


async def _serve(engine: RolloutEngine, connection: socket.socket) -> None:
    link = Link(connection, "rondo-link")
    server = Server(engine, link)
    try:
        await serve(link, server.operate, server.reply, at_once={"pulse": pulse})
    finally:
        server.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
