"""Advantage estimators: pure functions of rewards, groups, masks and values. Importing registers the built-in
ones.

An estimator returns advantages [B] (one per row) or [B, T] (0 where the mask is 0), or (advantages, returns),
or a mapping of column names.
Rewards are finite: failed trajectories are taken out before, so that they are in no baseline.
"""

from rondo.algorithms.advantages import (
    agentic,
    constrained,
    distill,
    gae,
    group,
    pass_at_k,
    process,
    returns,
    token_baseline,
)

__all__ = [
    "agentic",
    "constrained",
    "distill",
    "gae",
    "group",
    "pass_at_k",
    "process",
    "returns",
    "token_baseline",
]
