"""The numbers that adapt from step to step, which the controller keeps and saves: the KL coefficient, and the
Lagrange multiplier of algorithm.constraint."""

from __future__ import annotations

from typing import Any

from rondo.algorithms import update_kl_coef
from rondo.algorithms.constraint import smooth_cost, update_multiplier
from rondo.batch import BatchRef
from rondo.columns import SCORE
from rondo.config.schema import AlgorithmConfig, ConstraintConfig
from rondo.types import StepStats


class Coefficients:
    """kl_coef: of algorithm.kl in the next step. multiplier: λ >= 0 for the next step; None without a
    constraint.
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._kl = algorithm.kl
        self._constraint = algorithm.constraint
        self.kl_coef = algorithm.kl.coef if algorithm.kl else 0.0
        self.multiplier = algorithm.constraint.initial if algorithm.constraint else None
        self._average_cost: float | None = None

    @property
    def adapts(self) -> bool:
        """Whether any of them changes in this run."""
        return self._adapts_kl or self._constraint is not None

    @property
    def _adapts_kl(self) -> bool:
        return self._kl is not None and self._kl.controller == "adaptive"

    def adapt(self, batch: BatchRef, stats: StepStats) -> None:
        """Comes after their use in a step. batch: all scored rows of the step; stats: its metrics."""
        kl = self._kl
        if kl is not None:
            stats.add_max("actor/kl_coef", self.kl_coef)
            if kl.controller == "adaptive":
                measured = stats.values().get(f"actor/kl_{kl.where}", kl.target)
                self.kl_coef = update_kl_coef(self.kl_coef, measured, kl.target, kl.horizon, len(batch))
        if self._constraint is not None:
            self._follow_cost(self._constraint, batch, stats)

    def _follow_cost(self, constraint: ConstraintConfig, batch: BatchRef, stats: StepStats) -> None:
        """λ follows the moving average of the cost."""
        assert self.multiplier is not None
        mean = float(batch.index.scalars(SCORE(constraint.cost)).mean())
        self._average_cost = smooth_cost(self._average_cost, mean, constraint.smoothing)
        stats.add_max("actor/multiplier", self.multiplier)
        stats.add_max("reward/cost_average", self._average_cost)
        self.multiplier = update_multiplier(
            self.multiplier, self._average_cost, constraint.limit, constraint.lr
        )

    def state(self) -> dict[str, Any]:
        """For a checkpoint; a coefficient that does not adapt is the configuration's."""
        return {
            "kl_coef": self.kl_coef if self._adapts_kl else None,
            "constraint": [self.multiplier, self._average_cost],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was cut."""
        if state["kl_coef"] is not None and self._adapts_kl:
            self.kl_coef = float(state["kl_coef"])
        self.multiplier, self._average_cost = state["constraint"]
