"""How families of models read images: the positions of the tokens of an image and around it, the names of
its parts. One record each. No pixels here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rondo.core.images import Grid, starts_of_images


def mrope_positions(ids: np.ndarray, grids: Sequence[Grid], token: int, merge: int) -> np.ndarray:
    """Returns the positions of expanded token ids [T] as Qwen's multimodal rotary embedding wants them, int64
    [3, T]: frame, row and column of an image's tokens, the same number three times for text. Text goes on
    behind the longer side of the image before it. Raises DataError (`starts_of_images`).
    """
    counts = [math.prod(grid) // merge**2 for grid in grids]
    out = np.empty((3, len(ids)), np.int64)
    done = position = 0
    for start, count, (frames, rows, columns) in zip(
        starts_of_images(ids, counts, token), counts, grids, strict=True
    ):
        out[:, done:start] = position + np.arange(start - done)
        position += start - done
        inside = np.indices((frames, rows // merge, columns // merge)).reshape(3, -1)
        out[:, start : start + count] = position + inside
        position += max(rows, columns) // merge
        done = start + count
    out[:, done:] = position + np.arange(len(ids) - done)
    return out


@dataclass(frozen=True)
class ImageFamily:
    """How models of a family read images. The names are those of its transformers class and config."""

    processor: str
    """The image processor's class, without the word behind it that says what computes it (`Pil`)."""
    mean: tuple[float, float, float]
    """What is taken from red, green and blue, where no folder says it."""
    std: tuple[float, float, float]
    """By what they are divided then, where no folder says it."""
    min_pixels: int
    """Where neither the folder nor the user says it."""
    max_pixels: int
    """Likewise."""
    token: str = "image_token_id"
    """The config's key of the token that stands for images."""
    tower: str = "model.visual."
    """How the names of the tower's parameters begin, the projector's among them."""
    projector: tuple[str, ...] = ("model.visual.merger.", "model.visual.deepstack_merger_list.")
    """How those begin that turn the tower's features into the language model's."""
    positions: Callable[[np.ndarray, Sequence[Grid], int, int], np.ndarray] = mrope_positions
    """(ids, grids, token, merge) -> positions [3, T]."""

    def part_of(self, parameter: str) -> str:
        """Returns which part a parameter belongs to: tower, projector or language."""
        if parameter.startswith(self.projector):
            return "projector"
        return "tower" if parameter.startswith(self.tower) else "language"

    def token_id(self, config: Any) -> int:
        """Returns the token that stands for images. config: transformers', of the whole model."""
        return int(getattr(config, self.token))


_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
QWEN2_5_VL = ImageFamily("Qwen2VLImageProcessor", *_CLIP, 56 * 56, 28 * 28 * 16384)
QWEN3_VL = ImageFamily("Qwen2VLImageProcessor", (0.5,) * 3, (0.5,) * 3, 1 << 16, 1 << 24)
