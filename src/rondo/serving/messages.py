"""Chat messages as OpenAI's clients send them: what the chat template gets, and what makes two of them the
same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, BeforeValidator, ConfigDict, PlainValidator, TypeAdapter
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from rondo.chat import JsonError, read_json
from rondo.serving.problems import checked


def _said(message: Any) -> Any:
    """Returns a message without the fields that are null or empty (`refusal`, `annotations`)."""
    if not isinstance(message, Mapping):
        return message
    fields = {name: value for name, value in message.items() if value not in (None, [], {})}
    return {"content": "", **fields} if "tool_calls" in fields else fields


def _tool_call(call: Any) -> dict[str, Any]:
    """Returns a call with the arguments as an object, which is what chat templates print."""
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") or "" if isinstance(function, Mapping) else None
    if (
        not isinstance(function, Mapping)
        or not isinstance(function.get("name"), str)
        or not isinstance(arguments, str | Mapping)
        or not isinstance(call.get("id") or "", str)
        or call.get("type", "function") != "function"
    ):
        raise PydanticCustomError("type", "must be {id, type: function, function: {name, arguments}}")
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments or "{}")
        except JsonError:
            pass  # a template prints text as it is
    read = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {**read, "id": call["id"]} if isinstance(call.get("id"), str) else read


class _Part(TypedDict):
    type: Literal["text"]
    text: str


_Content = Annotated[
    list[_Part],
    BeforeValidator(lambda said: [{"type": "text", "text": said}] if isinstance(said, str) else said),
    AfterValidator(lambda parts: "".join(part["text"] for part in parts)),
]


class _Message(TypedDict):
    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    role: str
    content: _Content
    tool_calls: NotRequired[list[Annotated[dict[str, Any], PlainValidator(_tool_call)]]]
    name: NotRequired[str]
    tool_call_id: NotRequired[str]


# A content of text parts is joined. Fields that a chat template does not know are refused.
Message = Annotated[_Message, BeforeValidator(_said)]
_MESSAGES: TypeAdapter[list[Message]] = TypeAdapter(list[Message])
# `json.dumps` with arguments makes an encoder for each of its calls.
_written = json.JSONEncoder(sort_keys=True, ensure_ascii=False).encode


def message_keys(messages: Sequence[Any]) -> list[str]:
    """Returns one text per message, equal where the messages say the same. Raises ApiError (400) naming the
    message and its field.
    """
    return [message_key(message) for message in checked(_MESSAGES, messages, "messages")]


def message_key(message: Mapping[str, Any]) -> str:
    """Returns the key of a checked message. Ids of an assistant's tool calls are no part of it, nor is the
    white space in their arguments.
    """
    said = repr((message["role"], message["content"], message.get("name"), message.get("tool_call_id")))
    if "tool_calls" not in message:  # most; JSON takes ten times as long
        return said
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    return said + _written(calls)
