"""Where the environments of episodes live: in threads of this process, or in episode workers.

    World ── reset, step, close ─▶ Placed ─▶ a thread for each call ─────────────────▶ Played
                                          ─▶ the line before a process ══ frames ══▶  Played

A process makes one call at a time. What waits in its line does so on the agents' loop, in no thread.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import pickle
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rondo.agents.worker_pool import EpisodeWorker, EpisodeWorkers
from rondo.config.schema import EnvironmentConfig
from rondo.core.errors import EnvironmentFailedError, EpisodeLostError
from rondo.environments.played import Played, Shown
from rondo.environments.registry import EnvironmentChoice, load_environments
from rondo.system.actor import PICKLE_ERRORS, Actor, CallFailedError, ProcessLostError
from rondo.system.border import in_thread

_THREADS = 32  # that step at one time; what hangs holds none


class Placed(Protocol):
    """The environment of one episode. Its methods raise EnvironmentFailedError, and EpisodeLostError where
    the episode has to be begun again.
    """

    seconds: float
    """That its calls took, without waiting for their turn."""

    async def reset(self, seed: int, task: Any) -> Shown: ...

    async def step(self, action: str) -> Shown: ...

    async def restore(self, state: Mapping[str, Any]) -> Mapping[str, Any]: ...

    async def close(self) -> None: ...


class Place(Protocol):
    """Where environments live."""

    def open(self, choice: EnvironmentChoice, episode: str) -> Placed: ...

    def close(self) -> None: ...


def over(what: str, limit: float) -> EnvironmentFailedError:
    """Returns the failure of a call that took too long."""
    return EnvironmentFailedError(f"{what} took longer than timeout_seconds = {limit}")


# ---- in threads


class Threads:
    """Threads of this process: one for each call, and 32 at most at a time."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(_THREADS)

    def open(self, choice: EnvironmentChoice, episode: str) -> Placed:
        """Returns the environment of an episode."""
        return _InThreads(choice, self._slots)

    def close(self) -> None:
        """Leaves behind what hangs."""


class _InThreads:
    def __init__(self, choice: EnvironmentChoice, slots: asyncio.Semaphore) -> None:
        self.seconds = 0.0
        self._choice = choice
        self._slots = slots
        self._played = Played(choice.make, keep_state=choice.config.keep_state)

    async def reset(self, seed: int, task: Any) -> Shown:
        return await self._called("reset", functools.partial(self._played.reset, seed, task))

    async def step(self, action: str) -> Shown:
        return await self._called("step", functools.partial(self._played.step, action))

    async def restore(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        return await self._called("restore", functools.partial(self._played.restore, state))

    async def close(self) -> None:
        await self._called("close", self._played.close)

    async def _called(self, what: str, call: Callable[[], Any]) -> Any:
        limit = self._choice.config.timeout_seconds
        async with self._slots:
            started = time.monotonic()
            try:
                async with asyncio.timeout(limit):
                    return await asyncio.wrap_future(in_thread(call, self._choice.name))
            except TimeoutError as error:
                raise over(what, limit) from error
            finally:
                self.seconds += time.monotonic() - started


# ---- in episode workers


class Environments(Actor):
    """The environments of many episodes, by the number that the host gave each. Answers are pickled by
    themselves: a class in one that the host cannot find is that episode's failure, and not the frame's.
    """

    def __init__(self, configs: Sequence[EnvironmentConfig]) -> None:
        self._environments = {choice.name: choice for choice in load_environments(configs)}
        self._played: dict[int, Played] = {}

    def reset(self, numbers: Sequence[int], names: Sequence[str], seeds: Any, tasks: Any) -> bytes:
        """Makes an environment, and begins an episode in it."""
        (number,), choice = numbers, self._environments[names[0]]
        played = self._played[number] = Played(choice.make, keep_state=choice.config.keep_state)
        return pickle.dumps([played.reset(seeds[0], tasks[0])])

    def step(self, numbers: Sequence[int], actions: Sequence[str]) -> bytes:
        """Makes one step of each; those of a vectorised environment come as one call."""
        played = [self._played[number] for number in numbers]
        several = len(played) > 1
        shown: list[Shown] = Played.step_many(played, actions) if several else [played[0].step(actions[0])]
        return pickle.dumps(shown)

    def restore(self, numbers: Sequence[int], states: Sequence[Mapping[str, Any]]) -> bytes:
        """Brings an environment to a state."""
        return pickle.dumps([self._played[numbers[0]].restore(states[0])])

    def close(self, numbers: Sequence[int]) -> bytes:
        """Ends an episode."""
        (number,) = numbers
        self._played.pop(number).close()
        return pickle.dumps([None])


@dataclass(eq=False)
class _Asked:
    """A call that waits in the line before a process."""

    of: _InWorker
    operation: str
    arguments: tuple[Any, ...]
    answer: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class _Line(EpisodeWorker):
    """A process in which environments live, and the calls that wait for it."""

    serves = Environments

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._waiting: deque[_Asked] = deque()
        self._working: asyncio.Task[None] | None = None

    async def answer(self, of: _InWorker, operation: str, *arguments: Any) -> Any:
        """Returns what a call gave. Raises EnvironmentFailedError, EpisodeLostError."""
        asked = _Asked(of, operation, arguments)
        self._waiting.append(asked)
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        return await asked.answer

    async def _work(self) -> None:
        while self._waiting:
            if asked := self._next():
                await self._call(asked)
        self._working = None

    def _next(self) -> list[_Asked]:
        """Returns the calls that are made next, as one: all steps that wait of one vectorised environment,
        but for those of suspects.
        """
        first = self._waiting.popleft()
        asked = [first]
        if first.operation == "step" and first.of.goes_with_others:
            asked += [
                each
                for each in self._waiting
                if each.operation == "step" and each.of.goes_with_others and each.of.choice == first.of.choice
            ]
            self._waiting = deque(each for each in self._waiting if each not in asked)
        return [each for each in asked if not each.answer.done()]  # given up meanwhile

    async def _call(self, asked: Sequence[_Asked]) -> None:
        started = time.monotonic()
        answers: Sequence[Any]
        try:
            await self.loaded()
            started = time.monotonic()
            answers = await self._answers(asked)
        except Exception as error:  # whatever it is, it is told to those who wait, and the line goes on
            answers = [error] * len(asked)
        seconds = time.monotonic() - started
        for each, answer in zip(asked, answers, strict=True):
            each.of.seconds += seconds
            if each.answer.done():
                continue
            if isinstance(answer, Exception):
                each.answer.set_exception(answer)
            else:
                each.answer.set_result(answer)

    async def _answers(self, asked: Sequence[_Asked]) -> list[Any]:
        first, several = asked[0], len(asked) > 1
        episodes = [each.of.episode for each in asked]
        limit, what = first.of.choice.config.timeout_seconds, first.operation
        numbers = [each.of.number for each in asked]
        columns = zip(*(each.arguments for each in asked), strict=True)
        try:
            async with asyncio.timeout(limit):
                said = await self.ask(what, numbers, *map(list, columns))
            answers: list[Any] = pickle.loads(said)
        except TimeoutError as error:
            failure, was_stopped = over(what, limit), self.is_stopped()
            await self.kill(f"{what} of {first.of.choice.name} took longer than {limit} s")
            begin_again = several or was_stopped
            raise (self._again(episodes, str(failure)) if begin_again else failure) from error
        except ProcessLostError as error:
            said = error.tail.splitlines()[-1:]
            why = "; it printed last: ".join([f"{what}: its process died, {self.how_it_ended()}", *said])
            raise self._again(episodes, why) from error
        except CallFailedError as error:
            cause = error.failure.cause()
            told = cause if isinstance(cause, EnvironmentFailedError) else _unreadable(what, error)
            raise (self._again(episodes, str(told)) if several else told) from error
        except PICKLE_ERRORS as error:
            raise _unreadable(what, error) from error
        return answers

    def _again(self, episodes: Sequence[str], why: str) -> Exception:
        """Returns what is raised to the episodes of a call that failed: one that was alone in it may be
        guilty.
        """
        guilty = self.supervisor.died(episodes)
        if guilty is None:
            return EpisodeLostError(why)
        return EnvironmentFailedError(f"{why}; so it was {self.supervisor.num_deaths(guilty)} times")


def _unreadable(what: str, error: Exception) -> EnvironmentFailedError:
    return EnvironmentFailedError(
        f"{what} cannot be asked in another process ({error}): tasks, and what results have as info, are of "
        "Python's own types"
    )


class Workers:
    """Processes of their own, in which one call is made at a time. environments: all that may live there."""

    def __init__(self, count: int, environments: Sequence[EnvironmentChoice]) -> None:
        self.pool = EpisodeWorkers(count, _Line, ([choice.config for choice in environments],))
        self.numbers = itertools.count()

    def open(self, choice: EnvironmentChoice, episode: str) -> Placed:
        """Returns the environment of an episode."""
        return _InWorker(choice, episode, self)

    def close(self) -> None:
        """Ends the processes. From any thread."""
        self.pool.close()


class _InWorker:
    def __init__(self, choice: EnvironmentChoice, episode: str, workers: Workers) -> None:
        self.seconds = 0.0
        self.choice = choice
        self.number = next(workers.numbers)
        self.episode = episode
        self._pool = workers.pool
        self._line: _Line | None = None
        self._lost = False

    @property
    def goes_with_others(self) -> bool:
        """Says whether its steps may be made in one call with those of others."""
        return self.choice.steps_many and not self._pool.supervisor.is_suspect(self.episode)

    async def reset(self, seed: int, task: Any) -> Shown:
        self._line = self._pool.seat(self)
        shown: Shown = await self._answer(self._line, "reset", self.choice.name, seed, task)
        return shown

    async def step(self, action: str) -> Shown:
        assert self._line is not None
        shown: Shown = await self._answer(self._line, "step", action)
        return shown

    async def restore(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self._line is not None
        restored: Mapping[str, Any] = await self._answer(self._line, "restore", state)
        return restored

    async def close(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.running.discard(self)
            if not line.ended:  # with all that lived in it
                await self._answer(line, "close")
        if not self._lost:
            self._pool.supervisor.ended(self.episode)

    async def _answer(self, line: _Line, operation: str, *arguments: Any) -> Any:
        try:
            return await line.answer(self, operation, *arguments)
        except EpisodeLostError:
            self._lost = True
            raise
