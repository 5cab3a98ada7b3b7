"""Pictures of rooms: pixel by pixel, and what becomes of them before a policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rondo.config.schema import EnvironmentConfig
from rondo.core.errors import ConfigError
from rondo.environments import check_environment
from rondo.environments.registry import load_environments
from rondo_worlds import frozen_lake, sokoban
from rondo_worlds.frozen_lake import FrozenLake
from rondo_worlds.sokoban import Sokoban
from rondo_worlds.tiles import TILE, draw

FLOOR, RED, WOOD, ICE, GOLD = (
    (232, 224, 200),
    (215, 50, 50),
    (190, 140, 70),
    (205, 230, 245),
    (245, 190, 40),
)


def dots(tile: np.ndarray) -> np.ndarray:
    """The eight by eight dots of a tile, of which each is two by two pixels."""
    assert np.array_equal(tile[::2, ::2].repeat(2, 0).repeat(2, 1), tile)
    return tile[::2, ::2]


def expected(rows: list[str], colours: dict[str, tuple[int, int, int]]) -> np.ndarray:
    return np.array([[colours[dot] for dot in row] for row in rows], dtype=np.uint8)


def test_a_target_and_a_box_on_one() -> None:
    colours = {" ": FLOOR, "t": RED, "b": WOOD}
    target = [
        "        ",
        "  tttt  ",
        " t    t ",
        " t tt t ",
        " t tt t ",
        " t    t ",
        "  tttt  ",
        "        ",
    ]
    placed = ["        ", " tttttt ", " ttbbtt ", " tbttbt ", " tbttbt ", " ttbbtt ", " tttttt ", "        "]
    image = draw([".*"], sokoban.SIGNS)
    assert (image.shape, image.dtype) == ((TILE, 2 * TILE, 3), np.uint8)
    assert np.array_equal(dots(image[:, :TILE]), expected(target, colours))
    assert np.array_equal(dots(image[:, TILE:]), expected(placed, colours))


def test_a_goal_on_ice() -> None:
    goal = ["   g    ", "   ggg  ", "   ggggg", "   ggg  ", "   g    ", "   g    ", "   g    ", "  ggg   "]
    image = draw(["G"], frozen_lake.SIGNS)
    assert np.array_equal(dots(image), expected(goal, {" ": ICE, "g": GOLD}))


@pytest.mark.parametrize("signs", [sokoban.SIGNS, frozen_lake.SIGNS])
def test_no_two_signs_look_alike(signs: Any) -> None:
    looks = {draw([sign], signs).tobytes() for sign in signs}
    assert len(looks) == len(signs)


@pytest.mark.parametrize(
    ("world", "signs"), [(Sokoban(image=True), sokoban.SIGNS), (FrozenLake(image=True), frozen_lake.SIGNS)]
)
def test_the_picture_says_what_the_text_says(world: Any, signs: Any) -> None:
    seen = world.reset(2)
    for action in ("right", "down", "left", "down", "right"):
        rows = seen.text.split("\n")
        assert seen.image.shape == (TILE * len(rows), TILE * len(rows[0]), 3)
        for row, line in enumerate(rows):
            for column, sign in enumerate(line):
                cell = seen.image[row * TILE :, column * TILE :][:TILE, :TILE]
                assert np.array_equal(cell, draw([sign], signs))
        seen = world.step(action).observation
    check_environment(lambda: type(world)(image=True))


@pytest.mark.parametrize("name", ["sokoban", "frozen_lake"])
def test_no_run_begins_with_pictures(name: str) -> None:
    assert load_environments([EnvironmentConfig(name, options={"image": False})])
    with pytest.raises(ConfigError, match=r"rollout\.environments\.0: image: true"):
        load_environments([EnvironmentConfig(name, options={"image": True})])
