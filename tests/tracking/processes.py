"""Other processes for tests about kills and locks: from one fork server, so that each starts at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from tests.ranks import fork_server


@contextmanager
def running(function: Callable[..., None], *args: Any) -> Iterator[tuple[ForkServerProcess, Connection]]:
    """`function(connection, *args)` in a process of its own; yields (process, our end). Killed at the end."""
    context = fork_server()
    ours, theirs = context.Pipe()
    process = context.Process(target=function, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join(10)
        ours.close()
