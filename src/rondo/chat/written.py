"""Whether a chat template writes what it is given. Many skip roles that they do not know, words beside calls,
the calls, or the tools, and say nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rondo.chat.messages import Message
from rondo.core.errors import DataError

# What is written or not: what messages of a role say (of the first one, which may be written apart, or of
# others; of an answer: beside its calls), that answers call tools, and which tools there are.
Kind = tuple[str, ...]
_CALLS: Kind = ("calls",)
_TOOLS: Kind = ("tools",)
_BESIDE_CALLS = "beside calls"
_TELL_MODEL = "the model does not see it; model.chat_template may be one that writes it"
_log = logging.getLogger(__name__)


def check_kinds(
    messages: Sequence[Message],
    tools: Any,
    # Messages before this one were looked at in an earlier call.
    first: int,
    # What is known of the template; what is new is added.
    known: dict[Kind, bool],
    write: Callable[[Sequence[Message], Any], str],
    *,
    learnt: bool,
) -> None:
    """Raises DataError for messages or calls that a template leaves out. Warns once of tools, which a message
    may describe, and of what an answer says beside its calls, where that is context and not `learnt` (Llama's
    templates leave it out). A conversation with something new in it is written once more, with marks in the
    place of its words.
    """
    kinds = {kind for place in range(first, len(messages)) for kind, _ in _things(messages[place], place)}
    kinds |= {_TOOLS} if tools else set()
    if not kinds <= known.keys():
        found = _tried(messages, tools, write)
        for kind in found.keys() - known.keys():
            if not found[kind] and _is_told(kind, learnt=learnt):
                _log.warning("the chat template leaves out %s: %s", _what([kind]), _TELL_MODEL)
        known |= found
    lost = sorted(kind for kind in kinds if not known[kind] and not _is_told(kind, learnt=learnt))
    if lost:
        raise DataError(
            f"the chat template leaves out {_what(lost)}: the model would not see them. Use a template that "
            "writes them (model.chat_template), or put it into a message of another role"
        )


def _is_told(kind: Kind, *, learnt: bool) -> bool:
    """Says whether this is warned of, and no error."""
    return kind == _TOOLS or (kind[-1] == _BESIDE_CALLS and not learnt)


def _what(lost: Sequence[Kind]) -> str:
    if lost[0] == _TOOLS:
        return "the tools that it is given"
    if lost[0] == _CALLS:
        return "the calls of an answer (tool_calls)"
    if lost[0][-1] == _BESIDE_CALLS:
        return "what an answer says beside its calls of tools"
    return f"what messages of the role {' and '.join(dict.fromkeys(kind[0] for kind in lost))} say"


def _tried(
    messages: Sequence[Message], tools: Any, write: Callable[[Sequence[Message], Any], str]
) -> dict[Kind, bool]:
    """Says what of a conversation is written; all, where the template refuses the marks."""
    marks: list[tuple[Kind, str]] = []

    def mark(kind: Kind) -> str:
        marks.append((kind, f"rondo_asks_{len(marks)}_"))
        return marks[-1][1]

    marked = []
    for place, message in enumerate(messages):
        copy = {key: _copied(value) for key, value in message.items()}
        for kind, (owner, key) in _things(copy, place):
            owner[key] = mark(kind)
        marked.append(copy)
    named = _copied(tools)
    for tool in named or ():
        if isinstance(tool, dict) and isinstance(tool.get("function"), dict):
            tool["function"]["name"] = mark(_TOOLS)
    try:
        text = write(marked, named)
    except DataError:
        text = " ".join(mark for _, mark in marks)
    written: dict[Kind, bool] = {_TOOLS: True} if tools else {}
    for kind, its_mark in marks:
        written[kind] = written.get(kind, True) and its_mark in text
    return written


def _things(message: Message, place: int) -> Iterator[tuple[Kind, tuple[Any, str]]]:
    """Yields what a message says and calls, and where: (a mapping, its key)."""
    content, calls = message["content"], message.get("tool_calls")
    kind = (str(message["role"]), "first" if place == 0 else "later", _BESIDE_CALLS if calls else "")
    if isinstance(content, str):
        if content.strip():
            yield kind, (message, "content")
    else:
        for part in content:
            if str(part.get("text", "")).strip():
                yield kind, (part, "text")
    for call in calls or ():
        yield _CALLS, (call["function"], "name")


def _copied(value: Any) -> Any:
    """Returns a copy whose lists and mappings are others."""
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list | tuple) else value
