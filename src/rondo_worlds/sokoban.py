"""Sokoban: push every box onto a target. Levels are made by playing backwards, so that each can be solved."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rondo.core.errors import ConfigError
from rondo.environments.protocol import Observation, StepResult
from rondo_worlds.levels import check_levels, level_of
from rondo_worlds.tiles import check_observe, draw, observed_as

Cell = tuple[int, int]
MOVES: Mapping[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
SIGNS: Mapping[str, tuple[str, ...]] = {
    "#": ("wall",),
    "_": ("floor",),
    ".": ("floor", "target"),
    "$": ("floor", "box"),
    "*": ("floor", "placed"),
    "@": ("floor", "player"),
    "+": ("floor", "target", "player"),
}


@dataclass(frozen=True)
class Level:
    """A position. All cells are sorted, so that equal positions are equal."""

    size: int
    """Rows and columns inside the outer walls."""
    walls: tuple[Cell, ...]
    """Those of the room's inside."""
    targets: tuple[Cell, ...]
    """As many as boxes."""
    boxes: tuple[Cell, ...]
    """Where they are now; the room is solved when these are the targets."""
    player: Cell
    """Neither on a wall nor on a box; perhaps on a target."""

    @property
    def solved(self) -> bool:
        return self.boxes == self.targets

    def is_free(self, cell: Cell) -> bool:
        """Says whether neither wall nor box is there."""
        inside = all(0 < part <= self.size for part in cell)
        return inside and cell not in self.walls and cell not in self.boxes

    def after(self, action: str) -> Level:
        """Returns the position after a move, which pushes a box that can be pushed."""
        to = _plus(self.player, MOVES[action])
        if to in self.boxes:
            beyond = _plus(to, MOVES[action])
            if not self.is_free(beyond):
                return self
            boxes = tuple(sorted(beyond if box == to else box for box in self.boxes))
            return replace(self, boxes=boxes, player=to)
        return replace(self, player=to) if self.is_free(to) else self

    def text(self) -> str:
        """Draws it as Sokoban is written, with _ for the floor."""
        sides = range(self.size + 2)
        return "\n".join("".join(self._sign((row, column)) for column in sides) for row in sides)

    def _sign(self, cell: Cell) -> str:
        on_target = cell in self.targets
        if cell == self.player:
            return "+" if on_target else "@"
        if cell in self.boxes:
            return "*" if on_target else "$"
        if not self.is_free(cell):
            return "#"
        return "." if on_target else "_"


@dataclass(frozen=True)
class Rewards:
    """What a move is worth."""

    move: float
    """For every move, one against a wall included."""
    box: float
    """For a box that comes onto a target; taken back where one leaves."""
    solved: float
    """When all boxes are on targets."""


REWARDS: Mapping[str, Rewards] = {
    "sparse": Rewards(move=0.0, box=0.0, solved=1.0),
    "gym_sokoban": Rewards(move=-0.1, box=1.0, solved=10.0),
}


class Sokoban:
    """A room of `size` × `size` cells inside its walls, with `boxes` boxes and as many targets, and a share
    `walls` of further walls. All boxes on targets end the episode. pulls: how far boxes are from targets, at
    most. observe: text, image or both.

    rewards: `sparse`, 1 at the end, and `shaping` for a box that comes onto a target, taken back where it
    leaves; or `gym_sokoban`, that package's scale, in which most published returns are: -0.1 for each move,
    1 for a box that comes onto a target, -1 for one that leaves it, and 10 at the end.
    """

    instructions = (
        "Push every box onto a target. # wall, _ floor, . target, $ box, * box on a target, @ you, + you on "
        "a target. Boxes can be pushed, one at a time, and not pulled. Answer with one move, such as "
        "<action>left</action>."
    )

    def __init__(
        self,
        *,
        size: int = 4,
        boxes: int = 1,
        walls: float = 0.1,
        pulls: int = 20,
        rewards: str = "sparse",
        shaping: float = 0.0,
        observe: str = "text",
    ) -> None:
        if not 3 <= size <= 20 or not 1 <= boxes <= size * size // 4 or not 0 <= walls <= 0.5 or pulls < 1:
            raise ConfigError(
                "sokoban: needs size 3 to 20, boxes 1 to a quarter of the cells, walls 0 to 0.5 and pulls at "
                f"least 1, got {size}, {boxes}, {walls} and {pulls}"
            )
        if rewards not in REWARDS:
            raise ConfigError(f"sokoban: rewards is one of {', '.join(REWARDS)}, not {rewards!r}")
        if shaping and rewards != "sparse":
            raise ConfigError(f"sokoban: rewards {rewards} have a reward for boxes; leave shaping out")
        self._size = size
        self._boxes = boxes
        self._walls = walls
        self._pulls = pulls
        self._rewards = replace(REWARDS[rewards], box=shaping) if shaping else REWARDS[rewards]
        self._observe_as = check_observe(observe, "sokoban")

    @classmethod
    def check(cls, **options: Any) -> None:
        """Raises ConfigError for options that it cannot have, or that leave no level for some seeds."""
        check_levels(cls(**options), options)

    def reset(self, seed: int, task: Any = None) -> Observation:
        """Furnishes a room. task: `{size: 6, boxes: 2}`, where it is to have others."""
        asked = task or {}
        size, boxes = int(asked.get("size", self._size)), int(asked.get("boxes", self._boxes))
        name = f"sokoban {size} {boxes} {self._walls} {self._pulls}"
        self._level = level_of(name, seed, lambda rng: self._draw(rng, size, boxes), _room, whole=_position)
        return self._observe()

    def _draw(self, rng: random.Random, size: int, boxes: int) -> Level | None:
        """Draws a room: it begins with all boxes on targets and pulls them away, so that each pull, reversed,
        is a legal push.
        """
        cells = [(row, column) for row in range(1, size + 1) for column in range(1, size + 1)]
        walls = tuple(sorted(cell for cell in cells if rng.random() < self._walls))
        floor = [cell for cell in cells if cell not in walls]
        if len(floor) < boxes + 2:
            return None
        *targets, player = rng.sample(floor, boxes + 1)
        level = Level(size, walls, tuple(sorted(targets)), tuple(sorted(targets)), player)
        for _ in range(self._pulls * boxes * 4):  # most moves of a player who walks at random pull nothing
            level = _pulled(level, rng.choice(list(MOVES)))
        # A box that is still on a target would need no push.
        return None if set(level.boxes) & set(level.targets) else level

    def step(self, action: str) -> StepResult:
        """Moves, and pushes."""
        before = len(set(self._level.boxes) & set(self._level.targets))
        self._level = self._level.after(action)
        solved = self._level.solved
        placed = len(set(self._level.boxes) & set(self._level.targets)) - before
        reward = self._rewards.move + self._rewards.box * placed + self._rewards.solved * solved
        return StepResult(self._observe(), reward, solved, success=solved)

    def _observe(self) -> Observation:
        room = self._level.text()
        return observed_as(self._observe_as, room, tuple(MOVES), lambda: draw(room.split("\n"), SIGNS))

    def state(self) -> Mapping[str, Any]:
        """Returns the position, which is a text."""
        return {"level": self._level.text(), "text": self._level.text()}

    def close(self) -> None:
        """Has nothing to end."""

    @property
    def level(self) -> Level:
        """The position, for `shortest_solution`."""
        return self._level


def _plus(cell: Cell, move: Cell) -> Cell:
    return cell[0] + move[0], cell[1] + move[1]


def _room(level: Level) -> object:
    return level.size, level.walls, level.targets


def _position(level: Level) -> object:
    return level


def _pulled(level: Level, action: str) -> Level:
    """Returns the position after a step back, which takes along a box that stands in front."""
    down, right = MOVES[action]
    to, front = _plus(level.player, (-down, -right)), _plus(level.player, (down, right))
    if not level.is_free(to):
        return level
    boxes = tuple(sorted(level.player if box == front else box for box in level.boxes))
    return replace(level, boxes=boxes, player=to)


def shortest_solution(level: Level) -> list[str] | None:
    """Returns the moves of a shortest solution, by breadth-first search; None: there is none."""
    came: dict[Level, tuple[Level, str] | None] = {level: None}
    frontier = deque([level])
    while frontier:
        position = frontier.popleft()
        if position.solved:
            moves: list[str] = []
            while (step := came[position]) is not None:
                position, move = step
                moves.append(move)
            return moves[::-1]
        for move in MOVES:
            following = position.after(move)
            if following not in came:
                came[following] = (position, move)
                frontier.append(following)
    return None
