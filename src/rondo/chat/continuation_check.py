"""Proves on made-up conversations what `continuation` relies on, once for a tokenizer and its template: what
is put behind an answer is what the template itself writes there. And whether a template has a clock, or drops
thoughts.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from rondo.chat.continuation import (
    NEXT,
    QUESTION,
    SAMPLE_TOOLS,
    SAMPLES,
    AnswerKind,
    Continuation,
    find_ends,
    kind_of,
)
from rondo.chat.encode import opening_of, reads_clock, render
from rondo.chat.messages import Message
from rondo.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Conversations per kind of answer.
_NUM_HISTORIES = 8
_THOUGHT = "rondo thinks"


def checked_continuation(tokenizer: PreTrainedTokenizerBase) -> Continuation:
    """Returns how conversations go on, without the kinds of answers behind which one of the conversations
    below would go on otherwise than the template writes it.
    """
    found = find_ends(tokenizer)
    if tokenizer.chat_template is None:
        return found
    for kind in ("text", "calls"):
        told = []
        for seed in range(_NUM_HISTORIES):
            messages, turn, tools = history(seed, kind)
            try:
                whole = render(tokenizer, messages, tools=tools, generation=True)
            except DataError:  # as a request with them is
                continue
            rest = found.text(messages, turn, tools)
            for written in {1, turn - 1} if turn > 1 and found.has_tail(tools) else ():
                if found.text(messages, turn, tools, written=written, is_sample=False) != rest:
                    found.drop_tails()
            told.append(rest is not None)
            fault = _fault(found, messages, turn, whole, rest) if rest is not None else ""
            if fault:
                found = found.without(kind, f"{fault} (roles {' '.join(m['role'] for m in messages)})")
        if kind in found.ends and told and not any(told):
            found = found.without(kind, "where an answer ends depends on what stands around it")
    return found


def has_clock(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Says whether the tokenizer's template, with its options, writes another text at another time."""
    for seed in range(_NUM_HISTORIES):
        messages, _, tools = history(seed, "text")
        with contextlib.suppress(DataError):  # it takes no system message, say
            if reads_clock(tokenizer, messages, tools):
                return True
    return False


def drops_thoughts(tokenizer: PreTrainedTokenizerBase, kind: AnswerKind) -> bool:
    """Says whether the template writes an answer of this kind without its thought where the conversation goes
    on.
    """
    if opening_of(tokenizer).rstrip().endswith("</think>"):  # it has the policy answer without any
        return False
    said = f"<think>\n{_THOUGHT}\n</think>\n\n{SAMPLES[kind]['content']}"
    messages = [QUESTION, {**SAMPLES[kind], "content": said}, NEXT[kind]]
    try:
        return _THOUGHT not in render(tokenizer, messages, generation=True)
    except (ConfigError, DataError):  # it takes no such conversation: requests will say so
        return False


def _fault(found: Continuation, messages: Sequence[Message], turn: int, whole: str, rest: str) -> str:
    """Says in what `rest`, which would be put behind answer `turn`, differs from what stands there in the
    whole; empty: in nothing.
    """
    if not whole.endswith(rest):
        return f"it goes on with {rest!r:.80} or, behind another text, with {whole[-len(rest) :]!r:.80}"
    before = whole[: len(whole) - len(rest)]
    if any(message["content"] in before for message in messages[turn + 1 :]):
        return "it writes new messages before the answer"
    answer = messages[turn]
    end = found.ends[kind_of(answer)]
    said = answer["content"].rpartition("\n")[2] + end.closing
    if not end.in_calls and not before.endswith(said):
        return f"it ends the answer {said!r} as {before[-40:]!r}"
    return ""


def history(seed: int, kind: AnswerKind) -> tuple[list[Message], int, Any]:
    """Returns a conversation, the index of its last answer (of this kind), and the tools. One to three
    messages follow the answer.
    """
    draw = random.Random(f"{seed} {kind}")
    words = (f"{draw.choice(('red', 'blue', 'green'))} {number}." for number in count(100))
    tools = SAMPLE_TOOLS if kind == "calls" or seed % 2 else None
    messages: list[Message] = []
    if draw.random() < 0.5:
        messages.append({"role": "system", "content": next(words)})
    for _ in range(draw.randrange(3)):
        messages.append({"role": "user", "content": next(words)})
        if tools and draw.random() < 0.5:
            messages += _calls(draw, words)
        messages.append(_says(draw, words))
    messages.append({"role": "user", "content": next(words)})
    if kind == "text":
        messages += [_says(draw, words), {"role": "user", "content": next(words)}]
        return messages, len(messages) - 2, tools
    new = _calls(draw, words)
    turn = len(messages)
    messages += new
    if draw.random() < 0.25:
        messages += [{"role": "user", "content": next(words)}]
    return messages, turn, tools


def _says(draw: random.Random, words: Iterator[str]) -> Message:
    thoughts = f"<think>\n{next(words)}\n</think>\n\n" if draw.random() < 0.5 else ""
    return {"role": "assistant", "content": thoughts + next(words)}


def _calls(draw: random.Random, words: Iterator[str]) -> list[Message]:
    """Returns an answer that calls one or two tools, and the tools' results."""
    names = draw.choices(("look", "count"), k=draw.choice((1, 1, 2)))
    ids = [f"call{draw.randrange(10**5):05}" for _ in names]
    calls = [
        {"id": i, "type": "function", "function": {"name": name, "arguments": {"at": next(words)}}}
        for i, name in zip(ids, names, strict=True)
    ]
    said = next(words) if draw.random() < 0.5 else ""
    results = [
        {"role": "tool", "content": next(words), "name": name, "tool_call_id": i}
        for i, name in zip(ids, names, strict=True)
    ]
    return [{"role": "assistant", "content": said, "tool_calls": calls}, *results]
