"""Algorithms: pure functions of tensors and numbers. No engine, no collective, no environment.

Advantage estimator × policy loss × KL × aggregation are independent choices by name; a new one is one
function with a decorator. Importing the package registers the built-in ones; a new file is named here, or in
`advantages` or `policy_losses`.
"""

# ruff: noqa: F401
from rondo.algorithms import (
    advantages,
    aggregation,
    coefficients,
    filters,
    kl,
    pair_losses,
    policy_losses,
    terms,
    value_loss,
)
from rondo.algorithms.advantages.gae import smooth_cost, update_multiplier
from rondo.algorithms.aggregation import Aggregate, loss_weights, seq_mean_token_mean, token_mean
from rondo.algorithms.filters import draw
from rondo.algorithms.kl import kl_reward, update_kl_coef
from rondo.algorithms.objective import GAP, ActorLoss, CriticLoss, PrmLoss, SftLoss
from rondo.algorithms.pair_objective import PreferenceLoss, RewardModelLoss
from rondo.algorithms.registry import (
    Kind,
    bind,
    bind_by_row,
    bind_preparation,
    columns_read,
    lookup,
    names,
    registered_by_user,
)
from rondo.algorithms.rollout_correction import correct, mean_weight, weight_sums, with_sample_size
from rondo.algorithms.statistics import Whitening, moments
from rondo.algorithms.token_rewards import TokenRewards, advantage_stats, check_finite, made_columns
from rondo.algorithms.trial import check_algorithm, try_functions, try_loss
from rondo.algorithms.value_loss import explained_variance
