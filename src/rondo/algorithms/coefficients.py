"""Numbers that adapt from step to step (`algorithm.coefficients`): each is made of the last one and of what
the step measured.

A function is `(value, metrics, *, options) -> value`. value: what is kept of it, a number or a list of
numbers. metrics: the step's, by their names in metrics.jsonl, but for those of the end of a step (buffer,
weights, time); `rows`, how many it trained on; and `score/<name>` and `accuracy`, the mean of each over the
answers that have it. Where what is kept is not what losses read, it returns both: (kept, read).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rondo.algorithms.advantages.gae import smooth_cost, update_multiplier
from rondo.algorithms.arguments import require
from rondo.algorithms.kl import update_kl_coef
from rondo.algorithms.registry import coefficient
from rondo.core.columns import SCORE
from rondo.core.errors import TrainError, did_you_mean
from rondo.core.readonly import ReadOnlyDict

Metrics = Mapping[str, float]
ROWS = "rows"


class OfNothingError(TrainError):
    """A metric is the mean over nothing: the step had no token, or no answer, that it is of."""


class Measured(ReadOnlyDict):
    """What a step has measured. names: of all means, also those over nothing. who: reads it, for messages.
    is_whole: the actor learnt in it; else anything may be missing, as its loss was not asked.
    Asked for anything else it raises TrainError: a number that follows nothing would stay without a word.
    """

    def __init__(self, values: Metrics, names: Collection[str], who: str, is_whole: bool = True) -> None:
        super().__init__(values)
        self._names = names
        self._who = who
        self._is_whole = is_whole

    def __missing__(self, name: str) -> float:
        if name in self._names or not self._is_whole:
            raise OfNothingError(f"{self._who}: in this step {name!r} is a mean over nothing")
        raise TrainError(
            f"{self._who} reads the metric {name!r}, which this step did not measure"
            f"{did_you_mean(name, self)} There are: {', '.join(sorted(self))}"
        )


@coefficient("adaptive_kl")
def adaptive_kl(value: float, metrics: Metrics, *, metric: str, target: float, horizon: float) -> float:
    """The adaptive KL controller (1909.08593; `update_kl_coef`) over `metric`: actor/kl_loss, say.
    algorithm.kl.controller=adaptive is this one.
    """
    require("algorithm.coefficients: adaptive_kl", above=0, start=value)  # from 0 it would never move
    return update_kl_coef(value, metrics[metric], target, horizon, int(metrics[ROWS]))


@coefficient("once_above")
def once_above(value: float, metrics: Metrics, *, metric: str, level: float) -> float:
    """1 from the step behind the first one in which `metric` is above `level`, and before that as it starts:
    a switch. metric: `accuracy` is the share of right answers.
    """
    return 1.0 if metrics[metric] > level else value


@coefficient("lagrange")
def lagrange(
    value: list[float | None] | float,
    metrics: Metrics,
    *,
    cost: str,
    limit: float,
    lr: float,
    smoothing: float,
) -> tuple[list[float | None], float]:
    """λ of E[cost] <= limit (2310.12773; `update_multiplier`), by the moving average of the score `cost`.
    Kept: λ and the average. algorithm.constraint is this one.
    """
    multiplier, average = value if isinstance(value, list) else (value, None)
    assert multiplier is not None
    require("algorithm.coefficients: lagrange", above=0, start=multiplier)
    average = smooth_cost(average, metrics[SCORE(cost)], smoothing)
    multiplier = update_multiplier(multiplier, average, limit, lr)
    return [multiplier, average], multiplier


@coefficient("entropy_target")
def entropy_target(
    value: float,
    metrics: Metrics,
    *,
    target: float,
    step: float = 1e-4,
    most: float = 5e-3,
    least: float = 0.0,
    metric: str = "actor/entropy_sampled",
) -> tuple[float, float]:
    """α of an entropy bonus that holds the entropy at `target` (Skywork-OR1, 2505.22312).

    α <- clip(α ± step, least, most), up where the step's entropy was below the target and down elsewhere;
    read is α below the target and 0 above, where the bonus is off at once while α sinks. The paper's scripts:
    target .2, start 0. metric: of the step's entropy; actor/entropy_sampled is the mean of -ℓ, which with one
    update a step is that of ℓ_old, as there.
    """
    require("algorithm.coefficients: entropy_target", at_least=0, step=step, least=least)
    require("algorithm.coefficients: entropy_target", at_least=least, most=most)
    require("algorithm.coefficients: entropy_target", at_least=least, at_most=most, start=value)
    below = metrics[metric] < target
    alpha = min(max(value + (step if below else -step), least), most)
    return alpha, alpha if below else 0.0
