"""The one place where an engine that was started again gets weights.

An engine process that dies is started again by its host, without weights, and whoever waits for its answers
would wait without end. While the trainer holds the version that is served, the mender loads it. While the
trainer's weights change (`changing` is held) it cannot: the publish at the end brings new ones to every
engine, and who must not wait that long (a drain, an evaluation, a replay) asks `stranded`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


async def _nothing() -> None: ...


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancels them and waits until they have ended, however."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Mender:
    """`async with Mender(…) as mender:` engines that are started again get weights inside."""

    def __init__(
        self,
        restarted: Callable[[], Coroutine[Any, Any, str]],
        reload: Callable[[], Awaitable[None]],
        *,
        check: Callable[[], Coroutine[Any, Any, object]] = _nothing,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        """restarted: returns a sentence when there is an engine without weights. reload: gives all engines
        the version that is served; they go on where they were. check: run after that (the canary). warn: told
        each sentence.
        """
        self.changing = asyncio.Lock()
        self._restarted = restarted
        self._reload = reload
        self._check = check
        self._warn = warn
        self._news = ""
        self._stranded = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="mender")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            await cancel(self._task)
            self._task = None

    async def served(self, work: Awaitable[T]) -> T:
        """The result of `work`, which waits for engines; raises what mending them raised meanwhile. Outside
        of `async with` nothing is mended.
        """
        if self._task is None:
            return await work
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait({working, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                self._task.result()  # the mender ends by an error only
            return working.result()
        finally:
            await cancel(working)

    async def stranded(self) -> str:
        """Returns when an engine was started again while weights change: what was asked of it waits for the
        next version.
        """
        await self._stranded.wait()
        return self._news

    async def _run(self) -> None:
        while True:
            news = await self._restarted()
            if self.changing.locked():
                self._news = news
                self._stranded.set()
                async with self.changing:  # whoever changed the weights has given new ones to all engines
                    self._stranded.clear()
                continue
            async with self.changing:
                await self.give_weights(news)
                await self._checked()

    async def give_weights(self, news: str) -> None:
        """Once, because of `news`."""
        self._warn(news)
        await self._reload()

    async def _checked(self) -> None:
        """The check asks engines, too; one that is started again meanwhile gets weights."""
        checking = asyncio.create_task(self._check())
        waiting = asyncio.create_task(self._restarted())
        try:
            while not checking.done():
                await asyncio.wait({checking, waiting}, return_when=asyncio.FIRST_COMPLETED)
                if waiting.done() and not checking.done():
                    await self.give_weights(waiting.result())
                    waiting = asyncio.create_task(self._restarted())
            checking.result()
        finally:
            await cancel(checking, waiting)
