"""Pictures of rooms: pixel by pixel, and what becomes of them before a policy."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest

from rondo.config.schema import EnvironmentConfig
from rondo.core.errors import ConfigError
from rondo.environments import check_environment
from rondo.environments.registry import load_environments
from rondo_worlds import frozen_lake, sokoban
from rondo_worlds.frozen_lake import FrozenLake
from rondo_worlds.gymnasium_adapter import Gymnasium
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
    ("world", "signs"),
    [(Sokoban(observe="both"), sokoban.SIGNS), (FrozenLake(observe="both"), frozen_lake.SIGNS)],
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
    check_environment(lambda: type(world)(observe="both"))


@pytest.mark.parametrize("world", [Sokoban, FrozenLake])
def test_text_picture_or_both(world: Any) -> None:
    """The same picture, the same text, and what is not asked for is not there."""
    text, image, both = (world(observe=observe).reset(4) for observe in ("text", "image", "both"))
    assert (text.text, text.image, image.text) == (both.text, None, "")
    assert np.array_equal(image.image, both.image)
    assert text.actions == image.actions == both.actions
    check_environment(lambda: world(observe="image"))


@pytest.mark.parametrize("name", ["sokoban", "frozen_lake", "gymnasium"])
def test_what_cannot_be_observed(name: str) -> None:
    options = {"id": "CartPole-v1", "actions": ["left", "right"]} if name == "gymnasium" else {}
    (choice,) = load_environments([EnvironmentConfig(name, options={**options, "observe": "picture"})])
    with pytest.raises(ConfigError, match=f"{name}: observe is one of text, image, both"):
        choice.make()


class Drawing(gymnasium.Env[int, int]):
    """Counts its steps, and draws them."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 4}
    action_space, observation_space = gymnasium.spaces.Discrete(2), gymnasium.spaces.Discrete(9)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.at = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = 0
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.at += action
        return self.at, float(action), self.at == 3, False, {}

    def render(self) -> Any:
        return np.full((8, 8 + self.at, 3), 10 * self.at, np.uint8)


class Undrawn(Drawing):
    """Draws nothing."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}


gymnasium.register("Drawing-v0", Drawing)
gymnasium.register("Undrawn-v0", Undrawn)


def told(seen: int, environment: Any) -> str:
    return f"at {seen}"


@pytest.mark.filterwarnings("ignore:.*render_mode")
def test_what_gymnasium_draws() -> None:
    """By pictures alone no function has to write what is to be seen."""
    chosen: dict[str, Any] = {"id": "Drawing-v0", "actions": ["stay", "go"]}
    world = Gymnasium(**chosen, observe="image")
    assert (world.reset(0).text, world.reset(0).image.shape) == ("", (8, 8, 3))  # type: ignore[union-attr]
    seen = world.step("go").observation.image
    assert np.array_equal(seen, np.full((8, 9, 3), 10))  # type: ignore[arg-type]
    both = Gymnasium(**chosen, observe="both", text=told)
    assert (both.reset(0).text, both.step("go").observation.text) == ("at 0", "at 1")
    check_environment(lambda: Gymnasium(**chosen, observe="image"))
    with pytest.raises(ConfigError, match="gymnasium: Undrawn-v0 draws no pictures"):
        Gymnasium(**{**chosen, "id": "Undrawn-v0"}, observe="image")
