"""FrozenLake for a small model that is made here: prompts of few tokens, moves without tags, and
demonstrations of which half the moves are random.

Every move has a prompt of its own, the lake with the player in it: a move is learnt for what is seen.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from rondo.core.errors import ConfigError
from rondo.environments import Observation
from rondo_worlds.frozen_lake import MOVES, FrozenLake, way_to_goal
from rondo_worlds.tiles import demonstrated

TASK = "Go"


def prompt(task: str, memory: Sequence[Any], seen: Observation) -> str:
    """Returns what a step's prompt says, for the option `prompt` of a loop."""
    return f"{task}\n{seen.text}"


def move(answer: str, seen: Observation) -> str | None:
    """Reads an answer that is a move and nothing else, for the option `action` of a loop."""
    return next((action for action in seen.actions if action == answer.strip()), None)


def demonstrations(
    size: int = 12800, seed: int = 0, right_share: float = 0.5, lake: int = 4, observe: str = "text"
) -> list[dict[str, Any]]:
    """Makes rows with prompt and response for the warm start, on lakes of even seeds: with odds `right_share`
    the move of a shortest way, else any of the four. The player walks at random, and never into a hole.
    observe: text, or image, whose rows have a column of that name.
    """
    if size < 1 or seed < 0 or not 0 <= right_share <= 1:
        raise ConfigError(
            f"frozen_lake: need size >= 1, seed >= 0 and right_share from 0 to 1, got {size}, {seed} and "
            f"{right_share}"
        )
    rng = random.Random(f"rondo frozen_lake demonstrations: {seed}")
    world = FrozenLake(size=lake, observe=observe)
    rows: list[dict[str, Any]] = []
    number = seed
    while len(rows) < size:
        seen = world.reset(2 * number)
        number += 1
        for _ in range(2 * lake):
            state = world.state()
            way = way_to_goal(tuple(state["level"]), tuple(state["at"]))
            if not way:
                break
            said = way[0] if rng.random() < right_share else rng.choice(list(MOVES))
            told = {"prompt": prompt(TASK, (), seen), "response": said}
            rows.append(told if seen.image is None else demonstrated(TASK, seen, said))
            result = world.step(way[0] if rng.random() < 0.5 else rng.choice(list(MOVES)))
            if result.done:
                break
            seen = result.observation
    return rows[:size]
