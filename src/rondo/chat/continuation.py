"""What a conversation adds behind an answer, as tokens: a session goes on from the tokens that the model was
given and made, never from its own text tokenised again.

The whole conversation is rendered with a marker in the answer's place; what stands behind the marker, from
the answer's end of turn on, is new. So the answer's own text plays no part: what a template makes of it (a
thinking block that it drops, white space that it strips) cannot change what stands behind it.

Where a caller knows that the beginning has been rendered before, only the end is (`tail`), if the template
allows that; a sample is rendered whole, too, and after a difference all are.
"""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rondo.chat.encode import common_start, encode_piece, render, tokenise
from rondo.chat.messages import Message
from rondo.chat.tail import TailTemplate, tail_template
from rondo.core.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

# An answer that says something; one that calls tools.
AnswerKind = Literal["text", "calls"]

QUESTION: Message = {"role": "user", "content": "a"}
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": {"at": "b"}}}
SAMPLES: Mapping[AnswerKind, Message] = {
    "text": {"role": "assistant", "content": "b"},
    "calls": {"role": "assistant", "content": "", "tool_calls": [_CALL]},
}
NEXT: Mapping[AnswerKind, Message] = {
    "text": {"role": "user", "content": "c"},
    "calls": {"role": "tool", "content": "c", "name": "look", "tool_call_id": _CALL["id"]},
}
# What made-up conversations are told that they may call.
SAMPLE_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {
                "type": "object",
                "properties": {"at": {"type": "string", "description": "Where"}},
            },
        },
    }
    for name in ("look", "count")
]


@dataclass(frozen=True)
class End:
    """How a template ends an answer of one kind."""

    in_calls: bool
    """Whether the marker stands in the arguments of the last call; else it is the content."""
    closing: str
    """The text between the marker and the end of turn."""
    token: int | None
    """The token that ends the turn; None: the template writes none."""
    text: str
    """The text of that token; empty where there is none."""


@dataclass(frozen=True)
class Continuation:
    """How conversations go on for one tokenizer with its template: see `find_ends`, and
    `checked_continuation`, which proves it.
    """

    tokenizer: PreTrainedTokenizerBase
    """The tokenizer with its template."""
    ends: Mapping[AnswerKind, End]
    """The ends of the kinds of answers for which they are known."""
    faults: Mapping[AnswerKind, str]
    """Why the other kinds of answers have none."""
    special: frozenset[int]
    """Tokens that stand for one text of their own."""
    tails: dict[str, TailTemplate | None] = field(default_factory=dict, compare=False)
    """Of each template in use, what renders the end of conversations; None: it is rendered whole."""

    def encode(
        self,
        messages: Sequence[Message],
        turn: int,
        tools: Any = None,
        *,
        last_token: int | None,
        limit: int = sys.maxsize,
        written: int = 0,
        is_sample: bool = True,
    ) -> np.ndarray | None:
        """Returns the tokens, int32 [N], between assistant message `turn`, already there as tokens, and the
        next answer; None where that cannot be told, and the conversation has to be rendered whole.

        messages: the whole conversation, the new messages behind `turn` included. last_token: the last one
        of the answer; the template's end of turn is not written twice where the answer ended with it, and is
        added where the answer was cut off. limit: see `tokenise_up_to`. written: as many messages of the
        beginning were rendered before, each at least once with what it says and what stands behind it now;
        the whole is rendered all the same where `is_sample`, and must end as what was rendered without them.
        Raises DataError where the template refuses the messages.
        """
        rest = self.text(messages, turn, tools, written=written, is_sample=is_sample)
        if rest is None:
            return None
        tokens = encode_piece(self.tokenizer, rest, limit=limit)
        is_there = last_token in self.special and len(tokens) and int(tokens[0]) == last_token
        return tokens[1:] if is_there else tokens

    def text(
        self,
        messages: Sequence[Message],
        turn: int,
        tools: Any = None,
        *,
        written: int = 0,
        is_sample: bool = True,
    ) -> str | None:
        """Returns the text behind answer `turn`, from its end of turn on, or None; see `encode`."""
        end = self.ends.get(kind_of(messages[turn]))
        if end is None:
            return None
        marker, conversation = _marked(messages, turn, in_calls=end.in_calls)
        behind = self._end_behind(marker, conversation, tools, min(written, turn - 1))
        if behind is None or is_sample:
            whole = _behind(self.tokenizer, marker, conversation, tools)
            if behind is not None and behind != whole:
                self.drop_tails()
                _log.warning(
                    "chat template: a conversation ends with %.80r, and %.80r was written without its "
                    "beginning. Conversations are rendered whole from now on; earlier calls that were no "
                    "sample may have had the other text",
                    whole,
                    behind,
                )
            behind = whole
        if behind is None or not behind.startswith(end.closing + end.text):
            return None
        return behind[len(end.closing) :]

    def has_tail(self, tools: Any) -> bool:
        """Says whether the end of conversations with these tools is rendered alone."""
        return self._tail(tools) is not None

    def drop_tails(self) -> None:
        """Has conversations rendered whole from now on."""
        self.tails.update(dict.fromkeys(self.tails))

    def _tail(self, tools: Any) -> TailTemplate | None:
        if self.tokenizer.chat_template is None:
            return None
        try:
            template = self.tokenizer.get_chat_template(None, tools)
        except ValueError:  # none of several is for this; rendering says so
            return None
        if template not in self.tails:
            self.tails[template] = tail_template(self.tokenizer, tools)
            if self.tails[template] is None:
                _log.info("chat template: conversations are rendered whole at each call (docs/agents.md)")
        return self.tails[template]

    def _end_behind(self, marker: str, conversation: list[Message], tools: Any, first: int) -> str | None:
        """Returns what stands behind the marker, rendered without the messages before `first`; None: that
        cannot be told.
        """
        tail = self._tail(tools) if first > 0 else None
        if tail is None:
            return None
        try:
            return tail.render(conversation, tools, first=first, marker=marker)
        except DataError:  # the whole says why, if it is no fault of the missing beginning
            return None

    def notes(self) -> list[str]:
        """Says for which answers conversations cannot go on, and why."""
        kinds = {"text": "an answer in text", "calls": "an answer that calls tools"}
        return [
            f"chat template: what goes on behind {kinds[kind]} is tokenised whole, a row of its own: {fault}"
            for kind, fault in self.faults.items()
        ]

    def without(self, kind: AnswerKind, fault: str) -> Continuation:
        """Returns one that never goes on behind answers of this kind, and why."""
        ends = {name: end for name, end in self.ends.items() if name != kind}
        return replace(self, ends=ends, faults={**self.faults, kind: fault})


def kind_of(answer: Message) -> AnswerKind:
    """Says whether an answer calls tools."""
    return "calls" if answer.get("tool_calls") else "text"


def find_ends(tokenizer: PreTrainedTokenizerBase) -> Continuation:
    """Finds how the tokenizer's template ends answers, from an answer that is the last message and one with
    another behind it: what both have between answer and end of turn is the template's, and only its own.
    """
    if tokenizer.chat_template is None:
        return Continuation(tokenizer, {}, {}, frozenset())
    ends: dict[AnswerKind, End] = {}
    faults: dict[AnswerKind, str] = {}
    special = frozenset({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder})
    for kind in SAMPLES:
        try:
            found = _end_of(tokenizer, kind, special, ends.get("text"))
        except DataError as error:
            found = str(error)
        if isinstance(found, str):
            faults[kind] = found
        else:
            ends[kind] = found
    return Continuation(tokenizer, ends, faults, special)


def _end_of(
    tokenizer: PreTrainedTokenizerBase, kind: AnswerKind, special: frozenset[int], of_text: End | None
) -> End | str:
    """Returns how an answer of this kind ends, or why that cannot be told. of_text: how one in text ends, if
    that is known. Raises DataError.
    """
    last, tools = [QUESTION, SAMPLES[kind]], SAMPLE_TOOLS if kind == "calls" else None
    for in_calls in (True, False) if kind == "calls" else (False,):
        marker, marked = _marked(last, 1, in_calls=in_calls)
        at_end = _behind(tokenizer, marker, marked, tools, generation=False)
        behind = _behind(tokenizer, marker, [*marked, NEXT[kind]], tools)
        if at_end is not None and behind is not None:
            break
    else:
        return "it does not write an answer's text exactly once"
    (tokens,) = tokenise(tokenizer, [at_end.strip()], special=False)
    if not in_calls:  # what is said ends right behind it
        ends = [int(token) for token in tokens[:1] if int(token) in special]
        closing = at_end[: len(at_end) - len(at_end.lstrip())] if ends else ""
    elif of_text is not None and (of_text.token is None or of_text.text in common_start(at_end, behind)):
        ends = [] if of_text.token is None else [of_text.token]
        closing = at_end[: at_end.find(of_text.text)] if ends else common_start(at_end, behind).rstrip()
    else:  # behind a call stands what closes it
        ends = [int(token) for token in tokens[-1:] if int(token) in special]
        closing = at_end[: at_end.rfind(tokenizer.decode(ends))] if ends else ""
    text = tokenizer.decode(ends) if ends else ""
    if not behind.startswith(closing + text) or (in_calls and not closing + text):
        return (
            f"it ends the last answer with {at_end!r:.60}, as the model does, and an earlier one with "
            f"{behind!r:.60}"
        )
    return End(in_calls, closing, ends[0] if ends else None, text)


def _marked(messages: Sequence[Message], turn: int, *, in_calls: bool) -> tuple[str, list[Message]]:
    """Returns a random marker, and the messages with the marker in place of answer `turn`: of its content, or
    of the arguments of its last call.
    """
    marker = "rondo" + secrets.token_hex(12)
    answer = {**messages[turn], "content": marker}
    if in_calls:
        *others, last = answer["tool_calls"]
        function = {**last["function"], "arguments": {marker: ""}}
        answer |= {"content": "", "tool_calls": [*others, {**last, "function": function}]}
    return marker, [*messages[:turn], answer, *messages[turn + 1 :]]


def _behind(
    tokenizer: PreTrainedTokenizerBase,
    marker: str,
    conversation: Sequence[Message],
    tools: Any,
    *,
    generation: bool = True,
) -> str | None:
    """Returns the rendered text behind the marker; None where it is not there exactly once."""
    text = render(tokenizer, conversation, tools=tools, generation=generation)
    return text.partition(marker)[2] if text.count(marker) == 1 else None
