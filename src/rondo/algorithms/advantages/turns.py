"""Generalized advantage estimation on two levels: over the turns of a trajectory, then over the tokens of
each turn (VAGEN, 2510.16907).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rondo.algorithms import statistics
from rondo.algorithms.advantages.agentic import StepPlaces
from rondo.algorithms.advantages.gae import accumulate
from rondo.algorithms.arguments import require
from rondo.algorithms.registry import advantage
from rondo.core.types import TURN_FLAGS, TURN_KINDS

_POLICY = TURN_KINDS.index("policy")
_NOTE = 1 << TURN_FLAGS.index("aside")


@advantage("bi_level_gae")
def bi_level_gae(
    token_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    turn_stops: Tensor,
    turn_kinds: Tensor,
    turn_rewards: Tensor,
    turn_flags: Tensor,
    trajectory_id: Tensor,
    step_index: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    high_level_gamma: float = 0.95,
    high_level_lam: float = 1.0,
    whiten: bool = True,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, T] (bi-level GAE: VAGEN, 2510.16907, §4.2 and Algorithm 2).

    Turn k of a trajectory ends with its last trained token e_k. Over the turns, with Γ = high_level_gamma and
    Λ = high_level_lam:  Δ_k = r_k + Γ V(e_{k+1}) - V(e_k),  A_k = Δ_k + Γ Λ A_{k+1}. Inside a turn, Â = A_k
    at e_k, in the place of a Δ of its own (as in the released code), and before that  Â_t = r_t + γ V_next -
    V_t + γ λ Â_next: nothing but A_k crosses the border of a turn. G_t = Â_t + V_t. Γ = γ = Λ = λ = 1 is
    `gae` with each turn's reward where the turn ends. From a note to the turn that it was written for Γ is 1.

    token_rewards [B, T]: the outcome on the trajectory's last trained token, and a KL. r_k: what is there at
    e_k, and turn_rewards, which the outcome's token gives up, so that all rewards still sum to the outcome.
    turn_stops, turn_kinds, turn_rewards, turn_flags [B, U]: the record's turns; those of the policy count,
    with reward 0 or without one, too. Turns of several rows are one trajectory's, in the order of step_index.
    whiten: as in `gae`.
    """
    options = {"gamma": gamma, "lam": lam}
    options |= {"high_level_gamma": high_level_gamma, "high_level_lam": high_level_lam}
    require("algorithm.advantage: bi_level_gae", at_least=0, at_most=1, **options)
    counted = response_mask > 0
    rewards = torch.where(counted, token_rewards, 0.0).to(torch.float64)
    before = torch.where(counted, values, 0.0).to(torch.float64)
    end_of_turn = _ends(counted, turn_stops)
    row, turn = torch.nonzero((turn_kinds == _POLICY) & (end_of_turn >= 0), as_tuple=True)
    end = end_of_turn[row, turn]
    turns = StepPlaces.of(trajectory_id[row], step_index[row] * turn_stops.shape[1] + turn)
    given = turn_rewards[row, turn].to(torch.float64).nan_to_num(nan=0.0)
    rewards[row, end] += given
    _take_from_last(rewards, row, end, given, turns)

    there = turns.padded(torch.ones_like(given)) > 0
    gained, worth = turns.padded(rewards[row, end]), turns.padded(before[row, end])
    is_note = turns.padded((turn_flags[row, turn].long() & _NOTE) > 0)
    discount = torch.where(is_note, 1.0, high_level_gamma).to(torch.float64)
    high = _over_turns(gained, worth, there, discount, high_level_lam)[turns.trajectory, turns.position]

    ends = torch.zeros_like(counted)
    ends[row, end] = True
    rewards[row, end] = high + before[row, end]
    advantages = accumulate(rewards, before, counted, gamma, rewards.new_full((len(rewards),), lam), ends)
    returns = torch.where(counted, advantages + before, 0.0)
    if whiten:
        advantages = statistics.whiten(advantages, response_mask)
    return advantages.to(values.dtype), returns.to(values.dtype)


def _over_turns(rewards: Tensor, values: Tensor, there: Tensor, discount: Tensor, lam: float) -> Tensor:
    """Accumulates A [N, K] backwards over turns. discount: Γ of each turn, for what follows it."""
    out = torch.zeros_like(rewards)
    next_value, next_advantage = rewards.new_zeros(len(rewards)), rewards.new_zeros(len(rewards))
    for k in reversed(range(rewards.shape[1])):
        delta = rewards[:, k] + discount[:, k] * next_value - values[:, k]
        advantage = delta + discount[:, k] * lam * next_advantage
        next_advantage = torch.where(there[:, k], advantage, next_advantage)
        next_value = torch.where(there[:, k], values[:, k], next_value)
        out[:, k] = next_advantage
    return out


def _ends(counted: Tensor, turn_stops: Tensor) -> Tensor:
    """Returns the last trained token of each turn, [B, U]; -1 where it has none, or there is no turn (a row
    with fewer has stops of 0 behind its own).
    """
    width = counted.shape[1]
    position = torch.arange(width, device=counted.device).expand_as(counted)
    # The last trained token before each border 0..T, -1: none.
    last = torch.where(counted, position, -1).cummax(1).values if width else position.long()
    last = torch.cat([last.new_full((len(last), 1), -1), last], 1)
    stops = turn_stops.long()
    starts = torch.cat([stops.new_zeros(len(stops), 1), stops[:, :-1]], 1)
    end = last.gather(1, stops)
    return torch.where(end >= starts, end, -1)


def _take_from_last(rewards: Tensor, row: Tensor, end: Tensor, given: Tensor, turns: StepPlaces) -> None:
    """Takes what the turns of a trajectory were given from the end of the last one, where the outcome is."""
    total = turns.padded(given).sum(1)
    size = torch.bincount(turns.trajectory, minlength=len(total))
    is_last = turns.position == size[turns.trajectory] - 1
    rewards[row[is_last], end[is_last]] -= total[turns.trajectory[is_last]]
