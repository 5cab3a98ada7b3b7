"""A vocabulary in which a tool call is one token: a model of random weights calls tools, on every engine, and
no answer's text is tokenised to the tokens that it was sampled as.
"""

from __future__ import annotations

import contextvars
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from rondo.agents.policy import Policy
from rondo.agents.tools import Toolbox
from rondo.core.types import Prompt, Trajectory
from rondo.recipes.quickstart import CHAT_TEMPLATE
from tests.agents.scripted import call
from tests.byte_tokenizers import byte_tokenizer
from tests.serving.agents import client

SIZE = 200
BYTES = [bytes([byte]) for byte in (*b"\n", *range(32, 127))]
CALLS = [f"{call('calculator', expression=f'{a}+{b}')}!".encode() for a in range(1, 11) for b in range(1, 8)]
ENDS = [f"{number}!".encode() for number in range(SIZE - 3 - len(BYTES) - len(CALLS))]
# Where an answer ends, with a call or without. Tokens that end one and are not shown: no calls.
STOP = "!"
STOP_IDS = (BYTES.index(b"!"), *(len(BYTES) + len(CALLS) + i for i in range(len(ENDS))))


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns it: one token for each character, call, and number with an exclamation mark."""
    made = byte_tokenizer([*BYTES, *CALLS, *ENDS])
    made.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    made.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    made.chat_template = CHAT_TEMPLATE
    assert len(made) == SIZE
    return made


# ---- of a run

seq: contextvars.ContextVar[int] = contextvars.ContextVar("seq", default=-1)
"""Of the prompt whose episode this is, where a test sets it."""


async def _nothing(seq: int) -> None: ...


before_a_result: Callable[[int], Awaitable[None]] = _nothing
"""What is waited for between two turns."""


async def calculator(expression: str) -> int:
    """Adds.

    expression: two numbers.
    """
    await before_a_result(seq.get())
    return sum(map(int, expression.split("+")))


async def asks_twice(messages: Sequence[Mapping[str, Any]], policy: Policy, tools: Toolbox) -> str:
    """Uses tools, and asks again in a context of its own."""
    said = list(messages)
    for _ in range(3):
        answer = await policy.chat(said, tools=tools.schemas)
        if not answer.tool_calls:
            break
        said += [answer.message, *await tools.answer(answer)]
    return (await policy.chat([{"role": "user", "content": f"{answer.text}?"}])).text


async def completes(policy: Policy, *, ids: Sequence[int], stop: str) -> str:
    """Goes on twice from token ids, first up to a stop string."""
    first = await policy.complete(ids, stop=[stop], max_tokens=60)
    await policy.complete([*ids, *first.token_ids, 1, 2, 3], max_tokens=8)
    return first.text


async def over_http(messages: Any, base_url: str, api_key: str, model: str) -> str:
    """Asks twice with OpenAI's client."""
    create = client().with_options(base_url=base_url, api_key=api_key).chat.completions.create
    first = await create(model=model, messages=messages)
    await before_a_result(seq.get())
    asked = [*messages, first.choices[0].message, {"role": "user", "content": "Sure?"}]
    return (await create(model=model, messages=asked)).choices[0].message.content or ""


def even(prompt: Prompt, trajectory: Trajectory) -> float:
    """Says whether the last number that it said is even."""
    digits = [int(letter) for letter in trajectory.text if letter.isdigit()]
    return float(bool(digits) and digits[-1] % 2 == 0)
