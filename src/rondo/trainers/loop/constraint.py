"""The Lagrange multiplier of algorithm.constraint: a number that the controller keeps, adapts and saves."""

from __future__ import annotations

from rondo.algorithms.constraint import smooth_cost, update_multiplier
from rondo.batch import BatchRef
from rondo.config.schema import ConstraintConfig
from rondo.data.rows import SCORE_PREFIX
from rondo.types import StepStats


class ConstraintController:
    """multiplier: λ >= 0 for the next step; None where there is no constraint."""

    def __init__(self, config: ConstraintConfig | None) -> None:
        self._config = config
        self.multiplier = config.initial if config is not None else None
        self._average: float | None = None

    def update(self, batch: BatchRef, stats: StepStats) -> None:
        """After a step: λ follows the moving average of the cost. batch: all scored rows of the step."""
        if self._config is None or self.multiplier is None:
            return
        config = self._config
        mean = float(batch.index.scalars(SCORE_PREFIX + config.cost).mean())
        self._average = smooth_cost(self._average, mean, config.smoothing)
        stats.add_max("actor/multiplier", self.multiplier)
        stats.add_max("reward/cost_average", self._average)
        self.multiplier = update_multiplier(self.multiplier, self._average, config.limit, config.lr)

    def state(self) -> list[float | None]:
        return [self.multiplier, self._average]

    def load_state(self, state: list[float | None]) -> None:
        """Go on where `state` was cut."""
        self.multiplier, self._average = state
