"""Demonstrations of Sokoban for the warm start of its recipe."""

from __future__ import annotations

import zlib

import pytest

from rondo.core.errors import ConfigError
from rondo.environments import Observation
from rondo_worlds.recipes.sokoban import demonstrations, move, prompt
from rondo_worlds.sokoban import MOVES, Level, Sokoban, shortest_solution


def room(lines: list[str]) -> Level:
    """The position that a prompt shows."""

    def cells(signs: str) -> tuple[tuple[int, int], ...]:
        found = [
            (i + 1, j + 1) for i, line in enumerate(lines) for j, sign in enumerate(line) if sign in signs
        ]
        return tuple(found)

    return Level(len(lines), cells("#"), cells(".+*"), cells("$*"), cells("@+")[0])


@pytest.mark.parametrize(("right_share", "expected"), [(0.0, 0.25), (0.6, 0.7), (1.0, 1.0)])
def test_they_are_as_right_as_asked_and_of_no_held_out_room(right_share: float, expected: float) -> None:
    """Each shows a room of the training's half in which the box can still be brought home."""
    rows = demonstrations(size=300, seed=3, right_share=right_share)
    assert len(rows) == 300
    right = 0
    for row in rows:
        task, *lines = row["prompt"].split("\n")
        level = room(lines)
        assert prompt(task, (), Observation(level.text())) == row["prompt"]
        assert zlib.crc32(repr((level.size, level.walls, level.targets)).encode()) % 2 == 0
        solution = shortest_solution(level)
        assert solution
        right += row["response"] == solution[0][0]
    assert right / len(rows) == pytest.approx(expected, abs=0.08)


def test_moves_are_letters() -> None:
    seen = Sokoban().reset(0)
    assert [move(f" {letter}", seen) for letter in "udlr"] == list(MOVES)
    assert [move(said, seen) for said in ("up", "uu", "", "x")] == [None] * 4


@pytest.mark.parametrize("wrong", [{"right_share": 1.5}, {"size": 0}, {"seed": -1}])
def test_what_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"need .*{next(iter(wrong))}"):
        demonstrations(**wrong)  # type: ignore[arg-type]
