"""Agents as users write them: they know the `openai` client, or nothing but HTTP, and not rondo."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import time
import urllib.request
from typing import Any

import openai


@functools.cache
def client() -> openai.AsyncOpenAI:
    """A client costs 75 ms to make; copies with another key share its connections."""
    return openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="none")


async def one_answer(messages: Any, base_url: str, api_key: str, model: str) -> None:
    """What `single_turn` does."""
    mine = client().with_options(base_url=base_url, api_key=api_key)
    await mine.chat.completions.create(model=model, messages=messages)


def plain_http(prompt: str, base_url: str, api_key: str, model: str) -> None:
    """The same, blocking, without a client library."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        json.load(response)


async def two_turns(
    messages: Any, base_url: str, api_key: str, model: str, *, first_tokens: int, say: str = "Sure?"
) -> str:
    """A second question after the first answer; returns the final text."""
    mine = client().with_options(base_url=base_url, api_key=api_key)
    first = await mine.chat.completions.create(model=model, messages=messages, max_tokens=first_tokens)
    messages = [*messages, first.choices[0].message, {"role": "user", "content": say}]
    second = await mine.chat.completions.create(model=model, messages=messages)
    return f"final: {second.choices[0].message.content}"


async def rewrites(messages: Any, base_url: str, api_key: str, model: str) -> None:
    """Changes what the model said."""
    mine = client().with_options(base_url=base_url, api_key=api_key)
    await mine.chat.completions.create(model=model, messages=messages, max_tokens=2)
    changed = [*messages, {"role": "assistant", "content": "no"}, {"role": "user", "content": "And?"}]
    await mine.chat.completions.create(model=model, messages=changed, max_tokens=2)


async def planner_and_solver(
    messages: Any, base_url: str, api_key: str, model: str, *, tokens: int = 4
) -> str:
    """Two contexts by turns: the planner's grows, each solver's is new."""
    create = client().with_options(base_url=base_url, api_key=api_key).chat.completions.create
    plan = [*messages]
    for _ in range(2):
        planned = (await create(model=model, messages=plan, max_tokens=4)).choices[0].message
        task = [{"role": "system", "content": "Solve"}, {"role": "user", "content": planned.content or "?"}]
        solved = (await create(model=model, messages=task, max_tokens=4)).choices[0].message
        plan = [*plan, planned, {"role": "user", "content": f"Result: {solved.content}"}]
    final = await create(model=model, messages=plan, max_tokens=4)
    return final.choices[0].message.content or ""


async def best_of_two(messages: Any, base_url: str, api_key: str, model: str) -> str:
    """Two choices, of which the longer goes on."""
    create = client().with_options(base_url=base_url, api_key=api_key).chat.completions.create
    both = (await create(model=model, messages=messages, n=2, max_tokens=4)).choices
    longer = max((choice.message for choice in both), key=lambda message: len(message.content or ""))
    asked = [*messages, longer, {"role": "user", "content": "Sure?"}]
    return (await create(model=model, messages=asked, max_tokens=4)).choices[0].message.content or ""


def exits() -> None:
    sys.exit(0)


async def exits_later() -> None:
    await asyncio.sleep(0)
    sys.exit(0)


async def cancels_itself() -> None:
    raise asyncio.CancelledError


async def leaves_a_task_that_exits() -> None:
    """Then the loop of the agents would end with it, and no other agent would go on."""
    task = asyncio.create_task(exits_later())
    await asyncio.wait([task])


async def asks_too_much(base_url: str, api_key: str, model: str) -> None:
    mine = client().with_options(base_url=base_url, api_key=api_key)
    await mine.chat.completions.create(model=model, messages=[{"role": "user", "content": "red " * 2000}])


def never_calls() -> None:
    """Needs nothing."""


def hangs() -> None:
    """Longer than any test."""
    time.sleep(3600)


async def raises(messages: Any, base_url: str, api_key: str, model: str) -> None:
    """After the answer."""
    await one_answer(messages, base_url, api_key, model)
    raise LookupError("no such tool")


async def fails_on_some_samples(messages: Any, base_url: str, api_key: str, model: str) -> None:
    """A choice that depends on the answer only: as good as a coin."""
    mine = client().with_options(base_url=base_url, api_key=api_key)
    ids = {"return_token_ids": True}
    answer = await mine.chat.completions.create(model=model, messages=messages, extra_body=ids)
    if sum(answer.choices[0].token_ids) % 3 == 0:
        raise LookupError("no such tool")


async def swallows_errors(messages: Any, base_url: str, api_key: str, model: str) -> None:
    """And tries again."""
    for _ in range(2):
        try:
            mine = client().with_options(base_url=base_url, api_key=api_key, max_retries=1)
            await mine.chat.completions.create(model=model, messages=messages)
        except openai.APIError:
            pass


def returns_a_number() -> int:
    """A reward, perhaps: that is not how it is done."""
    return 1


def misspelt(mesages: Any) -> None:
    """A parameter that nobody gives."""
