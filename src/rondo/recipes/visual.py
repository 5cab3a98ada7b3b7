"""A task for a model that sees, drawn in this process: nothing is downloaded.

A board of 3 × 3 cells of 16 pixels with a red disc, a green square and up to three blue triangles. The answer
is a way from the disc to the square. The worked answer says where both are before it moves (`1 5 #### right
down`, cells counted from 1, row by row); most demonstrations guess (`#### left`), and reinforcement learning
finds out that looking pays.

Use from a recipe: `{type: function, task: rondo.recipes.visual.train_rows, size: 2048, seed: 0}`,
`model.tokenizer: rondo.recipes.visual.tokenizer`. Needs Pillow.
"""

from __future__ import annotations

import functools
import io
import random
from typing import TYPE_CHECKING, Any, NamedTuple

from rondo.core.errors import ConfigError
from rondo.recipes.quickstart import SPECIAL_TOKENS, fast_tokenizer, train_bpe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedTokenizerFast

    from rondo.core.types import Prompt, Trajectory

SIDE, CELL = 3, 16
MOST_MOVES = 2 * (SIDE - 1)
MOVES = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}
QUESTION = "Which way?"
_RED, _GREEN, _BLUE = (220, 40, 40), (40, 180, 60), (50, 80, 220)


class Board(NamedTuple):
    """A picture, and what is in it."""

    picture: bytes
    """A PNG of 48 × 48 pixels."""
    disc: int
    """The cell of the red disc, from 0, row by row."""
    square: int
    """That of the green square."""

    def way(self) -> list[str]:
        """Returns the moves from the disc to the square: across, then up or down."""
        across = self.square % SIDE - self.disc % SIDE
        down = self.square // SIDE - self.disc // SIDE
        moves = ["right"] * across + ["left"] * -across
        return moves + ["down"] * down + ["up"] * -down

    def worked(self) -> str:
        """Returns the answer that says first where both are."""
        return f"{self.disc + 1} {self.square + 1} #### {' '.join(self.way())}"


def _drawn(rng: random.Random) -> Board:
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE * CELL, SIDE * CELL), "white")
    draw = ImageDraw.Draw(image)
    cells = rng.sample(range(SIDE * SIDE), 2 + rng.randint(0, 3))
    for number, cell in enumerate(cells):
        left = cell % SIDE * CELL + 1 + rng.randint(0, 2)
        top = cell // SIDE * CELL + 1 + rng.randint(0, 2)
        size = rng.randint(9, 12)
        around = [left, top, left + size, top + size]
        if number == 0:
            draw.ellipse(around, fill=_RED)
        elif number == 1:
            draw.rectangle(around, fill=_GREEN)
        else:
            low = top + size
            draw.polygon([(left, low), (left + size, low), (left + size // 2, top)], fill=_BLUE)
    file = io.BytesIO()
    image.save(file, "PNG")
    return Board(file.getvalue(), cells[0], cells[1])


@functools.cache
def boards(stream: str, size: int, seed: int) -> tuple[Board, ...]:
    """Draws boards, a function of the arguments alone. Raises ConfigError for a size below 1."""
    if size < 1:
        raise ConfigError(f"visual: size must be at least 1, got {size}")
    rng = random.Random(f"rondo visual: {stream}: {seed}")
    return tuple(_drawn(rng) for _ in range(size))


def train_rows(size: int = 2048, seed: int = 0) -> list[dict[str, Any]]:
    """Makes rows with prompt, image (a PNG), disc and square (cells)."""
    return [_row(board) for board in boards("train", size, seed)]


def eval_rows(size: int = 256, seed: int = 0) -> list[dict[str, Any]]:
    """Makes rows as in `train_rows`, of other drawings."""
    return [_row(board) for board in boards("eval", size, seed)]


def _row(board: Board) -> dict[str, Any]:
    return {"prompt": QUESTION, "image": board.picture, "disc": board.disc, "square": board.square}


def demonstrations(
    size: int = 17600, pictures: int = 2048, seed: int = 0, seen_first: float = 0.65, worked: float = 0.35
) -> list[dict[str, Any]]:
    """Makes rows with prompt, image and response for the warm start, to be read in this order: seeing is
    learnt from worked answers alone, the first `seen_first` of the rows; of the others `worked` are, and the
    rest are guesses. pictures: so many different ones. Raises ConfigError for impossible values.
    """
    drawn = [
        ({"prompt": QUESTION, "image": board.picture}, board.worked())
        for board in boards("train", pictures, seed)
    ]
    rng = random.Random(f"rondo visual: demonstrations: {seed}")
    return shown_in_order(
        drawn, lambda: f"#### {_guess(rng)}", rng, size=size, seen_first=seen_first, worked=worked
    )


def shown_in_order(
    drawn: Sequence[tuple[dict[str, Any], str]],
    guess: Callable[[], str],
    rng: random.Random,
    *,
    size: int,
    seen_first: float,
    worked: float,
) -> list[dict[str, Any]]:
    """Draws from rows with their worked answers, and gives each this answer or a guess as its response.
    Raises ConfigError for impossible values.
    """
    if size < 1 or not 0.0 <= seen_first <= 1.0 or not 0.0 <= worked <= 1.0:
        raise ConfigError(
            f"demonstrations: need size >= 1 and shares in [0, 1], got {size}, {seen_first} and {worked}"
        )
    rows = []
    for number in range(size):
        row, answer = rng.choice(drawn)
        works = number < seen_first * size or rng.random() < worked
        rows.append({**row, "response": answer if works else guess()})
    return rows


def _guess(rng: random.Random) -> str:
    return " ".join(rng.choice(list(MOVES)) for _ in range(rng.randint(1, MOST_MOVES)))


def reaches_square(prompt: Prompt, trajectory: Trajectory) -> float:
    """A reward: 1 where the moves behind `####` lead from the disc to the square, on the board all the way,
    in four moves at most.
    """
    _, mark, moves = trajectory.text.partition("####")
    x, y = prompt.fields["disc"] % SIDE, prompt.fields["disc"] // SIDE
    words = moves.split()
    for word in words:
        step = MOVES.get(word)
        if step is None:
            return 0.0
        x, y = x + step[0], y + step[1]
        if not (0 <= x < SIDE and 0 <= y < SIDE):
            return 0.0
    return float(bool(mark) and len(words) <= MOST_MOVES and y * SIDE + x == prompt.fields["square"])


VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}
{%- set vision = '<|vision_start|><|image_pad|><|vision_end|>' %}
{{- vision if part.type == 'image' else part.text }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


@functools.cache
def _bpe() -> str:
    texts = [f"user\n{QUESTION}\nassistant\n{board.worked()}" for board in boards("tokenizer", 500, 0)]
    return train_bpe(texts, (*SPECIAL_TOKENS, *VISION_TOKENS))


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE like the quickstart's, of the words of this task; its special tokens are
    those of Qwen's models: `<|vision_start|>` is 3, `<|vision_end|>` 4, `<|image_pad|>` 5, `<|video_pad|>` 6.
    """
    return fast_tokenizer(_bpe(), CHAT_TEMPLATE)
