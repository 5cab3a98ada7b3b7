"""A user's file whose functions raise what borders between threads, tasks and processes lose or trip over."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any

from rondo.rewards import reward_function


class OddError(Exception):
    """Comes back from no pickle."""

    def __init__(self, one: object, other: object) -> None:
        super().__init__(one)
        self.lock = threading.Lock()


class WordlessError(Exception):
    def __str__(self) -> str:
        raise KeyError("words")

    __repr__ = __str__


class HeavyArgument:
    def __reduce__(self) -> Any:
        raise LookupError("cannot be pickled")


class Calls:
    """A pickle that calls something when it is read."""

    def __init__(self, call: Callable[..., Any], *given: Any) -> None:
        self._made = (call, given)

    def __reduce__(self) -> Any:
        return self._made


KINDS: Mapping[str, Callable[[], BaseException]] = {
    "StopIteration": StopIteration,
    "StopAsyncIteration": StopAsyncIteration,
    "GeneratorExit": GeneratorExit,
    "SystemExit": lambda: SystemExit(0),
    "CancelledError": asyncio.CancelledError,
    "KeyboardInterrupt": KeyboardInterrupt,
    "BaseException": BaseException,
    "OddError": lambda: OddError(1, 2),
    "WordlessError": WordlessError,
    "ValueError": lambda: ValueError(HeavyArgument()),
}


def fail(kind: str) -> Any:
    raise KINDS[kind]()


def reward(prompt: Any, trajectory: Any, *, kind: str) -> float:
    return float(fail(kind))


async def reward_later(prompt: Any, trajectory: Any, *, kind: str) -> float:
    return float(fail(kind))


@reward_function(run_in="loop")
def reward_at_once(prompt: Any, trajectory: Any, *, kind: str) -> float:
    return float(fail(kind))


@reward_function(run_in="process")
def reward_elsewhere(prompt: Any, trajectory: Any, *, kind: str) -> float:
    return float(fail(kind))


def _check(kind: str) -> None:
    fail(kind)


@reward_function(check=_check)
def reward_checked(prompt: Any, trajectory: Any, *, kind: str) -> float:
    return 0.0


def rows(kind: str) -> Any:
    yield fail(kind)


def tool(kind: str) -> str:
    """Fails."""
    return str(fail(kind))


async def tool_later(kind: str) -> str:
    """Fails."""
    return str(fail(kind))


class ToolChecked:
    """Has a check, and something to prepare."""

    def __init__(self, kind: str) -> None: ...

    def __call__(self) -> str:
        return ""

    @classmethod
    def check(cls, kind: str) -> None:
        fail(kind)

    @classmethod
    def prepare(cls, kind: str) -> None:
        fail(kind)


class World:
    """Fails when it begins."""

    instructions = ""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    @classmethod
    def check(cls, kind: str) -> None:
        fail(kind)

    def reset(self, seed: int, task: Any = None) -> Any:
        return fail(self._kind)

    def step(self, action: str) -> Any: ...

    def state(self) -> Mapping[str, Any]:
        return {}

    def close(self) -> None: ...


def estimator(rewards: Any, *, kind: str) -> Any:
    return fail(kind)


def loss(log_probs: Any, *, kind: str) -> Any:
    return fail(kind)


class Tracker:
    """Fails in one of its methods."""

    where = ""

    def __init__(self, context: Any, *, kind: str, fails_in: str) -> None:
        self._kind, self._fails_in = kind, fails_in
        self._do("init")

    def _do(self, method: str) -> None:
        if method == self._fails_in:
            fail(self._kind)

    def log(self, step: int, metrics: Any) -> None:
        self._do("log")

    def log_samples(self, step: int, samples: Any) -> None:
        self._do("log_samples")

    def finish(self, status: str) -> None:
        self._do("finish")


class Sampler:
    def __init__(self, *, kind: str, fails_in: str) -> None:
        self.kind, self.fails_in = kind, fails_in
        self._do("init")

    def _do(self, name: str) -> Any:
        return fail(self.kind) if name == self.fails_in else None

    def choose(self, k: int) -> Any:
        return self._do("choose") or [("a source", 0, 2)] * k

    def heard(self, row: int) -> None:
        self._do("heard")

    def too_long(self, row: int) -> None:
        self._do("too_long")

    def check(self, n: int) -> None:
        self._do("check")

    def metrics(self) -> Any:
        return self._do("metrics")

    def state(self) -> Any:
        return self._do("state")

    def load(self, state: Any) -> None:
        self._do("load")


# Of functions that have no options.
def _named(kind: str) -> Callable[[], Any]:
    def function() -> Any:
        return fail(kind)

    return function


for _kind in KINDS:
    globals()[f"raises_{_kind}"] = _named(_kind)
