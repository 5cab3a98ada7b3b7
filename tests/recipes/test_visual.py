"""The tasks of models that see: pictures show what their rows say, and rewards are right."""

from __future__ import annotations

import io
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rondo.chat import MessageReader, encode_prompt
from rondo.core.errors import ConfigError
from rondo.core.types import Prompt, Trajectory
from rondo.recipes import visual, visual_tasks
from rondo.recipes.visual_tasks import AREAS, BOARDS, TASKS, TRIANGLES, area, examples, triangle
from tests.rewards.conftest import make_trajectory


def pixels(picture: bytes) -> np.ndarray:
    """Returns int [48, 48, 3]."""
    with Image.open(io.BytesIO(picture)) as image:
        assert image.size == (48, 48)
        return np.asarray(image.convert("RGB")).astype(int)


def said(text: str, **fields: Any) -> tuple[Prompt, Trajectory]:
    """Returns a prompt of these fields, and an answer to it."""
    trajectory = make_trajectory(text, **fields)
    return trajectory.prompt, trajectory


def cells_of(picture: bytes, colour: tuple[int, int, int]) -> set[int]:
    rows, columns = np.nonzero((pixels(picture) == colour).all(axis=-1))
    return {int(cell) for cell in rows // visual.CELL * visual.SIDE + columns // visual.CELL}


def blots(picture: bytes) -> set[int]:
    """Returns the places around which 3 × 3 pixels are black, as of dots and never of lines."""
    black = (pixels(picture) == 0).all(axis=-1)
    whole = np.lib.stride_tricks.sliding_window_view(black, (3, 3)).all(axis=(2, 3))
    rows, columns = np.nonzero(whole)
    return {int(place) for place in (rows + 1) // visual.CELL * visual.SIDE + (columns + 1) // visual.CELL}


def test_boards_show_disc_and_square() -> None:
    for board in visual.boards("tests", 200, 3):
        assert cells_of(board.picture, (220, 40, 40)) == {board.disc}
        assert cells_of(board.picture, (40, 180, 60)) == {board.square}


@pytest.mark.parametrize(
    ("disc", "square", "way"),
    [(0, 8, "right right down down"), (8, 0, "left left up up"), (4, 1, "up"), (2, 3, "left left down")],
)
def test_the_way_by_hand(disc: int, square: int, way: str) -> None:
    board = visual.Board(b"", disc, square)
    assert board.worked() == f"{disc + 1} {square + 1} #### {way}"
    assert visual.reaches_square(*said(board.worked(), disc=disc, square=square)) == 1.0


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("#### right down", 1.0),
        ("#### down right", 1.0),
        ("5 9 #### left right right down", 1.0),  # four moves
        ("#### left right left right right down", 0.0),  # six
        ("#### right", 0.0),
        ("right down", 0.0),
        ("#### right right down left", 0.0),  # over the edge
        ("#### right then down", 0.0),
        ("####", 0.0),
    ],
)
def test_reward_of_moves_from_the_middle_to_the_corner(text: str, reward: float) -> None:
    assert visual.reaches_square(*said(text, disc=4, square=8)) == reward


@pytest.mark.parametrize(
    ("corners", "size"),
    [((0, 1, 3), 0.5), ((0, 2, 6), 2.0), ((0, 1, 8), 1.0), ((0, 5, 7), 1.5), ((0, 4, 8), 0.0)],
)
def test_area_by_hand(corners: tuple[int, ...], size: float) -> None:
    assert area(corners) == size


def test_triangles_of_each_area() -> None:
    """84 choices of three places less the 8 lines."""
    assert Counter(map(area, TRIANGLES)) == {0.5: 32, 1.0: 32, 1.5: 4, 2.0: 8}


def test_figures_show_their_corners() -> None:
    for example in examples("figures", "tests", 200, 3):
        (image,) = example.row["images"]
        assert blots(image["bytes"]) == set(example.seen)
        assert f"{area(example.seen):g}" == example.answer == example.row["reward_model"]["ground_truth"]
        assert example.worked() == f"{' '.join(str(1 + at) for at in example.seen)} #### {example.answer}"


def test_rows_of_figures_are_those_of_verl() -> None:
    """The columns of verl's examples/data_preprocess/geo3k.py."""
    (row,) = visual_tasks.eval_rows("figures", 1)
    (image,) = row.pop("images")
    answer = row["reward_model"]["ground_truth"]
    assert row == {
        "data_source": "rondo/figures",
        "prompt": [{"role": "user", "content": "<image>What is its area?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "test", "index": 0, "answer": answer, "question": "What is its area?"},
    }
    assert answer in AREAS
    assert set(image) == {"bytes", "path"}
    assert image["path"] is None


@pytest.mark.parametrize(
    ("text", "reward"),
    [("1 2 4 #### 0.5", 1.0), ("#### 1 #### 0.5", 1.0), ("#### 0.50", 0.0), ("0.5", 0.0), ("#### 1", 0.0)],
)
def test_reward_of_an_area(text: str, reward: float) -> None:
    assert visual_tasks.right_area(*said(text, reward_model={"ground_truth": "0.5"})) == reward


def test_boards_compared_show_their_discs() -> None:
    found = Counter()
    for example in examples("compare", "tests", 300, 3):
        discs = [cells_of(picture, (220, 40, 40)) for picture in example.row["images"]]
        assert discs == [{example.seen[0]}, {example.seen[1]}]
        first, second = (place % visual.SIDE for place in example.seen)
        right = BOARDS[0] if first > second else BOARDS[1] if second > first else BOARDS[2]
        assert right == example.answer == example.row["answer"]
        found[right] += 1
    assert min(found.values()) > 80


def pictures(rows: list[dict[str, Any]]) -> set[bytes]:
    shown = [image for row in rows for image in row["images"]]
    return {image["bytes"] if isinstance(image, dict) else image for image in shown}


@pytest.mark.parametrize("task", TASKS)
def test_drawing_is_a_function_of_its_arguments(task: str) -> None:
    made = visual_tasks.train_rows(task, 40, seed=5)
    examples.cache_clear()
    visual.boards.cache_clear()
    assert visual_tasks.train_rows(task, 40, seed=5) == made
    assert visual_tasks.train_rows(task, 40, seed=6) != made
    assert not pictures(made) & pictures(visual_tasks.eval_rows(task, 40, seed=5))


def test_a_triangle_is_a_function_of_corners_and_generator() -> None:
    one, again, other = (triangle((0, 2, 6), random.Random(seed)) for seed in (1, 1, 2))
    assert one == again != other


@pytest.mark.parametrize("task", TASKS)
def test_demonstrations_see_first_and_then_mostly_guess(task: str) -> None:
    rows = visual_tasks.demonstrations(task, 1000, pictures=100, seen_first=0.5, worked=0.2)
    worked = [not row["response"].startswith("####") for row in rows]
    assert all(worked[:500])
    assert 70 < sum(worked[500:]) < 130
    right = {example.worked() for example in examples(task, "train", 100, 0)}
    guesses = {f"#### {answer}" for answer in TASKS[task][1]}
    assert {row["response"] for row in rows} == {row["response"] for row in rows} & right | guesses


@pytest.mark.parametrize(("task", "tokens"), [("figures", 9), ("compare", 18)])
def test_lengths_fit_the_recipe(task: str, tokens: int) -> None:
    tok = visual_tasks.tokenizer()
    assert tok.convert_tokens_to_ids(list(visual.VISION_TOKENS)) == [3, 4, 5, 6]
    rows = visual_tasks.demonstrations(task, 300)
    assert max(len(tok(row["response"])["input_ids"]) for row in rows) + 1 <= 14
    asked = MessageReader().read([{"role": "user", "content": visual_tasks.FURTHER}]).messages
    assert len(encode_prompt(tok, asked)) + tokens + 4 <= 64


@pytest.mark.parametrize(
    "make",
    [
        lambda: visual.boards("tests", 0, 0),
        lambda: visual.demonstrations(0),
        lambda: visual.demonstrations(5, worked=1.5),
        lambda: visual_tasks.train_rows("figures", 0),
        lambda: visual_tasks.train_rows("count"),
        lambda: visual_tasks.demonstrations("compare", 5, seen_first=-0.1),
    ],
)
def test_impossible_values_are_errors(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"need|size"):
        make()
