"""TextWorld's games: made once, the same everywhere, and won by their walkthroughs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rondo.core.errors import ConfigError
from rondo_worlds.textworld_adapter import TextWorld
from tests.installed import needs
from tests.messages import full_text

needs("textworld")
SIMPLE = {"challenge": "tw-simple", "rewards": "dense", "goal": "brief"}


@pytest.mark.parametrize(
    "options", [{"challenge": "tw-coin_collector", "level": 2}, {"challenge": "tw-cooking"}, SIMPLE]
)
def test_a_walkthrough_wins_and_the_game_is_kept(options: dict[str, Any], cache: Path) -> None:
    world = TextWorld(**options)
    first = seen = world.reset(4)
    folder = cache / "rondo" / "textworld"
    games = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    plan = world.plan()
    assert len(plan) >= 2
    rewards = []
    for action in plan:
        assert action in seen.actions
        result = world.step(action)
        assert (result.done, result.success) == (action is plan[-1], action is plan[-1])
        rewards.append(result.reward)
        seen = result.observation
    assert sum(rewards) == pytest.approx(1)
    assert "RESTART" not in seen.text
    world.close()
    other = TextWorld(**options)
    assert other.reset(4) == first
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == games
    other.close()


def test_what_is_to_be_seen() -> None:
    world = TextWorld(challenge="tw-coin_collector", level=2)
    seen = world.reset(4)
    assert seen.text.startswith("-= ")
    assert "\nGoal: " in seen.text
    assert {"look", "inventory"} <= set(seen.actions)
    looked = world.step("look").observation
    assert (
        looked.anchor
        == seen.anchor
        == "\n".join(world.state()[name] for name in ("description", "inventory"))
    )
    assert world.step(world.plan()[0]).observation.anchor != seen.anchor
    assert world.reset(4, {"level": 1}).text != seen.text
    assert len(world.plan()) == 1
    world.close()


def test_a_game_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Also where hashes of strings are others."""
    code = """
from rondo_worlds.textworld_adapter import TextWorld
world = TextWorld(challenge="tw-coin_collector", level=2)
print(world.reset(9), world.plan())
"""
    told = set()
    for number in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": number, "XDG_CACHE_HOME": str(tmp_path / number)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        told.add(done.stdout)
    assert len(told) == 1
    assert "take coin" in told.pop()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"challenge": "tw-chess"}, full_text("has no challenge 'tw-chess'")),
        ({"challenge": "tw-coin_collector"}, full_text("has the options level")),
        ({"challenge": "tw-coin_collector", "level": 1, "rooms": 3}, "not rooms"),
        ({**SIMPLE, "goal": "vague"}, full_text("goal of tw-simple is one of")),
    ],
)
def test_what_it_cannot_be_asked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TextWorld(**options)
