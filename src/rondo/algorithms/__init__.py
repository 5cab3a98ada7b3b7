"""Algorithms: pure functions of tensors and numbers. No engine, no collective, no environment.

Advantage estimator × policy loss × KL × aggregation are independent choices by name; a new one is one
function with a decorator. Importing the package registers the built-in ones.
"""

from rondo.algorithms import (
    advantages,
    aggregation,
    filters,
    pair_losses,
    policy_losses,
    resampling,
    value_loss,
)
from rondo.algorithms.check import check_algorithm
from rondo.algorithms.kl import kl_reward, update_kl_coef
from rondo.algorithms.objective import actor_loss, critic_loss, sft_loss
from rondo.algorithms.pair_objective import preference_loss, reward_model_loss
from rondo.algorithms.registry import bind, check_options, columns_read, lookup, lookup_advantage, names
from rondo.algorithms.value_loss import explained_variance

__all__ = [
    "actor_loss",
    "advantages",
    "aggregation",
    "bind",
    "check_algorithm",
    "check_options",
    "columns_read",
    "critic_loss",
    "explained_variance",
    "filters",
    "kl_reward",
    "lookup",
    "lookup_advantage",
    "names",
    "pair_losses",
    "policy_losses",
    "preference_loss",
    "resampling",
    "reward_model_loss",
    "sft_loss",
    "update_kl_coef",
    "value_loss",
]
