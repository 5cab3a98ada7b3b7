"""The engine's process: builds one engine and serves it to the host over one socket.

    Server.take: starts Calls ─┬─ generate: a task each; tokens are collected, and sent a few hundred times a
                               │            second at most, all requests' together
                               ├─ begin, bucket, commit, parameter: the one weights thread, in their order
                               └─ the rest: a task each
When the host's end of the socket closes, the process ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from rondo.errors import ReplicaLostError
from rondo.rollout.build import build_engine
from rondo.rollout.protocol import RolloutEngine
from rondo.rollout.server.wire import Done, Ready, Tokens
from rondo.transport.frames import Frame, receive
from rondo.transport.link import Call, Failure, Link, Reply, serve
from rondo.types import Completion, GenerateRequest
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
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._tokens: dict[int, list[Completion]] = {}
        self._records: list[Any] = []
        self._timer: asyncio.TimerHandle | None = None

    def take(self, calls: Sequence[Call]) -> None:
        """Starts what the host asks for."""
        for call in calls:
            self._start(call)

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._weights.shutdown(wait=False, cancel_futures=True)
        self._engine.close()

    # ---- calls ----

    def _start(self, call: Call) -> None:
        if call.operation == "drop":  # the host's task was cancelled: nobody wants an answer
            task = self._tasks.get(call.args[0])
            if task is not None:
                task.cancel()
            return
        if call.operation in ("begin", "bucket", "commit", "parameter"):  # synchronous, and in this order
            method = getattr(self, f"_{call.operation}")
            done = self._loop.run_in_executor(self._weights, method, *call.args)
            task = self._loop.create_task(self._answer(call.number, done))
        elif call.operation == "generate":
            task = self._loop.create_task(self._generate(call.number, *call.args))
        else:
            task = self._loop.create_task(self._answer(call.number, self._do(call)))
        self._tasks[call.number] = task
        task.add_done_callback(lambda _: self._tasks.pop(call.number, None))

    async def _do(self, call: Call) -> Any:
        assert call.operation in ("cancel", "pause", "resume", "sleep", "wake", "stats"), call.operation
        return await getattr(self._engine, call.operation)(*call.args)

    # The two methods below are the boundary at which an engine's exception travels to the host as a record.
    async def _answer(self, number: int, result: Any) -> None:
        try:
            reply = Reply(number, await result)
        except ReplicaLostError as error:
            self._leave(error)
            return
        except Exception as error:
            _log.debug("call %d failed", number, exc_info=error)
            reply = Reply(number, failure=Failure.of(error))
        self._send(reply)

    async def _generate(self, number: int, request: GenerateRequest) -> None:
        sent = 0 if request.prefix is None else len(request.prefix.token_ids)

        def on_tokens(part: Completion) -> None:
            nonlocal sent
            sent += len(part.token_ids)
            self._tokens.setdefault(number, []).append(part)
            if self._timer is None:
                self._timer = self._loop.call_later(TOKENS_SECONDS, self._flush)

        try:
            whole = await self._engine.generate(request, on_tokens)
        except ReplicaLostError as error:
            self._leave(error)
            return
        except Exception as error:
            self._send(Reply(number, failure=Failure.of(error)))
            return
        if len(whole.token_ids) > sent:
            self._tokens.setdefault(number, []).append(whole.part(sent))
        done = Done(number, whole.prompt_ids, whole.finish_reason, len(whole.token_ids), whole.extras)
        self._send(done)

    def _leave(self, error: ReplicaLostError) -> None:
        """The engine cannot go on: neither does its process. What it made has been sent, or is sent now."""
        _log.error("this engine's process ends: %s", error)
        self._flush()
        self._link.close(socket.SHUT_RDWR)  # ends `serve`

    # ---- weights: on the weights thread ----

    def _begin(self, version: int) -> None:
        self._engine.begin(version)

    def _bucket(self, bucket: SharedBucket) -> None:
        whole = getattr(self._engine, "receive_bucket", None)
        if whole is not None:
            whole(bucket)
            return
        with bucket.tensors() as tensors:
            for name, tensor in tensors:
                self._engine.receive(name, tensor)

    def _commit(self, version: int, checksums: Mapping[str, int] | None) -> None:
        self._engine.commit(version, checksums)

    def _parameter(self, name: str) -> torch.Tensor:
        return self._engine.parameter(name).detach().cpu().clone()  # type: ignore[attr-defined,no-any-return]

    # ---- sending ----

    def _send(self, record: Reply | Done) -> None:
        """With what else is ready in this turn of the loop."""
        if not self._records:
            self._loop.call_soon(self._flush)
        self._records.append(record)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        records = [*([Tokens.of(self._tokens)] if self._tokens else []), *self._records]
        self._tokens, self._records = {}, []
        if records:
            self._link.send(*records)


def main(descriptor: int) -> None:
    """Builds the engine that the first call wants, before there is an event loop, and serves it."""
    os.dup2(2, 1)  # what engines print goes to the log
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
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
        await serve(link, server.take)
    finally:
        server.close()
