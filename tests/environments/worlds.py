"""Environments that break their promises, one each, and a text for one of gymnasium's."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Sequence
from typing import Any

import numpy as np

from rondo.environments import Observation, StepResult


class Honest:
    """Counts to three."""

    instructions = "Count to three."

    def __init__(self, *, wrong: str = "") -> None:
        self.wrong = wrong
        self.count = 0
        self.episodes = 0
        self.processes: list[subprocess.Popen[bytes]] = []

    def reset(self, seed: int, task: Any = None) -> Observation:
        if self.wrong == "starts":
            raise OSError("no such machine")
        self.count = 0
        self.episodes += 1
        self.seed = seed
        if self.wrong == "prints":
            print("hello")
        if self.wrong == "prints from a child":
            subprocess.run(["echo", "hello"], check=True)
        if self.wrong == "random":
            random.random()
        if self.wrong == "numpy":
            np.random.rand()
        if self.wrong == "process":
            self.processes.append(subprocess.Popen(["sleep", "60"]))
        return self._observe()

    def step(self, action: str) -> StepResult:
        if self.wrong == "dies" and self.count == 1:
            raise OSError("the machine is gone")
        self.count += 1
        rewards: dict[str, Any] = {"reward": float("nan"), "reward as text": "1"}
        reward = rewards.get(self.wrong, 1.0)
        return StepResult(self._observe(), reward, done=self.count == 3, success=self.count == 3)

    def _observe(self) -> Observation:
        if self.wrong == "empty":
            return Observation(" ")
        seen: Any = f"{self.count} of 3"
        if self.wrong == "randomly other":
            seen = f"{seen} {random.random()}"
        if self.wrong == "seedless":
            seen = f"{seen} {id(self)}"
        if self.wrong == "remembers":
            seen = f"{seen} in episode {self.episodes}"
        return seen if self.wrong == "text" else Observation(seen, ("next", "stay"))

    def state(self) -> dict[str, Any]:
        return {"count": self.count}

    def close(self) -> None:
        if self.wrong == "closes once":
            self.wrong = "was closed"
        elif self.wrong == "was closed":
            raise OSError("closed twice")


class Side(Honest):
    """Counts side by side."""

    @classmethod
    def step_many(cls, environments: Sequence[Side], actions: Sequence[str]) -> list[StepResult]:
        results = [each.step(action) for each, action in zip(environments, actions, strict=True)]
        if environments[0].wrong == "one too few":
            return results[1:]
        if environments[0].wrong == "mixed up":
            return results[::-1]
        return results


def cell(observation: Any, environment: Any) -> str:
    """Of gymnasium's FrozenLake-v1."""
    row, column = divmod(int(observation), environment.ncol)
    return f"row {row}, column {column}"
