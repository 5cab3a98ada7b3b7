"""MiniGrid and BabyAI: what is written about a view, the library's own solver, and what is held out."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import numpy as np
import pytest

from rondo.core.errors import ConfigError, EnvironmentFailedError
from rondo.environments import episodes
from rondo_worlds import minigrid_adapter as adapter
from rondo_worlds.minigrid_adapter import ACTIONS, MiniGrid
from tests.installed import needs

needs("minigrid")

from minigrid.core.grid import Grid  # noqa: E402
from minigrid.core.world_object import Ball, Box, Door, Goal, Key, Wall  # noqa: E402

FAMILIES = [
    "BabyAI-GoToLocal-v0",
    "BabyAI-PutNextLocal-v0",
    "BabyAI-PickupLoc-v0",
    "BabyAI-OpenDoorsOrderN4-v0",
    "BabyAI-UnlockPickup-v0",
    "BabyAI-GoToSeqS5R2-v0",
]


def furnished() -> MiniGrid:
    """A room of 9 × 9 with the agent in its middle, facing up."""
    world = MiniGrid(id="MiniGrid-Fetch-8x8-N3-v0")
    world.reset(0)
    made = world._world
    made.grid = Grid(9, 9)
    made.grid.wall_rect(0, 0, 9, 9)
    made.width = made.height = 9
    made.agent_pos, made.agent_dir, made.carrying = (4, 4), 3, None
    made.mission = "look about"
    return world


def test_what_is_seen_is_said() -> None:
    world = furnished()
    grid = world._world.grid
    for place, found in {
        (4, 2): Ball("red"),
        (2, 3): Key("grey"),
        (5, 4): Box("blue"),
        (4, 0): Door("yellow", is_locked=True),
        (0, 2): Door("green"),
        (6, 1): Goal(),
        (4, 6): Ball("purple"),  # behind
    }.items():
        grid.set(*place, found)
    world._world.carrying = Key("yellow")
    assert world._observe().text.split("\n") == [
        "Mission: look about.",
        "You see a blue box 1 right.",
        "You see a red ball 2 ahead.",
        "You see a grey key 1 ahead and 2 left.",
        "You see a locked yellow door 4 ahead.",
        "You see a green goal 3 ahead and 2 right.",
        "You carry a yellow key.",
    ]
    assert world.state()["carrying"] == "yellow key"
    grid.get(4, 0).is_open = True
    assert "You see an open yellow door 4 ahead." in world._observe().text


def test_walls_are_said_where_they_are_seen() -> None:
    world = furnished()
    assert world._observe().text == "Mission: look about.\nWalls: 4 ahead."
    grid = world._world.grid
    grid.set(4, 2, Wall())
    grid.set(1, 4, Wall())
    grid.set(6, 4, Wall())
    assert world._observe().text == "Mission: look about.\nWalls: 2 ahead, 3 left, 2 right."
    world._world.agent_dir = 0
    assert world._observe().text == "Mission: look about.\nWalls: 2 ahead, 2 left."


def test_a_step_turns_moves_and_picks_up() -> None:
    world = furnished()
    world._world.grid.set(4, 2, Ball("red"))
    seen = []
    for action in ("go forward", "turn left", "turn right", "pick up", "drop"):
        seen.append(world.step(action).observation.text.split("\n")[1])
        if world._world.carrying:
            break
    assert seen[:3] == ["You see a red ball 1 ahead.", "You see a red ball 1 right.", seen[0]]


@pytest.mark.parametrize("id", FAMILIES)
def test_the_librarys_bot_wins(id: str) -> None:
    """So each of these levels can be solved, and our names are the library's actions."""
    for seed in range(8):
        world = MiniGrid(id=id)
        seen = world.reset(seed)
        assert seen.actions == ACTIONS[:-1]
        count = 0
        for action in world.solution():
            result = world.step(action)
            count += 1
            if result.done or result.truncated:
                break
        assert (result.done, result.success) == (True, True)
        assert result.reward == pytest.approx(1 - 0.9 * count / world._world.max_steps)


def test_who_stands_still_is_cut_off_by_the_library() -> None:
    world = MiniGrid(id="MiniGrid-DoorKey-8x8-v0")
    assert world.reset(0).actions == ACTIONS
    world._world.max_steps = 2
    ends = [(result.reward, result.done, result.truncated) for result in map(world.step, ["done"] * 2)]
    assert ends == [(0.0, False, False), (0.0, False, True)]


def test_rejected_levels_are_not_told(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """The library prints them on standard output."""
    told: list[tuple[object, ...]] = []
    monkeypatch.setattr(adapter, "_silent", lambda *said: told.append(said))
    world = MiniGrid(id="BabyAI-GoTo-v0")
    for seed in range(6):
        world.reset(seed)
    assert told
    assert {said[0] for said in told} == {"Sampling rejected:"}
    assert capfd.readouterr().out == ""


def test_held_out_missions_are_no_training_missions() -> None:
    """What no move changes is never the same: here the mission and the objects there are."""
    world = MiniGrid(id="BabyAI-GoToObj-v0")

    def fixed(held_out: bool) -> set[str]:
        rows = episodes("minigrid", size=60, held_out=held_out)
        return {world.reset(row["seed"]).text.split("\n")[0] for row in rows}

    train, held_out = fixed(False), fixed(True)
    assert len(train) > 3
    assert len(held_out) > 3
    assert not train & held_out


def test_what_can_be_moved_does_not_make_another_level() -> None:
    world = furnished()
    made = world._world
    made.reset = lambda seed: None

    def draw() -> object:
        return world._draw(random.Random(0))[0]

    made.grid.set(2, 2, Ball("red"))
    made.grid.set(3, 3, Door("blue"))
    before = draw()
    made.grid.set(2, 2, None)
    made.carrying = Ball("red")
    made.grid.get(3, 3).is_open = True
    made.agent_pos = (5, 5)
    assert draw() == before
    made.carrying = None
    made.grid.set(6, 6, Box("green", contains=Ball("red")))
    assert draw() == before
    made.grid.set(6, 6, Ball("green"))
    assert draw() != before


@pytest.mark.parametrize("id", ["BabyAI-GoToLocal-v0", "MiniGrid-FourRooms-v0"])
def test_no_two_held_out_levels_are_alike(id: str) -> None:
    """Nor do they depend on which was asked for first."""
    seen = {}
    for seed in [39, *range(1, 41, 2)]:
        world = MiniGrid(id=id)
        world.reset(seed)
        grid = str(world.state())
        assert seen.setdefault(seed, grid) == grid
    assert len(set(seen.values())) == 20


def test_a_task_is_another_environment_for_one_episode() -> None:
    world = MiniGrid(id="BabyAI-GoToLocal-v0")
    assert "open" in world.reset(0, {"id": "BabyAI-OpenDoor-v0"}).text
    assert "go to" in world.reset(0).text


def test_a_picture_is_what_is_seen() -> None:
    world = MiniGrid(observe="both")
    both = world.reset(0)
    seen = both.image
    assert seen is not None
    alone = MiniGrid(observe="image").reset(0)
    assert np.array_equal(np.asarray(alone.image), seen)
    assert alone.text == both.text.split("\n")[0]  # the mission, which no picture shows
    assert MiniGrid().reset(0).text == both.text
    assert (seen.shape, seen.dtype) == ((7 * 16, 7 * 16, 3), np.uint8)
    agent = seen[6 * 16 :, 3 * 16 : 4 * 16]
    turned = world.step("turn left").observation.image
    assert turned is not None
    assert not np.array_equal(turned, seen)
    assert np.array_equal(turned[6 * 16 :, 3 * 16 : 4 * 16], agent)  # oneself is always below, facing up
    red = agent[agent[..., 0] == 255]
    assert red.tolist() == [[255, 76, 76]] * 48  # lit up, as all that is in view


@pytest.mark.parametrize(
    ("id", "said"),
    [
        ("BabyAI-GoToLocals-v0", "cannot make 'BabyAI-GoToLocals-v0'"),
        ("FrozenLake-v1", "none of minigrid's environments"),
    ],
)
def test_what_it_cannot_be_asked(id: str, said: str) -> None:
    for make in (MiniGrid, MiniGrid.check):
        with pytest.raises(ConfigError, match=said):
            make(id=id)


@pytest.mark.skipif(importlib.util.find_spec("imageio") is not None, reason="imageio is there")
def test_a_further_package_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r'pip install "minigrid\[wfc\]"'):
        MiniGrid.check(id="MiniGrid-WFC-MazeSimple-v0")


def test_an_environment_of_one_level_is_of_one_half() -> None:
    world, failed = MiniGrid(id="MiniGrid-Empty-5x5-v0"), []
    for seed in (0, 1):
        try:
            world.reset(seed)
        except EnvironmentFailedError as error:
            failed.append(str(error))
    assert len(failed) == 1
    assert "too few" in failed[0]
