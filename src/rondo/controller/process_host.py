"""`python -m rondo.controller.process_host SOCKET`: a host of the `process` backend."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from rondo.controller.remote import HostProgram
from rondo.transport.frames import SharedObject
from rondo.transport.link import Call, Failure, Link, Reply, serve


class _Server:
    """Runs each call as a task of its own."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._program = HostProgram()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def take(self, calls: Sequence[Call]) -> None:
        for call in calls:
            if call.operation == "cancel":  # nobody waits for the answer
                task = self._tasks.get(call.args[0])
                if task is not None:
                    task.cancel()
                continue
            task = asyncio.get_running_loop().create_task(self._answer(call))
            self._tasks[call.number] = task
            task.add_done_callback(partial(self._forget, call.number))

    def _forget(self, number: int, _: asyncio.Task[None]) -> None:
        del self._tasks[number]

    async def _answer(self, call: Call) -> None:
        try:
            value = await (self._run(*call.args) if call.operation == "run" else self._other(call))
        except Exception as error:
            self._link.send(Reply(call.number, failure=Failure.of(error)))
        else:
            self._link.send(Reply(call.number, value))

    async def _run(
        self, ticket: int | None, payload: bytes, blocks: Sequence[SharedObject]
    ) -> tuple[bytes, SharedObject | None]:
        reply, kept = await self._program.run(ticket, payload, [block.load() for block in blocks])
        return reply, None if kept is None else SharedObject.of(kept)

    async def _other(self, call: Call) -> Any:
        assert call.operation in ("open_store", "join", "cpu_seconds", "close"), call.operation
        return await getattr(self._program, call.operation)(*call.args)


async def _main(connection: socket.socket) -> None:
    link = Link(connection, "rondo-link")
    await serve(link, _Server(link).take)


if __name__ == "__main__":
    # Forks of one process begin with the same state of every generator.
    random.seed()
    np.random.seed(int.from_bytes(os.urandom(4), "little"))
    torch.seed()
    asyncio.run(_main(socket.socket(fileno=int(sys.argv[1]))))
