"""Scorers: from a finished trajectory to a reward, with a time limit, and a typed failure instead of a
zero.
"""

# ruff: noqa: F401
from __future__ import annotations

from rondo.rewards.failures import check_dropped_share
from rondo.rewards.functions import (
    RewardFunction,
    accuracy_score,
    check_names,
    load_functions,
    score_names,
)
from rondo.rewards.marks import reward_function
from rondo.rewards.scorer import Scorer
