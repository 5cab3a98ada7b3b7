"""What each step of a real episode is credited with: estimators of steps and turns, each against its
definition written out for one row after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rondo.trainers.program.advantages import AdvantageStage
from tests.agents.test_environment_episodes import WORLDS
from tests.trainers.conftest import metrics

ROOMS = {
    "frozen_lake": "{name: frozen_lake, size: 2, holes: 0.4}",
    "sokoban": "{name: sokoban, size: 3, walls: 0, pulls: 3}",
}


def in_rooms(name: str, loop: str) -> tuple[str, ...]:
    """Settings for episodes whose actions follow from how long an answer is; one in five is none."""
    rows = f"{{type: function, task: rondo.environments.episodes, options: {{environment: {name}, size: 8}}}}"
    return (
        f"data.train=[{rows}]",
        "data.max_prompt_tokens=400",
        f"rollout.environments=[{ROOMS[name]}]",
        f"rollout.agent={{name: {loop}, max_steps: 4, action: '{WORLDS}:by_length', invalid_penalty: 0.5}}",
        "rollout.max_tokens=150" if loop == "concatenated" else "rollout.max_tokens=8",
        "reward.functions=[environment]",
        "trainer.evaluation.every=null",
    )


Rows = dict[str, list[Any]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Rows]:
    """The columns of each batch that a run made advantages for, with the advantages."""
    found: list[Rows] = []
    original = AdvantageStage.__call__

    async def spy(self: AdvantageStage, batch: Any, step: Any) -> Any:
        made = await original(self, batch, step)
        tokens = set(made.columns) - set(made.index.columns)
        whole = await made.fetch(list(tokens))
        rows = {name: made.index.scalars(name).tolist() for name in made.index.columns}
        found.append(rows | {name: [x.tolist() for x in whole.rows(name)] for name in NUMBERS & tokens})
        return made

    monkeypatch.setattr(AdvantageStage, "__call__", spy)
    return found


NUMBERS = {"advantages", "returns", "values", "response_mask", "turn_stops", "turn_kinds", "turn_rewards"}


def trajectories(rows: Rows) -> list[list[int]]:
    """The rows of each trajectory, in the order of its steps."""
    found: dict[str, list[int]] = {}
    for row in sorted(range(len(rows["reward"])), key=lambda row: int(rows["step_index"][row])):
        found.setdefault(rows["trajectory_id"][row], []).append(row)
    return list(found.values())


def of_hgpo(rows: Rows, depth: int, alpha: float, gamma: float) -> np.ndarray:
    """Σ_k w_k A_k of each row, A_k without a division by deviations."""
    returns: dict[int, float] = {}
    contexts: dict[int, tuple[Any, ...]] = {}  # the group, and what was seen at the row and before
    for steps in trajectories(rows):
        for place, row in enumerate(steps):
            later = [rows["step_reward"][other] for other in steps[place:]]
            returns[row] = sum(gamma**t * reward for t, reward in enumerate(later))
            contexts[row] = tuple(rows["anchor_id"][other] for other in steps[place::-1])
    out = np.zeros(len(returns))
    for row, context in contexts.items():
        parts: list[tuple[float, float]] = []
        for k in range(min(depth, len(context) - 1) + 1):
            alike = [
                returns[other]
                for other, its in contexts.items()
                if rows["group_id"][other] == rows["group_id"][row]
                and its[: k + 1] == context[: k + 1]
                and len(its) > k
            ]
            if len(alike) > 1:
                parts.append(((k + 1) ** alpha, returns[row] - float(np.mean(alike))))
        if parts:
            out[row] = sum(weight * a for weight, a in parts) / sum(weight for weight, _ in parts)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["frozen_lake", "sokoban"])
def test_hgpo_on_steps_of_real_episodes(run: Any, seen: list[Rows], name: str) -> None:
    options = "{name: hgpo, depth: 2, alpha: 1.0, gamma: 0.9, normalize_std: false}"
    run("hgpo", *in_rooms(name, "steps"), f"algorithm.advantage={options}")
    assert len(seen) == 2
    for rows in seen:
        np.testing.assert_allclose(rows["advantages"], of_hgpo(rows, 2, 1.0, 0.9), atol=1e-5)
        flat = of_hgpo(rows, 0, 1.0, 0.9)
        assert np.abs(flat - rows["advantages"]).max() > 0.01  # contexts beyond the state itself matter


def of_bi_level_gae(
    rows: Rows, steps: Sequence[int], token: float, turn: float
) -> dict[tuple[int, int], float]:
    """Advantages of one trajectory's tokens, by (row, token), one turn after the other from the back, with
    discounts for tokens and turns, both λ 0.9.
    """
    ends: list[tuple[int, int, int, float]] = []  # row, first and last token, reward
    for row in steps:
        start = 0
        turns = zip(rows["turn_stops"][row], rows["turn_kinds"][row], rows["turn_rewards"][row], strict=True)
        for stop, kind, reward in turns:
            if kind == 0:
                ends.append((row, start, stop - 1, 0.0 if np.isnan(reward) else reward))
            start = stop
    out: dict[tuple[int, int], float] = {}
    value, advantage = 0.0, 0.0  # of the turn that follows
    for row, first, last, reward in reversed(ends):
        here = rows["values"][row]
        advantage = reward + turn * value - here[last] + turn * 0.9 * advantage
        value = here[last]
        out[row, last] = inside = advantage
        for t in range(last - 1, first - 1, -1):
            inside = token * here[t + 1] - here[t] + token * 0.9 * inside
            out[row, t] = inside
    return out


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["concatenated", "steps"])
def test_bi_level_gae_on_turns_of_real_episodes(run: Any, seen: list[Rows], loop: str) -> None:
    """In one context, and in a row for each step. The episodes have turns with and without reward."""
    options = "gamma: 0.9, lam: 0.9, high_level_gamma: 0.5, high_level_lam: 0.9, whiten: false"
    chosen = f"algorithm.advantage={{name: bi_level_gae, {options}}}"
    critic = "critic={optimizer: {lr: 0.01}}"
    folder = run("turns", *in_rooms("frozen_lake", loop), chosen, critic)
    assert len(seen) == 2
    for rows in seen:
        rewards = [r for row in rows["turn_rewards"] for r in row if not np.isnan(r)]
        assert 0.0 in rewards
        assert any(rewards)
        for steps in trajectories(rows):
            for (row, t), expected in of_bi_level_gae(rows, steps, 0.9, 0.5).items():
                assert rows["response_mask"][row][t] == 1
                assert rows["advantages"][row][t] == pytest.approx(expected, abs=1e-5)
                target = expected + rows["values"][row][t]
                assert rows["returns"][row][t] == pytest.approx(target, abs=1e-5)
    assert all(line["critic/loss"] > 0 for line in metrics(folder)[1:])
