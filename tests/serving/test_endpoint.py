"""The endpoint on a real port, by OpenAI's own client and by raw HTTP: exact tokens, and exact refusals."""

from __future__ import annotations

import asyncio
import urllib.parse
from dataclasses import replace
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from rondo.chat import encode_prompt
from rondo.core.errors import RolloutError
from rondo.core.types import Completion, GenerateRequest, request_seed
from rondo.recipes.quickstart import tokenizer
from rondo.rollout import NativeEngine
from rondo.serving.http import ClientLimits
from tests.serving.conftest import MODEL, TOKEN, TOKENIZER, direct, post, served, with_client

ASK: list[Any] = [{"role": "user", "content": "Tom has 3 apples, buys 4, finds 5. How many?"}]
IDS = encode_prompt(TOKENIZER, ASK)
CHAT, TEXT = "/chat/completions", "/completions"


def chat(body: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "messages": ASK, **body}


def test_a_chat_answer_is_the_engines(engine: NativeEngine) -> None:
    """With `n`: the first choice has the seed itself."""
    sampling: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95}

    async def ask(client: openai.AsyncOpenAI) -> Any:
        return await client.chat.completions.create(
            model=MODEL,
            messages=ASK,
            seed=5,
            n=2,
            max_tokens=12,
            logprobs=True,
            extra_body={"top_k": 50, "min_p": 0.001},
            **sampling,
        )

    answer = with_client(engine.generate, ask)
    assert answer.prompt_token_ids == IDS.tolist()
    for choice, seed in zip(answer.choices, (5, request_seed(5, 1)), strict=True):
        made = direct(engine, IDS, seed, max_tokens=12, top_k=50, min_p=0.001, **sampling)
        assert choice.token_ids == made.token_ids.tolist()
        assert np.array_equal(np.array(choice.token_log_probs, np.float32), made.log_probs)
        assert choice.policy_versions == [3] * len(made.token_ids)
        assert choice.message.content == TOKENIZER.decode(made.token_ids, skip_special_tokens=True)
        assert choice.finish_reason == ("stop" if made.finish_reason == "stop" else "length")
        assert [token.logprob for token in choice.logprobs.content] == choice.token_log_probs
        assert all(
            t.top_logprobs == [] and bytes(t.bytes).decode(errors="replace") == t.token
            for t in choice.logprobs.content
            if t.token != TOKENIZER.eos_token
        )
    made_tokens = sum(len(choice.token_ids) for choice in answer.choices)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(IDS), made_tokens)
    assert answer.usage.total_tokens == len(IDS) + made_tokens


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_exact_tokens_are_in_an_answer_that_was_asked_for_them(engine: NativeEngine, path: str) -> None:
    """Else it is the same without them, streamed too."""
    body = {"model": MODEL, "seed": 5, "max_tokens": 6}
    body |= {"messages": ASK} if path == CHAT else {"prompt": "Tom has 3"}
    exact = ("token_ids", "token_log_probs", "policy_versions")

    async def main() -> list[Any]:
        async with served(engine.generate) as (_, base_url):
            asked = [await post(base_url, path, {**body, "return_token_ids": ids}) for ids in (True, False)]
            headers = {"Authorization": f"Bearer {TOKEN}"}
            async with aiohttp.ClientSession(headers=headers) as http:
                async with http.post(base_url + path, json={**body, "stream": True}) as stream:
                    return [*(answer for _, answer in asked), await stream.text()]

    with_ids, without, streamed = asyncio.run(main())
    prompt_ids, choice = with_ids.pop("prompt_token_ids"), with_ids["choices"][0]
    assert len(prompt_ids) == with_ids["usage"]["prompt_tokens"]
    assert [len(choice.pop(name)) for name in exact] == [with_ids["usage"]["completion_tokens"]] * 3
    for answer in (with_ids, without):
        del answer["id"], answer["created"]
    assert with_ids == without
    assert not any(name in streamed for name in (*exact, "prompt_token_ids"))


@pytest.mark.parametrize("prompt", ["Tom has 3", TOKENIZER("Tom has 3")["input_ids"]])
def test_a_text_completion_is_the_engines(engine: NativeEngine, prompt: Any) -> None:
    async def ask(client: openai.AsyncOpenAI) -> Any:
        return await client.completions.create(model=MODEL, prompt=prompt, seed=9, max_tokens=6, logprobs=0)

    answer = with_client(engine.generate, ask)
    made = direct(engine, np.array(TOKENIZER("Tom has 3")["input_ids"], np.int32), 9, max_tokens=6)
    (choice,) = answer.choices
    assert choice.token_ids == made.token_ids.tolist()
    assert choice.text == TOKENIZER.decode(made.token_ids, skip_special_tokens=True)
    assert np.array_equal(np.array(choice.logprobs.token_logprobs, np.float32), made.log_probs)
    assert "".join(choice.logprobs.tokens) == TOKENIZER.decode(made.token_ids)


@pytest.mark.parametrize("seed", range(3))
def test_a_stream_says_what_the_whole_answer_says(engine: NativeEngine, seed: int) -> None:
    """Random bytes: many characters are cut by tokens."""
    settings: dict[str, Any] = {"model": MODEL, "messages": ASK, "seed": seed, "max_tokens": 60, "n": 2}

    async def ask(client: openai.AsyncOpenAI) -> Any:
        whole = await client.chat.completions.create(**settings)
        stream = await client.chat.completions.create(
            **settings, stream=True, stream_options={"include_usage": True}
        )
        return whole, [chunk async for chunk in stream]

    whole, chunks = with_client(engine.generate, ask)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    for index, choice in enumerate(whole.choices):
        parts = [part for chunk in chunks[1:-1] for part in chunk.choices if part.index == index]
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert [token for part in parts for token in part.token_ids] == choice.token_ids
        assert [number for part in parts for number in part.token_log_probs] == choice.token_log_probs
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]


def test_a_stream_on_the_wire(engine: NativeEngine) -> None:
    async def main() -> tuple[str, str]:
        async with served(engine.generate) as (_, base_url), aiohttp.ClientSession() as http:
            headers = {"Authorization": f"Bearer {TOKEN}"}
            body = chat({"stream": True, "max_tokens": 2})
            async with http.post(base_url + CHAT, json=body, headers=headers) as answer:
                return answer.headers["Content-Type"], await answer.text()

    kind, text = asyncio.run(main())
    assert kind == "text/event-stream; charset=utf-8"
    events = text.split("\n\n")
    assert all(event.startswith("data: {") for event in events[:-2])
    assert events[-2:] == ["data: [DONE]", ""]


def test_without_a_seed_answers_differ(engine: NativeEngine) -> None:
    async def ask(client: openai.AsyncOpenAI) -> Any:
        calls = [client.completions.create(model=MODEL, prompt="Tom", max_tokens=20) for _ in range(2)]
        return [answer.choices[0].token_ids for answer in await asyncio.gather(*calls)]

    first, second = with_client(engine.generate, ask)
    assert first != second


@pytest.mark.parametrize("bearer", ["", "wrong", TOKEN[:-1], TOKEN + "x", TOKEN.upper()])
def test_a_wrong_token_is_refused_everywhere(engine: NativeEngine, bearer: str) -> None:
    async def main() -> set[tuple[int, str]]:
        seen = set()
        headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
        async with served(engine.generate) as (_, base_url), aiohttp.ClientSession() as http:
            root = base_url.removesuffix("/v1")
            for path in (
                "/v1/chat/completions",
                "/v1/completions",
                "/v1/models",
                "/metrics",
                "/v1/sessions/a",
                "/nothing",
            ):
                method = "POST" if "completions" in path else "GET"
                async with http.request(method, root + path, json=chat({}), headers=headers) as answer:
                    seen.add((answer.status, (await answer.json())["error"]["code"]))
        return seen

    assert asyncio.run(main()) == {(401, "invalid_api_key")}


def test_a_token_that_is_no_text_is_a_wrong_one(engine: NativeEngine) -> None:
    async def main() -> bytes:
        async with served(engine.generate) as (_, base_url):
            url = urllib.parse.urlsplit(base_url)
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
            status = await reader.readline()
            writer.close()
            return status

    assert asyncio.run(main()).split()[1] == b"401"


ANSWER = {"role": "assistant", "content": "7"}
LONG = {"role": "user", "content": "many " * 200}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
BAD: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"temprature": 1}, "temprature", "did you mean 'temperature'"),
    (CHAT, {"frequency_penalty": 0.5}, "frequency_penalty", "not supported"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    (CHAT, {"reasoning_effort": "low"}, "reasoning_effort", "not supported"),
    (CHAT, {"temperature": -1}, "temperature", "greater than or equal to 0"),
    (CHAT, {"temperature": "hot"}, "temperature", "must be a valid number"),
    (CHAT, {"top_p": 0}, "top_p", "greater than 0"),
    (CHAT, {"top_k": 1.5}, "top_k", "must be a valid integer"),
    (CHAT, {"min_p": 2}, "min_p", "less than or equal to 1"),
    (CHAT, {"n": 0}, "n", "greater than or equal to 1"),
    (CHAT, {"n": True}, "n", "must be a valid integer"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "give one of them"),
    (CHAT, {"stop": ["a", "b", "c", "d", "e"]}, "stop", "at most 4 items"),
    (CHAT, {"stop": ""}, "stop.0", "at least 1 character"),
    (CHAT, {"stop": "<|im_end|> and more"}, "stop", "has the special token '<|im_end|>'"),
    (CHAT, {"stop": "\ufffd"}, "stop", "stands for bytes that are none"),
    (CHAT, {"stop": [1]}, "stop.0", "must be a valid string"),
    (CHAT, {"top_logprobs": 2, "logprobs": True}, "top_logprobs", "only the chosen token's"),
    (TEXT, {"prompt": "a", "logprobs": 1}, "logprobs", "only the chosen token's"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    (CHAT, {"stream": True, "stream_options": {"chunks": 1}}, "stream_options.chunks", "is no parameter"),
    (CHAT, {"tool_choice": "required"}, "tool_choice", "is 'required', and there are no tools"),
    (
        CHAT,
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
        "names 'f'; the tools are none",
    ),
    (CHAT, {"tool_choice": "any"}, "tool_choice", "'auto', 'none', 'required' or {type: function"),
    (CHAT, {"parallel_tool_calls": "no"}, "parallel_tool_calls", "must be a valid boolean"),
    (CHAT, {"tools": [{"type": "code"}]}, "tools.0", "must be {type: function"),
    (CHAT, {"user": 3}, "user", "must be a valid string"),
    (CHAT, {"messages": []}, "messages", "at least 1 item"),
    (CHAT, {"messages": ["hi"]}, "messages.0", "must be a valid dictionary"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages.0.role", "is missing"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content", "is missing"),
    (CHAT, {"messages": [*ASK, ANSWER]}, "messages", "must end with a message"),
    (CHAT, {"messages": [IMAGE]}, "messages.0.content.0.type", "must be 'text'"),
    (CHAT, {"messages": [LONG]}, "messages", "nothing is left to generate"),
    (TEXT, {"prompt": ["a", "b"]}, "prompt", "several prompts in one request are not supported here"),
    (TEXT, {"prompt": []}, "prompt", "one string or one list of token ids"),
    (TEXT, {"prompt": ["a", 1]}, "prompt", "one string or one list of token ids"),
    (TEXT, {"prompt": [-4]}, "prompt", "no token ids"),
    (TEXT, {"prompt": "a", "best_of": 2}, "best_of", "not supported"),
    (TEXT, {"prompt": "a", "messages": ASK}, "messages", "unknown parameter"),
]


def test_what_cannot_be_honoured_is_refused_by_name(engine: NativeEngine) -> None:
    async def main() -> list[tuple[int, dict[str, Any]]]:
        async with served(engine.generate) as (_, base_url):
            bodies = [(path, (chat if path == CHAT else with_model)(extra)) for path, extra, _, _ in BAD]
            return [await post(base_url, path, body) for path, body in bodies]

    def with_model(extra: dict[str, Any]) -> dict[str, Any]:
        return {"model": MODEL, **extra}

    for (status, answer), (_, _, param, text) in zip(asyncio.run(main()), BAD, strict=True):
        error = answer["error"]
        assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error"), error
        assert text in error["message"]


def test_values_that_ask_for_nothing_are_taken(engine: NativeEngine) -> None:
    async def ask(client: openai.AsyncOpenAI) -> Any:
        return await client.chat.completions.create(
            model=MODEL,
            messages=ASK,
            seed=1,
            max_completion_tokens=3,
            presence_penalty=0,
            frequency_penalty=0.0,
            logit_bias={},
            response_format={"type": "text"},
            parallel_tool_calls=True,
            store=False,
            user="me",
            metadata=None,
        )

    made = direct(engine, IDS, 1, max_tokens=3)
    assert with_client(engine.generate, ask).choices[0].token_ids == made.token_ids.tolist()


def test_other_refusals_have_openais_shape(engine: NativeEngine) -> None:
    """No JSON, nested too deep, another model, a body too large, a path or method that is not there."""

    async def main() -> list[tuple[int, Any]]:
        async with served(engine.generate, limits=ClientLimits(body_bytes=1000)) as (_, base_url):
            big = chat({"user": "x" * 2000})
            other = chat({"model": "gpt"})
            deep = b"[" * 999
            answers = [await post(base_url, CHAT, body) for body in (b"{", deep, [], other, big)]
            answers += [await post(base_url, path, {}) for path in ("/nothing", "/models")]
            two = {"X-Session-Id": "a", "Authorization": f"Bearer {TOKEN}:b"}
            answers.append(await post(base_url, CHAT, chat({}), **two))
        return [(status, answer["error"]["code"]) for status, answer in answers]

    assert asyncio.run(main()) == [
        (400, "invalid_json"),
        (400, "invalid_json"),
        (400, "invalid_type"),
        (404, "model_not_found"),
        (413, "body_too_large"),
        (404, "unknown_url"),
        (405, None),
        (400, "invalid_session"),
    ]


def test_messages_are_read_as_the_template_reads_them(engine: NativeEngine) -> None:
    """With what an answer thought, where the template writes it; a role that it leaves out is refused."""
    tok = tokenizer()
    tok.chat_template = (
        "{% for m in messages if m.role != 'developer' %}<|im_start|>{{ m.role }}\n"
        "{{ m.reasoning_content }}{{ m.content }}<|im_end|>{% endfor %}"
    )
    question = {"role": "user", "content": "3+4?"}
    answer = {"role": "assistant", "content": "7", "reasoning_content": "3 and 4"}
    said = [question, answer, question]

    async def main() -> list[Any]:
        async with served(engine.generate, tokenizer=tok) as (_, base_url):
            path = "/chat/completions"
            lost = [{"role": "developer", "content": "Be short."}, *said]
            body = {"model": MODEL, "max_tokens": 1, "return_token_ids": True}
            return [await post(base_url, path, {**body, "messages": one}) for one in (said, lost)]

    (status, taken), (refused, problem) = asyncio.run(main())

    assert (status, taken["prompt_token_ids"]) == (200, encode_prompt(tok, tuple(said)).tolist())
    assert "3 and 4" in tok.decode(taken["prompt_token_ids"])
    assert (refused, problem["error"]["type"]) == (400, "invalid_request_error")
    assert "what messages of the role developer say" in problem["error"]["message"]


def test_models(engine: NativeEngine) -> None:
    async def ask(client: openai.AsyncOpenAI) -> Any:
        listed = await client.models.list()
        one = await client.models.retrieve(MODEL)
        with pytest.raises(openai.NotFoundError, match="there is 'tiny'"):
            await client.models.retrieve("gpt")
        return [model.id for model in listed.data], one.max_model_len

    assert with_client(engine.generate, ask) == (["tiny"], 160)


async def never(request: GenerateRequest, on_tokens: Any = None) -> Completion:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(stream: bool) -> None:
    """The engine's call is cancelled, and nothing stays pending."""
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def generate(request: GenerateRequest, on_tokens: Any = None) -> Completion:
        started.set()
        try:
            return await never(request)
        finally:
            cancelled.set()

    async def main() -> int:
        async with served(generate) as (endpoint, base_url):
            asking = asyncio.create_task(post(base_url, CHAT, chat({"stream": stream})))
            await started.wait()
            assert endpoint.pending == 1
            asking.cancel()
            await cancelled.wait()
            while endpoint.pending:
                await asyncio.sleep(0.01)
            return endpoint.pending

    assert asyncio.run(asyncio.wait_for(main(), 240)) == 0


def test_a_full_endpoint_says_429(engine: NativeEngine) -> None:
    async def main() -> tuple[int, Any, str]:
        async with served(never, max_pending=3) as (endpoint, base_url):
            asking = asyncio.create_task(post(base_url, CHAT, chat({"n": 2})))
            while endpoint.pending < 2:
                await asyncio.sleep(0.01)
            status, answer = await post(base_url, CHAT, chat({"n": 2}))
            asking.cancel()
            return status, answer["error"]["code"], answer["error"]["message"]

    status, code, message = asyncio.run(main())
    assert (status, code) == (429, "queue_full")
    assert message == "2 sequences are pending, of 3 at most; try again later"


def test_deadlines(engine: NativeEngine) -> None:
    """Tokens that are there come back; a request that got none is a 504."""

    async def generate(request: GenerateRequest, on_tokens: Any = None) -> Completion:
        assert request.deadline_seconds == 5.0
        made = await engine.generate(replace(request, deadline_seconds=None))
        keep = 2 if request.sampling.top_k else 0
        parts = (made.token_ids[:keep], made.log_probs[:keep], made.policy_versions[:keep])
        return Completion(made.request_id, made.prompt_ids, *parts, finish_reason="deadline")

    async def main() -> list[tuple[int, Any]]:
        async with served(generate, deadline_seconds=5.0) as (_, base_url):
            ids = {"return_token_ids": True}
            bodies = (chat({"top_k": 400, "max_tokens": 4, **ids}), chat({"max_tokens": 4}))
            return [await post(base_url, CHAT, body) for body in bodies]

    (status, some), (late, none) = asyncio.run(main())
    (choice,) = some["choices"]
    assert (status, len(choice["token_ids"])) == (200, 2)
    assert (choice["finish_reason"], choice["engine_finish_reason"]) == ("length", "deadline")
    assert (late, none["error"]["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize("stream", [False, True])
def test_an_engines_error_is_a_500(stream: bool) -> None:
    async def generate(request: GenerateRequest, on_tokens: Any = None) -> Completion:
        raise RolloutError("the logits are NaN")

    async def ask(client: openai.AsyncOpenAI) -> None:
        answer = await client.chat.completions.create(model=MODEL, messages=ASK, stream=stream)
        if stream:
            async for _ in answer:
                pass

    with pytest.raises(openai.APIError, match="the logits are NaN"):
        with_client(generate, ask)


@pytest.mark.slow
def test_a_thousand_requests_at_once(engine: NativeEngine) -> None:
    """All answered, each with its own tokens."""
    prompts = [TOKENIZER(f"Tom has {i} apples")["input_ids"] for i in range(1000)]

    async def main() -> list[tuple[int, dict[str, Any]]]:
        connector = aiohttp.TCPConnector(limit=0)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with served(engine.generate) as (_, base_url):
            async with aiohttp.ClientSession(connector=connector, headers=headers) as http:

                async def one(prompt: list[int]) -> tuple[int, dict[str, Any]]:
                    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "seed": 1}
                    body["return_token_ids"] = True
                    async with http.post(base_url + TEXT, json=body) as answer:
                        return answer.status, await answer.json()

                return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))

    answers = asyncio.run(main())
    assert [status for status, _ in answers] == [200] * 1000
    assert [answer["prompt_token_ids"] for _, answer in answers] == prompts
    for i in (0, 500, 999):
        made = direct(engine, np.array(prompts[i], np.int32), 1, max_tokens=2)
        assert answers[i][1]["choices"][0]["token_ids"] == made.token_ids.tolist()
