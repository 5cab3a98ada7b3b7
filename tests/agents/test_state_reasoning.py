"""What a policy says of states, scored against the environment's own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from rondo.agents.state_reasoning import StateReasoning, cells, part_of
from rondo.config.schema import EnvironmentConfig, FunctionConfig
from rondo.core.errors import ConfigError, RewardError
from rondo.data.rows import rows_from_trajectories
from rondo.rewards.builtin import environment
from rondo_worlds.frozen_lake import FrozenLake
from rondo_worlds.sokoban import Sokoban
from tests.agents.scripted import episode, saying
from tests.agents.test_environment_episodes import prompt, way, worlds

HERE = "tests.agents.test_state_reasoning"
LAKE = EnvironmentConfig("frozen_lake", keep_state=True, options={"size": 3})


def test_the_share_of_cells() -> None:
    """Each sign in its line and place: 7 of 9, 3 of 9 (a line is missing, and one is shifted), none, all."""
    state = {"text": "P_O\n___\n_OG"}
    assert cells("P_O\n_P_\n_O_", state) == pytest.approx(7 / 9)
    assert cells("P_O\n_OG", state) == pytest.approx(4 / 9)  # the second line has _ in its first place
    assert cells("nothing", state) == 0
    assert cells("\n P _ O\n _ _ _\n _ O G  \n", state) == 1
    with pytest.raises(ConfigError, match="`text` of the environment's state"):
        cells("P", {"level": 1})


@pytest.mark.parametrize("world", [FrozenLake, Sokoban])
def test_the_state_says_what_is_to_be_seen(world: Any) -> None:
    made = world()
    seen = made.reset(3)
    for action in ("right", "down", "left"):
        assert made.state()["text"] == seen.text
        seen = made.step(action).observation


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("<prediction> a </prediction>", "a"),
        ("<prediction>a</prediction><prediction>b</prediction> <action>up</action>", "b"),
        ("<prediction>a", ""),
        ("a</prediction>", ""),
        ("</prediction><prediction>", ""),
        ("", ""),
    ],
)
def test_where_a_part_stands(answer: str, found: str) -> None:
    assert part_of(answer, "prediction") == found


def lakes() -> list[str]:
    """What the lake of seed 0 looks like before each step of its way, and behind the last."""
    world = FrozenLake(size=3)
    seen = [world.reset(0).text]
    return seen + [world.step(action).observation.text for action in way()]


@pytest.mark.parametrize("loop", ["concatenated", "steps"])
def test_turns_are_credited_with_what_they_said(loop: str) -> None:
    """All right; the prediction is that nothing changes (two cells do); nothing said. The reward of a turn is
    the environment's and this, and so is what the outcome is made of.
    """
    moves, seen = way(), lakes()
    assert len(moves) >= 3
    said = [
        f"<observation>{seen[0]}</observation><prediction>{seen[1]}</prediction><action>{moves[0]}</action>",
        f"<observation>{seen[1]}</observation><prediction>{seen[1]}</prediction><action>{moves[1]}</action>",
        *(f"<action>{move}</action>" for move in moves[2:]),
    ]
    reasoning = {"observation": 0.5, "prediction": 0.25, "format": 0.125}
    trajectory, values = episode(
        saying(*said),
        FunctionConfig(loop, {"reasoning": reasoning}),
        worlds=worlds(LAKE),
        prompt=prompt(seed=0),
    )
    first, second = 0.5 + 0.25 + 0.125, 0.5 + 0.25 * 7 / 9 + 0.125
    expected = [first, second, *[0.0] * (len(moves) - 3), 1.0]
    turns = [turn for row in trajectory.rows for turn in row.turns if turn.kind == "policy"]
    assert [turn.reward for turn in turns] == pytest.approx(expected)
    assert environment(trajectory.prompt, trajectory) == pytest.approx(sum(expected))
    assert values["environment/return/frozen_lake"] == pytest.approx(sum(expected))
    assert values["environment/success/frozen_lake"] == 1
    assert values["environment/observation_score/frozen_lake"] == pytest.approx(2 / len(moves))
    assert values["environment/prediction_score/frozen_lake"] == pytest.approx((1 + 7 / 9) / len(moves))
    assert "[reasoning] observation 1.00 · prediction 0.78" in trajectory.transcript
    rows = rows_from_trajectories([trajectory.replaced(reward=sum(expected))], of_agents=True)
    given = np.concatenate([np.asarray(one) for one in rows.rows("turn_rewards")])
    assert given[np.isfinite(given)].tolist() == pytest.approx(expected)


def test_an_action_that_is_none_is_followed_by_the_same_state() -> None:
    seen = lakes()[0]
    said = f"<observation>{seen}</observation><prediction>{seen}</prediction> I stay."
    agent = FunctionConfig("steps", {"reasoning": {"prediction": 1.0}, "max_steps": 1})
    trajectory, _ = episode(saying(said), agent, worlds=worlds(LAKE), prompt=prompt(seed=0))
    assert trajectory.turns[-1].reward == 1.0


async def judged(said: str, state: Mapping[str, Any]) -> float:
    """Looks, as a served model would, whether the place was named."""
    await asyncio.sleep(0)
    return float(str(state["at"]) in said)


def unbounded(said: str, state: Mapping[str, Any]) -> float:
    return 2.0


def test_a_judge_of_ones_own() -> None:
    reasoning = StateReasoning(observation=2.0, by=f"{HERE}.judged")
    answer = "<observation>I am at [0, 1]</observation>"
    before, after = {"at": [0, 1]}, {"at": [1, 1]}
    assert asyncio.run(reasoning.score(answer, before, after)) == (2.0, {"observation": 1.0, "prediction": 0})
    assert asyncio.run(reasoning.score(answer, after, before))[0] == 0.0
    with pytest.raises(RewardError, match=r"returned 2\.0, no score from 0 to 1"):
        asyncio.run(StateReasoning(observation=1.0, by=unbounded).score(answer, before, after))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("{name: steps, reasoning: {observation: 1.0}}", "set keep_state: true beside its name"),
        ("{name: steps, reasoning: {observations: 1.0}}", "did you mean 'observation'"),
        ("{name: steps, reasoning: {observation: -1.0}}", "must be at least 0"),
        ("{name: steps, reasoning: {by: cells}}", "set observation, prediction or format"),
        ("{name: steps, reasoning: {observation: 1.0, by: cell}}", "did you mean 'cells'"),
    ],
)
def test_what_cannot_be_is_said_before_the_run(run: Any, options: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run("none", "rollout.environments=[frozen_lake]", f"rollout.agent={options}")
