"""Learning-rate schedules as pure functions of the optimizer step."""

from __future__ import annotations

import math

from rondo.config.schema import ScheduleConfig
from rondo.errors import ConfigError


def lr_ratio(step: int, schedule: ScheduleConfig, total_steps: int | None) -> float:
    """Learning rate of optimizer step `step` (from 0) as a share of `lr`.

    Warm-up is linear: step s of w gives (s + 1) / w. Then `constant` is 1; `linear` and `cosine` fall from 1
    towards min_ratio, which they reach after total_steps; `wsd` stays at 1 and falls linearly to min_ratio
    over the last decay_steps (default: a tenth of the run). Raises ConfigError when a falling schedule has no
    total_steps.
    """
    warmup, floor = schedule.warmup_steps, schedule.min_ratio
    if step < warmup:
        return (step + 1) / warmup
    if schedule.name == "constant":
        return 1.0
    if total_steps is None:
        raise ConfigError(
            f"optimizer.schedule.name={schedule.name} needs the number of optimizer steps in advance"
        )
    start = warmup
    if schedule.name == "wsd":
        decay = max(1, total_steps // 10) if schedule.decay_steps is None else schedule.decay_steps
        start = max(warmup, total_steps - decay)
    done = min(1.0, max(0.0, (step - start) / max(1, total_steps - start)))
    fall = 0.5 * (1 - math.cos(math.pi * done)) if schedule.name == "cosine" else done
    return 1.0 - (1.0 - floor) * fall
