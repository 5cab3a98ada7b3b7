"""What of an environment a policy sees, text, picture or both; and pictures of rooms that are written with
one sign a cell, as those of Sokoban and FrozenLake are.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rondo.core.errors import ConfigError
from rondo.core.images import MARK
from rondo.environments.protocol import Observation

OBSERVE = ("text", "image", "both")
"""What the option `observe` may be."""


def check_observe(observe: str, who: str) -> str:
    """Returns it. Raises ConfigError."""
    if observe not in OBSERVE:
        raise ConfigError(f"{who}: observe is one of {', '.join(OBSERVE)}, not {observe!r}")
    return observe


def observed_as(
    observe: str, text: str, actions: Sequence[str], picture: Callable[[], np.ndarray], also: str = ""
) -> Observation:
    """Returns an observation as the option `observe` wants it. picture: draws it, where it is wanted. also:
    what no picture shows (a mission), which is said in every case.
    """
    image = None if observe == "text" else picture()
    said = [also, "" if observe == "image" else text]
    return Observation("\n".join(part for part in said if part), tuple(actions), image=image)


TILE = 16
"""Pixels of a side of a cell: each dot of a drawing is two by two."""

_COLOURS = {
    "-": (232, 224, 200),
    "~": (205, 230, 245),
    "w": (150, 80, 60),
    "m": (95, 60, 50),
    "o": (30, 50, 90),
    "t": (215, 50, 50),
    "g": (245, 190, 40),
    "b": (190, 140, 70),
    "k": (90, 60, 20),
    "p": (40, 130, 70),
    "s": (250, 205, 165),
}
# Eight rows of eight dots each; a space shows what lies beneath.
_DRAWINGS = {
    "floor": ["--------"] * 8,
    "ice": ["~~~~~~~~"] * 8,
    "wall": "wwwwwwwm|wwwwwwwm|wwwwwwwm|mmmmmmmm|wwwmwwww|wwwmwwww|wwwmwwww|mmmmmmmm".split("|"),
    "hole": "        |  oooo  | oooooo | oooooo | oooooo | oooooo |  oooo  |        ".split("|"),
    "target": "        |  tttt  | t    t | t tt t | t tt t | t    t |  tttt  |        ".split("|"),
    "goal": "   g    |   ggg  |   ggggg|   ggg  |   g    |   g    |   g    |  ggg   ".split("|"),
    "box": "        | kkkkkk | kkbbkk | kbkkbk | kbkkbk | kkbbkk | kkkkkk |        ".split("|"),
    "placed": "        | tttttt | ttbbtt | tbttbt | tbttbt | ttbbtt | tttttt |        ".split("|"),
    "player": "        |   ss   |   ss   |  pppp  | p pp p |   pp   |  p  p  |  p  p  ".split("|"),
}


def demonstrated(task: str, seen: Observation, response: str) -> dict[str, Any]:
    """Returns a row of a demonstration of what to say to a picture, with the tokens that the prompt
    `task`, a line's end and the picture has in an episode.
    """
    from PIL import Image

    assert seen.image is not None
    file = io.BytesIO()
    Image.fromarray(seen.image).save(file, "PNG")
    return {"prompt": f"{task}\n{MARK}", "image": file.getvalue(), "response": response}


def draw(room: Sequence[str], signs: Mapping[str, tuple[str, ...]]) -> np.ndarray:
    """Returns the picture of a room, [H, W, 3] uint8. signs: the drawings that lie over one another in a cell
    with this sign, the lowest first.
    """
    return np.vstack([np.hstack([_tile(signs[sign]) for sign in row]) for row in room])


@functools.cache
def _tile(drawings: tuple[str, ...]) -> np.ndarray:
    dots = np.zeros((8, 8, 3), dtype=np.uint8)
    for name in drawings:
        for row, line in enumerate(_DRAWINGS[name]):
            for column, colour in enumerate(line):
                if colour != " ":
                    dots[row, column] = _COLOURS[colour]
    return dots.repeat(TILE // 8, axis=0).repeat(TILE // 8, axis=1)
