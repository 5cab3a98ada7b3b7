"""An environment whose observations a function writes, which may ask a model."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rondo.config.functions import check_options, resolve_function
from rondo.core.errors import ConfigError
from rondo.environments.protocol import Environment, Observation, StepResult
from rondo.environments.registry import environment_class
from rondo_worlds.user import text_of


class Observed:
    """Another environment whose observations a function writes anew; actions, rewards, ends and anchors stay
    as they are.
    """

    def __init__(self, *, of: str | Mapping[str, Any], by: str | Callable[..., Any]) -> None:
        """of: the environment, by name or as `{name: sokoban, size: 5}`. by: `(seen, state, seed) -> text`,
        plain or a coroutine: what it shows, and its `state()`; what is drawn follows from the seed.
        """
        made, options = _chosen(of)
        self._world: Environment = made(**options)
        self._tell = resolve_function(by)

    @classmethod
    def check(cls, *, of: str | Mapping[str, Any], by: str | Callable[..., Any]) -> None:
        """Checks that the environment has what it needs. Raises RondoError."""
        resolve_function(by)
        made, options = _chosen(of)
        check = getattr(made, "check", None)
        if check is not None:
            check(**options)

    def reset(self, seed: int, task: Any = None) -> Observation:
        """Begins an episode of the environment."""
        self._seed = seed
        self._told = 0
        return self._in_words(self._world.reset(seed, task))

    def step(self, action: str) -> StepResult:
        """Acts in the environment."""
        result = self._world.step(action)
        return replace(result, observation=self._in_words(result.observation))

    def state(self) -> Mapping[str, Any]:
        """Returns the environment's."""
        return self._world.state()

    def close(self) -> None:
        """Ends the environment."""
        self._world.close()

    def _in_words(self, seen: Observation) -> Observation:
        seed = zlib.crc32(f"{self._seed} {self._told}".encode())
        self._told += 1
        text = text_of("observed: the function", self._tell(seen, self._world.state(), seed))
        return replace(seen, text=text, anchor=seen.identity)


def _chosen(of: str | Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the class of an environment, and its options. Raises ConfigError."""
    options = {"name": of} if isinstance(of, str) else dict(of)
    if "name" not in options:
        raise ConfigError(f"observed: of: needs the name of an environment, got {of!r}")
    made = environment_class(options.pop("name"), "observed")
    check_options(made, options, "observed: of", given=0)
    return made, options
