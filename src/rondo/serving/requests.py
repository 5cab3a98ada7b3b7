"""Bodies of requests, checked: every parameter is honoured or refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rondo.config.functions import did_you_mean
from rondo.serving.messages import Conversation, read_messages
from rondo.serving.problems import ApiError, refuse

Kind = Literal["chat", "text"]

_COMMON = {"model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop", "seed", "stream"}
_COMMON |= {"stream_options", "user", "logprobs"}
_READ: dict[Kind, set[str]] = {
    "chat": _COMMON | {"messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice"},
    "text": _COMMON | {"prompt"},
}
# Parameters of OpenAI's that are not supported, with the values that ask for nothing (null always does).
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "store": (False,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "metadata": ({},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
}
_UNSUPPORTED = {"audio", "function_call", "functions", "moderation", "prediction", "prompt_cache_key"}
_UNSUPPORTED |= {"prompt_cache_options", "prompt_cache_retention", "reasoning_effort", "safety_identifier"}
_UNSUPPORTED |= {"verbosity", "web_search_options"}
MAX_CHOICES = 128


@dataclass(frozen=True)
class ApiRequest:
    """None: not said. prompt: of a text completion, text or token ids. tools: for the template; None with
    tool_choice none.
    """

    kind: Kind
    conversation: Conversation | None = None
    prompt: str | np.ndarray | None = None
    tools: tuple[Any, ...] | None = None
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


def read_request(kind: Kind, body: Any, model: str) -> ApiRequest:
    """The request in `body`. model: the one that is served. Raises ApiError (400; 404 for another model)."""
    if not isinstance(body, Mapping):
        raise ApiError("the body must be a JSON object", code="invalid_type")
    _check_names(kind, body)
    said = {name: value for name, value in body.items() if value is not None}
    if not isinstance(said.get("model"), str):
        raise refuse("model", f"is missing; there is {model!r}", "missing_required_parameter")
    if said["model"] != model:
        text = f"the model {said['model']!r} does not exist here; there is {model!r}"
        raise ApiError(text, param="model", code="model_not_found", status=404)
    if not isinstance(said.get("user", ""), str):
        raise refuse("user", "must be a string", "invalid_type")
    stream, include_usage = _stream(said)
    conversation = read_messages(said.get("messages")) if kind == "chat" else None
    return ApiRequest(
        kind=kind,
        conversation=conversation,
        prompt=_prompt(said.get("prompt")) if kind == "text" else None,
        tools=_tools(said),
        n=_integer(said, "n", 1, MAX_CHOICES) or 1,
        stream=stream,
        include_usage=include_usage,
        logprobs=_logprobs(kind, said),
        max_tokens=_max_tokens(said),
        temperature=_number(said, "temperature", 0, math.inf),
        top_p=_number(said, "top_p", 0, 1, above=True),
        top_k=_integer(said, "top_k", 0, 1 << 31),
        min_p=_number(said, "min_p", 0, 1),
        seed=_integer(said, "seed", -(1 << 63), (1 << 64) - 1),
        stop=_stop(said),
    )


def _check_names(kind: Kind, body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if name in _READ[kind]:
            continue
        if name not in _NEUTRAL and name not in _UNSUPPORTED:
            near = did_you_mean(name, _READ[kind])
            raise ApiError(f"unknown parameter {name!r}{near}", param=name, code="unknown_parameter")
        if value is not None and not any(
            value == neutral and type(value) in (type(neutral), float) for neutral in _NEUTRAL.get(name, ())
        ):
            raise refuse(name, "is not supported; remove it", "unsupported_parameter")


def _number(
    said: Mapping[str, Any], name: str, low: float, high: float, *, above: bool = False
) -> float | None:
    value = said.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refuse(name, f"must be a number, got {value!r:.40}", "invalid_type")
    if not (low <= value <= high and math.isfinite(value)) or (above and value == low):
        limits = f"{'above' if above else 'at least'} {low}" + (
            f", at most {high}" if high < math.inf else ""
        )
        raise refuse(name, f"must be {limits}, got {value}")
    return float(value)


def _integer(said: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = said.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise refuse(name, f"must be an integer, got {value!r:.40}", "invalid_type")
    if not low <= value <= high:
        raise refuse(name, f"must be between {low} and {high}, got {value}")
    return value


def _boolean(said: Mapping[str, Any], name: str) -> bool:
    value = said.get(name, False)
    if not isinstance(value, bool):
        raise refuse(name, f"must be true or false, got {value!r:.40}", "invalid_type")
    return value


def _max_tokens(said: Mapping[str, Any]) -> int | None:
    old, new = (_integer(said, name, 1, 1 << 31) for name in ("max_tokens", "max_completion_tokens"))
    if old is not None and new is not None and old != new:
        raise refuse("max_tokens", f"is {old}, but max_completion_tokens is {new}; give one of them")
    return old if new is None else new


def _stream(said: Mapping[str, Any]) -> tuple[bool, bool]:
    stream, options = _boolean(said, "stream"), said.get("stream_options")
    if options is None:
        return stream, False
    if not stream or not isinstance(options, Mapping):
        raise refuse("stream_options", "must be an object, and needs stream: true")
    for name in options:
        if name != "include_usage":
            raise refuse(f"stream_options.{name}", "is not supported; include_usage is", "unknown_parameter")
    return stream, _boolean(options, "include_usage")


def _logprobs(kind: Kind, said: Mapping[str, Any]) -> bool:
    """Of the chosen tokens; others' are not kept."""
    if kind == "text":
        if _integer(said, "logprobs", 0, 1 << 31):
            raise refuse("logprobs", "only the chosen token's log-prob is there: logprobs must be 0")
        return "logprobs" in said
    if _integer(said, "top_logprobs", 0, 1 << 31):
        raise refuse("top_logprobs", "only the chosen token's log-prob is there: must be 0 or left out")
    return _boolean(said, "logprobs")


def _stop(said: Mapping[str, Any]) -> tuple[str, ...]:
    stop = said.get("stop", ())
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, Sequence) or not all(isinstance(text, str) and text for text in stop):
        raise refuse("stop", "must be a string or a list of strings", "invalid_type")
    return tuple(stop)


def _tools(said: Mapping[str, Any]) -> tuple[Any, ...] | None:
    choice, tools = said.get("tool_choice", "auto"), said.get("tools")
    if choice not in ("auto", "none"):
        raise refuse("tool_choice", "must be auto or none: an answer is not forced", "unsupported_value")
    if tools is None:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise refuse("tools", "must be a list of tools", "invalid_type")
    for i, tool in enumerate(tools):
        function = (
            tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        )
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise refuse(f"tools.{i}", "must be {type: function, function: {name, …}}", "invalid_type")
    return tuple(tools) if tools and choice == "auto" else None


def _prompt(prompt: Any) -> str | np.ndarray:
    if isinstance(prompt, Sequence) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        if not all(0 <= token < 1 << 31 for token in prompt):
            raise refuse("prompt", "has token ids that are no token ids (negative, or too large)")
        return np.asarray(prompt, np.int32)
    raise refuse("prompt", "must be one string or one list of token ids, and not empty", "invalid_type")
