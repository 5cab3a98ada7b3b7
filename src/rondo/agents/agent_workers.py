"""Agents that ask over HTTP, in episode workers: coroutines all on the loop of their process, plain functions
each in a thread there, so that what one computes holds up no rollout worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rondo.agents.worker_pool import MAX_REISSUES, EpisodeWorker, EpisodeWorkers
from rondo.config.schema import FunctionConfig
from rondo.core.errors import DataError, EpisodeLostError
from rondo.system.child import ProcessLostError
from rondo.system.link import PICKLE_ERRORS

_THREADS = 64  # plain functions that run at one time in a process


class _Agents(EpisodeWorker):
    kind = "agent"


class AgentWorkers:
    """count processes that run the function of `config`."""

    def __init__(self, count: int, config: FunctionConfig, function: Callable[..., Any]) -> None:
        given = (config.name, dict(config.options))
        self._pool: EpisodeWorkers[_Agents] = EpisodeWorkers(
            count, lambda number, forkserver: _Agents(number, given, forkserver)
        )
        plain = not inspect.iscoroutinefunction(function)
        self._slots = asyncio.Semaphore(count * _THREADS) if plain else contextlib.nullcontext()

    async def run(
        self, episode: str, arguments: Mapping[str, Any], deadline_seconds: float | None
    ) -> tuple[str, str]:
        """Returns what the agent said, and why it failed. Waiting for a thread, or a process, does not count
        as its time. Raises TimeoutError, EpisodeLostError, DataError.
        """
        async with self._slots:
            worker = await self._pool.place()
            try:
                said = await self._asked(worker, arguments, deadline_seconds)
            except ProcessLostError as error:
                why = f"its {error} with {worker.episodes} episodes in it; it printed last:\n{error.tail}"
                if self._pool.blame(episode):
                    raise EpisodeLostError(why) from error
                said = "", f"{why}\nso it was {MAX_REISSUES + 1} times"
            except PICKLE_ERRORS as error:
                raise DataError(
                    f"{episode}: the prompt's fields cannot be handed to an episode worker ({error}); have "
                    "values of Python's own types in rows, or rollout.episode_workers=0"
                ) from error
            finally:
                worker.episodes -= 1
        self._pool.forget(episode)
        return said

    async def _asked(
        self, worker: _Agents, arguments: Mapping[str, Any], deadline_seconds: float | None
    ) -> tuple[str, str]:
        answer = worker.ask("run", dict(arguments))
        async with asyncio.timeout(deadline_seconds):
            try:
                said: tuple[str, str] = await asyncio.wrap_future(answer)
            except asyncio.CancelledError:
                worker.drop(answer)
                raise
        return said

    def close(self) -> None:
        """Ends the processes. From any thread."""
        self._pool.close()
