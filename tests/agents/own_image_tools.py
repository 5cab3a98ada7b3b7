"""Tools with images, as users write them, and some that return what is none."""

from __future__ import annotations

import asyncio
import io
import json
import urllib.error
import urllib.request
from typing import Any

import numpy as np
from PIL import Image

from rondo.agents.external import use_tools
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


def squares(messages: list[Any], base_url: str, api_key: str, *, urls: list[str]) -> str:
    """Asks over HTTP, with an image more each time, as OpenAI's clients send them."""
    said = list(messages)
    for url in ["", *urls]:
        if url:
            parts = [{"type": "text", "text": "And "}, {"type": "image_url", "image_url": {"url": url}}]
            said.append({"role": "user", "content": parts})
        body = json.dumps({"model": "policy", "messages": said}).encode()
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
        try:
            with urllib.request.urlopen(request) as answer:
                said.append(json.load(answer)["choices"][0]["message"])
        except urllib.error.HTTPError as error:
            raise ValueError(error.read().decode()) from None
    return str(said[-1]["content"])


async def brings(messages: list[Any], policy: Policy, tools: Toolbox, *, url: str, max_turns: int) -> str:
    """Brings an image, and has the tools called then."""
    part = {"type": "image_url", "image_url": {"url": url}}
    return await use_tools(
        [*messages, {"role": "user", "content": [part]}], policy, tools, max_turns=max_turns
    )


async def anew(messages: list[Any], policy: Policy, tools: Toolbox) -> str:
    """Sends back another call than the policy's, so that the conversation is written whole."""
    await policy.chat(messages)
    function = {"name": "zoom", "arguments": '{"<|image_pad|>": ["<|image_pad|>"]}'}
    said = {
        "role": "assistant",
        "content": "<|image_pad|>",
        "tool_calls": [{"id": "a", "function": function}],
    }
    return (await policy.chat([*messages, said, {"role": "tool", "content": "b"}])).text


async def late(colour: int, images: ShownImages, seconds: float = 0.0) -> ToolResult:
    """Paints, and says how many images were there."""
    await asyncio.sleep(seconds)
    return ToolResult(f"{colour} of {len(images)}", images=[np.full((32, 32, 3), colour, np.uint8)])


def paints(colour: int) -> Image.Image:
    """Paints a square."""
    return Image.new("RGB", (32, 32), (colour, colour, colour))


def writes(code: str, shown: str = "") -> str:
    """Writes what no policy can say in its own tokens.

    code: of which kind
    """
    pad = "<|image_pad|>"
    return {"pad": f"a {pad} b", "name": f"a {shown} b"}[code]


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
