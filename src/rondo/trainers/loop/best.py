"""Which evaluation was the best so far, and whether a better one is still to be waited for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rondo.config import BestConfig
from rondo.core.errors import ConfigError
from rondo.trainers.loop.evaluation import OF_SCORED, numbers_of


class Best:
    """Has no state of its own in a checkpoint: a run that goes on reads its metrics again.

    The evaluation before the first step is left out: there is no checkpoint of it.
    """

    def __init__(self, config: BestConfig) -> None:
        self.config = config
        self.step: int | None = None
        self.value: float | None = None
        self.waited = 0
        """Evaluations since, none of them better."""

    @property
    def enough(self) -> bool:
        """Whether `patience` is over."""
        return self.config.patience is not None and self.waited >= self.config.patience

    def read(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Takes the evaluations in the lines of metrics.jsonl."""
        for line in lines:
            self.add(line["step"], line)

    def add(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Takes the metrics of a step; those without an evaluation make no difference. Returns whether it is
        the best so far. Raises ConfigError where evaluations have no such metric.
        """
        name = self.config.metric
        evaluation = numbers_of(metrics)
        if name is None or not evaluation:
            return False
        value = metrics.get(name)
        if value is None:
            self._check_possible(name, evaluation)
        if step == 0:
            return False
        if value is None or not self._is_better(float(value)):
            self.waited += 1
            return False
        self.step, self.value, self.waited = step, float(value), 0
        return True

    def _is_better(self, value: float) -> bool:
        if self.value is None:
            return math.isfinite(value)
        return self.config.sign * (value - self.value) > self.config.min_delta  # not where it is no number

    def _check_possible(self, name: str, evaluation: Mapping[str, float]) -> None:
        if self.value is None and not OF_SCORED.fullmatch(name):
            known = ", ".join(f"eval/{one}" for one in evaluation)
            raise ConfigError(
                f"checkpoint.best.metric={name}: evaluations have no such metric; they have {known}",
                key="checkpoint.best.metric",
            )

    def forget(self) -> None:
        """Begins anew: what was the best cannot be had any more."""
        self.step, self.value, self.waited = None, None, 0

    def told(self) -> dict[str, Any] | None:
        """Returns what summary.json says of it; None where there is nothing to say."""
        if self.step is None:
            return None
        return {"metric": self.config.metric, "step": self.step, "value": self.value}
