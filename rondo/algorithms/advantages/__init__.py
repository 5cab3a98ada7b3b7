"""Advantage estimators: pure functions of rewards, groups, masks and values. Importing registers the built-in
ones.

An estimator returns advantages [B] (one per row) or [B, T] (0 where the mask is 0), or (advantages, returns).
Rewards are finite: failed trajectories are taken out before, so that they are in no baseline.
"""

from rondo.algorithms.advantages import gae, group, pass_at_k, returns

__all__ = ["gae", "group", "pass_at_k", "returns"]
