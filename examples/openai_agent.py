"""An agent for the quickstart's word problems that knows nothing of rondo: it talks to an OpenAI server.

    pip install "rondo-rl[serve]" openai
    rondo train quickstart rollout.agent=examples/openai_agent.py:solve

Write an agent as you would for any model: the conversation, the tools and the turns are yours. What the
policy answers is recorded token by token and trained on; what you put between two answers carries no loss.
Options are keyword-only: rollout.agent='{name: examples/openai_agent.py:solve, attempts: 2}'.
"""

from __future__ import annotations

import functools
from typing import Any

from openai import AsyncOpenAI


@functools.cache
def shared_client() -> AsyncOpenAI:
    """Made once: a client takes 75 ms, a copy of it for another key does not."""
    return AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="unused")


async def solve(
    messages: list[dict[str, Any]], base_url: str, api_key: str, model: str, *, attempts: int = 1
) -> str:
    """Ask; while there is no final line `#### answer`, ask for it. Returns the last answer, to be scored."""
    client = shared_client().with_options(base_url=base_url, api_key=api_key)
    for attempt in range(attempts):
        reply = await client.chat.completions.create(model=model, messages=messages)
        text = reply.choices[0].message.content or ""
        if "####" in text or attempt + 1 == attempts:
            break
        messages = [*messages, reply.choices[0].message, {"role": "user", "content": "How many?"}]
    return text
