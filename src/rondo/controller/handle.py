"""The controller's end of a host process: it hands out tickets, and knows what happens when a host breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from rondo.controller.host import Call, Failure, Reply

# What a call ends with: the reply, and the handle of the Batch that was kept (None: none was).
Answer = tuple[Reply, Any]


class HostHandle:
    """One host as the controller sees it. A backend says how calls travel: `pack` and `submit`."""

    def __init__(self) -> None:
        # Why this host can take no more calls.
        self.broken: Failure | None = None
        # The roles of the workers that live there.
        self.roles: set[str] = set()
        # Bytes of calls and replies that passed through the controller.
        self.num_bytes = 0
        self._num_tickets = 0
        self._on_broken: asyncio.Future[Failure] | None = None
        self._tasks: set[asyncio.Task[Answer]] = set()  # the event loop holds tasks weakly

    def pack(self, call: Call) -> Any:
        """Returns what travels; it may be submitted to several hosts."""
        raise NotImplementedError

    def submit(self, packed: Any, is_async: bool) -> asyncio.Task[Answer]:
        """Sends now (calls keep this order). The task ends with the reply and the handle of what was kept."""
        raise NotImplementedError

    def condemn(self, failure: Failure) -> None:
        """Marks the host broken; everything that waits for it fails."""
        if self.broken is None:
            self.broken = failure
            self.on_broken()

    def on_broken(self) -> asyncio.Future[Failure]:
        """Returns a future that is done when the host is broken."""
        if self._on_broken is None:
            self._on_broken = asyncio.get_running_loop().create_future()
        if self.broken is not None and not self._on_broken.done():
            self._on_broken.set_result(self.broken)
        return self._on_broken

    def _ticket(self, is_async: bool) -> int | None:
        if is_async:
            return None
        self._num_tickets += 1
        return self._num_tickets - 1

    def _task(self, coroutine: Coroutine[Any, Any, Answer]) -> asyncio.Task[Answer]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
