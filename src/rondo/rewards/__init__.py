"""Scorers: from a finished trajectory to a reward, with a time limit, and a typed failure instead of a
zero.
"""

from __future__ import annotations

from rondo.rewards.failures import check_dropped_share
from rondo.rewards.functions import RewardFunction, accuracy_score, load_functions, score_names
from rondo.rewards.marks import reward_function
from rondo.rewards.scorer import Scorer

__all__ = [
    "RewardFunction",
    "Scorer",
    "accuracy_score",
    "check_dropped_share",
    "load_functions",
    "reward_function",
    "score_names",
]
