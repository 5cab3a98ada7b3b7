"""The promises of environments: those that ship keep them, and whoever breaks one is told which."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from rondo.core.errors import ConfigError, EnvironmentFailedError
from rondo.environments import Observation, check_environment
from rondo.environments.registry import environment_class
from rondo.system.names import offered
from tests.environments.worlds import Honest, Side
from tests.messages import full_text
from tests.rondo_worlds.shipped import ELSEWHERE, SHIPPED, Shipped


@pytest.mark.parametrize(("name", "shipped"), [pair for pair in SHIPPED if not pair[1].packages])
def test_promises_are_kept(name: str, shipped: Shipped) -> None:
    assert isinstance(shipped.make(), environment_class(name, "here"))
    check_environment(shipped.make, seeds=range(shipped.seeds), act=shipped.act, steps=shipped.steps)


def test_an_environment_of_a_user_keeps_them() -> None:
    check_environment(Honest)


def test_every_environment_that_ships_is_tested() -> None:
    """Those with packages in tests/rondo_worlds/packages."""
    assert {name for name, _ in SHIPPED} | set(ELSEWHERE) == set(offered("environments"))
    for path in ELSEWHERE.values():
        assert "check_environment(" in (Path(__file__).parent / path).read_text()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("prints", "printed b'hello"),
        ("prints from a child", "printed b'hello"),
        ("random", "Python's global random stream"),
        ("numpy", "numpy's global random stream"),
        ("process", "processes that it started"),
        ("empty", "the observation is empty"),
        ("text", "not str"),
        ("reward", full_text("of a step is a finite number, not nan")),
        ("reward as text", full_text("of a step is a finite number, not '1'")),
        ("randomly other", "Python's global random stream"),
        ("seedless", "a second episode is another"),
        ("remembers", "the same instance is another"),
    ],
)
def test_a_broken_promise_is_named(wrong: str, said: str) -> None:
    made: list[Honest] = []

    def make() -> Honest:
        made.append(Honest(wrong=wrong))
        return made[-1]

    try:
        with pytest.raises(EnvironmentFailedError, match=said):
            check_environment(make)
    finally:
        for process in (process for world in made for process in world.processes):
            process.kill()
            process.wait()


def test_what_an_environment_raises_is_what_the_test_sees() -> None:
    """Also at the second close, with standard output as it was."""
    for wrong, said in (("starts", "no such machine"), ("dies", "is gone"), ("closes once", "closed twice")):
        before = os.fstat(1)
        with pytest.raises(OSError, match=said) as caught:
            check_environment(lambda wrong=wrong: Honest(wrong=wrong))  # type: ignore[misc]
        assert os.path.samestat(before, os.fstat(1))
        notes = {"starts": "seed 0, reset", "dies": "seed 0, step 2"}
        assert getattr(caught.value, "__notes__", []) == [
            f"check_environment: {where}" for name, where in notes.items() if name == wrong
        ]


def test_free_text_needs_somebody_who_writes_it() -> None:
    class Free(Honest):
        def _observe(self) -> Any:
            from rondo.environments import Observation

            return Observation(f"{self.count} of 3")

    with pytest.raises(EnvironmentFailedError, match="act="):
        check_environment(Free)
    check_environment(Free, act=lambda seen, rng: f"{seen.text[0]}{rng.random()}")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("one too few", "step_many returns a list of 3 results"),
        ("mixed up", full_text("seed 0: the episode by step_many")),
    ],
)
def test_steps_side_by_side_are_those_one_by_one(wrong: str, said: str) -> None:
    def act(seen: Observation, rng: random.Random) -> str:
        return "next"

    class Seeded(Side):
        def _observe(self) -> Any:
            return Observation(f"{self.seed}: {self.count}", ("next",))

    check_environment(Seeded, seeds=range(3), act=act)
    with pytest.raises(EnvironmentFailedError, match=said):
        check_environment(lambda: Seeded(wrong=wrong), seeds=range(3), act=act)


def test_step_many_is_a_class_method() -> None:
    class Wrong(Honest):
        def step_many(self, environments: Any, actions: Any) -> Any: ...

    with pytest.raises(ConfigError, match=r"Wrong\.step_many is no class method"):
        check_environment(Wrong)
