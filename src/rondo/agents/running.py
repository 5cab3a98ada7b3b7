"""Running code of the user's where it can block nobody but its like: plain functions each in a thread of its
own, coroutines on one loop in a thread of theirs. Both are daemons: code that hangs is left behind.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from rondo.system.border import EscapeError, awaited, contained, described

T = TypeVar("T")
_log = logging.getLogger(__name__)


def in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Calls a plain function in a thread of its own: one that hangs is left behind, and holds up nobody."""
    result: Future[T] = Future()

    def run() -> None:
        if not result.set_running_or_notify_cancel():
            return
        try:
            with contained():
                result.set_result(call())
        except Exception as error:  # the boundary: it travels to whoever waits for the result
            result.set_exception(error)

    threading.Thread(target=run, name=f"rondo-{name}", daemon=True).start()
    return result


def on_agents_loop(call: Callable[[], Awaitable[T]], at_end: Callable[[], Awaitable[None]]) -> Future[T]:
    """Awaits a coroutine on the agents' loop. Cancelling the future cancels it. at_end: is awaited after it,
    however it ended.
    """

    async def run() -> T:
        try:
            return await awaited(call())
        finally:
            await at_end()

    return asyncio.run_coroutine_threadsafe(run(), _agents_loop())


async def said_by(agent: Awaitable[Any]) -> tuple[str, str]:
    """Returns what an agent returned, and why it failed."""
    try:
        said = await agent
    except Exception as error:  # the boundary: what the user's agent raises is a failed trajectory
        return "", f"the agent raised {described(error)}"
    if said is not None and not isinstance(said, str):
        return "", f"the agent returned {type(said).__name__}; it must return None or its final text"
    return said or "", ""


@functools.cache
def _agents_loop() -> asyncio.AbstractEventLoop:
    """Returns one loop for the life of the process, so that agents may keep their clients from run to run."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run_forever, args=(loop,), name="rondo-agents", daemon=True).start()
    return loop


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    """Goes on where a task that an agent started, and nobody awaits, would end the loop."""
    while True:
        try:
            with contained():
                loop.run_forever()
        except EscapeError as error:
            _log.error("a task that an agent started raised %s", described(error))
