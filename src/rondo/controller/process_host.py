"""`python -m rondo.controller.process_host SOCKET`: a host of the `process` backend."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
from typing import Any

import numpy as np
import torch

from rondo.controller.remote import HostProgram, log_everything
from rondo.system.frames import SharedObject
from rondo.system.link import Call, Link, serve


async def _main(connection: socket.socket) -> None:
    program = HostProgram()

    async def operate(call: Call) -> Any:
        if call.operation == "run":
            ticket, payload, blocks = call.args
            reply, kept = await program.run(ticket, payload, [block.load() for block in blocks])
            return reply, None if kept is None else SharedObject.of(kept)
        assert call.operation in ("open_store", "join", "cpu_seconds", "close"), call.operation
        return await getattr(program, call.operation)(*call.args)

    await serve(Link(connection, "rondo-link"), operate, at_once={"pulse": program.pulse})


if __name__ == "__main__":
    os.dup2(2, 1)  # what is printed goes to the log
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    log_everything()
    # Forks of one process begin with the same state of every generator.
    random.seed()
    np.random.seed(int.from_bytes(os.urandom(4), "little"))
    torch.seed()
    asyncio.run(_main(socket.socket(fileno=int(sys.argv[1]))))
