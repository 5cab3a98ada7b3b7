"""Environments of gymnasium's API with discrete actions, which have names here. Needs rondo-rl[gymnasium]."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rondo.config.functions import resolve_function
from rondo.core.errors import ConfigError, EnvironmentFailedError
from rondo.environments.protocol import Observation, StepResult
from rondo_worlds.packages import require_package
from rondo_worlds.tiles import check_observe, observed_as


class Gymnasium:
    """An environment that `gymnasium.make(id, **further options)` makes.

    actions: names of the actions, from the first on. text: a function `(observation, environment) -> str`
    that writes an observation for the policy; without one, those that are text are taken as they are.
    success: the least return of an episode that ended by the rules and counts as a success. observe: text,
    image (what the environment draws, `render_mode: rgb_array`) or both.
    """

    def __init__(
        self,
        *,
        id: str,
        actions: Sequence[str],
        text: str | Callable[..., str] | None = None,
        success: float = 1.0,
        observe: str = "text",
        **options: Any,
    ) -> None:
        self._observe_as = check_observe(observe, "gymnasium")
        if observe != "text":
            options = {**options, "render_mode": "rgb_array"}
        self._made = _made(id, actions, options)
        self._actions = tuple(actions)
        self._text = None if text is None else resolve_function(text)
        self._success = success
        self._last: Any = None
        self._return = 0.0

    @classmethod
    def check(cls, **options: Any) -> None:
        """Raises ConfigError where the package is missing, does not know the environment or its options, or
        the environment has other actions.
        """
        cls(**options).close()

    def reset(self, seed: int, task: Any = None) -> Observation:
        """Begins an episode. task: gymnasium's `options` of `reset`."""
        self._return = 0.0
        seen, _ = self._made.reset(seed=seed % 2**32, options=task)
        return self._observe(seen)

    def step(self, action: str) -> StepResult:
        """Takes the action of this name."""
        seen, reward, terminated, truncated, _ = self._made.step(self._actions.index(action))
        self._return += float(reward)
        won = bool(terminated) and self._return >= self._success
        return StepResult(self._observe(seen), float(reward), bool(terminated), bool(truncated), won)

    def _observe(self, seen: Any) -> Observation:
        self._last = seen
        if self._observe_as == "image":
            seen = ""
        elif self._text is not None:
            seen = str(self._text(seen, self._made.unwrapped))
        if not isinstance(seen, str):
            raise EnvironmentFailedError(
                f"gymnasium: an observation is {type(seen).__name__}; set the option text to a function that "
                "writes it: my.py:text"
            )
        return observed_as(self._observe_as, seen, self._actions, self._drawn)

    def _drawn(self) -> np.ndarray:
        return np.asarray(self._made.render())

    def state(self) -> Mapping[str, Any]:
        """Returns the last observation."""
        plain = self._last.tolist() if isinstance(self._last, np.ndarray | np.generic) else self._last
        return {"observation": plain}

    def close(self) -> None:
        """Closes it."""
        self._made.close()


def _made(id: str, actions: Sequence[str], options: Mapping[str, Any]) -> Any:
    require_package("gymnasium")
    import gymnasium

    if isinstance(actions, str) or len(set(actions)) != len(actions):
        raise ConfigError(f"gymnasium: actions are a list of different names, not {actions!r}")
    # pygame, which draws, would greet on the run's standard output.
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    try:
        gymnasium.spec(id)
        made: Any = gymnasium.make(id, **options)
        if options.get("render_mode") is not None:
            if options["render_mode"] not in made.metadata.get("render_modes", ()):
                made.close()
                raise ConfigError(f"gymnasium: {id} draws no pictures; leave observe out")
            made.reset(seed=0)
            made.render()  # some lack a further package only here
    except gymnasium.error.Error as error:
        raise ConfigError(f"gymnasium knows no environment {id!r}: {error}") from error
    except TypeError as error:
        raise ConfigError(f"gymnasium: {id} cannot be made with {dict(options)}: {error}") from error
    there = made.action_space
    if not isinstance(there, gymnasium.spaces.Discrete) or there.n != len(actions):
        made.close()
        raise ConfigError(f"gymnasium: {id} has the actions {there}, and there are {len(actions)} names")
    return made
