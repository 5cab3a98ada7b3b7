"""Any agent on any chat template: what is trained is what the engine got and sampled.

Beside three templates of our own this takes all of TRL's where it is installed, here or in the environment of
benchmarks/vs_trl.py; they are read there, and are no part of this repository.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rondo.agents.record import rows_of
from rondo.chat import encode_piece, render, stop_token_ids
from rondo.core.errors import DataError
from rondo.core.types import Completion, GenerateRequest, PolicyCall, SamplingParams
from rondo.recipes.quickstart import CHAT_TEMPLATE, tokenizer
from rondo.serving import ApiError, Endpoint, EndpointSession, Key, SessionRules, Sessions
from tests.chat.test_continuation import CALLS_ONLY_TEMPLATE, PLAIN_TEMPLATE

MODEL = "stub"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALLED = '<tool_call>{"name": "look", "arguments": {"at": "\\u003c|im_end|>"}}</tool_call>'
# Ends an answer otherwise when it is the last one: nothing can go on behind it.
TWO_ENDS_TEMPLATE = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{{- m.tool_calls | tojson if m.tool_calls }}
{{- '<|endoftext|>' if loop.last and m.role == 'assistant' else '<|im_end|>\\n' }}{% endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}"""
OWN = {
    "quickstart": CHAT_TEMPLATE,
    "calls only": CALLS_ONLY_TEMPLATE,
    "no end of turn": PLAIN_TEMPLATE,
    "two ends": TWO_ENDS_TEMPLATE,
}


def trl_templates() -> list[Path]:
    spec = importlib.util.find_spec("trl")
    installed = [Path(place) for place in spec.submodule_search_locations or []] if spec else []
    beside = Path(__file__).parents[2].glob(".venv-trl/lib/*/site-packages/trl")
    return sorted(file for place in [*installed, *beside] for file in place.glob("chat_templates/*.jinja"))


on_templates_at_hand = pytest.mark.parametrize(
    "file",
    trl_templates() or [pytest.param(None, marks=pytest.mark.skip(reason="TRL's templates are not here"))],
    ids=lambda file: file.stem if file else "none",
)


def tokenizer_for(template: str) -> Any:
    """The quickstart's with all that looks like a special token in the template as one."""
    tok = tokenizer()
    marks = re.findall(r"<[^<>\s'\"{}%=/][^<>\s'\"{}%]{0,40}>|\[/?[A-Z_]{3,}\]", template)
    new = sorted({*marks} - {*tok.get_vocab()})
    tok.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": new})
    tok.chat_template = template
    tok.tool_format = "hermes"  # of `CALLED`, whatever the template writes
    return tok


class Stub:
    """An engine that answers with any tokens, at times with a call, at times with an end, and remembers."""

    def __init__(self, tok: Any, seed: int) -> None:
        self.draw, self.size, self.seen = random.Random(seed), len(tok), []
        self.stops = stop_token_ids(tok)
        self.call = encode_piece(tok, CALLED).tolist()

    async def generate(self, request: GenerateRequest, on_tokens: Any = None) -> Completion:
        ids = [self.draw.randrange(self.size) for _ in range(self.draw.randrange(1, 6))]
        ids = [token for token in ids if token not in self.stops] or [0]
        ids = self.call if self.draw.random() < 0.3 else ids
        ended = self.draw.random() < 0.7
        ids = [*ids, self.draw.choice(self.stops)] if ended else ids
        self.seen.append((request.token_ids.tolist(), ids))
        made = np.array(ids, np.int32)
        zeros = np.zeros(len(ids), np.float32)
        return Completion(
            request.request_id, request.token_ids, made, zeros, made * 0, "stop" if ended else "length"
        )


class Agent:
    """Takes whatever turns it is told to, with several contexts at a time."""

    def __init__(self, template: str, seed: int) -> None:
        self.tok = tokenizer_for(template)
        self.stub = Stub(self.tok, seed)
        self.endpoint = Endpoint(self.tok, model=MODEL, max_context=1 << 20, sessions=Sessions())
        sampling = SamplingParams(1 << 19, stop_token_ids=self.stub.stops)
        nothing = np.zeros(0, np.int32)
        rules = SessionRules(self.stub.generate, sampling, 0, "t", "t", nothing, Key.of("none"))
        self.session = EndpointSession("t", rules)
        self.contexts: list[list[Any]] = []
        self.number = 0
        self.refused = 0

    def text(self) -> str:
        self.number += 1
        return f"{self.number}. <|im_end|>?"

    async def take(self, move: str, which: int, n: int) -> None:
        """Asks once. A request that the template refuses is none."""
        head = [{"role": "system", "content": self.text()}] if which % 3 == 0 else []
        opening = [*head, {"role": "user", "content": self.text()}]
        messages = list(self.contexts[which % len(self.contexts)]) if self.contexts else []
        if move == "new" or not messages:
            messages = opening
        elif move == "summary":
            messages = [*opening, messages[-1], {"role": "user", "content": self.text()}]
        elif move == "on":
            called = messages[-1].get("tool_calls", [])
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "name": "look", "content": self.text()}
                for call in called
            ] or [{"role": "user", "content": self.text()}]
        else:  # the same again
            messages = messages[:-1]
        body = {"model": MODEL, "messages": messages, "n": n, "tools": [TOOL]}
        try:
            prepared = await self.endpoint.prepare("chat", json.dumps(body).encode(), self.session)
        except ApiError:
            self.refused += 1
            return
        self.check_new(prepared.place, prepared.asked.messages)
        for choice in json.loads(await self.endpoint.answer(prepared))["choices"]:
            self.contexts.append([*messages, choice["message"]])

    def check_new(self, place: Any, messages: Any) -> None:
        """What was put behind an answer is what the whole conversation's text ends with."""
        whole = render(self.tok, messages, tools=[TOOL], generation=True)
        if place.parent is None:
            expected = self.tok(whole, add_special_tokens=False)["input_ids"]
            assert place.prompt_ids.tolist() == expected
            return
        before = self.session.calls[place.parent].token_ids
        assert place.prompt_ids[: len(before)].tolist() == before.tolist()
        assert whole.endswith(self.tok.decode(place.prompt_ids[len(before) :]))


def trained(rows: Any) -> list[tuple[list[int], list[int]]]:
    """(what stood before, what was sampled) of each turn of the policy."""
    found = []
    for row in rows:
        whole = [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
        mask = [0] * len(row.prompt_ids) + row.response_mask.tolist()
        for turn in row.turns:
            if turn.kind == "policy":
                start, stop = len(row.prompt_ids) + turn.start, len(row.prompt_ids) + turn.stop
                found.append((whole[:start], whole[start:stop]))
                mask[start:stop] = [bit - 1 for bit in mask[start:stop]]
        assert not any(mask)
    return found


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["on", "on", "on", "new", "summary", "again"]), st.integers(0, 9), st.integers(1, 2)
    ),
    min_size=1,
    max_size=8,
)


def check_any_agent(template: str, moves: list[tuple[str, int, int]], seed: int) -> Agent:
    async def episode() -> Agent:
        agent = Agent(template, seed)
        try:
            for move in moves:
                await agent.take(*move)
        finally:
            agent.endpoint.close()
        return agent

    agent = asyncio.run(episode())
    rows = rows_of(PolicyCall(call.completion, call.inserted) for call in agent.session.calls)
    assert sorted(trained(rows)) == sorted(agent.stub.seen)
    return agent


@pytest.mark.parametrize("name", OWN)
@settings(max_examples=20, deadline=None)
@given(moves=MOVES, seed=st.integers(0, 2**32))
def test_every_row_is_what_the_engine_got(name: str, moves: Any, seed: int) -> None:
    check_any_agent(OWN[name], moves, seed)


@pytest.mark.slow
@on_templates_at_hand
@settings(max_examples=6, deadline=None)
@given(moves=MOVES, seed=st.integers(0, 2**32))
def test_every_row_is_what_the_engine_got_on_templates_at_hand(file: Path, moves: Any, seed: int) -> None:
    template = file.read_text()
    try:
        stop_token_ids(tokenizer_for(template))
    except DataError as error:
        pytest.skip(f"refuses messages of text: {error}")
    check_any_agent(template, moves, seed)


ON = [("on", -1, 1)] * 8


def test_a_conversation_that_grows_is_one_row() -> None:
    for name in ("quickstart", "calls only", "no end of turn"):
        agent = check_any_agent(OWN[name], ON, 3)
        parents = [call.parent for call in agent.session.calls]
        sent_back = sum(len(ids) for _, ids in agent.stub.seen[:-1])
        assert agent.session.tokens_sent_back() == (sent_back, 0)
        assert (name, parents, agent.refused) == (name, [None, *range(7)], 0)
        assert {call.inserted for call in agent.session.calls[1:]} == {"user", "tool"}


def test_where_the_template_cannot_go_on_each_call_is_a_row() -> None:
    """Tokenised whole, as a client without a session has it; and said."""
    agent = check_any_agent(OWN["two ends"], ON, 3)
    assert [call.parent for call in agent.session.calls] == [None] * 8
    sent_back = sum(len(ids) for _, ids in agent.stub.seen[:-1])
    assert agent.session.tokens_sent_back() == (sent_back, sent_back)
    text, calls = agent.endpoint.continuation.notes()
    assert "an answer in text is tokenised whole, a row of its own: it ends the last answer with" in text
    assert "calls tools" in calls


def test_messages_that_the_template_leaves_out_are_refused() -> None:
    template = CHAT_TEMPLATE.replace("message in messages", "message in messages if message.role != 'tool'")
    assert template != CHAT_TEMPLATE
    agent = check_any_agent(template, ON, 3)
    assert agent.refused
