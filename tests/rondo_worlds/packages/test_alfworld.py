"""ALFWorld: made rooms under its rules, and games from a folder."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rondo.core.errors import ConfigError, EnvironmentFailedError
from rondo_worlds import alfworld_adapter
from rondo_worlds.alfworld_adapter import AlfWorld, _rules
from rondo_worlds.alfworld_rooms import TASKS, draw_room
from rondo_worlds.levels import level_of
from tests.installed import needs
from tests.messages import full_text

needs("alfworld", "textworld")


def solve(world: AlfWorld, seed: int, task: Any = None) -> int:
    """Plays the plan, whose actions are all admissible, and of which no part does the task; returns its
    length.
    """
    seen = world.reset(seed, task)
    plan = world.plan()
    for number, action in enumerate(plan, start=1):
        assert action in seen.actions
        result = world.step(action)
        won = number == len(plan)
        assert (result.reward, result.done, result.success) == (float(won), won, won)
        seen = result.observation
    return len(plan)


@pytest.mark.parametrize("task", TASKS)
def test_the_plan_of_every_room_does_its_task(task: str) -> None:
    world = AlfWorld(others=2)
    lengths = [solve(world, seed, {"tasks": [task]}) for seed in range(2)]
    assert 3 <= min(lengths)
    assert max(lengths) <= (12 if task == "two" else 9)
    json.dumps(world.state())
    world.close()


def test_what_is_to_be_seen() -> None:
    world = AlfWorld(tasks=["cool"])
    seen = world.reset(0)
    assert seen.text.startswith("You are in the middle of a room.")
    assert "fridge 1" in seen.text
    task = seen.text.splitlines()[-1]
    assert task.startswith("Your task is to: ")
    assert "go to fridge 1" in seen.actions
    assert "sinkbasin 1" in seen.text
    seen = world.step("go to fridge 1").observation
    assert seen.text == f"You arrive at fridge 1. The fridge 1 is closed.\n{task}"
    before = world.state()
    opened = world.step("open fridge 1").observation
    assert opened.text.startswith("You open the fridge 1. The fridge 1 is open. In it, you see ")
    assert len(set(world.state()["facts"]) - set(before["facts"])) == 1
    world.close()


def test_rooms_of_odd_seeds_are_held_out() -> None:
    """They differ in more than in what lies where, which actions change."""
    rules, *_ = _rules()
    rooms: dict[int, set[str]] = {0: set(), 1: set()}
    draw = functools.partial(draw_room, rules=rules, tasks=["place"], others=0)
    for seed in range(300):
        room = level_of("test", seed, draw, lambda room: room.fixed)
        rooms[seed % 2].add(repr(room.fixed))
    assert min(len(half) for half in rooms.values()) > 100
    assert not rooms[0] & rooms[1]


def test_games_of_a_folder_are_played_as_made_ones_are(tmp_path: Path) -> None:
    """The folder is written here, as official games are; these are not there to be tested."""
    made = AlfWorld(tasks=["heat", "clean"])
    for number in range(3):
        made.reset(number)
        data = {**made._game.data, "walkthrough": made.plan(), "solvable": number != 1}
        folder = tmp_path / ("movable_recep" if number == 2 else f"trial_{number}")
        folder.mkdir()
        (folder / "game.tw-pddl").write_text(json.dumps(data))
    world = AlfWorld(games=str(tmp_path))
    assert world.reset(0) == made.reset(0)
    assert world.plan() == made.plan()
    for seed in (0, 5):  # the only one that can be solved
        assert solve(world, seed) == len(made.plan())
        assert world.state()["game"] == str(tmp_path / "trial_0" / "game.tw-pddl")
    (tmp_path / "trial_0" / "game.tw-pddl").write_text(json.dumps({"solvable": False}))
    with pytest.raises(EnvironmentFailedError, match=r"no game in .* can be solved"):
        world.reset(0)
    world.close()
    made.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tasks": ["boil"]}, "needs tasks of place, light"),
        ({"tasks": "heat"}, "needs tasks of place, light"),
        ({"others": -1}, "0 to 50 others"),
        ({"games": "nowhere"}, full_text("in nowhere; alfworld-download")),
    ],
)
def test_what_it_cannot_be_asked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        AlfWorld(**options)


@pytest.mark.parametrize("task", ["place", "light"])
def test_what_is_kept_of_the_engines_work_changes_nothing(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Observations, actions and states are those of the engine by itself, at a first start and at others."""

    def episode() -> list[Any]:
        world = AlfWorld(tasks=[task], others=3)
        seen: list[Any] = [world.reset(1), world.state()]
        for action in (*world.plan()[:2], "inventory", "look"):
            seen += [world.step(action), world.state()]
        world.close()
        return seen

    ours = [episode(), episode()]
    monkeypatch.setattr(alfworld_adapter, "_work_kept", contextlib.nullcontext)
    assert ours == [episode()] * 2


def test_games_share_engines_and_leave_no_folder_in_the_home(tmp_path: Path) -> None:
    """In a process of its own, which ends as it should."""
    code = """
import os
from rondo_worlds import alfworld_adapter
for episode in range(4):
    pair = [alfworld_adapter.AlfWorld(others=0) for _ in range(2)]
    for world in pair:
        world.reset(0)
    for world in pair:
        world.close()
        world.close()
print(len(alfworld_adapter._FREE), os.listdir(os.environ["HOME"]), "ALFWORLD_DATA" in os.environ)
"""
    environment = {name: value for name, value in os.environ.items() if name != "ALFWORLD_DATA"}
    environment["HOME"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "2 [] False\n"), done.stderr
