"""What the controller's ends of host processes have in common: tickets, and what happens when a host
breaks."""

from __future__ import annotations

import asyncio
from typing import Any

from rondo.controller.host import Failure


class ByteCounter:
    """Bytes that passed through the controller."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, num_bytes: int) -> None:
        """Count bytes sent or received."""
        self.total += num_bytes


class HandleBase:
    """Tickets for sync calls, and the state `broken`."""

    def __init__(self) -> None:
        self.broken: Failure | None = None
        self.roles: set[str] = set()
        self._num_tickets = 0
        self._on_broken: asyncio.Future[Failure] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()  # the event loop holds tasks weakly

    def _ticket(self, is_async: bool) -> int | None:
        if is_async:
            return None
        self._num_tickets += 1
        return self._num_tickets - 1

    def _task(self, coroutine: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def condemn(self, failure: Failure) -> None:
        """Mark the host broken; everything that waits for it fails."""
        if self.broken is None:
            self.broken = failure
            self.on_broken()

    def on_broken(self) -> asyncio.Future[Failure]:
        """Done when the host is broken."""
        if self._on_broken is None:
            self._on_broken = asyncio.get_running_loop().create_future()
        if self.broken is not None and not self._on_broken.done():
            self._on_broken.set_result(self.broken)
        return self._on_broken
