"""Images of a row: the references that travel in the place of pixels, how many tokens each takes (of its
width and height alone), and where these stand. No pixels here.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from rondo.core.errors import ConfigError, DataError, ToolError

MOST_BYTES = 1 << 26
"""Of an image's file: larger ones are refused before they are read."""
MOST_PIXELS = 100_000_000
"""Of an image, before it is resized: larger ones are refused before they are decoded."""
MARK = "<image>"
"""What stands for an image in the text of a message."""
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
    """How many tokens stand for it: those that have features. (Between them may be others.)"""
    turn: int = 0
    """The message that it is in, from 0."""
    read_by: str = ""
    """What made its pixels where the row was sampled (`ImageReader.fingerprint`); empty: nothing did yet."""

    @property
    def path(self) -> str:
        """Returns the file's place."""
        return self.ref.removeprefix("path:")


NAME = re.compile(r"<image:([0-9a-f]{16})>")
"""What stands for an image in the messages of an agent: see `name_of`."""


def name_of(image: ImageRef) -> str:
    """Returns what stands for an image in the messages of an agent: other images have other names, so that a
    text with names says which pictures it shows, wherever it is carried.
    """
    return f"<image:{image.sha256[:16]}>"


@dataclass(frozen=True)
class EpisodeImages:
    """How the episodes of a worker show images to a model that reads them."""

    token: int
    """The token that stands for them."""
    ids: Callable[[Grid], np.ndarray]
    """Returns what a prompt has in the place of an image of this grid: all its tokens, int32 [N]."""
    keep: Callable[[Any], ImageRef]
    """Keeps a picture as a file: [H, W, 3] uint8, a Pillow image, or a file's bytes. Raises DataError and
    ConfigError for what is no image that is taken, StorageError.
    """
    decoded: Callable[[ImageRef], Any]
    """Returns an image as a Pillow image in RGB, upright. Raises DataError."""
    seen_size: Callable[[ImageRef], tuple[int, int] | None]
    """Returns width and height as the model gets it; None: not all of it in its own proportions."""
    per_prompt: int | None = None
    """So many in a prompt at most; None: any number."""


@dataclass
class Pictures:
    """What the policy's prompts may show in one episode."""

    shown: dict[str, ImageRef]
    """By name (`name_of`), in the order in which they came; what environments and tools show is added."""
    how: EpisodeImages | None
    """None: the model reads none."""
    number: int = 0
    """How many the episode's prompt and `show` showed, the same again counted again."""

    def __post_init__(self) -> None:
        self._counted = set(self.shown)

    @property
    def in_prompt(self) -> int:
        """Counts those that one prompt may have: with what the agent brought itself."""
        return self.number + len(self.shown.keys() - self._counted)

    def show(self, picture: ImageRef) -> int:
        """Lets prompts show a picture, and returns its number: the one it has, or the next."""
        name = name_of(picture)
        if name not in self.shown:  # else the prompt has it, or an earlier call, or the agent brought it
            self._counted.add(name)
        self.shown.setdefault(name, picture)
        self.number += 1
        return list(self.shown).index(name) + 1


@dataclass(frozen=True)
class ShownImage:
    """An image of an episode, as a tool gets it."""

    number: int
    """From 1, in the order in which the episode showed them first: its prompt's, then those of tools."""
    ref: ImageRef
    """Its file (`ref.path`), and how many tokens it is."""
    _how: EpisodeImages

    def open(self) -> Any:
        """Returns all of its pixels: a Pillow image in RGB, upright. Raises DataError where its file is gone
        or another than it was.
        """
        return self._how.decoded(self.ref)

    @property
    def seen_size(self) -> tuple[int, int] | None:
        """Width and height in pixels as the model gets it; None: its family cuts images into tiles, or
        squeezes them into a square.
        """
        return self._how.seen_size(self.ref)


class ShownImages(tuple[ShownImage, ...]):
    """The images that an episode has shown before a call. A tool's parameter of this type is no argument of
    the policy's: it is given them.
    """

    _how: EpisodeImages

    @classmethod
    def of(cls, images: Iterable[ImageRef], how: EpisodeImages) -> ShownImages:
        """Returns those of an episode. images: in the order in which they came."""
        shown = cls(ShownImage(n, image, how) for n, image in enumerate(images, 1))
        shown._how = how
        return shown

    def numbered(self, number: int) -> ShownImage:
        """Returns an image that the policy names. Raises ToolError, which it reads, where there is none."""
        if not 1 <= number <= len(self):
            raise ToolError(f"there is no image {number}; {len(self)} were shown, counted from 1")
        return self[number - 1]

    def keep(self, picture: Any) -> ImageRef:
        """Keeps a picture for `ToolResult.images`: a Pillow image, [H, W, 3] uint8, or a file's bytes. Raises
        ToolError for one that the model cannot be shown: too thin, too large, none at all.
        """
        try:
            return self._how.keep(picture)
        except (ConfigError, DataError) as error:
            raise ToolError(str(error)) from error


_GREY = "grey:"


def grey(image: ImageRef) -> ImageRef:
    """Returns a reference to an image of the same size without anything on it, which is in no file."""
    return replace(image, ref=_GREY, sha256=f"{_GREY}{image.grid}")


def is_grey(image: ImageRef) -> bool:
    """Says whether an image is one that `grey` made."""
    return image.ref == _GREY


def images_as_text(images: Sequence[ImageRef]) -> str:
    """Returns what the column `images` has of a row: JSON; "" for a row without images."""
    return json.dumps([asdict(image) for image in images]) if images else ""


def images_of_text(text: str) -> tuple[ImageRef, ...]:
    """Reads what `images_as_text` wrote."""
    found = json.loads(text) if text else []
    return tuple(ImageRef(**{**one, "grid": tuple(one["grid"])}) for one in found)


def each_once(of_rows: Iterable[Sequence[ImageRef]]) -> tuple[ImageRef, ...]:
    """Returns the images of a trajectory's rows: those of the first, and of each later one (of an agent with
    several contexts) what was in none before.
    """
    found: list[ImageRef] = []
    for images in of_rows:
        before = set(found)
        found += [image for image in images if image not in before]
    return tuple(found)


@dataclass(frozen=True)
class ImageSizes:
    """What decides how many patches and tokens an image has."""

    patch: int
    """Pixels along a patch's side."""
    merge: int
    """Patches along the side of the square that is one token."""
    min_pixels: int
    """Smaller images are enlarged to so many pixels."""
    max_pixels: int
    """Larger ones are made smaller."""

    def tokens(self, grid: Grid) -> int:
        """Returns how many tokens stand for an image of this grid."""
        return math.prod(grid) // self.merge**2


def grid_of_pixels(width: int, height: int, sizes: ImageSizes) -> Grid:
    """Returns the grid of an image as transformers' Qwen2VLImageProcessor resizes it: sides that are whole
    tokens, about the same proportions, and pixels within the limits. Raises DataError for what it does not
    take: no pixels, or sides more than 200 : 1.
    """
    long, short = max(width, height), min(width, height)
    if short < 1 or long / short > 200:
        raise DataError(
            f"an image of {width} x {height} pixels: its sides must be at least 1, and at most 200 : 1"
        )
    side = sizes.patch * sizes.merge
    rows, columns = (round(pixels / side) * side for pixels in (height, width))
    if rows * columns > sizes.max_pixels:
        shrink = math.sqrt(height * width / sizes.max_pixels)
        rows, columns = (max(side, math.floor(n / shrink / side) * side) for n in (height, width))
    elif rows * columns < sizes.min_pixels:
        grow = math.sqrt(sizes.min_pixels / (height * width))
        rows, columns = (math.ceil(n * grow / side) * side for n in (height, width))
    return 1, rows // sizes.patch, columns // sizes.patch


def with_images(arrays: Sequence[np.ndarray], images: Sequence[np.ndarray], token: int) -> list[np.ndarray]:
    """Returns token ids [T], and arrays beside them, in which an image's one placeholder is all of its tokens
    (`ImageReader.ids`); beside each stands what was beside the placeholder. Raises DataError where there are
    more placeholders than images, or fewer.
    """
    at = np.flatnonzero(arrays[0] == token)
    if len(at) != len(images):
        raise DataError(f"the tokens have {len(at)} places for images, and there are {len(images)} images")
    times = np.ones(len(arrays[0]), np.int64)
    times[at] = [len(one) for one in images]
    ids, *beside = (np.repeat(array, times) for array in arrays)
    for start, one in zip((np.cumsum(times) - times)[at], images, strict=True):
        ids[start : start + len(one)] = one
    return [ids, *beside]


def images_in(ids: np.ndarray, images: Sequence[ImageRef], token: int) -> tuple[ImageRef, ...]:
    """Returns those of a row's images whose tokens are in its beginning, the expanded token ids [T]."""
    ends = np.cumsum([image.n_tokens for image in images])
    return tuple(images[: int(np.searchsorted(ends, np.count_nonzero(ids == token), side="right"))])


def places_of_images(ids: np.ndarray, pieces: Sequence[Sequence[int]], token: int) -> list[np.ndarray]:
    """Returns which of the expanded token ids are those of each image, int64 [n_tokens] of each. pieces: how
    many of an image's tokens are side by side, piece after piece (`ImageReader.pieces`); between two there
    may be others. Raises DataError where its tokens are not just those of these images: cut off, expanded
    twice, or written by the model itself.
    """
    at = np.flatnonzero(ids == token)
    lengths = np.array([length for own in pieces for length in own], np.int64)
    if len(at) != lengths.sum():
        raise DataError(f"{len(at)} tokens stand for images, and its images have {lengths.sum()}")
    ends = np.cumsum(lengths)
    if np.any(at[ends - 1] - at[ends - lengths] != lengths - 1):
        raise DataError("tokens of one image are not side by side")
    counts = [sum(own) for own in pieces]
    return np.split(at, np.cumsum(counts)[:-1]) if counts else []


def of_data_url(value: str, name: str) -> bytes:
    """Returns what a `data:image/…;base64,…` URL holds. Raises DataError."""
    head, comma, text = value.partition(",")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        raise DataError(f"{name} is no data:image/…;base64,… URL: {value[:40]!r}")
    return of_base64(text, name)


def of_base64(text: str, name: str) -> bytes:
    """Returns what base64 stands for. Raises DataError."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{name} is no base64: {error}") from error
