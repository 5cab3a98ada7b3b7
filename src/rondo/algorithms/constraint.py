"""The Lagrange multiplier of E[cost] <= limit (Safe-RLHF, 2310.12773): numbers in, numbers out."""

from __future__ import annotations

import math

_LARGEST_LOG = 10.0  # λ stays in [e^-10, e^10]: beyond that the advantages are cost, or reward, alone
_LARGEST_STEP = 1.0  # of ln λ: the step grows with λ itself, and would else leap from one bound to the other


def update_multiplier(multiplier: float, average_cost: float, limit: float, lr: float) -> float:
    """Returns the next λ: ln λ += lr · λ · J_C, J_C = average_cost - limit, up while it is violated.

    average_cost: a moving average of the steps' mean costs, finite. The step of ln λ is held in ±1 and ln λ
    in ±10 (the paper bounds neither), so that λ neither overflows nor vanishes.
    """
    assert math.isfinite(average_cost), f"average cost {average_cost}"
    log = math.log(max(multiplier, math.exp(-_LARGEST_LOG)))
    step = lr * multiplier * (average_cost - limit)
    log += max(-_LARGEST_STEP, min(_LARGEST_STEP, step))
    return math.exp(max(-_LARGEST_LOG, min(_LARGEST_LOG, log)))


def smooth_cost(average: float | None, step_mean: float, smoothing: float) -> float:
    """Returns the moving average after a step, smoothing · average + (1 - smoothing) · step_mean; at first
    (None) the step's mean.
    """
    return step_mean if average is None else smoothing * average + (1.0 - smoothing) * step_mean
