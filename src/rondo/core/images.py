"""Images of a row, by reference: what travels in the place of pixels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

Grid = tuple[int, int, int]
"""Of an image in patches: frames, rows, columns."""


@dataclass(frozen=True)
class ImageRef:
    """An image of a row, by reference: what the column `images` lists, in the order of their tokens."""

    ref: str
    """`path:` and the file's place."""
    sha256: str
    """Of the file's bytes: what the reference must still hold when it is read."""
    grid: Grid
    """In patches."""
    n_tokens: int
    """How many tokens stand for it."""
    turn: int = 0
    """The message that it is in, from 0."""


def images_as_text(images: Sequence[ImageRef]) -> str:
    """Returns what the column `images` has of a row: JSON; "" for a row without images."""
    return json.dumps([asdict(image) for image in images]) if images else ""


def images_of_text(text: str) -> tuple[ImageRef, ...]:
    """Reads what `images_as_text` wrote."""
    found = json.loads(text) if text else []
    return tuple(ImageRef(**{**one, "grid": tuple(one["grid"])}) for one in found)
