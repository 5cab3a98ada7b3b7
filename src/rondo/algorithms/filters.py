"""Which prompt groups are worth training on (dynamic sampling). Numpy only.

A filter reads per-row columns of ONE group and returns why the group is dropped, or None to keep it. It reads
the raw accuracy, never the shaped reward: a length penalty would make every group look mixed.
"""

from __future__ import annotations

import numpy as np

from rondo.algorithms.registry import group_filter
from rondo.core.errors import ConfigError


@group_filter("mixed_accuracy")
def mixed_accuracy(accuracy: np.ndarray) -> str | None:
    """Keeps groups whose samples [n] differ in accuracy (DAPO's dynamic sampling, 2503.14476 §3.2).

    All equal means no gradient; so does a group of one, which the reference keeps.
    """
    if np.all(accuracy == accuracy[:1]):
        return "all samples have the same accuracy"
    return None


@group_filter("accuracy_range")
def accuracy_range(accuracy: np.ndarray, *, low: float = 0.2, high: float = 0.8) -> str | None:
    """Keeps groups whose share of right answers (accuracy > 0) is in [low, high] (PRIME, 2502.01456: 0.2 to
    0.8).
    """
    if not 0.0 <= low <= high <= 1.0:
        raise ConfigError(
            f"algorithm.filter: accuracy_range needs 0 <= low <= high <= 1, got low={low}, high={high}"
        )
    share = np.count_nonzero(accuracy > 0) / max(len(accuracy), 1)
    if not low <= share <= high:
        return f"the share of right answers is not in {low} to {high}"
    return None
