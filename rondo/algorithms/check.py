"""The second pass of configuration: do the chosen functions exist, fit their options, and fit each other?"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rondo.algorithms.objective import actor_loss, critic_loss
from rondo.algorithms.registry import bind, columns_read, lookup, names
from rondo.config.schema import AlgorithmConfig
from rondo.errors import ConfigError


def check_algorithm(algorithm: AlgorithmConfig) -> None:
    """Raise ConfigError for a function, option, value or combination that cannot work.

    Built-in functions are also called once on two made-up rows, so that a value out of range fails at start
    and not after the first rollouts; functions of the user's are not called.
    """
    estimator = bind("advantage", algorithm.advantage)
    aggregate = bind("aggregation", algorithm.aggregation)
    actor, critic = actor_loss(algorithm), critic_loss(algorithm)
    if algorithm.kl is not None:
        lookup("kl", algorithm.kl.name)
        _check_kl(algorithm)
    lengths = np.array([2, 1])
    if algorithm.aggregation.name in names("aggregation"):
        aggregate(lengths)
    if algorithm.advantage.name in names("advantage"):
        table = _padded_columns()
        estimator(**{name: table[name] for name in columns_read(estimator) if name in table})
    cu_seqlens = torch.tensor([0, 2, 3], dtype=torch.int32)
    flat = {name: torch.zeros(3) for name in ("log_probs", "entropy", "values")}
    if algorithm.policy_loss.name in names("policy_loss"):
        actor(flat, dict.fromkeys(actor.columns, torch.ones(3)), cu_seqlens)
    if algorithm.value_loss.name in names("value_loss"):
        critic(flat, dict.fromkeys(critic.columns, torch.ones(3)), cu_seqlens)


def _check_kl(algorithm: AlgorithmConfig) -> None:
    kl = algorithm.kl
    assert kl is not None
    if kl.coef <= 0:
        raise ConfigError(
            f"algorithm.kl.coef is {kl.coef}; it must be positive. For no KL write algorithm.kl=null"
        )
    if kl.controller == "adaptive" and (kl.target <= 0 or kl.horizon <= 0):
        raise ConfigError(
            f"algorithm.kl: target and horizon must be positive, got {kl.target} and {kl.horizon}"
        )


def _padded_columns() -> dict[str, Tensor]:
    per_token = {name: torch.zeros(2, 2) for name in ("token_rewards", "values")}
    return per_token | {
        "response_mask": torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
        "reward": torch.tensor([0.0, 1.0]),
        "greedy_reward": torch.zeros(2),
        "group_id": torch.zeros(2, dtype=torch.int64),
        "num_trained_tokens": torch.tensor([2, 1]),
        "scores": torch.zeros(2, 1),
    }
