"""FrozenLake: a way over the ice, round the holes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from typing import Any

from rondo.core.errors import ConfigError, EnvironmentFailedError
from rondo.environments.protocol import Observation, StepResult
from rondo_worlds.levels import check_levels, level_of
from rondo_worlds.tiles import check_observe, draw, observed_as

Cell = tuple[int, int]
MOVES: Mapping[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
ICE, HOLE, GOAL, PLAYER, DROWNED = "_", "O", "G", "P", "X"
SIGNS: Mapping[str, tuple[str, ...]] = {
    ICE: ("ice",),
    HOLE: ("ice", "hole"),
    GOAL: ("ice", "goal"),
    PLAYER: ("ice", "player"),
    DROWNED: ("ice", "hole", "player"),
}
# gymnasium's fixed maps, which it calls by these names, too.
MAPS: Mapping[str, tuple[str, ...]] = {
    "4x4": ("____", "_O_O", "___O", "O__G"),
    "8x8": (
        "________",
        "________",
        "___O____",
        "_____O__",
        "___O____",
        "_OO___O_",
        "_O__O_O_",
        "___O___G",
    ),
}


class FrozenLake:
    """A square lake of `size` × `size` (4): start in one corner, goal in the other, holes with odds `holes`
    (0.2); there is always a way. Or a fixed one of `MAPS`, the same for every seed.

    Reward 1 at the goal, as gymnasium has it. A step into a hole ends the episode. slippery: a third of the
    steps each goes to one side or the other. observe: text, image or both.
    """

    instructions = (
        "Walk over the frozen lake from P to G. O is a hole: do not step into it. _ is ice. "
        "Answer with one move, such as <action>left</action>."
    )

    def __init__(
        self,
        *,
        size: int | None = None,
        holes: float | None = None,
        map: str | None = None,
        slippery: bool = False,
        observe: str = "text",
    ) -> None:
        if map is not None and map not in MAPS:
            raise ConfigError(f"frozen_lake: map is one of {', '.join(MAPS)}, not {map!r}")
        if map is not None and not size is holes is None:
            raise ConfigError(f"frozen_lake: the map {map} has its own size and holes; leave these out")
        self._size = 4 if size is None else size
        self._holes = 0.2 if holes is None else holes
        if not 2 <= self._size <= 32 or not 0 <= self._holes <= 0.9:
            raise ConfigError(
                f"frozen_lake: needs size 2 to 32 and holes 0 to 0.9, got {self._size} and {self._holes}"
            )
        self._map = map
        self._slippery = slippery
        self._observe_as = check_observe(observe, "frozen_lake")
        self._level: tuple[str, ...] = ()

    @classmethod
    def check(cls, **options: Any) -> None:
        """Raises ConfigError for options that it cannot have, or that leave no level for some seeds."""
        check_levels(cls(**options), options)

    def reset(self, seed: int, task: Any = None) -> Observation:
        """Freezes a lake. task: `{size: 6}`, where it is to have another size."""
        size = int((task or {}).get("size", self._size))
        if self._map is not None:
            if task:
                raise EnvironmentFailedError(f"frozen_lake: the map {self._map} takes no task, got {task}")
            self._level = MAPS[self._map]
        else:
            name = f"frozen_lake {size} {self._holes}"
            self._level = level_of(name, seed, lambda rng: self._draw(rng, size))
        self._rng = random.Random(f"rondo frozen_lake slips: {seed}")
        self._at: Cell = (0, 0)
        return self._observe()

    def _draw(self, rng: random.Random, size: int) -> tuple[str, ...] | None:
        ice = [HOLE if rng.random() < self._holes else ICE for _ in range(size * size)]
        ice[0], ice[-1] = ICE, GOAL
        level = tuple("".join(ice[start : start + size]) for start in range(0, size * size, size))
        return level if way_to_goal(level, (0, 0)) is not None else None

    def step(self, action: str) -> StepResult:
        """Goes one step; at the edge it stays."""
        down, right = MOVES[action]
        if self._slippery and (slip := self._rng.randrange(3)):
            down, right = (right, down) if slip == 1 else (-right, -down)
        last = len(self._level) - 1
        self._at = (min(max(self._at[0] + down, 0), last), min(max(self._at[1] + right, 0), last))
        there = self._level[self._at[0]][self._at[1]]
        won = there == GOAL
        return StepResult(self._observe(), float(won), done=there in (GOAL, HOLE), success=won)

    def _observe(self) -> Observation:
        lines = self._lines()
        return observed_as(self._observe_as, "\n".join(lines), tuple(MOVES), lambda: draw(lines, SIGNS))

    def _lines(self) -> list[str]:
        row, column = self._at
        player = DROWNED if self._level[row][column] == HOLE else PLAYER
        lines = list(self._level)
        lines[row] = lines[row][:column] + player + lines[row][column + 1 :]
        return lines

    def state(self) -> Mapping[str, Any]:
        """Returns the lake without the player, where the player is, and both as text."""
        return {"level": list(self._level), "at": list(self._at), "text": "\n".join(self._lines())}

    def close(self) -> None:
        """Has nothing to end."""


def way_to_goal(level: tuple[str, ...], start: Cell) -> list[str] | None:
    """Returns the moves of a shortest way (on ice that is not slippery); None: there is none."""
    ways: dict[Cell, list[str]] = {start: []}
    frontier = deque([start])
    while frontier:
        at = frontier.popleft()
        if level[at[0]][at[1]] == GOAL:
            return ways[at]
        for name, (down, right) in MOVES.items():
            to = (at[0] + down, at[1] + right)
            inside = 0 <= to[0] < len(level) and 0 <= to[1] < len(level)
            if inside and to not in ways and level[to[0]][to[1]] != HOLE:
                ways[to] = [*ways[at], name]
                frontier.append(to)
    return None
