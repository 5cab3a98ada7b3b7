"""Sessions: exact tokens in, exact tokens out, whatever the text of them would tokenise to."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from rondo.chat import encode_piece, encode_prompt
from rondo.core.types import Completion, GenerateRequest, Prompt, SamplingParams, request_seed
from rondo.rollout import NativeEngine
from rondo.serving import ApiError, EndpointSession, Key, ModelCall, SessionRules, Sessions, prompt_key
from tests.messages import full_text
from tests.serving.conftest import MODEL, STOPS, TOKEN, TOKENIZER, direct, post, served, with_client

ASK: list[Any] = [{"role": "user", "content": "Tom has 3 apples. How many?"}]
MORE: dict[str, Any] = {"role": "user", "content": "Sure?"}
IDS = encode_prompt(TOKENIZER, ASK)
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
BETWEEN = "<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
TOOLS: list[Any] = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}]


async def ask(client: openai.AsyncOpenAI, messages: Any, **settings: Any) -> Any:
    return await client.chat.completions.create(
        model=MODEL, messages=messages, **{"max_tokens": 8, "seed": 4, **settings}
    )


def says(text: str, *more: int) -> Any:
    """A generate call that answers with the tokens of `text`, cut as no tokenizer would: byte by byte."""
    pieces = [TOKENIZER(piece, add_special_tokens=False)["input_ids"] for piece in text]
    return says_tokens([*(token for piece in pieces for token in piece), *more], "stop" if more else "length")


def says_tokens(tokens: list[int], reason: Any) -> Any:
    """A generate call that answers with these tokens, one after the other, and returns them too."""
    ids = np.array(tokens, np.int32)

    async def generate(request: GenerateRequest, on_tokens: Any = None) -> Completion:
        numbers = -np.arange(1, len(ids) + 1, dtype=np.float32)
        made = Completion(
            request.request_id, request.token_ids, ids, numbers, np.full(len(ids), 2, np.int32), reason
        )
        if on_tokens is not None:
            for i in range(len(ids)):
                part = (ids[i : i + 1], numbers[i : i + 1], made.policy_versions[i : i + 1])
                on_tokens(Completion(request.request_id, request.token_ids, *part, finish_reason=reason))
        return made

    return generate, ids


@pytest.mark.parametrize("more", [(), (END,)])
def test_a_second_turn_goes_on_from_the_tokens(more: tuple[int, ...]) -> None:
    """Not from what their text tokenises to; the end of turn is written once."""
    generate, made = says("How many apples", *more)
    again = encode_piece(TOKENIZER, "How many apples")
    assert len(again) < len(made) - len(more)

    async def use(client: openai.AsyncOpenAI) -> Any:
        first = await ask(client, ASK)
        assert first.choices[0].message.content == "How many apples"
        return await ask(client, [*ASK, first.choices[0].message, MORE])

    between = encode_piece(TOKENIZER, BETWEEN).tolist()
    expected = [*IDS.tolist(), *made.tolist(), *(between[1:] if more else between)]
    assert with_client(generate, use, session="s").prompt_token_ids == expected
    # a client without a session sends text, and gets the tokens of text
    texts = [*ASK, {"role": "assistant", "content": "How many apples"}, MORE]
    assert with_client(generate, use).prompt_token_ids == encode_prompt(TOKENIZER, texts).tolist()


def test_a_session_with_the_real_engine(engine: NativeEngine) -> None:
    """Three turns: the last prompt holds all of both answers; the engine's answer to it is the endpoint's."""

    async def use(client: openai.AsyncOpenAI) -> tuple[list[Any], dict[str, Any]]:
        messages, answers = list(ASK), []
        for _ in range(3):
            answers.append(await ask(client, messages))
            messages += [answers[-1].choices[0].message.model_dump(exclude_none=True), MORE]
        return answers, await client.get("/sessions/mine", cast_to=dict[str, Any])

    answers, recorded = with_client(engine.generate, use, session="mine")
    context = IDS.tolist()
    for answer in answers:
        assert answer.prompt_token_ids == context
        made = direct(engine, np.array(context, np.int32), 4, max_tokens=8)
        (choice,) = answer.choices
        assert choice.token_ids == made.token_ids.tolist()
        ended = choice.token_ids[-1] == END
        context = context + choice.token_ids + encode_piece(TOKENIZER, BETWEEN).tolist()[ended:]
    assert recorded["id"] == "mine"
    assert [call["parent"] for call in recorded["calls"]] == [None, 0, 1]
    assert [call["inserted"] for call in recorded["calls"]] == ["environment", "user", "user"]
    assert [call["token_ids"] for call in recorded["calls"]] == [a.choices[0].token_ids for a in answers]
    assert [call["token_log_probs"] for call in recorded["calls"]] == [
        a.choices[0].token_log_probs for a in answers
    ]


def calls_of(generate: Any, use: Any, **settings: Any) -> list[tuple[int | None, str]]:
    """(parent, inserted) of every call of session "s"."""
    store = Sessions(8)
    with_client(generate, use, session="s", sessions=store, **settings)
    return [(call.parent, call.inserted) for call in store.peek("s").calls]


def test_what_is_no_extension_starts_anew() -> None:
    generate, _ = says("yes")

    async def use(client: openai.AsyncOpenAI) -> None:
        first = await ask(client, ASK)
        answer = {"role": "assistant", "content": first.choices[0].message.content}
        await ask(client, [*ASK, {**answer, "content": "yes "}, MORE])  # another answer
        await ask(client, [{"role": "system", "content": "Hi"}, *ASK, answer, MORE])  # another beginning
        await ask(client, [*ASK, answer, MORE], tools=TOOLS)  # other tools
        await ask(client, [*ASK, {**answer, "content": [{"type": "text", "text": "yes"}]}, MORE])

    assert [parent for parent, _ in calls_of(generate, use)] == [None, None, None, None, 0]


def test_the_longest_conversation_is_gone_on_with() -> None:
    """Branches too: each goes on from the call that it extends; of two equal answers from the later one."""
    generate, _ = says("yes")
    yes = {"role": "assistant", "content": "yes"}

    async def use(client: openai.AsyncOpenAI) -> None:
        await ask(client, ASK)
        await ask(client, ASK)
        await ask(client, [*ASK, yes, MORE])
        await ask(client, [*ASK, yes, MORE, yes, MORE])
        await ask(client, [*ASK, yes, {"role": "user", "content": "No?"}])

    assert [parent for parent, _ in calls_of(generate, use)] == [None, None, 1, 2, 1]


def chat_turns(turns: int) -> EndpointSession:
    """A session of a conversation with 8 tokens of an answer and 48 of others a turn."""
    session, ids = EndpointSession(), np.arange(40, dtype=np.int32)
    key = Key.of("chat", "null", "user 0")
    for turn in range(turns):
        found = session.extended_call(key)
        assert (found is None) == (turn == 0)
        answer = np.full(8, turn, np.int32)
        made = Completion(str(turn), ids.copy(), answer, np.zeros(8, np.float32), answer, "stop")
        key = key.then([f"assistant {turn}" * 8])
        session.add(ModelCall(found and found[0], "user", made, len(key)), key, key)
        key = key.then([f"user {turn}" * 48])
        ids = np.concatenate([ids, answer, np.arange(turn, turn + 48, dtype=np.int32)])
    return session


def test_a_session_of_many_turns_keeps_each_token_about_once() -> None:
    """79 MB when each call kept its whole prompt and conversation."""
    tracemalloc.start()
    try:
        session = chat_turns(512)
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept <= 2_000_000
    assert [call.parent for call in session.calls] == [None, *range(511)]
    expected = np.arange(40, dtype=np.int32)
    for turn, call in enumerate(session.calls):  # what was added later changed nothing
        np.testing.assert_array_equal(call.completion.prompt_ids, expected)
        expected = np.concatenate([call.token_ids, np.arange(turn, turn + 48, dtype=np.int32)])
    with pytest.raises(ValueError, match="read-only"):
        session.calls[0].completion.prompt_ids[0] = 1


def test_branches_of_a_session_keep_their_own_tokens() -> None:
    """Two calls go on from one answer, a third asks again what the second did, a fourth less than it."""
    session, prompts = EndpointSession(), [[1, 2], [1, 2, 9, 3], [1, 2, 9, 4, 5, 6], [1, 2, 9, 4, 5, 6]]
    prompts += [[1, 2, 9, 3, 9, 7], [1, 2, 9], [1, 2, 9, 4, 5, 6, 9, 8]]
    for name, (parent, ids) in enumerate(zip([None, 0, 0, 0, 1, 0, 3], prompts, strict=True)):
        one = np.array([9], np.int32)
        made = Completion(str(name), np.array(ids, np.int32), one, np.zeros(1, np.float32), one, "stop")
        session.add(ModelCall(parent, "user", made, 1), Key.of("ids"), Key.of("ids"))
    assert [call.completion.prompt_ids.tolist() for call in session.calls] == prompts
    found = [session.extended_ids(np.array(ids)) for ids in ([1, 2, 9, 4, 5, 6, 9], [1, 2, 9, 3, 9, 8], [1])]
    assert found == [3, 1, None]


def test_streamed_answers_are_recorded_like_others() -> None:
    generate, made = says("How many", END)

    async def use(client: openai.AsyncOpenAI) -> Any:
        stream = await ask(client, ASK, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        return await ask(client, [*ASK, {"role": "assistant", "content": text}, MORE])

    answer = with_client(generate, use, session="s")
    assert answer.prompt_token_ids[: len(IDS) + len(made)] == [*IDS.tolist(), *made.tolist()]


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_come_back_as_tokens(stream: bool) -> None:
    """The answer has OpenAI's tool_calls; the tool's result goes behind the exact tokens of the call."""
    call = '<tool_call>{"name": "calc", "arguments": {"expr":  "3+4"}}</tool_call>'
    generate, made = says(f"Let me see. {call}", END)
    results: list[Any] = []

    async def use(client: openai.AsyncOpenAI) -> None:
        if stream:
            chunks = [chunk async for chunk in await ask(client, ASK, tools=TOOLS, stream=True)]
            last = chunks[-1].choices[0]
            content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            calls = [c.model_dump(exclude={"index"}) for c in last.delta.tool_calls]
            reason, message = (
                last.finish_reason,
                {"role": "assistant", "content": content, "tool_calls": calls},
            )
        else:
            choice = (await ask(client, ASK, tools=TOOLS)).choices[0]
            reason, message = choice.finish_reason, choice.message.model_dump()
        (call,) = message["tool_calls"]
        assert (reason, message["content"], call["function"]["name"]) == (
            "tool_calls",
            "Let me see. ",
            "calc",
        )
        assert json.loads(call["function"]["arguments"]) == {"expr": "3+4"}
        tool = {"role": "tool", "content": "7", "tool_call_id": call["id"]}
        results.append(await ask(client, [*ASK, message, tool], tools=TOOLS))

    assert calls_of(generate, use, max_context=400) == [(None, "environment"), (0, "tool")]
    head = encode_prompt(TOKENIZER, ASK, tools=TOOLS)
    behind = "\n<|im_start|>user\n<tool_response>7</tool_response><|im_end|>\n<|im_start|>assistant\n"
    expected = [*head.tolist(), *made.tolist(), *encode_piece(TOKENIZER, behind).tolist()]
    assert results[0].prompt_token_ids == expected


def test_without_tools_a_call_is_text() -> None:
    text = '<tool_call>{"name": "calc"}</tool_call>'
    generate, _ = says(text)
    for settings in ({}, {"tools": TOOLS, "tool_choice": "none"}):

        async def use(client: openai.AsyncOpenAI, settings: Any = settings) -> Any:
            return await ask(client, ASK, **settings)

        answer = with_client(generate, use)
        assert answer.choices[0].message.content == text
        assert answer.choices[0].finish_reason == "length"
        assert answer.prompt_token_ids == IDS.tolist()


@pytest.mark.parametrize("as_ids", [False, True])
def test_text_completions_go_on_too(as_ids: bool) -> None:
    generate, made = says(" apples")

    async def use(client: openai.AsyncOpenAI) -> Any:
        async def complete(prompt: Any) -> Any:
            return await client.completions.create(model=MODEL, prompt=prompt, max_tokens=8)

        first = await complete("Tom has")
        if not as_ids:
            return await complete("Tom has apples and pens")
        ids = first.prompt_token_ids + first.choices[0].token_ids
        return await complete([*ids, *encode_piece(TOKENIZER, " and pens").tolist()])

    expected = [*TOKENIZER("Tom has")["input_ids"], *made, *encode_piece(TOKENIZER, " and pens")]
    assert with_client(generate, use, session="s").prompt_token_ids == [int(token) for token in expected]
    assert calls_of(generate, use) == [(None, "environment"), (0, "environment")]


def test_a_session_by_header_is_the_same_session() -> None:
    generate, made = says("yes")

    async def main() -> list[int]:
        async with served(generate) as (_, base_url):
            body = {"model": MODEL, "messages": ASK}
            await post(base_url, "/chat/completions", body, **{"X-Session-Id": "one"})
            body["messages"] = [*ASK, {"role": "assistant", "content": "yes"}, MORE]
            body["return_token_ids"] = True
            key = {"Authorization": "Bearer correct-horse:one"}
            _, answer = await post(base_url, "/chat/completions", body, **key)
            return answer["prompt_token_ids"]

    assert asyncio.run(main())[: len(IDS) + len(made)] == [*IDS.tolist(), *made.tolist()]


def test_the_longest_unused_sessions_are_forgotten() -> None:
    store = Sessions(2)
    first = store.get("a")
    store.get("b")
    assert store.get("a") is first
    store.get("c")
    assert store.peek("a") is first
    with pytest.raises(ApiError, match="no session 'b'"):
        store.peek("b")
    assert store.get(None) is not store.get(None)


def test_a_session_can_be_deleted() -> None:
    generate, _ = says("yes")

    async def use(client: openai.AsyncOpenAI) -> Any:
        await ask(client, ASK)
        deleted = await client.delete("/sessions/s", cast_to=dict[str, Any])
        with pytest.raises(openai.NotFoundError, match="there is no session 's'"):
            await client.get("/sessions/s", cast_to=dict[str, Any])
        return deleted

    assert with_client(generate, use, session="s") == {"id": "s", "deleted": True}


# ---- what a training run fixes


def rules(generate: Any, **changes: Any) -> SessionRules:
    prompt = Prompt(0, "p", "s", IDS, {}, tuple(ASK))
    given = {
        "generate": generate,
        "sampling": SamplingParams(10, temperature=0.8, stop_token_ids=STOPS),
        "seed": 77,
        "name": "train/p/0",
        "affinity": "train/0",
        "prompt_ids": IDS,
        "key": prompt_key(prompt, ""),
    }
    return SessionRules(**{**given, **changes})


def in_training(use: Any, given: SessionRules) -> tuple[Any, EndpointSession]:
    store = Sessions()
    session = store.open("s", given)
    return with_client(None, use, session="s", sessions=store), session


def test_the_run_says_how_to_sample(engine: NativeEngine) -> None:
    requests: list[GenerateRequest] = []

    async def generate(request: GenerateRequest, on_tokens: Any = None) -> Completion:
        requests.append(request)
        return await engine.generate(request)

    async def use(client: openai.AsyncOpenAI) -> None:
        create = client.chat.completions.create
        first = await create(model=MODEL, messages=ASK, temperature=0.8, max_tokens=4)
        with pytest.raises(openai.BadRequestError, match="in this session and cannot be"):
            await create(model=MODEL, messages=ASK, temperature=0.5)
        again = [*ASK, first.choices[0].message, {"role": "user", "content": "?"}]
        await create(model=MODEL, messages=again)

    in_training(use, rules(generate, sampling=SamplingParams(40, temperature=0.8, stop_token_ids=STOPS)))
    first, second = requests
    assert first.sampling == SamplingParams(4, temperature=0.8, stop_token_ids=STOPS)
    assert (first.seed, first.affinity) == (77, "train/0")
    # rollout.max_tokens is for the whole response, what was inserted included
    assert second.sampling.max_tokens == len(IDS) + 40 - len(second.token_ids)
    assert second.seed not in (77, first.seed)


def test_a_response_has_its_bound() -> None:
    generate, _ = says("How many apples")

    async def use(client: openai.AsyncOpenAI) -> None:
        create = client.chat.completions.create
        first = await create(model=MODEL, messages=ASK)
        with pytest.raises(openai.BadRequestError, match=full_text("+ rollout.max_tokens) with")) as caught:
            await create(model=MODEL, messages=[*ASK, first.choices[0].message, MORE])
        assert caught.value.code == "context_length_exceeded"

    in_training(use, rules(generate))


def test_the_prompts_own_tokens_are_used() -> None:
    """Whatever its messages would tokenise to: it may have been cut."""
    generate, _ = says("yes")

    async def use(client: openai.AsyncOpenAI) -> Any:
        return await client.chat.completions.create(model=MODEL, messages=ASK)

    answer, _ = in_training(use, rules(generate, prompt_ids=IDS[3:]))
    assert answer.prompt_token_ids == IDS[3:].tolist()


def test_seeds_follow_from_prompts_not_from_order() -> None:
    """Two different calls get the same noise in any order; the same call twice gets two."""
    other = [{"role": "user", "content": "Ana?"}]
    seen: list[dict[tuple[int, ...], list[int]]] = []
    for order in ((ASK, other, other), (other, ASK, other)):
        seeds: dict[tuple[int, ...], list[int]] = {}

        async def generate(request: GenerateRequest, on_tokens: Any = None, seeds: Any = seeds) -> Completion:
            seeds.setdefault(tuple(request.token_ids.tolist()), []).append(request.seed)
            return await says("yes")[0](request)

        async def use(client: openai.AsyncOpenAI, order: Any = order) -> None:
            for messages in order:
                await client.chat.completions.create(model=MODEL, messages=messages)

        in_training(use, rules(generate))
        seen.append(seeds)
    assert seen[0] == seen[1]
    assert seen[0][tuple(IDS.tolist())] == [77]
    twice = seen[0][tuple(encode_prompt(TOKENIZER, other).tolist())]
    assert len(set(twice)) == 2
    assert 77 not in twice


def test_a_seed_that_the_agent_gives_is_mixed_with_the_runs() -> None:
    seeds = []

    async def generate(request: GenerateRequest, on_tokens: Any = None) -> Completion:
        seeds.append(request.seed)
        return await says("yes")[0](request)

    async def use(client: openai.AsyncOpenAI) -> None:
        await ask(client, ASK, seed=1)
        await ask(client, ASK, seed=1)

    in_training(use, rules(generate))
    assert seeds == [request_seed(77, "asked", 1)] * 2


def test_a_session_that_ends_takes_its_calls_back() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def generate(request: GenerateRequest, on_tokens: Any = None) -> Completion:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    store = Sessions()
    store.open("s", rules(generate))

    async def use(client: openai.AsyncOpenAI) -> None:
        asking = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=ASK))
        await started.wait()
        store.close("s")
        with pytest.raises(openai.APIStatusError, match="the session has ended"):
            await asking
        assert cancelled.is_set()
        with pytest.raises(openai.NotFoundError, match="there is no such session"):
            await client.chat.completions.create(model=MODEL, messages=ASK)

    with_client(None, use, session="s", sessions=store)


def test_each_key_has_sessions_of_its_own(engine: NativeEngine) -> None:
    """The same name under two keys is two sessions; nobody sees, goes on from or ends another's."""

    async def main() -> None:
        async with served(engine.generate, more_keys=("other",)) as (_, base_url):
            async with aiohttp.ClientSession() as http:

                async def status(method: str, key: str, name: str) -> tuple[int, int]:
                    headers = {"Authorization": f"Bearer {key}"}
                    async with http.request(method, f"{base_url}/sessions/{name}", headers=headers) as answer:
                        return answer.status, len((await answer.json()).get("calls", []))

                body = {"model": MODEL, "messages": ASK, "max_tokens": 2}
                for key, times in ((f"{TOKEN}:alice", 2), ("other:alice", 1), ("other:bob", 1)):
                    for _ in range(times):
                        headers = {"Authorization": f"Bearer {key}"}
                        assert (await post(base_url, "/chat/completions", body, **headers))[0] == 200
                assert await status("GET", TOKEN, "alice") == (200, 2)
                assert await status("GET", "other", "alice") == (200, 1)
                assert await status("GET", TOKEN, "bob") == (404, 0)
                assert await status("DELETE", TOKEN, "bob") == (404, 0)
                assert await status("DELETE", "other", "alice") == (200, 0)
                assert await status("GET", "other", "alice") == (404, 0)
                assert await status("GET", TOKEN, "alice") == (200, 2)
                assert await status("GET", "other", "bob") == (200, 1)

    asyncio.run(main())
