"""Episode workers (`rollout.episode_workers`): processes on processors only, in which environments live, or
agents that ask over HTTP.

    EpisodeWorkers ── place() ─▶ the EpisodeWorker with the fewest episodes ══ a process ══▶ Agent

One that dies is started again when it is next wanted, and what it held is begun again (EpisodeLostError).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

from rondo.config.functions import resolve_function
from rondo.config.schema import FunctionConfig
from rondo.core.errors import ConfigError, DataError, EpisodeLostError, RolloutError
from rondo.platform import hidden
from rondo.system.actor import (
    PICKLE_ERRORS,
    Actor,
    ActorFuture,
    ActorHandle,
    CallFailedError,
    ProcessLostError,
    spawn,
)
from rondo.system.border import awaited, in_thread, said_by
from rondo.system.forkserver import ForkServer, fork_server
from rondo.system.pool import Pool, Pooled, Supervision, Supervisor, begun
from rondo.system.process import import_path

START_SECONDS = 120.0  # for a process to import what it is to run
STOPPED_SECONDS = 5.0  # one that is frozen (SIGSTOP) for so long is ended, as if it had been killed
# Restarts in a row, of processes that died before they were asked anything; deaths in calls of an episode.
SUPERVISION = Supervision(restarts=5, deaths=3, forgiven=1)
_log = logging.getLogger(__name__)


class EpisodeWorker(Pooled):
    """A process, and what lives in it. given: what it is to load. forkserver: what it is forked from.
    supervisor: of the pool that it is in.
    """

    serves: type[Actor]

    def __init__(
        self, number: int, given: tuple[Any, ...], forkserver: ForkServer, supervisor: Supervisor[Hashable]
    ) -> None:
        super().__init__()
        self.supervisor = supervisor
        self.who = f"episode worker {number}"
        self.was_asked = False
        self._child: ActorHandle | None = None
        self._ended = ""
        self._loading = begun(self._load(given, forkserver))

    async def loaded(self) -> None:
        """Returns when it can be asked. Raises EpisodeLostError where it died, ConfigError, RolloutError."""
        try:
            await asyncio.shield(self._loading)  # a call that is cancelled leaves it to the others
        except ProcessLostError as error:
            raise EpisodeLostError(str(error)) from error

    async def _load(self, given: tuple[Any, ...], forkserver: ForkServer) -> None:
        fork = functools.partial(spawn, forkserver=forkserver, stopped_seconds=STOPPED_SECONDS)
        start = functools.partial(fork, self.serves, self.who, _environment())
        try:
            self._child = await asyncio.wrap_future(in_thread(start, "start"))
            await self._child.begin(*given, seconds=START_SECONDS)
        except ProcessLostError as error:
            if not error.late:
                raise
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

    def is_stopped(self) -> bool:
        """Says whether it is frozen, by SIGSTOP: what it does not answer is not the fault of what it runs."""
        return self._child is not None and self._child.process.is_stopped()

    def last_words(self) -> str:
        """Returns the last lines that it printed."""
        return "" if self._child is None else self._child.process.tail()

    def how_it_ended(self) -> str:
        """Says how the process ended, for a message: "exit code 1", "signal SIGKILL"."""
        assert self._child is not None
        return self._child.process.how_it_ended()

    def ask(self, operation: str, *arguments: Any) -> ActorFuture:
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


class EpisodeWorkers(Pool[W]):
    """Episode workers, forked from one process that has imported rondo's part. kind: of which each is. given:
    what it is to load. room: see `Pool`.
    """

    def __init__(self, count: int, kind: type[W], given: tuple[Any, ...], room: int | None = None) -> None:
        super().__init__(count, self._anew, SUPERVISION, room)
        self._kind = kind
        self._given = given
        self._forkserver: ForkServer | None = None
        self._num_again = 0

    def _anew(self, number: int, before: W | None) -> W:
        """Starts a worker in the place of one that died. Raises RolloutError where they die as they start."""
        if before is not None:
            self._num_again += 1
            # The 1st, 2nd, 4th, 8th …: what ends its process in every episode would fill the log.
            level = logging.DEBUG if self._num_again & (self._num_again - 1) else logging.WARNING
            _log.log(level, "%s; it is started again (%d so far)", before.ended, self._num_again)
            if before.was_asked:
                self.supervisor.worked()
            if self.supervisor.gives_up:
                raise RolloutError(
                    f"{before.ended}, after {SUPERVISION.restarts} others that also died before they were "
                    f"asked anything. Its last lines:\n{before.last_words() or '(none)'}"
                )
        if self._forkserver is None:
            self._forkserver = fork_server([__name__, "rondo.environments.played"], _environment())
        return self._kind(number, self._given, self._forkserver, self.supervisor)

    def close(self) -> None:
        """Ends the processes. From any thread."""
        super().close()
        if self._forkserver is not None:
            self._forkserver.give_back()
            self._forkserver = None


def _environment() -> dict[str, str]:
    own = {"PYTHONPATH": import_path(), **hidden()}
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
        room = None if inspect.iscoroutinefunction(function) else _THREADS
        self._pool = EpisodeWorkers(count, _Agents, (config.name, dict(config.options)), room)

    async def run(
        self, episode: str, arguments: Mapping[str, Any], deadline_seconds: float | None
    ) -> tuple[str, str]:
        """Returns what the agent said, and why it failed. Waiting for a thread, or a process, does not count
        as its time. Raises TimeoutError, EpisodeLostError, DataError.
        """
        async with self._pool.place(episode) as worker:
            try:
                await worker.loaded()
                return await self._asked(worker, arguments, deadline_seconds)
            except ProcessLostError as error:
                why = f"its {error} with {len(worker.running)} episodes in it; it printed last:\n{error.tail}"
                if self._pool.died(worker, worker.running) != episode:
                    raise EpisodeLostError(why) from error
                deaths = self._pool.supervisor.num_deaths(episode)
                return "", f"{why}\nso it was {deaths} times, the last one alone"
            except PICKLE_ERRORS as error:
                raise DataError(
                    f"{episode}: the prompt's fields cannot be handed to an episode worker ({error}); have "
                    "values of Python's own types in rows, or rollout.episode_workers=0"
                ) from error

    async def _asked(
        self, worker: _Agents, arguments: Mapping[str, Any], deadline_seconds: float | None
    ) -> tuple[str, str]:
        answer = worker.ask("run", dict(arguments))
        try:
            async with asyncio.timeout(deadline_seconds):
                said: tuple[str, str] = await answer
        except TimeoutError:
            if not (worker.ended or worker.is_stopped()):
                raise
            await worker.kill("it was stopped (SIGSTOP)")
            raise ProcessLostError(worker.ended, worker.last_words(), closed=False) from None
        return said

    def close(self) -> None:
        """Ends the processes. From any thread."""
        self._pool.close()
