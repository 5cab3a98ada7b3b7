"""Sokoban for a small model that is made here: the room without its outer walls, a move of one letter, and
demonstrations of which 4 moves in 10 are random.

Every move has a prompt of its own, the room as it is now: a move is learnt for what is seen.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from rondo.core.errors import ConfigError
from rondo.core.images import NAME
from rondo.environments import Observation
from rondo_worlds.sokoban import MOVES, Sokoban, shortest_solution
from rondo_worlds.tiles import demonstrated

TASK = "Push"
LETTERS = {move[0]: move for move in MOVES}  # as solutions are written: l, u, r, d


def prompt(task: str, memory: Sequence[Any], seen: Observation) -> str:
    """Returns what a step's prompt says, for the option `prompt` of a loop."""
    if NAME.search(seen.text):  # a picture alone
        return f"{task}\n{seen.text}"
    inside = [line[1:-1] for line in seen.text.splitlines()[1:-1]]
    return "\n".join([task, *inside])


def move(answer: str, seen: Observation) -> str | None:
    """Reads an answer that is a move's letter and nothing else, for the option `action` of a loop."""
    return LETTERS.get(answer.strip())


def demonstrations(
    size: int = 12800,
    seed: int = 0,
    right_share: float = 0.6,
    room: int = 4,
    pulls: int = 6,
    observe: str = "text",
) -> list[dict[str, Any]]:
    """Makes rows with prompt and response for the warm start, in rooms of even seeds: with odds `right_share`
    the move of a shortest solution, else any of the four. The player goes half of the moves at random, and
    the episode ends where the box can no longer be brought to its target. observe: text, or image, whose rows
    have a column of that name.
    """
    if size < 1 or seed < 0 or not 0 <= right_share <= 1:
        raise ConfigError(
            f"sokoban: need size >= 1, seed >= 0 and right_share from 0 to 1, got {size}, {seed} and "
            f"{right_share}"
        )
    rng = random.Random(f"rondo sokoban demonstrations: {seed}")
    world = Sokoban(size=room, pulls=pulls, observe=observe)
    rows: list[dict[str, Any]] = []
    number = seed
    while len(rows) < size:
        seen = world.reset(2 * number)
        number += 1
        for _ in range(3 * room):
            solution = shortest_solution(world.level)
            if solution is None:
                break
            said = solution[0] if rng.random() < right_share else rng.choice(list(MOVES))
            if seen.image is None:
                rows.append({"prompt": prompt(TASK, (), seen), "response": said[0]})
            else:
                rows.append(demonstrated(TASK, seen, said[0]))
            result = world.step(solution[0] if rng.random() < 0.5 else rng.choice(list(MOVES)))
            if result.done:
                break
            seen = result.observation
    return rows[:size]
