"""Messages of agents in this process: handed over as they are, and read once.

An agent sends its whole conversation with each call. As far as it is the last one's, unchanged, it is known;
what is behind it is copied, as JSON would give it, and read. What cannot be read here goes the way of a
request over HTTP, whole, which says what is wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rondo.chat import JsonError, Message, MessageError, read_json
from rondo.core.errors import half_of_a_pair
from rondo.serving.requests import CLIENTS, message_key
from rondo.serving.sessions import Key


@dataclass(frozen=True)
class HandedMessages:
    """A conversation as it was when a call was made. These objects are shared with no one."""

    given: list[Any]
    """The messages in types that JSON has."""
    read: list[Message]
    """The messages as they were read."""
    numbers: Mapping[int, str] = field(default_factory=dict)
    """By place, what Python writes for the messages that hold numbers: 1 equals True, and says something
    else.
    """
    num_parts: int = 0
    """At least as many texts, commas and brackets as they are in JSON."""
    written: int = 0
    """As many messages of the beginning were rendered with what they say, in calls that were answered."""
    head: str = ""
    """What `key` begins with."""
    key: Key = field(default_factory=lambda: Key.of("chat"))
    """The conversation's."""

    def begins(self, messages: Sequence[Any]) -> bool:
        """Says whether `messages`, a list, begins with these."""
        known = len(self.given)
        return messages[:known] == self.given and all(
            repr(messages[place]) == text for place, text in self.numbers.items()
        )

    def size(self, *, has_tail: bool) -> int:
        """Counts about as many characters as have to be rendered; has_tail: without their beginning."""
        new = self.read[self.written :] if has_tail else self.read
        return sum(len(message["content"]) for message in new)

    def keyed(self, head: str) -> HandedMessages:
        """Returns the messages with the key of their conversation. head: see `prompts.chat_head`."""
        if head == self.head:
            known = len(self.key) - 2
            return replace(self, key=self.key.then(map(message_key, self.read[known:])))
        key = Key.of("chat", head).then(map(message_key, self.read))
        return replace(self, head=head, key=key, written=0)  # written with other tools, if at all


_NONE = HandedMessages([], [])


def read_handed(messages: list[Any], last: HandedMessages | None) -> HandedMessages | None:
    """Reads a call's messages. last: of the last call. None: JSON has to say what is wrong with them. Raises
    TypeError and ValueError where JSON cannot hold them.
    """
    if last is None or not last.begins(messages):
        last = _NONE
    known = len(last.given)
    given, numbers, num_parts = last.given[:], dict(last.numbers), last.num_parts
    for message in messages[known:]:
        if _is_text(message):
            given.append(dict(message))
            num_parts += 3 * len(message) + 1
            continue
        text = json.dumps(message)
        try:  # as deep in it as in a request
            own = read_json(f'{{"messages": [{text}]}}')["messages"][0]
        except JsonError:
            return None
        if _has_numbers(own):
            numbers[len(given)] = repr(own)
        given.append(own)
        num_parts += sum(map(text.count, '",{[')) + 1
    try:
        read = CLIENTS.read(given[known:]).messages
    except MessageError:
        return None
    return HandedMessages(given, [*last.read, *read], numbers, num_parts, last.written, last.head, last.key)


def _is_text(message: Any) -> bool:
    """Says whether a message is a dict of strings, as most are: it needs no way through JSON."""
    return type(message) is dict and all(
        type(part) is str and half_of_a_pair(part) is None for item in message.items() for part in item
    )


def _has_numbers(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_numbers, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, str | None)
