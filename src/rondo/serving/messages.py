"""Chat messages as OpenAI's clients send them: what the chat template gets, and what makes two of them the
same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from rondo.chat import Message, MessageError, MessageReader, TemplateKeys
from rondo.serving.problems import refuse

_CLIENTS = MessageReader(takes_broken_arguments=True)
_PROMPTS = MessageReader(TemplateKeys(reads_all=True), takes_broken_arguments=True)


def _read(messages: list[Any]) -> list[Message]:
    try:
        return list(_CLIENTS.read(messages).messages)
    except MessageError as error:
        raise refuse(".".join(map(str, ("messages", *error.path))), error.problem, error.code) from error


ClientMessages = Annotated[list[Any], Field(min_length=1), AfterValidator(_read)]
# `json.dumps` with arguments makes an encoder for each of its calls.
_written = json.JSONEncoder(sort_keys=True, ensure_ascii=False).encode


def message_keys(messages: Sequence[Message]) -> list[str]:
    """Returns one text for each message of a prompt, equal where the messages say the same. Raises DataError
    for what is no message.
    """
    return list(map(message_key, _PROMPTS.read(messages).messages))


def message_key(message: Mapping[str, Any]) -> str:
    """Returns the key of a checked message. Ids of an assistant's tool calls are no part of it, nor is the
    white space in their arguments.
    """
    said = repr((message["role"], message["content"], message.get("name"), message.get("tool_call_id")))
    if "tool_calls" not in message:  # most; JSON takes ten times as long
        return said
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    return said + _written(calls)
