"""A bandit: arms that pay with different odds."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from rondo.core.errors import ConfigError, EnvironmentFailedError
from rondo.environments.protocol import Observation, StepResult


class Bandit:
    """A machine with `arms` arms, which pay 1 with odds that follow from the seed; `pulls` for an episode.

    It has succeeded where the arm with the best odds was pulled most.
    """

    instructions = "Each arm of the machine pays with odds of its own. Find out which one pays most."

    def __init__(self, *, arms: int = 3, pulls: int = 6) -> None:
        if not 2 <= arms <= 100 or not 1 <= pulls <= 1000:
            raise ConfigError(f"bandit: needs 2 to 100 arms and 1 to 1000 pulls, got {arms} and {pulls}")
        self._actions = tuple(f"arm {number}" for number in range(1, arms + 1))
        self._pulls = pulls
        self._seen: list[tuple[str, int]] | None = None

    @classmethod
    def check(cls, **options: Any) -> None:
        """Raises ConfigError for options that it cannot have."""
        cls(**options)

    def reset(self, seed: int, task: Any = None) -> Observation:
        """Sets the odds. task: odds by arm, where they are not to be drawn."""
        self._rng = random.Random(f"rondo bandit: {seed}")
        self._odds = [self._rng.random() for _ in self._actions] if task is None else list(task)
        if len(self._odds) != len(self._actions):
            raise EnvironmentFailedError(
                f"bandit: the task has odds for {len(self._odds)} of {len(self._actions)} arms"
            )
        self._seen = []
        return self._observe()

    def step(self, action: str) -> StepResult:
        """Pulls an arm."""
        assert self._seen is not None, "reset comes first"
        paid = int(self._rng.random() < self._odds[self._actions.index(action)])
        self._seen.append((action, paid))
        done = len(self._seen) >= self._pulls
        return StepResult(self._observe(), float(paid), done, success=done and self._found())

    def _found(self) -> bool:
        pulls = [sum(arm == each for arm, _ in self._seen or ()) for each in self._actions]
        best = self._odds.index(max(self._odds))
        return all(pulls[best] > other for arm, other in enumerate(pulls) if arm != best)

    def _observe(self) -> Observation:
        assert self._seen is not None
        lines = [f"{arm} paid {paid}" for arm, paid in self._seen]
        return Observation("\n".join([*lines, f"{self._pulls - len(lines)} pulls left"]), self._actions)

    def state(self) -> Mapping[str, Any]:
        """Returns the odds, and what was paid."""
        return {"odds": self._odds, "seen": [list(pull) for pull in self._seen or ()]}

    def close(self) -> None:
        """Has nothing to end."""
