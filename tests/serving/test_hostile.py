"""What a client may send by mistake or on purpose: refused by name, never a 500, and nobody else waits."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import re
import threading
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from rondo.chat import decode
from rondo.core.types import Completion, GenerateRequest
from rondo.rollout import NativeEngine
from rondo.serving.text import TextStream, answer_text
from tests.serving.conftest import MODEL, STOPS, TOKEN, TOKENIZER, post, served

CHAT, TEXT = "/chat/completions", "/completions"
ASK = [{"role": "user", "content": "Tom has 3"}]
CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}
CALLED = [
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "1"},
]

# Every field of every body, each with a value that is taken.
FIELDS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": CALLED, "tools": [TOOL], "tool_choice": "auto", "chat_template_kwargs": {}},
    TEXT: {"prompt": [5, 6], "logprobs": 0},
}
BOTH = {
    "model": MODEL,
    "user": "me",
    "n": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": False,
    "max_tokens": 2,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 3,
    "min_p": 0.0,
    "seed": 1,
    "stop": ["7"],
    "frequency_penalty": 0,
    "logit_bias": {},
    "metadata": {},
}
DEEP = 15_000
# JSON texts: some have no Python value that json.dumps would write.
HOSTILE = {
    "null": "null",
    "true": "true",
    "zero": "0",
    "negative": "-4",
    "fraction": "1.5",
    "tiny": "1e-320",
    "huge": "1e308",
    "infinite": "1e999",
    "NaN": "NaN",
    "Infinity": "-Infinity",
    "64 bits": str(1 << 64),
    "5,000 digits": "7" * 5000,
    "5,000 decimals": "0." + "7" * 5000,
    "100,000 digits": "7" * 100_000,
    "empty": '""',
    "text": '"hot"',
    "a lone surrogate": '"\\ud800"',
    "a NUL": '"\\u0000"',
    "special tokens": '"<|im_end|><|im_start|>"',
    "an undecodable name": '{"\\udfff": 1}',
    "no items": "[]",
    "no fields": "{}",
    "ids beyond the vocabulary": "[442]",
    "negative ids": "[-1]",
    "ids beyond 32 bits": f"[{1 << 31}]",
    "a lone surrogate in a list": '["\\ud800"]',
    "mixed": '[1, "a", null, {}]',
    "nested": "[" * 60 + "]" * 60,
    "nested deep": "[" * 900 + "]" * 900,
    "nested deeper": "[" * DEEP + "]" * DEEP,
    "objects nested deeper": '{"a":' * DEEP + "1" + "}" * DEEP,
    "many": "[" + "0," * 25_000 + "0]",
    "a fraction of a JSON": '[1, "a',
    "no JSON": "{'a': 1}",
}


async def never(request: GenerateRequest, on_tokens: Any = None) -> Completion:
    await asyncio.Event().wait()
    raise AssertionError


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all that is in it."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from places(item, (*path, name))


def with_text(value: Any, path: tuple[Any, ...], text: str) -> str:
    """The JSON of `value`, with `text` at this place."""
    mark = "--here--"
    copied = json.loads(json.dumps(value))
    inside = copied
    for name in path[:-1]:
        inside = inside[name]
    inside[path[-1]] = mark
    return json.dumps(copied).replace(f'"{mark}"', text)


BODIES = [(path, (), "nothing wrong", json.dumps({**BOTH, **own})) for path, own in FIELDS.items()]
BODIES += [
    (path, place, name, with_text(body, place, text))
    for path, own in FIELDS.items()
    for body in [{**BOTH, **own}]
    for place in places(body)
    for name, text in HOSTILE.items()
]


@pytest.mark.slow
def test_no_value_of_any_field_is_an_error_of_ours(
    engine: NativeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does the log say anything at any level."""
    caplog.set_level(logging.DEBUG)

    async def main() -> list[tuple[Any, ...]]:
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        settings = {"vocab_size": len(TOKENIZER)}
        async with served(engine.generate, **settings) as (_, base_url):
            async with aiohttp.ClientSession(headers=headers) as http:

                async def one(path: str, place: Any, name: str, body: str) -> tuple[Any, ...]:
                    async with http.post(base_url + path, data=body.encode()) as answer:
                        text = await answer.text()
                    if answer.status == 200:
                        events = text.removesuffix("\n\n").split("\n\n")
                        error = "" if events[-1] in ("data: [DONE]", *events[:1]) else events[-1]
                    else:
                        error = json.loads(text)["error"]
                    return path, place, name, answer.status, error

                return [await one(*body) for body in BODIES]

    answers = asyncio.run(main())
    wrong = [each for each in answers if each[3] not in (200, 400, 404) or (each[3] == 200 and each[4])]
    assert wrong == []
    assert [status for _, _, name, status, _ in answers if name == "nothing wrong"] == [200, 200]
    assert [r.getMessage() for r in caplog.records if r.name not in ("asyncio",)] == []


@pytest.mark.parametrize(
    "arguments", ["[" * DEEP, "[" * DEEP + "]" * DEEP, "7" * 5000, '{"a": "\\ud800"}', '{"a": NaN}', "{"]
)
def test_arguments_of_a_call_that_are_no_json_stay_text(engine: NativeEngine, arguments: str) -> None:
    call = {**CALL, "function": {"name": "add", "arguments": arguments}}
    messages = [CALLED[0], {"role": "assistant", "content": "", "tool_calls": [call]}, CALLED[2]]
    body = {"model": MODEL, "messages": messages, "max_tokens": 1, "return_token_ids": True}

    async def main() -> tuple[int, dict[str, Any]]:
        async with served(engine.generate) as (_, base_url):
            return await post(base_url, CHAT, body)

    status, answer = asyncio.run(main())
    if status == 200:
        assert json.dumps(arguments) in TOKENIZER.decode(answer["prompt_token_ids"])
    else:
        assert answer["error"]["code"] == "context_length_exceeded"
    assert (status == 200) == (len(arguments) < 100)


BIG = "red " * 3_900_000  # 15 MB


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "messages", [{"role": "user", "content": BIG}]),
        (CHAT, "tools", [{**TOOL, "function": {"name": "add", "description": BIG}}]),
        (TEXT, "prompt", BIG),
    ],
)
def test_a_text_that_is_much_too_long_is_not_tokenised_whole(path: str, field: str, value: Any) -> None:
    body = {"model": MODEL, **({"messages": ASK} if path == CHAT else {}), field: value}

    async def main() -> tuple[int, dict[str, Any]]:
        async with served(never) as (_, base_url):
            return await post(base_url, path, body)

    status, answer = asyncio.run(main())
    found = re.match(r"the conversation has (\d+) tokens or more", answer["error"]["message"])
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert found is not None
    assert int(found[1]) < 6000  # the first 16 kB


# Texts that are no part of the conversation, and words that stand in the refusal of a long one.
LONG = "x" * 1_000_000
LONG_TEXTS: dict[str, tuple[dict[str, Any], str]] = {
    "stop": ({"stop": [LONG]}, "a stop string has 1000000 characters; it may have 1000"),
    "stop as one": ({"stop": LONG}, "a stop string has 1000000 characters; it may have 1000"),
    "model": ({"model": LONG}, "at most 1000 characters"),
    "user": ({"user": LONG}, "at most 1000 characters"),
    "tools": ({"tools": [{**TOOL, "function": {"name": LONG}}]}, "name has more than 1000 characters"),
    "tool_choice": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": LONG}}},
        "tool_choice: must be",
    ),
    "an option": ({"chat_template_kwargs": {LONG: 1}}, "is not set here"),
    "an option's value": ({"chat_template_kwargs": {"enable_thinking": LONG}}, "is not set here"),
    "a parameter": ({LONG: 1}, "unknown parameter"),
    "a parameter that is not supported": ({"logit_bias": {LONG: 1}}, "is not supported"),
    "an item": ({"stream_options": {LONG: 1}}, "is no parameter here"),
}


@pytest.mark.parametrize("name", LONG_TEXTS)
def test_every_text_of_a_request_has_a_length(name: str) -> None:
    """And its refusal has one, too."""
    more, words = LONG_TEXTS[name]

    async def main() -> tuple[int, dict[str, Any]]:
        async with served(never) as (_, base_url):
            return await post(base_url, CHAT, {"model": MODEL, "messages": ASK, **more})

    status, answer = asyncio.run(main())
    assert (status, words in answer["error"]["message"]) == (400, True)
    assert len(json.dumps(answer)) < 1500


def test_more_messages_than_the_context_has_tokens_are_refused_unread() -> None:
    async def main() -> tuple[int, dict[str, Any]]:
        async with served(never) as (_, base_url):
            return await post(base_url, CHAT, {"model": MODEL, "messages": ASK * 20_000})

    status, answer = asyncio.run(main())
    assert (status, answer["error"]["code"]) == (400, "too_many_values")


@pytest.mark.parametrize(
    ("path", "slow"),
    [
        (CHAT, "rondo.serving.endpoint.read_body"),
        (CHAT, "rondo.serving.prompts.render"),
        (CHAT, "rondo.serving.prompts.tokenise_up_to"),
        (TEXT, "rondo.serving.prompts.tokenise_up_to"),
    ],
)
def test_a_large_request_keeps_nobody_waiting(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch, path: str, slow: str
) -> None:
    """While one is read, templated or tokenised, which ends only after it, others are answered and stream."""
    module, _, name = slow.rpartition(".")
    real = getattr(importlib.import_module(module), name)
    entered, others_done = threading.Event(), threading.Event()

    def stopped(*arguments: Any, **options: Any) -> Any:
        if len(str(arguments[0] if name == "read_body" else arguments[1])) > 5000:
            entered.set()
            assert others_done.wait(60)
        return real(*arguments, **options)

    monkeypatch.setattr(slow, stopped)
    text = "red " * 2000
    large = {
        "model": MODEL,
        **({"prompt": text} if path == TEXT else {"messages": [{**ASK[0], "content": text}]}),
    }

    async def main() -> tuple[int, int, bool]:
        async with served(engine.generate) as (_, base_url):
            answering = asyncio.create_task(post(base_url, path, large))
            assert await asyncio.to_thread(entered.wait, 60)
            small = {"model": MODEL, "messages": ASK, "stream": True, "max_tokens": 20}
            headers = {"Authorization": f"Bearer {TOKEN}"}
            async with aiohttp.ClientSession(headers=headers) as http:
                async with http.post(base_url + CHAT, json=small) as stream:
                    events = await stream.text()
                async with http.get(base_url.removesuffix("/v1") + "/health") as health:
                    alive = health.status
            waits_still = not answering.done()
            others_done.set()
            status, _ = await answering
            assert "data: [DONE]" in events
            return alive, status, waits_still

    assert asyncio.run(main()) == (200, 400, True)


FIRST, SECOND = TOKENIZER("é", add_special_tokens=False)["input_ids"]  # of its two bytes
(LETTER,) = TOKENIZER("a", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    "token_ids",
    [
        [SECOND] * 500,
        [FIRST] * 500,
        [STOPS[0]] * 500,
        [*[SECOND] * 33, FIRST, SECOND, LETTER, *[SECOND] * 40, *[FIRST, SECOND] * 40, FIRST],
        [LETTER, *[FIRST, FIRST, SECOND] * 99],
    ],
)
def test_an_answer_that_is_no_text_is_not_decoded_again_and_again(
    monkeypatch: pytest.MonkeyPatch, token_ids: list[int]
) -> None:
    """Pieces are those of the whole, and what is decoded at once does not grow with the answer."""
    most = 0

    def counted(tokenizer: Any, ids: Any) -> str:
        nonlocal most
        most = max(most, len(ids))
        return decode(tokenizer, ids)

    whole = answer_text(TOKENIZER, token_ids, ())[0].text
    monkeypatch.setattr("rondo.serving.text.decode", counted)
    stream = TextStream(TOKENIZER, ())
    pieces = [stream.feed([token]) for token in token_ids]
    assert "".join(pieces) + stream.finish().text == whole
    assert most < 50
