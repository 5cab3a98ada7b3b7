"""Waiting for one thing while watching another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel and wait until they have ended, however."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def attended(
    work: Awaitable[T], news: Callable[[], Coroutine[Any, Any, str]], attend: Callable[[str], Awaitable[None]]
) -> T:
    """The result of `work`; meanwhile `attend(sentence)` for each sentence that a call of `news` returns."""
    working = asyncio.ensure_future(work)
    waiting = asyncio.create_task(news())
    try:
        while True:
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            await attend(waiting.result())
            waiting = asyncio.create_task(news())
    finally:
        await cancel(working, waiting)
