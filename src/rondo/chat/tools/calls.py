"""Where the calls of an answer stand in its text, and what they are: name and arguments, or what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rondo.chat.strict_json import JsonError, json_parts, read_json
from rondo.chat.tools.formats import ToolFormat

Reason = Literal["not_closed", "no_json", "no_name", "arguments_no_object", "unknown_tool", "not_parallel"]
# What Python's templates write for values that are no text.
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool."""

    name: str
    """The tool's name."""
    arguments: str
    """A JSON object as text: as the model wrote it where it wrote JSON."""


@dataclass(frozen=True)
class MalformedCall:
    """A call that cannot be made."""

    reason: Reason
    """`not_closed` (the closing mark is missing), `no_json`, `no_name`, `arguments_no_object`,
    `unknown_tool`, `not_parallel` (a further call, where one was asked for).
    """
    text: str
    """What the model wrote, marks included."""


class CallError(ValueError):
    """reason: as in MalformedCall."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


def read_calls(known: ToolFormat, region: Region, tools: Mapping[str, Any]) -> list[ToolCall | MalformedCall]:
    """Returns the calls of a region: one, or all of a list. tools: name → JSON schema of the arguments."""
    try:
        if not region.closed:
            raise CallError("not_closed")
        read = list(_calls(known, region.body.strip(), tools))
    except CallError as error:
        return [MalformedCall(error.reason, region.raw)]
    return read


def _calls(known: ToolFormat, body: str, tools: Mapping[str, Any]) -> Iterator[ToolCall | MalformedCall]:
    found = known.body.fullmatch(body) if known.body is not None else None
    if found is not None:
        name = found["name"].strip()
        schema = tools.get(name, {})
        written = found["arguments"].strip()
        arguments = _object(written) if known.pair is None else _pairs(known.pair, written, schema)
        yield _call(name, arguments, tools)
        return
    if not known.json:
        raise CallError("no_name")
    try:
        value = read_json(body)
    except JsonError:
        raise CallError("no_json") from None
    if not isinstance(value, list):
        yield _json_call(body, value, tools)
        return
    if not value:
        raise CallError("no_name")
    for item, (_, text) in zip(value, json_parts(body), strict=True):
        try:
            yield _json_call(text, item, tools)
        except CallError as error:
            yield MalformedCall(error.reason, text)


def _json_call(text: str, value: Any, tools: Mapping[str, Any]) -> ToolCall:
    """Reads {name, arguments}; Llama's word for arguments is parameters."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise CallError("no_name")
    written = dict(json_parts(text))
    arguments = written.get("arguments", written.get("parameters", "{}"))
    return _call(value["name"], _object(arguments), tools)


def _call(name: str, arguments: str, tools: Mapping[str, Any]) -> ToolCall:
    if not name:
        raise CallError("no_name")
    if name not in tools:
        raise CallError("unknown_tool")
    return ToolCall(name, arguments)


def _object(text: str) -> str:
    try:
        value = read_json(text or "{}")
    except JsonError:
        raise CallError("no_json") from None
    if not isinstance(value, dict):
        raise CallError("arguments_no_object")
    # Arguments stay the text that the model wrote: written anew they would be other tokens in the next
    # prompt.
    return text or "{}"


def _pairs(pair: re.Pattern[str], text: str, schema: Any) -> str:
    """Returns the JSON object of arguments that stand one by one."""
    # Something is left besides the pairs: a tag that is not closed, or plain text.
    if pair.sub("", text).strip():
        raise CallError("arguments_no_object")
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    properties = properties if isinstance(properties, Mapping) else {}
    found = {each["key"].strip(): each["value"] for each in pair.finditer(text)}
    values = {key: _cast(value, properties.get(key)) for key, value in found.items()}
    return _object(json.dumps(values, ensure_ascii=False))


def _cast(text: str, schema: Any) -> Any:
    """Returns the value that a text stands for: the text itself where the schema takes text; JSON where it
    takes something else and the text is JSON; objects and lists where it says nothing.
    """
    kinds = _kinds(schema)
    if "string" in kinds or (not kinds and text[:1] not in ("{", "[")):
        return text
    try:
        return read_json(_PYTHON_WORDS.get(text.strip(), text))
    except JsonError:
        return text


def _kinds(schema: Any) -> set[str]:
    """Returns the JSON types that a schema names."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    kinds = {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
    for alternatives in (schema.get("anyOf"), schema.get("oneOf")):
        for one in alternatives if isinstance(alternatives, list) else ():
            kinds |= _kinds(one)
    return kinds


# ---- where the calls of an answer stand in its text ----


@dataclass(frozen=True)
class Region:
    """A call as it stands in the text."""

    raw: str
    """With its marks."""
    body: str
    """What stands between the marks."""
    closed: bool
    """Whether the closing mark is there."""


def regions(known: ToolFormat, text: str) -> list[str | Region]:
    """Returns texts and calls, in order; the first piece is the text before all of them."""
    bare = _bare_start(known, text)
    if bare is not None and known.bare is not None and known.bare.match(text, bare):
        return [text[:bare], Region(text[bare:], text[bare:], closed=True)]
    opening = re.compile("|".join(map(re.escape, (known.open, *known.around))))
    # Another opening ends a call, too: models forget to close one before they begin the next.
    ending = re.compile("|".join(map(re.escape, (known.open, *((known.close,) if known.close else ())))))
    pieces: list[str | Region] = []
    at = 0
    while (found := opening.search(text, at)) is not None:
        pieces.append(text[at : found.start()])
        at = found.end()
        if found[0] != known.open:
            continue
        end = ending.search(text, at)
        closed = known.close is None or (end is not None and end[0] == known.close)
        body = text[at : end.start() if end else len(text)]
        at = len(text) if end is None else end.end() if end[0] == known.close else end.start()
        pieces.append(Region(text[found.start() : at], body, closed))
    return [*pieces, text[at:]]


def settled_text(known: ToolFormat, text: str) -> str:
    """Returns what of an unfinished answer cannot become part of a call, nor stand behind one."""
    bare = _bare_start(known, text)
    if bare is not None:
        return text[:bare]
    marks = (known.open, *known.around)
    starts = [start for start in map(text.find, marks) if start >= 0]
    return text[: min(starts)] if starts else text[: len(text) - held_back(text, marks)]


def held_back(text: str, marks: Sequence[str]) -> int:
    """Counts the last characters of `text` that may be the beginning of a mark."""
    # Less one: a whole mark is found, not held back.
    longest = max(map(len, marks)) - 1
    tails = (text[-n:] for n in range(min(longest, len(text)), 0, -1))
    return next((len(tail) for tail in tails if any(mark.startswith(tail) for mark in marks)), 0)


def _bare_start(known: ToolFormat, text: str) -> int | None:
    """Returns where an answer begins that may be a call without an opening."""
    start = len(text) - len(text.lstrip())
    return start if known.bare is not None and text.startswith("{", start) else None
