"""Tools with images, as users write them, and some that return what is none."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import numpy as np
from PIL import Image

from rondo.agents.policy import Policy
from rondo.agents.tools import Toolbox
from rondo.core.images import ShownImages
from rondo.core.types import ToolResult


async def looks(messages: list[Any], policy: Policy, tools: Toolbox) -> str:
    """Zooms into its prompt's image, and into what it is shown then, where the answers' lengths say."""
    said = list(messages)
    for number in (1, 2, 3):
        answer = await policy.chat(said)
        if number == 3:
            break
        edge = 1000 - 40 * (len(answer.token_ids) % 12)
        shown = await tools.call("zoom", {"image": number, "box": [0, 100, edge, 900]})
        said += [answer.message, {"role": "user", "content": shown}]
    return answer.text


async def late(colour: int, images: ShownImages, seconds: float = 0.0) -> ToolResult:
    """Paints, and says how many images were there."""
    await asyncio.sleep(seconds)
    return ToolResult(f"{colour} of {len(images)}", images=[np.full((32, 32, 3), colour, np.uint8)])


def paints(colour: int) -> Image.Image:
    """Paints a square."""
    return Image.new("RGB", (32, 32), (colour, colour, colour))


def odd(kind: str) -> ToolResult:
    """Returns what is no image."""
    square = Image.new("RGB", (8, 8))
    animated = io.BytesIO()
    square.save(animated, "GIF", save_all=True, append_images=[Image.new("RGB", (8, 8), (9, 9, 9))])
    of_kind: dict[str, Any] = {
        "none": [b"GIF89a"],
        "hundred": [square] * 100,
        "thin": [np.zeros((2, 900, 3), np.uint8)],
        "animated": [animated.getvalue()],
        "grey": [np.zeros((4, 4), np.uint8)],
        "path": ["/etc/passwd"],
        "large": [Image.new("1", (10001, 10000))],
    }
    return ToolResult("see", images=of_kind[kind])
