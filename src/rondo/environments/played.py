"""An environment in one episode: made when the episode begins, what it shows checked, and what it raises
typed and reported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rondo.core.errors import EnvironmentFailedError
from rondo.environments.conformance import check_observation, check_result, check_results
from rondo.environments.protocol import Environment, StepResult
from rondo.system.border import contained, described


@dataclass(frozen=True)
class Shown:
    """What an environment gave after a reset or an action."""

    result: StepResult
    """What the environment gave; of a reset only the observation says something."""
    state: Mapping[str, Any] | None = None
    """The true state after it; None: it is not kept."""


class Played:
    """make: an instance. keep_state: after each call. Its methods raise EnvironmentFailedError only, which
    says which call it was.
    """

    def __init__(self, make: Callable[[], Environment], *, keep_state: bool) -> None:
        self._make = make
        self._keep_state = keep_state
        self._made: Environment | None = None
        self._closed = False

    def reset(self, seed: int, task: Any) -> Shown:
        """Makes the environment, and begins the episode."""
        with _told("reset"):
            made = self._made = self._make()
            if self._closed:  # it took longer than it may, and nobody else would end it
                made.close()
                raise EnvironmentFailedError("it was made when the episode had ended")
            return self._shown(StepResult(check_observation(made.reset(seed, task))))

    def step(self, action: str) -> Shown:
        """Acts."""
        with _told("step"):
            return self._shown(check_result(self._environment.step(action)))

    @staticmethod
    def step_many(played: Sequence[Played], actions: Sequence[str]) -> list[Shown]:
        """Acts in several environments of one class, which has a `step_many`."""
        environments = [one._environment for one in played]
        with _told("step_many"):
            made: Any = type(environments[0])
            results = check_results(made.step_many(environments, list(actions)), len(environments))
            return [one._shown(result) for one, result in zip(played, results, strict=True)]

    def restore(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Brings the environment to a state, and returns the one that it says it is in."""
        with _told("restore"):
            made: Any = self._environment
            made.restore(dict(state))
            return _checked_state(made.state())

    def close(self) -> None:
        """Ends the environment, also while another thread makes it."""
        self._closed = True
        made, self._made = self._made, None
        if made is not None:
            with _told("close"):
                made.close()

    @property
    def _environment(self) -> Environment:
        if self._made is None:
            raise EnvironmentFailedError("it was closed")
        return self._made

    def _shown(self, result: StepResult) -> Shown:
        return Shown(result, _checked_state(self._environment.state()) if self._keep_state else None)


def _checked_state(state: Any) -> Mapping[str, Any]:
    """Returns a copy of a state as JSON has it; later steps do not change the copy."""
    if not isinstance(state, Mapping):
        raise EnvironmentFailedError(f"state() returns a mapping, not {type(state).__name__}")
    try:
        copied: dict[str, Any] = json.loads(json.dumps(dict(state)))
    except (TypeError, ValueError) as error:
        raise EnvironmentFailedError(f"state() cannot be written as JSON: {error}") from error
    return copied


@contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        with contained():
            yield
    except EnvironmentFailedError:
        raise
    except Exception as error:
        raise EnvironmentFailedError(f"{what} raised {described(error)}") from error
