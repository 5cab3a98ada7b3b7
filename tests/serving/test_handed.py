"""An agent in the process gets what it would get over HTTP: the same prompts, seeds, answers and errors."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rondo.agents.policy import MODEL, Answer, Policy
from rondo.agents.record import rows_of
from rondo.chat import encode_piece, stop_token_ids
from rondo.core.errors import DataError
from rondo.core.types import Completion, GenerateRequest, PolicyCall, SamplingParams, request_seed
from rondo.recipes.quickstart import CHAT_TEMPLATE
from rondo.serving import ApiError, Endpoint, EndpointSession, Key, SessionRules, Sessions
from rondo.serving.handed import read_handed
from rondo.serving.prompts import is_sample
from rondo.serving.sessions import PromptSeeds
from tests.chat.test_tail import WITH_TAIL, WITHOUT
from tests.serving.test_templates import CALLED, OWN, on_templates_at_hand, tokenizer_for

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"at": {"type": "integer", "minimum": 1}}},
        },
    }
]
TEMPLATES = {**OWN, "backwards": WITH_TAIL["backwards"], "numbers": WITH_TAIL["numbers"]}
TEMPLATES["remembers"] = WITHOUT["remembers"]
TEMPLATES["refuses"] = CHAT_TEMPLATE.replace(
    "{%- if message.role == 'tool'",
    "{%- if 'no' in message.content %}{{ raise_exception('no in ' ~ loop.index) }}{% endif %}"
    "{%- if message.role == 'tool'",
)


class Engine:
    """Answers by what it is asked, and remembers that."""

    def __init__(self, tok: Any) -> None:
        self.stops, self.size = stop_token_ids(tok), len(tok)
        self.call = encode_piece(tok, CALLED).tolist()
        self.asked: list[Any] = []

    async def generate(self, request: GenerateRequest, on_tokens: Any = None) -> Completion:
        ids = request.token_ids.tolist()
        before = sum(ids == asked for asked, *_ in self.asked)
        assert request.seed == request_seed(5, request.token_ids.tobytes(), before)
        self.asked.append((ids, request.seed, request.sampling))
        draw = random.Random(request.seed)
        ids = [draw.randrange(self.size) for _ in range(draw.randrange(1, 6))]
        ids = self.call if draw.random() < 0.3 else ids
        ids = [token for token in ids if token not in self.stops] or [0]
        ended = draw.random() < 0.7
        made = np.array([*ids, self.stops[0]] if ended else ids, np.int32)
        zeros = np.zeros(len(made), np.float32)
        return Completion(
            request.request_id, request.token_ids, made, zeros, made * 0, "stop" if ended else "length"
        )


class Side:
    """An episode on an endpoint of its own."""

    def __init__(self, template: str) -> None:
        tok = tokenizer_for(template)
        self.engine = Engine(tok)
        self.endpoint = Endpoint(tok, model=MODEL, max_context=1 << 16, sessions=Sessions())
        sampling = SamplingParams(1 << 15, stop_token_ids=self.engine.stops)
        rules = SessionRules(
            self.engine.generate, sampling, 5, "t", "t", np.zeros(0, np.int32), Key.of("none")
        )
        self.session = EndpointSession("t", rules)
        self.policy = Policy(self.endpoint, self.session, asyncio.get_running_loop())

    async def chat(self, messages: Any, **given: Any) -> Any:
        """What the agent gets, an error included."""
        try:
            return await self.ask(messages, **given)
        except ApiError as error:
            return str(error), error.param, error.code, error.status
        except TypeError as error:
            return str(error)

    async def ask(self, messages: Any, **given: Any) -> Answer:
        return await self.policy.chat(messages, **given)


class Wire(Side):
    """As a request over HTTP is read."""

    async def ask(self, messages: Any, **given: Any) -> Answer:
        body = {"model": MODEL, **given, "messages": messages}
        answers = await self.policy._answers("chat", json.dumps(body))
        if not isinstance(answers, list):
            raise answers
        return answers[0]


EDITS = (
    "nothing",
    "a text",
    "an id",
    "a number",
    "a type",
    "parts",
    "a name",
    "an order",
    "an unknown key",
    "half of a pair",
    "no role",
    "an object",
    "a tuple",
    "depth",
    "cut",
    "arguments",
    "no",
)


OF_CALLS = ("an id", "a number", "a type", "a tuple", "arguments")


def edited(edit: str, messages: list[Any], place: int, number: int) -> list[Any]:
    """Changes a message of the past, or writes one as clients do."""
    calling = [i for i, message in enumerate(messages) if message.get("tool_calls")]
    places = calling if calling and edit in OF_CALLS else range(len(messages))
    place = places[place % len(places)]
    message = messages[place]
    deep: Any = "deep"
    for _ in range(59 + number % 8):
        deep = [deep]
    changes: dict[str, Any] = {
        "a text": {"content": f"{number}"},
        "parts": {"content": [{"type": "text", "text": message.get("content") or ""}]},
        "a name": {"name": "Tom"},
        "an unknown key": {"reasoning": "hm"},
        "half of a pair": {"content": "\ud800"},
        "no role": {"role": None},
        "an object": {"content": Path("/")},
        "depth": {"content": deep},
        "no": {"content": "no"},
    }
    calls = message.get("tool_calls")
    if calls and edit == "an id":
        changes[edit] = {"tool_calls": [{**calls[0], "id": f"id{number}"}, *calls[1:]]}
    if calls and edit == "a tuple":
        changes[edit] = {"tool_calls": tuple(calls)}
    arguments = {"a number": {"at": 1}, "a type": {"at": True}, "arguments": "{no JSON"}
    if calls and edit in arguments:
        function = {"name": "look", "arguments": arguments[edit]}
        changes[edit] = {"tool_calls": [{**calls[0], "function": function}, *calls[1:]]}
    message = {**message, **changes.get(edit, {})}
    if edit == "an order":
        message = dict(reversed(message.items()))
    return messages[: place + 1] if edit == "cut" else [*messages[:place], message, *messages[place + 1 :]]


TURNS = st.lists(
    st.tuples(
        st.sampled_from([*EDITS, *["nothing"] * len(EDITS)]),
        st.integers(0, 30),
        st.sampled_from([(), (), TOOLS, TOOLS, "wrong"]),
        st.sampled_from([None, None, 9, 0]),
        st.integers(0, 9),
    ),
    min_size=2,
    max_size=14,
)


async def both(template: str, turns: Any) -> int:
    """Takes the same turns on both sides; returns how many were answered."""
    sides = [Side(template), Wire(template)]
    conversations: list[list[Any]] = [[{"role": "user", "content": "Go."}]]
    answered = 0
    try:
        for number, (edit, place, tools, max_tokens, which) in enumerate(turns):
            kept = conversations[which % len(conversations)]
            messages = edited(edit, kept, place, number)
            wanted = {"tools": [*TOOLS, {"type": "x"}] if tools == "wrong" else list(tools)}
            given = {**wanted, "max_tokens": max_tokens}
            given = {name: value for name, value in given.items() if value not in (None, [])}
            mine, theirs = [await side.chat(messages, **given) for side in sides]
            assert mine == theirs
            assert sides[0].engine.asked == sides[1].engine.asked
            if isinstance(mine, Answer):
                answered += 1
                calls = [call["id"] for call in mine.tool_calls]
                more = [{"role": "tool", "content": f"{number}", "tool_call_id": call} for call in calls]
                more = more or [{"role": "user", "content": f"{number} \u00e4\U0001f600"}]
                conversations = [*conversations[-2:], [*messages, mine.message, *more]]
        for one, other in zip(sides[0].session.calls, sides[1].session.calls, strict=True):
            assert (one.parent, one.inserted, one.key_length, one.reencoded) == (
                (other.parent, other.inserted, other.key_length, other.reencoded)
            )
        rows = [
            rows_of(PolicyCall(call.completion, call.inserted) for call in side.session.calls)
            for side in sides
        ]
        assert [row.response_ids.tolist() for row in rows[0]] == [
            row.response_ids.tolist() for row in rows[1]
        ]
    finally:
        for side in sides:
            side.endpoint.close()
    return answered


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(turns=TURNS)
def test_an_agent_is_answered_as_over_http(name: str, turns: Any) -> None:
    asyncio.run(both(TEMPLATES[name], turns))


@pytest.mark.slow
@on_templates_at_hand
@settings(max_examples=6, deadline=None)
@given(turns=TURNS)
def test_an_agent_is_answered_as_over_http_on_templates_at_hand(file: Path, turns: Any) -> None:
    template = file.read_text()
    try:
        stop_token_ids(tokenizer_for(template))
    except DataError as error:
        pytest.skip(f"refuses messages of text: {error}")
    asyncio.run(both(template, turns))


ON = ("nothing", 0, (), None, -1)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", ["quickstart", "refuses"])
def test_each_edit_of_the_past_is_seen(name: str, edit: str) -> None:
    """In a long conversation, with tools, and then it goes on."""
    called = [(*ON[:2], TOOLS, *ON[3:])] * 12
    for place in (0, 1, 5, -2, -1):
        asyncio.run(both(TEMPLATES[name], [*called, (edit, place, TOOLS, None, -1), *called[:3]]))


def test_only_what_is_behind_the_last_call_is_read() -> None:
    said = [{"role": "user", "content": "a" * 100}, {"role": "assistant", "content": "b"}]
    calls = [{"id": "i", "function": {"name": "look", "arguments": {"at": 1}}}]
    said += [{"role": "user", "content": "c"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    first = read_handed(said, None)
    assert first is not None
    second = read_handed([*said, {"role": "user", "content": "d"}], first)
    assert second is not None
    assert [a is b for a, b in zip(first.read, second.read, strict=False)] == [True] * 4
    said[3]["tool_calls"][0]["function"]["arguments"]["at"] = True  # equals 1, and says something else
    third = read_handed(said, second)
    assert third is not None
    assert third.read[3]["tool_calls"][0]["function"]["arguments"]["at"] is True
    assert third.read[0] is not first.read[0]
    said[0]["content"] = "other"  # nobody else has what was read
    assert first.read[0]["content"] == "a" * 100


def test_a_conversation_is_known_by_the_key_of_its_whole() -> None:
    """Whether read at once or call by call, and with other tools in between."""
    said = [{"role": "user", "content": str(i)} for i in range(6)]
    at_once = read_handed(said, None)
    last = None
    for length, head in ((1, "a"), (3, "b"), (3, "b"), (5, "a"), (6, "a")):
        read = read_handed(said[:length], last)
        assert read is not None
        last = read.keyed(head)
    assert at_once is not None
    assert last is not None
    assert last.key.digests == at_once.keyed("a").key.digests
    assert len(last.key) == 8


@given(
    ids=st.lists(st.sampled_from([0x27, 0x22, 0x2722, 0x5C, 0, 5, 70000]), max_size=12),
    cut=st.integers(0, 12),
    seed=st.integers(-(1 << 63), 1 << 63),
    before=st.integers(0, 3),
)
def test_the_seeds_of_a_prompt_in_two_parts_are_those_of_the_whole(
    ids: list[int], cut: int, seed: int, before: int
) -> None:
    """Python writes bytes in one kind of quotes or the other, by what is in them."""
    prompt = np.array(ids, np.int32)
    seeds = PromptSeeds(seed).then(prompt[:cut]).then(prompt[cut:])
    assert seeds.seed(before) == request_seed(seed, prompt.tobytes(), before)


def test_samples_are_two_conversations_of_as_many_as_there_are_messages() -> None:
    keys = [Key.of("chat", "null", str(i)) for i in range(4000)]
    assert all(is_sample(key, 2) for key in keys)
    assert sum(is_sample(key, 8) for key in keys) == pytest.approx(1000, abs=110)
    assert sum(is_sample(key, 64) for key in keys) == pytest.approx(125, abs=45)
    assert [i for i, key in enumerate(keys[:200]) if is_sample(key, 64)] == [15, 45]  # in each run


def test_a_whole_conversation_goes_on_in_the_time_of_its_end() -> None:
    """Lines of Python a call, at 8 and at 256 turns."""

    async def lines(turns: int) -> int:
        side = Side(CHAT_TEMPLATE)
        messages: list[Any] = [{"role": "user", "content": "Go."}]
        for _ in range(turns):
            messages += [(await side.policy.chat(messages)).message, {"role": "user", "content": "On."}]
        count = 0

        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        sys.settrace(trace)
        try:
            for _ in range(8):
                messages += [(await side.policy.chat(messages)).message, {"role": "user", "content": "On."}]
        finally:
            sys.settrace(None)
        side.endpoint.close()
        return count

    few, many = (asyncio.run(lines(turns)) for turns in (8, 256))
    assert many < 1.5 * few
