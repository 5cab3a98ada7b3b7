"""Chat messages as OpenAI's clients send them: what the chat template gets, and what makes two of them the
same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rondo.serving.problems import refuse

_KNOWN = {"role", "content", "name", "tool_calls", "tool_call_id"}


@dataclass(frozen=True)
class Conversation:
    """messages: for the chat template. keys: one text per message, equal where the messages say the same."""

    messages: tuple[dict[str, Any], ...]
    keys: tuple[str, ...]

    def kind_behind(self, turn: int) -> Literal["tool", "environment", "user"]:
        """Who wrote what follows message `turn`: tool, user or (mixed, anything else) environment."""
        roles = {message["role"] for message in self.messages[turn + 1 :]}
        return "tool" if roles == {"tool"} else "user" if roles == {"user"} else "environment"


def read_messages(messages: Any) -> Conversation:
    """Raises ApiError (400) naming the message and its field.

    A content of text parts is joined. Fields that are null or empty (`refusal`, `annotations`) are left out;
    others that a chat template does not know are refused. Ids of an assistant's tool calls are no part of the
    key, nor is the white space in their arguments.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise refuse("messages", "must be a list of at least one message", "invalid_type")
    read = [_message(message, f"messages.{i}") for i, message in enumerate(messages)]
    return Conversation(tuple(read), tuple(message_key(message) for message in read))


def message_key(message: Mapping[str, Any]) -> str:
    """See `read_messages`; message: as it returns them."""
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
    ]
    parts = [message["role"], message["content"], message.get("name"), message.get("tool_call_id"), calls]
    return json.dumps(parts, sort_keys=True, ensure_ascii=False)


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise refuse(where, f"must be an object, got {type(message).__name__}", "invalid_type")
    fields = {name: value for name, value in message.items() if value not in (None, [], {})}
    for name in fields:
        if name not in _KNOWN:
            raise refuse(f"{where}.{name}", "is not supported; text and tool calls are", "unsupported_value")
    role = fields.get("role")
    if not isinstance(role, str):
        raise refuse(f"{where}.role", "must be a string: system, user, assistant or tool", "invalid_type")
    read: dict[str, Any] = {"role": role, "content": _content(fields.get("content", ""), f"{where}.content")}
    if "content" not in fields and "tool_calls" not in fields:
        raise refuse(f"{where}.content", "is missing", "missing_required_parameter")
    if "tool_calls" in fields:
        read["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls.{i}") for i, call in enumerate(fields["tool_calls"])
        ]
    for name in ("name", "tool_call_id"):
        if name in fields:
            if not isinstance(fields[name], str):
                raise refuse(f"{where}.{name}", "must be a string", "invalid_type")
            read[name] = fields[name]
    return read


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise refuse(where, "must be a string or a list of text parts", "invalid_type")
    for i, part in enumerate(content):
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            raise refuse(f"{where}.{i}", "only text parts are supported", "unsupported_value")
    return "".join(part["text"] for part in content)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """With the arguments as an object, which is what chat templates print."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise refuse(where, "must be {id, type: function, function: {name, arguments}}", "invalid_type")
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except json.JSONDecodeError:
            pass  # a template prints text as it is
    read = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {**read, "id": call["id"]} if isinstance(call.get("id"), str) else read
