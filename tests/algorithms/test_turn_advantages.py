"""GAE on two levels, turns and tokens: a hand-computed table, and what it reduces to."""

from __future__ import annotations

import pytest
import torch

from rondo.algorithms.advantages.gae import gae
from rondo.algorithms.advantages.turns import bi_level_gae
from rondo.core.errors import ConfigError

T = torch.tensor
NAN = float("nan")

# Two turns of the policy (tokens 0, 1 and 4, 5) around an observation (tokens 2, 3); token 6 is padding.
ROW = {
    "token_rewards": T([[0.0, 0.0, 5.0, 5.0, 0.0, 1.5, NAN]]),
    "values": T([[0.2, 0.4, 9.0, 9.0, 0.6, 0.8, NAN]]),
    "response_mask": T([[1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0]]),
    "turn_stops": T([[2, 4, 6]]),
    "turn_kinds": T([[0, 2, 0]]),
    "turn_rewards": T([[0.5, NAN, NAN]]),
    "turn_flags": T([[0, 0, 0]]),
    "trajectory_id": T([7]),
    "step_index": T([0]),
}


def estimate(rows: dict[str, torch.Tensor], **options: float) -> tuple[torch.Tensor, torch.Tensor]:
    return bi_level_gae(**rows, whiten=False, **options)


def one_row(
    length: int, stops: list[int], rewards: list[float], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """A row whose tokens are all the policy's, in turns that stop there; the outcome is what they sum to."""
    outcome = torch.zeros(1, length)
    outcome[0, -1] = sum(rewards)
    return {
        "token_rewards": outcome,
        "values": torch.randn(1, length, generator=generator),
        "response_mask": torch.ones(1, length),
        "turn_stops": T([stops]),
        "turn_kinds": torch.zeros(1, len(stops)),
        "turn_rewards": T([rewards]),
        "turn_flags": torch.zeros(1, len(stops)),
        "trajectory_id": T([0]),
        "step_index": T([0]),
    }


def test_table() -> None:
    """γ = λ = ½ over tokens, Γ = ½ and Λ = ½ over turns; the outcome of 1.5 is 0.5 of the first turn and 1.

    Turns: A_2 = 1 - .8 = .2; A_1 = .5 + .5·.8 - .4 + .25·.2 = .55.
    Tokens: Â_5 = .2, Â_4 = .5·.8 - .6 + .25·.2 = -.15; Â_1 = .55, Â_0 = .5·.4 - .2 + .25·.55 = .1375.
    """
    options = {"gamma": 0.5, "lam": 0.5, "high_level_gamma": 0.5, "high_level_lam": 0.5}
    advantages, returns = estimate(ROW, **options)
    torch.testing.assert_close(advantages, T([[0.1375, 0.55, 0.0, 0.0, -0.15, 0.2, 0.0]]))
    torch.testing.assert_close(returns, T([[0.3375, 0.95, 0.0, 0.0, 0.45, 1.0, 0.0]]))
    white, same = bi_level_gae(**ROW, **options)
    raw = advantages[ROW["response_mask"] > 0]
    torch.testing.assert_close(
        white[ROW["response_mask"] > 0], (raw - raw.mean()) / (raw.var() + 1e-8).sqrt()
    )
    assert torch.equal(same, returns)


def test_nothing_is_discounted_behind_a_note() -> None:
    """Γ = ½, Λ = 1, a token each, values .4, .2, .6: step, note, step with reward 1.

    A_3 = 1 - .6 = .4; the note: .6 - .2 + .4 = .8, what is behind it undiscounted; A_1 = .5·.2 - .4 + .5·.8 =
    .1: one discount from step to step. The same steps without the note: .5·.6 - .4 + .5·.4 = .1.
    """
    row = one_row(3, [1, 2, 3], [0.0, NAN, 1.0], torch.Generator())
    row |= {"token_rewards": T([[0.0, 0.0, 1.0]]), "values": T([[0.4, 0.2, 0.6]])}
    advantages, _ = estimate(row | {"turn_flags": T([[0, 8, 0]])}, high_level_gamma=0.5)
    torch.testing.assert_close(advantages, T([[0.1, 0.8, 0.4]]))
    two = one_row(2, [1, 2], [0.0, 1.0], torch.Generator())
    two |= {"token_rewards": T([[0.0, 1.0]]), "values": T([[0.4, 0.6]])}
    torch.testing.assert_close(estimate(two, high_level_gamma=0.5)[0], T([[0.1, 0.4]]))


@pytest.mark.parametrize("given", [0.0, NAN])
def test_a_turn_of_reward_0_in_the_middle_is_a_turn(given: float) -> None:
    """Γ = ½, else 1; values 0, a token each: the reward of 1 in the third turn is worth ¼ in the first."""
    row = one_row(3, [1, 2, 3], [0.0, given, 1.0], torch.Generator())
    row |= {"token_rewards": T([[0.0, 0.0, 1.0]]), "values": torch.zeros(1, 3)}
    advantages, _ = estimate(row, high_level_gamma=0.5)
    assert advantages.tolist() == [[0.25, 0.5, 1.0]]
    # Adjacent turns are apart in the record alone: no hole of the mask, and no reward, says where one ends.
    joined, _ = estimate(
        row
        | {"turn_stops": T([[1, 3]]), "turn_kinds": T([[0, 0]]), "turn_rewards": T([[0.0, 1.0]])}
        | {"turn_flags": T([[0, 0]])},
        high_level_gamma=0.5,
    )
    assert joined.tolist() == [[0.5, 1.0, 1.0]]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.7)])
@pytest.mark.parametrize("high", [1.0, 0.3])
def test_one_turn_is_gae_of_its_tokens_whatever_holds_between_turns(
    gamma: float, lam: float, high: float
) -> None:
    row = one_row(6, [6], [2.0], torch.Generator().manual_seed(0))
    row["token_rewards"] += 0.1 * torch.randn(1, 6)  # and a KL
    row["response_mask"][0, 2] = 0
    expected = gae(row["token_rewards"], row["values"], row["response_mask"], gamma=gamma, lam=lam)
    made = bi_level_gae(**row, gamma=gamma, lam=lam, high_level_gamma=high, high_level_lam=high)
    torch.testing.assert_close(made, expected)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.7)])
def test_turns_of_one_token_are_gae_of_the_turns(gamma: float, lam: float) -> None:
    """With γ = λ of tokens at any value: there is no token before another in its turn."""
    rewards = [0.5, 0.0, -1.0, 0.25]
    row = one_row(4, [1, 2, 3, 4], rewards, torch.Generator().manual_seed(0))
    expected = gae(T([rewards]), row["values"], row["response_mask"], gamma=gamma, lam=lam, whiten=False)
    made = estimate(row, gamma=0.1, lam=0.2, high_level_gamma=gamma, high_level_lam=lam)
    torch.testing.assert_close(made, expected)


def test_undiscounted_it_is_gae_of_rewards_at_the_ends_of_turns() -> None:
    """Γ = γ = Λ = λ = 1: the value at a turn's end cancels, and Â_t is what is still to come less V_t."""
    rewards = [0.5, 0.0, -1.0]
    row = one_row(7, [2, 3, 7], rewards, torch.Generator().manual_seed(0))
    placed = torch.zeros(1, 7)
    placed[0, [1, 2, 6]] = T(rewards)
    expected = gae(placed, row["values"], row["response_mask"], whiten=False)
    torch.testing.assert_close(estimate(row, high_level_gamma=1.0), expected)


def test_rows_of_one_turn_each_are_the_turns_of_one_row() -> None:
    """A trajectory in two rows (a prompt for each step), in any order, beside another one."""
    other = one_row(7, [7], [3.0], torch.Generator().manual_seed(1))
    whole = {
        name: torch.cat([ROW[name], other[name]]) for name in ("token_rewards", "values", "response_mask")
    }
    whole |= {"turn_stops": T([[2, 4, 6], [7, 0, 0]]), "turn_kinds": T([[0, 2, 0], [0, 0, 0]])}
    whole |= {"turn_rewards": T([[0.5, NAN, NAN], [3.0, 0.0, 0.0]]), "turn_flags": torch.zeros(2, 3)}
    whole |= {"trajectory_id": T([7, 3]), "step_index": T([0, 0])}
    expected, returns = estimate(whole)
    tokens = [[4, 5], [0, 1, 2, 3, 4, 5, 6], [0, 1]]  # of the trajectories' rows 1 of 7, 0 of 3, 0 of 7
    rows = {name: torch.zeros(3, 7) for name in ("token_rewards", "values", "response_mask")}
    for row, (source, taken) in enumerate(zip([0, 1, 0], tokens, strict=True)):
        for name, column in rows.items():
            column[row, : len(taken)] = whole[name][source, taken]
    rows |= {"turn_stops": T([[2], [7], [2]]), "turn_kinds": torch.zeros(3, 1)}
    rows |= {"turn_rewards": T([[NAN], [3.0], [0.5]]), "turn_flags": torch.zeros(3, 1)}
    rows |= {"trajectory_id": T([7, 3, 7]), "step_index": T([1, 0, 0])}
    made, made_returns = estimate(rows)
    for row, (source, taken) in enumerate(zip([0, 1, 0], tokens, strict=True)):
        torch.testing.assert_close(made[row, : len(taken)], expected[source, taken])
        torch.testing.assert_close(made_returns[row, : len(taken)], returns[source, taken])


@pytest.mark.parametrize(
    "options", [{"high_level_gamma": 1.1}, {"high_level_lam": -0.1}, {"gamma": 2.0}, {"lam": NAN}]
)
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"bi_level_gae needs {next(iter(options))}"):
        bi_level_gae(**ROW, **options)
