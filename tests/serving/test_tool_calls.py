"""Tool calls through the endpoint: what a malformed one is, and what parallel_tool_calls does."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import openai
import pytest

from rondo.chat import encode_piece, encode_prompt
from rondo.core.types import Completion, GenerateRequest
from rondo.recipes.quickstart import tokenizer
from tests.serving.conftest import STOPS, TOKEN, TOKENIZER, served, with_client
from tests.serving.test_sessions import ASK, END, TOOLS, ask, says

GOOD = '<tool_call>{"name": "calc", "arguments": {"expr":  "3+4"}}</tool_call>'
BROKEN = '<tool_call>{"name": "calc", </tool_call>'
UNKNOWN = '<tool_call>{"name": "sqrt", "arguments": {}}</tool_call>'


async def answered(client: openai.AsyncOpenAI, stream: bool, messages: Any = ASK, **settings: Any) -> Any:
    """The choice of an answer to ASK with TOOLS, whole or put together from its chunks."""
    if not stream:
        return (await ask(client, messages, tools=TOOLS, **settings)).choices[0].model_dump()
    chunks = [chunk async for chunk in await ask(client, messages, tools=TOOLS, stream=True, **settings)]
    choice = chunks[-1].choices[0].model_dump()
    choice["message"] = choice.pop("delta")
    choice["message"]["content"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    made = [chunk.choices[0].model_dump().get("token_ids") or [] for chunk in chunks[1:]]
    choice["token_ids"] = [token for part in made for token in part]
    for call in choice["message"]["tool_calls"] or []:
        del call["index"]
    return choice


def called_and_answered(generate: Any, stream: bool, **settings: Any) -> Any:
    """Answers the one call of an answer, in the same session. Returns the choice with that call."""

    async def use(client: openai.AsyncOpenAI) -> Any:
        first = await answered(client, stream, **settings)
        (call,) = first["message"]["tool_calls"]
        message = {"role": "assistant", "content": first["message"]["content"], "tool_calls": [call]}
        tool = {"role": "tool", "content": "7", "tool_call_id": call["id"]}
        await answered(client, stream, [*ASK, message, tool])
        return first

    return with_client(generate, use, max_context=400, session="s")


@pytest.mark.parametrize("stream", [False, True])
def test_a_malformed_call_stays_text_and_is_counted(stream: bool) -> None:
    generate, _ = says(f"See. {BROKEN}\n{GOOD}\n{UNKNOWN}", END)

    async def main() -> tuple[Any, str]:
        async with (
            served(generate, max_context=400) as (endpoint, base_url),
            openai.AsyncOpenAI(base_url=base_url, api_key=TOKEN) as client,
        ):
            return await answered(client, stream), endpoint.metrics_text()

    choice, metrics = asyncio.run(main())
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "calc", "arguments": '{"expr":  "3+4"}'}
    assert (choice["finish_reason"], choice["message"]["content"]) == (
        "tool_calls",
        f"See. {BROKEN}{UNKNOWN}",
    )
    assert choice["malformed_tool_calls"] == [
        {"reason": "no_json", "text": BROKEN},
        {"reason": "unknown_tool", "text": UNKNOWN},
    ]
    counted = [line for line in metrics.splitlines() if line.startswith("rondo_tool_calls_total")]
    assert counted == [
        f'rondo_tool_calls_total{{outcome="{outcome}"}} 1' for outcome in ("no_json", "ok", "unknown_tool")
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_where_several_are_not_allowed(stream: bool) -> None:
    """Generation stops at the call's closing token, which is part of the answer; the next turn goes on from
    there, with the end of turn that the model was not asked for.
    """
    text = f"See. {GOOD}"
    ids = np.array(TOKENIZER(text + GOOD, add_special_tokens=False)["input_ids"], np.int32)
    closing = TOKENIZER.convert_tokens_to_ids("</tool_call>")
    asked: list[GenerateRequest] = []

    async def generate(request: GenerateRequest, on_tokens: Any = None) -> Completion:
        asked.append(request)
        made = ids[: int(np.isin(ids, request.sampling.stop_token_ids).argmax()) + 1]
        numbers, versions = np.zeros(len(made), np.float32), np.zeros(len(made), np.int32)
        whole = Completion(request.request_id, request.token_ids, made, numbers, versions, "stop")
        if on_tokens is not None:
            on_tokens(whole)
        return whole

    first = called_and_answered(generate, stream, parallel_tool_calls=False)
    assert [request.sampling.stop_token_ids for request in asked] == [
        tuple(sorted({*STOPS, closing})),
        tuple(sorted(STOPS)),
    ]
    assert (first["finish_reason"], first["message"]["content"]) == ("tool_calls", "See. ")
    assert first["token_ids"] == TOKENIZER(text, add_special_tokens=False)["input_ids"]
    head = [*encode_prompt(TOKENIZER, ASK, tools=TOOLS), *first["token_ids"]]
    behind = (
        "<|im_end|>\n<|im_start|>user\n<tool_response>7</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert asked[1].token_ids.tolist() == [*head, *encode_piece(TOKENIZER, behind)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_call_in_spite_of_that_stays_text(stream: bool) -> None:
    """As where the model writes the closing mark in other tokens."""
    generate, _ = says(GOOD + GOOD, END)

    async def use(client: openai.AsyncOpenAI) -> Any:
        return await answered(client, stream, parallel_tool_calls=False)

    choice = with_client(generate, use, max_context=400)
    assert (len(choice["message"]["tool_calls"]), choice["message"]["content"]) == (1, GOOD)
    assert choice["malformed_tool_calls"] == [{"reason": "not_parallel", "text": GOOD}]


def test_a_template_without_a_known_format_cannot_have_tools() -> None:
    """It can where the model's format is said, and without tools."""
    tok = tokenizer()
    tok.chat_template = "{% for m in messages %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}"
    generate, _ = says("[TOOL_CALLS]calc[ARGS]{}")

    async def use(client: openai.AsyncOpenAI) -> Any:
        with pytest.raises(openai.BadRequestError, match=r"model.tool_format to one of deepseek") as caught:
            await ask(client, ASK, tools=TOOLS)
        assert caught.value.param == "tools"
        await ask(client, ASK, tools=TOOLS, tool_choice="none")
        await ask(client, ASK)
        tok.tool_format = "mistral"
        return (await ask(client, ASK, tools=TOOLS)).choices[0].message

    message = with_client(generate, use, max_context=400, tokenizer=tok)
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [("calc", "{}")]


NAMED = {"type": "function", "function": {"name": "calc"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "opening", "rest"),
    [
        ("required", '<tool_call>{"name": "', 'calc", "arguments": {"expr":  "3+4"}}</tool_call>'),
        (NAMED, '<tool_call>{"name": "calc", "arguments":', ' {"expr":  "3+4"}}</tool_call>'),
    ],
)
def test_a_call_that_is_asked_for_is_begun_in_the_prompt(
    choice: Any, opening: str, rest: str, stream: bool
) -> None:
    """The next turn goes on from these tokens; what was not sampled is in the prompt."""
    say, ids = says(rest, END)
    asked: list[GenerateRequest] = []

    async def generate(request: GenerateRequest, on_tokens: Any = None) -> Completion:
        asked.append(request)
        made: Completion = await say(request, on_tokens)
        return made

    first = called_and_answered(generate, stream, tool_choice=choice)
    assert first["message"]["tool_calls"][0]["function"] == {"name": "calc", "arguments": '{"expr":  "3+4"}'}
    assert (first["finish_reason"], first["message"]["content"] or "") == ("tool_calls", "")
    head = [*encode_prompt(TOKENIZER, ASK, tools=TOOLS), *encode_piece(TOKENIZER, opening)]
    assert asked[0].token_ids.tolist() == head
    behind = "\n<|im_start|>user\n<tool_response>7</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert asked[1].token_ids.tolist() == [*head, *ids, *encode_piece(TOKENIZER, behind)]


def test_a_call_that_was_begun_may_still_be_none() -> None:
    generate, _ = says("sqrt", END)

    async def use(client: openai.AsyncOpenAI) -> Any:
        return await answered(client, False, tool_choice="required")

    choice = with_client(generate, use, max_context=400)
    assert choice["message"]["tool_calls"] is None
    assert [call["reason"] for call in choice["malformed_tool_calls"]] == ["not_closed"]


def test_a_call_cannot_be_asked_for_of_a_template_that_writes_none() -> None:
    tok = tokenizer()
    tok.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<tool_call>arguments'[:0] }}"
    generate, _ = says("no")

    async def use(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="cannot be kept with this chat template") as caught:
            await ask(client, ASK, tools=TOOLS, tool_choice="required")
        assert caught.value.param == "tool_choice"

    with_client(generate, use, max_context=400, tokenizer=tok)
