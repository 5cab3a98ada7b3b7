"""Episode workers (`rollout.episode_workers`): processes on processors only, in which environments live, or
agents that ask over HTTP.

    EpisodeWorkers ── place() ─▶ the EpisodeWorker with the fewest episodes ══ a process ══▶ Agent

One that dies is started again when it is next wanted, and what it held is begun again (EpisodeLostError).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from rondo.config.functions import resolve_function
from rondo.config.schema import FunctionConfig
from rondo.core.errors import ConfigError, DataError, EpisodeLostError, RolloutError
from rondo.system.actor import (
    PICKLE_ERRORS,
    Actor,
    ActorHandle,
    Answer,
    CallFailedError,
    ProcessLostError,
    spawn,
)
from rondo.system.border import awaited, in_thread, said_by
from rondo.system.forkserver import ForkServer, fork_server
from rondo.system.process import import_path

START_SECONDS = 120.0  # for a process to import what it is to run
MAX_RESTARTS = 5  # in a row, of processes that died before they were asked anything
MAX_REISSUES = 2  # of an episode that was in a call when its process died
_log = logging.getLogger(__name__)


class EpisodeWorker:
    """A process, and how many episodes live in it. given: what it is to load. forkserver: what it is forked
    from.
    """

    serves: type[Actor]

    def __init__(self, number: int, given: tuple[Any, ...], forkserver: ForkServer) -> None:
        self.who = f"episode worker {number}"
        self.episodes = 0
        self.was_asked = False
        self._child: ActorHandle | None = None
        self._ended = ""
        self._loading = asyncio.ensure_future(self._load(given, forkserver))

    async def loaded(self) -> None:
        """Returns when it can be asked. Raises ProcessLostError, ConfigError, RolloutError."""
        await asyncio.shield(self._loading)

    async def _load(self, given: tuple[Any, ...], forkserver: ForkServer) -> None:
        start = functools.partial(spawn, self.serves, self.who, _environment(), forkserver=forkserver)
        try:
            async with asyncio.timeout(START_SECONDS):
                self._child = await asyncio.wrap_future(in_thread(start, "start"))
                await self._child.begin(*given)
        except TimeoutError as error:
            await self.kill("it took too long to start")
            raise RolloutError(f"{self.who} was not ready within {START_SECONDS:.0f} s") from error
        except OSError as error:
            raise RolloutError(f"{self.who} cannot be started: {error}") from error
        except CallFailedError as error:
            cause = error.failure.cause()
            raise cause if isinstance(cause, ConfigError) else RolloutError(str(error)) from error

    @property
    def ended(self) -> str:
        """Says why it can be asked no more; empty: it can."""
        lost = None if self._child is None else self._child.lost
        return self._ended or ("" if lost is None else str(lost))

    def last_words(self) -> str:
        """Returns the last lines that it printed."""
        return "" if self._child is None else self._child.process.tail()

    def how_it_ended(self) -> str:
        """Says it for a message: "exit code 1", "signal SIGKILL"."""
        assert self._child is not None
        return self._child.process.how_it_ended()

    def ask(self, operation: str, *arguments: Any) -> Answer:
        """Calls it, when it has loaded. Raises EpisodeLostError where it has ended already."""
        if self.ended:
            raise EpisodeLostError(self.ended)
        assert self._child is not None
        self.was_asked = True
        try:
            return self._child.call(operation, *arguments)
        except ProcessLostError as error:
            raise EpisodeLostError(str(error)) from error

    async def kill(self, why: str) -> None:
        """Ends it and all that it has started."""
        self._ended = self._ended or f"{self.who} was ended: {why}"
        await asyncio.wrap_future(in_thread(self.end, "kill"))

    def end(self) -> None:
        """Ends it at once. From any thread."""
        if self._child is not None:
            self._child.kill()


W = TypeVar("W", bound=EpisodeWorker)


class EpisodeWorkers(Generic[W]):
    """count processes, each started when there is an episode for it, by a fork of one that has imported
    rondo's part. All on one event loop, but for `close`. start: makes the one of a number.
    """

    def __init__(self, count: int, start: Callable[[int, ForkServer], W]) -> None:
        self._start = start
        self._forkserver: ForkServer | None = None
        self._workers: list[W | None] = [None] * count
        self._restarts = 0  # in a row
        self._closed = False
        self._deaths: Counter[str] = Counter()  # in a call of the episode of this name

    async def place(self) -> W:
        """Returns one for a new episode, which is counted as its. Raises RolloutError where they die as they
        start, ConfigError for what they cannot load.
        """
        while True:
            counts = [0 if one is None or one.ended else one.episodes for one in self._workers]
            number = counts.index(min(counts))
            worker = self._workers[number]
            if worker is None or worker.ended:
                worker = self._workers[number] = self._anew(number, worker)
            worker.episodes += 1
            try:
                await worker.loaded()
            except ProcessLostError:
                worker.episodes -= 1
            except BaseException:
                worker.episodes -= 1
                raise
            else:
                return worker

    def _anew(self, number: int, before: W | None) -> W:
        if self._closed:
            raise RolloutError("the run's episode workers have ended")
        if before is not None:
            _log.warning("%s; it is started again", before.ended)
            self._restarts = 0 if before.was_asked else self._restarts + 1
            if self._restarts > MAX_RESTARTS:
                raise RolloutError(
                    f"{before.ended}, after {MAX_RESTARTS} others that also died before they were asked "
                    f"anything. Its last lines:\n{before.last_words() or '(none)'}"
                )
        if self._forkserver is None:
            self._forkserver = fork_server([__name__, "rondo.environments.played"], _environment())
        return self._start(number, self._forkserver)

    def blame(self, episode: str) -> bool:
        """Counts a death in a call of this episode. Says whether it may be begun again."""
        self._deaths[episode] += 1
        return self._deaths[episode] <= MAX_REISSUES

    def is_suspect(self, episode: str) -> bool:
        """Says whether a process has died in a call of this episode."""
        return episode in self._deaths

    def forget(self, episode: str) -> None:
        """Is told that an episode has ended for good."""
        self._deaths.pop(episode, None)

    def close(self) -> None:
        """Ends the processes. From any thread."""
        self._closed = True
        for worker in self._workers:
            if worker is not None:
                worker.end()
        if self._forkserver is not None:
            self._forkserver.give_back()
            self._forkserver = None


def _environment() -> dict[str, str]:
    own = {"PYTHONPATH": import_path(), "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


# ---- agents that ask over HTTP, in episode workers ----


_THREADS = 64  # plain functions that run at one time in a process


class Agent(Actor):
    """The function of an agent that asks over HTTP."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._function = functools.partial(resolve_function(name), **options)

    async def run(self, arguments: Mapping[str, Any]) -> tuple[str, str]:
        """Runs it; returns what it said, and why it failed."""
        if inspect.iscoroutinefunction(self._function.func):
            return await said_by(awaited(self._function(**arguments)))
        run = functools.partial(self._function, **arguments)
        return await said_by(asyncio.wrap_future(in_thread(run, "agent")))


class _Agents(EpisodeWorker):
    serves = Agent


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
            said: tuple[str, str] = await answer
        return said

    def close(self) -> None:
        """Ends the processes. From any thread."""
        self._pool.close()
