"""Numbers that adapt from step to step (`algorithm.coefficients`): each is made of the last one and of what
the step measured.

A function is `(value, metrics, *, options) -> value`. value: what is kept of it, a number or a list of
numbers. metrics: the step's, by their names in metrics.jsonl; `rows`, how many it trained on; and
`score/<name>`, the mean of each score over its answers. Where what is kept is not what losses read, it
returns both: (kept, read).
"""

from __future__ import annotations

from collections.abc import Mapping

from rondo.algorithms.advantages.gae import smooth_cost, update_multiplier
from rondo.algorithms.arguments import require
from rondo.algorithms.kl import update_kl_coef
from rondo.algorithms.registry import coefficient
from rondo.core.columns import SCORE

Metrics = Mapping[str, float]
ROWS = "rows"


@coefficient("adaptive_kl")
def adaptive_kl(value: float, metrics: Metrics, *, metric: str, target: float, horizon: float) -> float:
    """The adaptive KL controller (1909.08593; `update_kl_coef`) over `metric`: actor/kl_loss, say. Without
    it in a step the coefficient stays. algorithm.kl.controller=adaptive is this one.
    """
    measured = metrics.get(metric, target)
    return update_kl_coef(value, measured, target, horizon, int(metrics[ROWS]))


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
    below = metrics[metric] < target
    alpha = min(max(value + (step if below else -step), least), most)
    return alpha, alpha if below else 0.0
