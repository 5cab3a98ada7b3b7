"""A user to talk to, whom a function or a served model plays."""

from __future__ import annotations

from typing import Any

import pytest

from rondo.environments import Observation, check_environment
from rondo.environments.frozen_lake import FrozenLake, way_to_goal
from rondo.environments.observed import Observed
from rondo.environments.user import User
from rondo.errors import ConfigError, EnvironmentFailedError

WANTS = {"wants": "a refund", "opening": "My kettle is broken."}


def counts(task: Any, conversation: list[dict[str, str]], seed: int) -> str:
    """Says how often it was answered and what last, and ends the fourth time."""
    answers = [message["content"] for message in conversation if message["role"] == "assistant"]
    return f"{task.get('wants')} {len(answers)} {answers[-1:]} {seed % 7}{' [END]' * (len(answers) > 2)}"


async def counts_later(task: Any, conversation: list[dict[str, str]], seed: int) -> str:
    return counts(task, conversation, seed)


@pytest.mark.parametrize("function", [counts, counts_later])
@pytest.mark.parametrize("task", [None, WANTS])
def test_a_function_plays_the_user(function: Any, task: Any) -> None:
    check_environment(lambda: User(function=function), seeds=range(3), task=task, act=lambda seen, _: "Why?")
    user = User(function=function)
    first = user.reset(0, task)
    assert first == Observation(WANTS["opening"] if task else "None 0 [] 5")
    steps = [user.step(text) for text in ("Oh.", "No.", "Yes.")]
    assert [step.observation.text[:-2] for step in steps][:2] == [
        f"{task and 'a refund'} {number} ['{said}']" for number, said in ((1, "Oh."), (2, "No."))
    ]
    assert [(step.done, step.truncated, step.reward) for step in steps] == [
        (False, False, 0.0),
        (False, False, 0.0),
        (True, False, 0.0),
    ]
    assert [said["role"] for said in user.state()["conversation"]] == ["user", "assistant"] * 3 + ["user"]


def test_a_conversation_has_an_end() -> None:
    user = User(function=counts, max_turns=2)
    user.reset(0)
    assert [user.step("Hm.").truncated for _ in range(2)] == [False, True]


async def says(seen: Observation, state: Any, seed: int) -> str:
    return f"You are at {state['at']}, {seed % 9}."


def test_a_function_tells_what_another_environment_shows() -> None:
    """Which keeps its actions, rewards, ends and anchors."""
    plain, told = FrozenLake(size=3), Observed(of={"name": "frozen_lake", "size": 3}, by=says)
    seen, words = plain.reset(0), told.reset(0)
    assert (words.text, words.actions, words.anchor) == ("You are at [0, 0], 4.", seen.actions, seen.text)
    for move in way_to_goal(tuple(plain.state()["level"]), (0, 0)) or ():
        one, other = plain.step(move), told.step(move)
        assert other.observation.text.startswith(f"You are at {plain.state()['at']}")
        assert other.observation.identity == one.observation.text
        assert (other.reward, other.done, other.success) == (one.reward, one.done, one.success)
    assert one.success
    with pytest.raises(EnvironmentFailedError, match="gave NoneType, no text"):
        Observed(of="bandit", by=lambda seen, state, seed: None).reset(0)
    for of, said in (({"size": 3}, "needs the name"), ({"name": "bandit", "arm": 3}, "did you mean 'arms'")):
        with pytest.raises(ConfigError, match=said):
            Observed.check(of=of, by=says)


def test_who_says_nothing_is_no_user() -> None:
    with pytest.raises(EnvironmentFailedError, match="gave NoneType, no text"):
        User(function=lambda task, conversation, seed: None).reset(0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "one of the two"),
        ({"base_url": "http://x/v1"}, "one of the two"),
        ({"base_url": "http://x/v1", "model": "m", "function": counts}, "one of the two"),
        ({"base_url": "x/v1", "model": "m"}, "no http:// or https:// URL"),
        ({"function": counts, "max_turns": 0}, "max_turns >= 1"),
        ({"function": counts, "end": ""}, "an end"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        User(**options)
