"""textarena's games for one player: played to ends that are known, and those that are refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rondo.core.errors import ConfigError
from rondo_worlds.textarena_adapter import TextArena
from tests.installed import needs
from tests.messages import full_text

needs("textarena")


def test_three_disks_take_seven_moves() -> None:
    world = TextArena(id="TowerOfHanoi-v0")
    first = world.reset(0)
    rules = first.text.partition("\nCurrent Board:")[0]
    assert rules.startswith("You are playing Tower of Hanoi with 3 disks.")
    assert world.reset(1) == world.reset(2) == first  # it begins in one way only
    moves = ["A C", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"]
    results = [world.step(move) for move in moves]
    assert [(one.reward, one.done, one.success, one.invalid) for one in results[:-1]] == [
        (0.0, False, False, False)
    ] * 6
    assert (results[-1].reward, results[-1].done, results[-1].success) == (1.0, True, True)
    assert results[0].observation.text.startswith(
        f"{rules}\nYou moved disk 1 from A to C.\nCurrent Board: \nA: [3, 2]\nB: []\nC: [1]"
    )
    assert "4 disks" in world.reset(0, {"num_disks": 4}).text


def test_what_is_no_move_is_invalid_and_the_second_ends_it() -> None:
    world = TextArena(id="TowerOfHanoi-v0")
    world.reset(0)
    first = world.step("hello")
    assert (first.reward, first.done, first.invalid) == (0.0, False, True)
    assert "did not respond with valid" in first.observation.text
    assert not world.step("[A C]").invalid
    last = [world.step("hello"), world.step("hello")][-1]
    assert (last.done, last.success, last.invalid) == (True, False, True)
    assert last.reward <= 0


def test_a_number_between_1_and_20_is_found_and_reported() -> None:
    world = TextArena(id="GuessTheNumber-v0")
    numbers: dict[int, set[int]] = {0: set(), 1: set()}
    for seed in range(12):
        world.reset(seed)
        number = world.state()["state"]["game_number"]
        numbers[seed % 2].add(number)
        result = world.step(f"[{number}]")
        assert (result.reward, result.done, result.success) == (1.0, True, True)
        assert result.observation.text.endswith("Congratulations! You guessed the correct number.")
    assert min(len(half) for half in numbers.values()) > 1
    assert not numbers[0] & numbers[1]  # of 20, odd seeds have others than even ones


def test_a_reward_and_a_reason_that_a_game_swaps_are_put_right() -> None:
    world = TextArena(id="Countdown-v0")
    world.reset(0)
    last = [world.step("hello"), world.step("hello")][-1]
    assert (last.done, last.invalid, last.success) == (True, True, False)
    assert 0 <= last.reward < 1
    assert "Invalid action format" in last.observation.text


def test_games_that_are_played_side_by_side_are_those_that_are_played_alone() -> None:
    """They draw from Python's global stream, which each borrows for a step."""

    def play(seed: int) -> list[str]:
        world = TextArena(id="Bandit-v0")
        texts = [world.reset(seed).text]
        return texts + [world.step(f"[{color}]").observation.text for color in ("red", "blue", "green") * 3]

    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(play, range(16)))
    assert together == [play(seed) for seed in range(16)]
    assert len({str(texts) for texts in together}) > 8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"id": "TowerOfHanoy-v0"}, "did you mean 'TowerOfHanoi-v0'"),
        ({"id": "TicTacToe-v0"}, full_text("does not start with one player")),
        ({"id": "QuantumTicTacToe-v0"}, "is for several players"),
        ({"id": "TowerOfHanoi-v0", "disks": 3}, "does not start .* TypeError"),
    ],
)
def test_what_it_cannot_be_asked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TextArena(**options)
