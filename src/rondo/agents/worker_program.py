"""An episode worker's process: `python -m rondo.agents.worker_program KIND SOCKET`.

environments   load(configs), then reset, step and close, one call at a time, in the main thread
agent          load(name, options), then run(arguments): coroutines on one loop, plain functions in threads
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import inspect
import os
import pickle
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rondo.config.functions import resolve_function
from rondo.config.schema import EnvironmentConfig
from rondo.environments.played import Played, Shown
from rondo.environments.registry import EnvironmentChoice, load_environments
from rondo.system.border import awaited, in_thread, said_by
from rondo.system.link import Call, Link, serve, serve_in_turn


class _Environments:
    """The environments of many episodes, by the number that the host gave each."""

    def __init__(self) -> None:
        self._choices: dict[str, EnvironmentChoice] = {}
        self._played: dict[int, Played] = {}

    def operate(self, call: Call) -> bytes:
        """Answers a call. The answer is pickled by itself: a class in it that the host cannot find is that
        episode's failure, and not the frame's.
        """
        operations: dict[str, Callable[..., Any]] = {
            "load": self._load,
            "reset": self._reset,
            "step": self._step,
            "close": self._close,
        }
        return pickle.dumps(operations[call.operation](*call.args))

    def _load(self, configs: Sequence[EnvironmentConfig]) -> None:
        self._choices = {choice.name: choice for choice in load_environments(configs)}

    def _reset(self, numbers: Sequence[int], names: Sequence[str], seeds: Any, tasks: Any) -> list[Shown]:
        (number,), choice = numbers, self._choices[names[0]]
        played = self._played[number] = Played(choice.make, keep_state=choice.config.keep_state)
        return [played.reset(seeds[0], tasks[0])]

    def _step(self, numbers: Sequence[int], actions: Sequence[str]) -> list[Shown]:
        played = [self._played[number] for number in numbers]
        return Played.step_many(played, actions) if len(played) > 1 else [played[0].step(actions[0])]

    def _close(self, numbers: Sequence[int]) -> list[None]:
        (number,) = numbers
        self._played.pop(number).close()
        return [None]


class _Agent:
    """The loaded function of an agent that asks over HTTP."""

    def __init__(self) -> None:
        self._function: Any = None

    async def operate(self, call: Call) -> Any:
        """Loads the function, or runs it: what it said, and why it failed."""
        if call.operation == "load":
            name, options = call.args
            self._function = functools.partial(resolve_function(name), **options)
            return None
        return await self._run(*call.args)

    async def _run(self, arguments: Mapping[str, Any]) -> tuple[str, str]:
        if inspect.iscoroutinefunction(self._function.func):
            return await said_by(awaited(self._function(**arguments)))
        run = functools.partial(self._function, **arguments)
        return await said_by(asyncio.wrap_future(in_thread(run, "agent")))


def main(kind: str, connection: socket.socket) -> None:
    """Answers calls until the host is gone."""
    os.dup2(2, 1)  # what the user's code prints goes to the log
    faulthandler.enable()  # a crash is told with the line of Python that it came from
    if kind == "environments":
        serve_in_turn(connection, _Environments().operate)
    else:
        asyncio.run(serve(Link(connection, "rondo-agents"), _Agent().operate))


if __name__ == "__main__":
    main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
