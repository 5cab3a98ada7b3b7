"""Tasksets of verifiers: those that are answered once, and which are refused."""

from __future__ import annotations

import pytest

from rondo.core.errors import ConfigError, EnvironmentFailedError
from rondo_worlds.verifiers_adapter import Verifiers
from tests.installed import needs

needs("verifiers")

FILE = "tests/rondo_worlds/packages/tasksets.py"


def test_an_answer_is_scored_by_the_tasksets_rewards() -> None:
    world = Verifiers(taskset=f"{FILE}:sums")
    assert world.reset(0, 3).text == "A number only.\n\nWhat is 3 + 3?"
    right = world.step(" 6 ")
    assert (right.reward, right.done, right.success) == (1.5, True, True)
    assert world.state() == {
        "task": 3,
        "rewards": {"right": 1.0, "short": 0.5},
        "metrics": {"messages": 3.0},
    }
    world.reset(0, 3)
    assert world.state() == {"task": 3}
    wrong = world.step("7")
    assert (wrong.reward, wrong.done, wrong.success) == (0.5, True, False)
    assert world.step("a long way round").reward == 0.0


def test_seeds_choose_tasks_and_odd_ones_are_held_out() -> None:
    """Of seven, the last is in neither half."""
    world = Verifiers(taskset=f"{FILE}:sums")
    chosen = []
    for seed in range(14):
        world.reset(seed)
        chosen.append(world.state()["task"])
    assert chosen == [*range(6), *range(6), 0, 1]


def test_one_without_an_end_is_cut() -> None:
    world = Verifiers(taskset=f"{FILE}:endless", size=4)
    world.reset(5)
    assert world.state()["task"] == 1
    with pytest.raises(EnvironmentFailedError, match="there are 4 tasks, and no 4"):
        world.reset(0, 4)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("endless", "has no end; set the option size"),
        ("tools", "have tools"),
        ("machine", "need a machine of their own"),
        ("shell", r"scored on a machine of their own \(ran\)"),
        ("silent", "have no rewards of their own"),
        ("none", "returned list, and no Taskset"),
        ("nothing", "nothing"),
    ],
)
def test_what_is_not_adapted_is_refused(name: str, said: str) -> None:
    for make in (Verifiers, Verifiers.check):
        with pytest.raises(ConfigError, match=said):
            make(taskset=f"{FILE}:{name}")


def test_a_task_without_a_prompt_has_failed() -> None:
    with pytest.raises(EnvironmentFailedError, match="without a prompt"):
        Verifiers(taskset=f"{FILE}:promptless").reset(0)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"rondo-rl\[verifiers\]"):
        Verifiers.check(taskset="nowhere.py:nothing")
