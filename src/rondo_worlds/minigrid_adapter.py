"""BabyAI and MiniGrid: rooms of objects, seen from where one stands. Needs rondo-rl[minigrid]."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any

import numpy as np

from rondo.core.errors import ConfigError
from rondo.environments.protocol import Observation, StepResult
from rondo_worlds.levels import level_of
from rondo_worlds.packages import require_package
from rondo_worlds.tiles import check_observe, observed_as

ACTIONS = ("turn left", "turn right", "go forward", "pick up", "drop", "toggle", "done")
"""In the library's order. toggle: opens and closes what is in front."""


class MiniGrid:
    """A mission of an environment that the package `minigrid` knows by `id`. The text says what is seen from
    where the agent stands: of each object how far it is, ahead and to a side, and how far the walls are.

    The reward is the library's: 1 − 0.9 × the share of its steps that were needed. observe: text, image (of
    what is seen; mission and what is carried are said all the same) or both.
    """

    instructions = (
        "Fulfil your mission in a world of rooms and objects. Answer with one action, such as "
        "<action>go forward</action>; toggle opens a door or a box in front of you."
    )

    def __init__(self, *, id: str = "BabyAI-GoToLocal-v0", observe: str = "text") -> None:
        self._id = id
        self._observe_as = check_observe(observe, "minigrid")
        self._worlds = {id: _made(id)}
        self._world = self._worlds[id]

    @classmethod
    def check(cls, *, id: str = "BabyAI-GoToLocal-v0", observe: str = "text") -> None:
        """Raises ConfigError where the package is missing or does not know the environment."""
        cls(id=id, observe=observe).close()

    def reset(self, seed: int, task: Any = None) -> Observation:
        """Begins a mission. task: `{id: BabyAI-GoToLocalS8N7-v0}`, where it is to be another."""
        id = str((task or {}).get("id", self._id))
        if id not in self._worlds:
            self._worlds[id] = _made(id)
        self._world = self._worlds[id]
        names = ACTIONS[: self._world.action_space.n]
        self._actions = names[:-1] if id.startswith("BabyAI") else names  # to which `done` is nothing
        level_of(f"minigrid {id}", seed, self._draw, itemgetter(0), whole=itemgetter(1))
        return self._observe()

    def _draw(self, rng: random.Random) -> tuple[object, object]:
        """Makes a level, and returns what no move changes: the mission, what stands fast, and what can be
        carried, wherever it lies. (A box does not count: opened, it is gone. What is in it does.) And all of
        it: the mission, and the grid as the library writes it.
        """
        self._world.reset(seed=rng.getrandbits(31))
        carried = [("", self._world.carrying)] if self._world.carrying else []
        fast, loose = [], []
        for place, found in [*enumerate(self._world.grid.grid), *carried]:
            if found is not None and found.type == "box":
                found = found.contains
            if found is not None and found.can_pickup():
                loose.append((found.type, found.color))
            elif found is not None:
                fast.append((place, found.type, found.color))
        mission = self._world.mission
        return (mission, self._world.grid.width, fast, sorted(loose)), (mission, self._world.pprint_grid())

    def step(self, action: str) -> StepResult:
        """Takes the action of this name."""
        _, reward, done, truncated, _ = self._world.step(ACTIONS.index(action))
        return StepResult(
            self._observe(), float(reward), bool(done), bool(truncated), bool(done and reward > 0)
        )

    def _observe(self) -> Observation:
        mission, lines = f"Mission: {self._world.mission}.", _seen(self._world)
        if self._world.carrying is not None:
            carried = f"You carry {_named(self._world.carrying)}."
            if self._observe_as == "image":
                mission = f"{mission}\n{carried}"
            lines.append(carried)

        def picture() -> np.ndarray:
            return np.asarray(self._world.get_frame(tile_size=16, agent_pov=True), np.uint8)

        return observed_as(self._observe_as, "\n".join(lines), self._actions, picture, mission)

    def state(self) -> Mapping[str, Any]:
        """Returns the whole grid, as the library writes it, with the agent as an arrow."""
        carried = self._world.carrying
        return {
            "mission": self._world.mission,
            "grid": self._world.pprint_grid(),
            "carrying": None if carried is None else f"{carried.color} {carried.type}",
        }

    def close(self) -> None:
        """Closes them all."""
        while self._worlds:
            self._worlds.popitem()[1].close()

    def solution(self) -> Iterator[str]:
        """Yields what minigrid's own bot does, from the start of a mission of BabyAI on. Each action is to be
        taken before the next is asked for.
        """
        from minigrid.utils.baby_ai_bot import BabyAIBot

        bot = BabyAIBot(self._world)
        while True:
            yield ACTIONS[bot.replan()]


def _made(id: str) -> Any:
    require_package("minigrid")
    import gymnasium
    import minigrid  # registers its environments

    assert minigrid
    levels: Any = importlib.import_module("minigrid.envs.babyai.core.roomgrid_level")
    levels.print = _silent  # tells of each level it rejects, on the run's standard output
    try:
        if not str(gymnasium.spec(id).entry_point).startswith("minigrid."):
            raise ConfigError(f"minigrid: {id} is none of minigrid's environments; use gymnasium for it")
        made: Any = gymnasium.make(id, disable_env_checker=True).unwrapped
        made.reset(seed=0)  # some lack a further package only here
    except gymnasium.error.Error as error:
        raise ConfigError(f"minigrid cannot make {id!r}: {error}") from error
    return made


def _silent(*_: object) -> None:
    """Stands where the library would print."""


def _seen(world: Any) -> list[str]:
    """Returns a line for each object in view, the nearest first, and one for walls."""
    grid, visible = world.gen_obs_grid()
    middle, here = grid.width // 2, grid.height - 1
    lines = []
    for column in range(grid.width):
        for row in range(grid.height):
            found, ahead, right = grid.get(column, row), here - row, column - middle
            if visible[column, row] and found is not None and found.type != "wall" and (ahead or right):
                lines.append((ahead + abs(right), f"You see {_named(found)} {_way(ahead, right)}."))
    walls = []
    for side, step in (("ahead", (0, -1)), ("left", (-1, 0)), ("right", (1, 0))):
        for distance in range(1, here + 1):
            column, row = middle + distance * step[0], here + distance * step[1]
            if not 0 <= column < grid.width or not visible[column, row]:
                break
            found = grid.get(column, row)
            if found is not None and not found.see_behind():  # a wall, or a closed door
                walls += [f"{distance} {side}"] if found.type == "wall" else []
                break
    return [line for _, line in sorted(lines)] + ([f"Walls: {', '.join(walls)}."] if walls else [])


def _named(found: Any) -> str:
    state = ""
    if found.type == "door":
        state = "open " if found.is_open else "locked " if found.is_locked else "closed "
    said = f"{state}{found.color} {found.type}"
    return f"{'an' if said[0] in 'aeiou' else 'a'} {said}"


def _way(ahead: int, right: int) -> str:
    parts = [f"{ahead} ahead"] if ahead else []
    parts += [f"{abs(right)} {'right' if right > 0 else 'left'}"] if right else []
    return " and ".join(parts)
