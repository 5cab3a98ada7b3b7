"""The second pass of configuration: do the chosen functions exist, fit their options, and fit each other?"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rondo.algorithms.objective import actor_loss, critic_loss
from rondo.algorithms.registry import bind, bind_preparation, columns_read, lookup, names
from rondo.config.schema import AlgorithmConfig
from rondo.errors import ConfigError, about


def check_algorithm(algorithm: AlgorithmConfig) -> None:
    """Raise ConfigError for a function, option, value or combination that cannot work.

    Built-in functions are also called once on two made-up rows, so that a value out of range fails at start
    and not after the first rollouts; functions of the user's are not called.
    """
    with about("algorithm.advantage"):
        estimator = bind("advantage", algorithm.advantage)
        table = _padded_columns(num_scores=len(algorithm.advantage.options.get("weights") or [1.0]))
        if algorithm.advantage.name in names("advantage"):
            estimator(**{name: table[name] for name in columns_read(estimator) if name in table})
    with about("algorithm.aggregation"):
        aggregate = bind("aggregation", algorithm.aggregation)
        if algorithm.aggregation.name in names("aggregation"):
            aggregate(np.array([2, 1]))
    with about("algorithm.kl"):
        if algorithm.kl is not None:
            lookup("kl", algorithm.kl.name)
            _check_kl(algorithm)
    with about("algorithm.filter"):
        if algorithm.filter is not None:
            keep = bind("filter", algorithm.filter)
            if algorithm.filter.name in names("filter"):
                keep(**{name: table[name].numpy() for name in columns_read(keep)})
    with about("algorithm.resample"):
        if algorithm.resample is not None:
            resample = bind("resample", algorithm.resample)
            if algorithm.resample.name in names("resample"):
                resample(**{name: table[name] for name in columns_read(resample)})
    _check_losses(algorithm, table)


def _check_losses(algorithm: AlgorithmConfig, table: Mapping[str, Tensor]) -> None:
    cu_seqlens = torch.tensor([0, 2, 3], dtype=torch.int32)
    flat = {name: torch.zeros(3) for name in ("log_probs", "entropy", "values")}
    with about("algorithm.policy_loss"):
        actor = actor_loss(algorithm)
        if algorithm.policy_loss.name in names("policy_loss"):
            wide = {name: torch.zeros(3, 1) for name in ("topk_log_probs", "teacher_topk_log_probs")}
            columns = dict.fromkeys(actor.columns, torch.ones(3))
            columns |= {name: value for name, value in wide.items() if name in columns}
            actor(flat | wide, columns, cu_seqlens)
            prepare = bind_preparation(algorithm.policy_loss)
            if prepare is not None:
                prepare(**{name: 0 if name == "seed" else table[name] for name in columns_read(prepare)})
    with about("algorithm.value_loss"):
        critic = critic_loss(algorithm)
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


def _padded_columns(num_scores: int) -> dict[str, Tensor]:
    """Two rows that are both a group's samples and the steps of two trajectories. num_scores: how many scores
    the reward functions have is not known here.
    """
    zeros = ("token_rewards", "values", "token_costs", "cost_values", "process_rewards", "sum_p_squared")
    log_probs = ("old_log_probs", "teacher_log_probs")
    per_token = {name: torch.zeros(2, 2) for name in (*zeros, *log_probs, "advantages")}
    same = {name: torch.zeros(2, dtype=torch.int64) for name in ("group_id", "step_index", "anchor_id")}
    rising = {name: torch.tensor([0.0, 1.0]) for name in ("reward", "accuracy", "step_reward")}
    return {
        **per_token,
        **same,
        **rising,
        "response_mask": torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
        "trajectory_id": torch.arange(2),
        "greedy_reward": torch.zeros(2),
        "num_trained_tokens": torch.tensor([2, 1]),
        "scores": torch.zeros(2, num_scores),
        "multiplier": torch.tensor(1.0),
    }
