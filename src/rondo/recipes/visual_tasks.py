"""Two more tasks for a model that sees, drawn in this process as those of `visual` are.

`figures`: the area of a triangle whose corners are dots on a lattice of 3 × 3, in rows as verl has
Geometry3K's (`prompt`, `images`, `reward_model` and so on). The worked answer says first where the corners
are (`1 5 6 #### 0.5`, places counted from 1, row by row). `compare`: two boards of `visual` in one prompt,
and on which of them the red disc is further right (`5 4 #### first`). As there most demonstrations guess.

Use from a recipe: `{type: function, task: rondo.recipes.visual_tasks.train_rows, options: {task: figures}}`,
`model.tokenizer: rondo.recipes.visual_tasks.tokenizer`. Needs Pillow.
"""

from __future__ import annotations

import functools
import io
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rondo.core.errors import ConfigError
from rondo.core.images import MARK
from rondo.recipes.quickstart import SPECIAL_TOKENS, fast_tokenizer, train_bpe
from rondo.recipes.visual import CELL, CHAT_TEMPLATE, SIDE, VISION_TOKENS, boards, shown_in_order

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rondo.core.types import Prompt, Trajectory

AREA, FURTHER = "What is its area?", "On which board is the disc further right?"
AREAS = ("0.5", "1", "1.5", "2")
BOARDS = ("first", "second", "neither")


class Example(NamedTuple):
    """A row, and what the worked answer says of it."""

    row: dict[str, Any]
    """Its columns."""
    seen: tuple[int, ...]
    """The places that the worked answer names, from 0, row by row."""
    answer: str
    """What is right behind `####`."""

    def worked(self) -> str:
        """Returns the answer that says first what is seen."""
        return f"{' '.join(str(place + 1) for place in self.seen)} #### {self.answer}"


def area(corners: Sequence[int]) -> float:
    """Returns the area of the triangle between three places of the lattice; 0: they lie on a line."""
    (ax, ay), (bx, by), (cx, cy) = ((place % SIDE, place // SIDE) for place in corners)
    return abs((bx - ax) * (cy - ay) - (cx - ax) * (by - ay)) / 2


TRIANGLES = [places for places in itertools.combinations(range(SIDE * SIDE), 3) if area(places)]


def triangle(corners: Sequence[int], rng: random.Random) -> bytes:
    """Draws a triangle, as a PNG of 48 × 48 pixels: its corners within two pixels of their places."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE * CELL, SIDE * CELL), "white")
    draw = ImageDraw.Draw(image)
    points = [
        tuple(place * CELL + CELL // 2 + rng.randint(-2, 2) for place in divmod(corner, SIDE)[::-1])
        for corner in corners
    ]
    line, dot = ((rng.randint(0, 120),) * 3, (0, 0, 0))
    draw.polygon(points, outline=line)
    for x, y in points:
        size = rng.randint(2, 3)
        draw.ellipse([x - size, y - size, x + size, y + size], fill=dot)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _figures(stream: str, size: int, seed: int) -> list[Example]:
    rng = random.Random(f"rondo figures: {stream}: {seed}")
    of_area = {answer: [one for one in TRIANGLES if area(one) == float(answer)] for answer in AREAS}
    examples = []
    for number in range(size):
        answer = rng.choice(AREAS)
        corners = rng.choice(of_area[answer])
        row = {
            "data_source": "rondo/figures",
            "prompt": [{"role": "user", "content": f"{MARK}{AREA}"}],
            "images": [{"bytes": triangle(corners, rng), "path": None}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": stream, "index": number, "answer": answer, "question": AREA},
        }
        examples.append(Example(row, corners, answer))
    return examples


def _compare(stream: str, size: int, seed: int) -> list[Example]:
    rng = random.Random(f"rondo compare: {stream}: {seed}")
    drawn = boards(stream, max(64, size), seed)
    by_column = [[board for board in drawn if board.disc % SIDE == column] for column in range(SIDE)]
    examples = []
    for _ in range(size):
        answer = rng.choice(BOARDS)
        left, right = sorted(rng.sample(range(SIDE), 2))
        columns = {"first": (right, left), "second": (left, right), "neither": (left, left)}[answer]
        pair = [rng.choice(by_column[column]) for column in columns]
        row = {"prompt": FURTHER, "images": [board.picture for board in pair], "answer": answer}
        examples.append(Example(row, tuple(board.disc for board in pair), answer))
    return examples


TASKS: Mapping[str, tuple[Callable[[str, int, int], list[Example]], tuple[str, ...]]] = {
    "figures": (_figures, AREAS),
    "compare": (_compare, BOARDS),
}


@functools.cache
def examples(task: str, stream: str, size: int, seed: int) -> tuple[Example, ...]:
    """Draws examples, a function of the arguments alone. Raises ConfigError for a task that there is not and
    a size below 1.
    """
    if task not in TASKS or size < 1:
        raise ConfigError(f"visual_tasks: need task in {sorted(TASKS)} and size >= 1, got {task} and {size}")
    return tuple(TASKS[task][0](stream, size, seed))


def train_rows(task: str, size: int = 2048, seed: int = 0) -> list[dict[str, Any]]:
    """Makes rows of a task, figures or compare. Raises ConfigError as `examples` does."""
    return [example.row for example in examples(task, "train", size, seed)]


def eval_rows(task: str, size: int = 256, seed: int = 0) -> list[dict[str, Any]]:
    """Makes rows as in `train_rows`, of other drawings."""
    return [example.row for example in examples(task, "test", size, seed)]


def demonstrations(
    task: str,
    size: int = 17600,
    pictures: int = 2048,
    seed: int = 0,
    seen_first: float = 0.65,
    worked: float = 0.35,
) -> list[dict[str, Any]]:
    """Makes rows as in `train_rows` with a response, for the warm start, in the order of
    `visual.demonstrations`. Raises ConfigError for impossible values.
    """
    drawn = examples(task, "train", pictures, seed)
    shown = [(example.row, example.worked()) for example in drawn]
    rng = random.Random(f"rondo {task}: demonstrations: {seed}")
    answers = TASKS[task][1]
    return shown_in_order(
        shown, lambda: f"#### {rng.choice(answers)}", rng, size=size, seen_first=seen_first, worked=worked
    )


def right_area(prompt: Prompt, trajectory: Trajectory) -> float:
    """A reward: 1 where `reward_model.ground_truth` of the row stands behind the last `####`."""
    _, mark, said = trajectory.text.rpartition("####")
    return float(bool(mark) and said.strip() == prompt.fields["reward_model"]["ground_truth"])


@functools.cache
def _bpe() -> str:
    texts = []
    for task, question in (("figures", AREA), ("compare", FURTHER)):
        worked = [example.worked() for example in examples(task, "tokenizer", 500, 0)]
        texts += [f"user\n{question}\nassistant\n{one}" for one in worked]
    return train_bpe(texts, (*SPECIAL_TOKENS, *VISION_TOKENS))


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE of the words of these tasks, with the special tokens of `visual.tokenizer`."""
    return fast_tokenizer(_bpe(), CHAT_TEMPLATE)
