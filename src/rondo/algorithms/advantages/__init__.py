"""Advantage estimators: pure functions of rewards, groups, masks and values.

An estimator returns advantages [B] (one per row) or [B, T] (0 where the mask is 0), or (advantages, returns),
or a mapping of column names. Rewards are finite: failed trajectories are taken out before, so that they are
in no baseline. Importing the package registers the built-in ones; a new file is named here.
"""

# ruff: noqa: F401
from rondo.algorithms.advantages import agentic, branches, dense, gae, group, returns, turns
