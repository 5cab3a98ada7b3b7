"""Bodies of requests: from bytes to JSON, from JSON to parameters that are honoured or refused by name, and
chat messages as OpenAI's clients send them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    TypeAdapter,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rondo.chat import Conversation, JsonError, Message, MessageError, MessageReader, TemplateKeys, read_json
from rondo.core.errors import did_you_mean
from rondo.core.images import MARK
from rondo.serving.problems import ApiError, checked, missing_here, refuse, unknown_model

Kind = Literal["chat", "text"]
# Of names and other texts that are no part of a conversation: some are tokenised, some are kept.
_LONGEST = 1000
Text = Annotated[str, Field(max_length=_LONGEST)]


def _stop_texts(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _no_others(asked: Any) -> bool:
    """Accepts only 0 as the number of other tokens whose log-probs are wanted (they are not kept); returns
    True.
    """
    if type(asked) is not int or asked:
        raise PydanticCustomError(
            "invalid_value",
            "only the chosen token's log-prob is there, as no others are kept: must be 0 or left out",
        )
    return True


def _tool(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PydanticCustomError("type", "must be {type: function, function: {name, …}}")
    if len(function["name"]) > _LONGEST:
        raise PydanticCustomError("invalid_value", f"the function's name has more than {_LONGEST} characters")
    return tool


def _tool_choice(choice: Any) -> Any:
    """Returns the word, or the function's name in a tuple."""
    if choice in ("auto", "none", "required"):
        return choice
    try:
        return (_tool(choice)["function"]["name"],)
    except PydanticCustomError as error:
        raise PydanticCustomError(
            "invalid_value",
            "must be 'auto', 'none', 'required' or {type: function, function: {name: one of the tools}}",
        ) from error


def _prompt(prompt: Any) -> str | np.ndarray:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(one, str | list) for one in prompt):
        raise PydanticCustomError(
            "invalid_value",
            "several prompts in one request are not supported here: send one request for each, at the same "
            "time, as they share the engine's batch",
        )
    if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
        raise PydanticCustomError("type", "must be one string or one list of token ids, and not empty")
    if not all(0 <= token < 1 << 31 for token in prompt):
        raise PydanticCustomError(
            "invalid_value", "has token ids that are no token ids (negative, or too large)"
        )
    return np.asarray(prompt, np.int32)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _StreamOptions(_Strict):
    include_usage: bool = False


class ApiRequest(_Strict):
    """What both kinds of requests may say. None: not said. logprobs: of the chosen tokens. return_token_ids:
    the answer has the exact tokens beside the text (vLLM's name for it).
    """

    kind: ClassVar[Kind]
    # The field that has the conversation.
    subject: ClassVar[str]
    model: Text
    user: Text = ""
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: _StreamOptions | None = None
    logprobs: bool = False
    return_token_ids: bool = False
    max_tokens: int | None = Field(None, ge=1, le=1 << 31)
    temperature: float | None = Field(None, ge=0, le=1e6, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 64) - 1)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        Field(max_length=4),
        BeforeValidator(_stop_texts),
    ] = []

    @model_validator(mode="after")
    def _usage_needs_a_stream(self) -> Self:
        if self.stream_options and not self.stream:
            raise refuse("stream_options", "needs stream: true")
        return self


class ChatRequest(ApiRequest):
    """tools: for the chat template; none with tool_choice none. tool_choice: a word, or in a tuple the name
    of the function to call. parallel_tool_calls: whether an answer may have several. max_tokens: by either of
    its names. chat_template_kwargs: nothing but what is configured.
    """

    kind: ClassVar[Kind] = "chat"
    subject: ClassVar[str] = "messages"
    messages: Annotated[list[Any], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 31)
    top_logprobs: Annotated[bool, PlainValidator(_no_others)] = False
    tools: list[Annotated[dict[str, Any], PlainValidator(_tool)]] = []
    tool_choice: Annotated[Any, PlainValidator(_tool_choice)] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    _said: Conversation = PrivateAttr(Conversation(()))

    @property
    def said(self) -> Conversation:
        """The messages as they were read, with their images."""
        return self._said

    @model_validator(mode="after")
    def _settled(self) -> Self:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise refuse("max_tokens", f"is {old}, but max_completion_tokens is {new}; give one of them")
        self.max_tokens = old or new
        if self.tool_choice == "none":
            self.tools = []
        names = [tool["function"]["name"] for tool in self.tools]
        if self.tool_choice == "required" and not names:
            raise refuse("tool_choice", "is 'required', and there are no tools")
        if isinstance(self.tool_choice, tuple) and self.tool_choice[0] not in names:
            listed = ", ".join(names) or "none"
            raise refuse("tool_choice", f"names {self.tool_choice[0]!r:.100}; the tools are {listed:.1000}")
        return self


class TextRequest(ApiRequest):
    """prompt: text or token ids."""

    kind: ClassVar[Kind] = "text"
    subject: ClassVar[str] = "prompt"
    prompt: Annotated[Any, PlainValidator(_prompt)]
    logprobs: Annotated[bool, PlainValidator(_no_others)] = False


_BODIES: dict[Kind, tuple[set[str], TypeAdapter[ApiRequest]]] = {
    kind.kind: (set(kind.model_fields), TypeAdapter(kind)) for kind in (ChatRequest, TextRequest)
}


def read_request(
    kind: Kind,
    body: Any,
    model: str,
    *,
    template: TemplateKeys = TemplateKeys(),  # noqa: B008 (frozen)
    takes_images: bool = False,
) -> ApiRequest:
    """Reads the request in `body`. model: the one that is served. template: the keys of messages that its
    chat template reads. takes_images: whether messages may have images. Raises ApiError (400; 404 for another
    model).
    """
    if not isinstance(body, Mapping):
        raise ApiError("the body must be a JSON object", code="invalid_type")
    names, adapter = _BODIES[kind]
    said = {name: value for name, value in body.items() if name in names and value is not None}
    for name, value in body.items():
        if name not in names:
            _check_unread(name, value, names)
    asked = checked(adapter, said)
    if isinstance(asked, ChatRequest):
        asked._said = _read(asked.messages, replace(CLIENTS, template=template, takes_images=takes_images))
        asked.messages = list(asked.said.messages)
    if asked.model != model:
        raise unknown_model(asked.model, model)
    return asked


def _check_unread(name: str, value: Any, names: set[str]) -> None:
    """Refuses a parameter that is not read, unless its value asks for nothing."""
    known = missing_here().get(name)
    if known is None:
        near = did_you_mean(name[:64], names)
        text = f"unknown parameter {name!r:.100}{near} There are: {', '.join(sorted(names))}"
        raise ApiError(text, param=name, code="unknown_parameter")
    if value is not None and not any(
        value == neutral and type(value) in (type(neutral), float) for neutral in known.neutral
    ):
        raise refuse(name, f"is not supported here: {known.instead}", "unsupported_parameter")


CLIENTS = MessageReader(takes_broken_arguments=True)
_PROMPTS = MessageReader(TemplateKeys(reads_all=True), takes_broken_arguments=True)


def _read(messages: list[Any], reader: MessageReader) -> Conversation:
    try:
        read = reader.read(messages)
    except MessageError as error:
        raise refuse(".".join(map(str, ("messages", *error.path))), error.problem, error.code) from error
    unsaid = [image for image in read.images if image.value is None]
    if unsaid and len(unsaid) == len(read.images) and not any(map(_has_empty_image, messages)):
        return read._replace(images=())  # the mark of an image is text
    if unsaid:
        text = f"says of an image not which it is ({MARK} is one, too, in messages with images)"
        raise refuse(f"messages.{unsaid[0].place}.content", text)
    return read


def _has_empty_image(message: Any) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(part.get("type") != "text" for part in content)


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


# Bytes up to which a body is worked on where it arrives: some milliseconds with tokenising. Agents' requests
# are mostly such, and a thread's turn costs them more.
SMALL = 4096
_FREE_VALUES = 20_000  # tools, options, names


def most_parts(max_context: int) -> int:
    """Returns how many texts, numbers and brackets a request can have."""
    return 4 * max_context + _FREE_VALUES  # a message has seven and five tokens or more, an id one


def read_body(data: bytes, max_context: int) -> Any:
    """Returns the value. max_context: tokens that a request can have; a body of so many parts that these
    cannot be meant for so few tokens is refused. Raises ApiError (400) naming the field.
    """
    most = most_parts(max_context)
    if len(data) > SMALL and _parts_above(data, most):
        text = f"the body has more than {most} texts, numbers and brackets, and {max_context} tokens fit"
        raise ApiError(text, code="too_many_values")
    try:
        return read_json(data.decode())
    except UnicodeDecodeError as error:
        text = f"the body is no UTF-8: byte {error.start} ({error.reason})"
        raise ApiError(text, code="invalid_json") from error
    except JsonError as error:
        if not error.path:
            raise ApiError(f"the body is no JSON: {error}", code="invalid_json") from error
        raise ApiError(str(error), param=error.path, code="invalid_value") from error


def _parts_above(data: bytes, most: int) -> bool:
    """Says whether a JSON text has more than `most` texts, commas and brackets, in the time of a few
    searches.
    """
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote left begins or ends a text
    parts = plain.count(b'"') // 2
    if parts <= most:
        outside = b"".join(plain.split(b'"')[::2])
        parts += sum(map(outside.count, (b",", b"[", b"{")))
    return parts > most
