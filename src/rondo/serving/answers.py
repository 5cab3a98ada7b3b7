"""OpenAI's answer objects, with the exact tokens beside the text.

Beyond OpenAI's fields: `prompt_token_ids` of the answer, and per choice `token_ids`, `token_log_probs`,
`policy_versions`, `engine_finish_reason` (stop, length, deadline).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rondo.chat import ToolCall
from rondo.serving.requests import Kind
from rondo.types import Completion

_OBJECTS = {
    ("chat", False): "chat.completion",
    ("chat", True): "chat.completion.chunk",
    ("text", False): "text_completion",
    ("text", True): "text_completion",
}


@dataclass(frozen=True)
class Piece:
    """Some of a choice's tokens and their text. text: None for an answer of tool calls only."""

    text: str | None
    token_ids: np.ndarray
    log_probs: np.ndarray
    policy_versions: np.ndarray
    tool_calls: tuple[ToolCall, ...] = ()
    call_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Frame:
    """What all objects of one answer share."""

    kind: Kind
    id: str
    created: int
    model: str
    tokenizer: Any
    logprobs: bool

    def whole(
        self, prompt_ids: np.ndarray, pieces: Sequence[Piece], completions: Sequence[Completion]
    ) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        choices = []
        for index, (piece, made) in enumerate(zip(pieces, completions, strict=True)):
            said = {"message": self._message(piece)} if self.kind == "chat" else {"text": piece.text}
            choices.append(self._choice(index, said, piece, made, finish_reason(made, piece.tool_calls)))
        return {
            **self._object(stream=False),
            "prompt_token_ids": prompt_ids.tolist(),
            "choices": choices,
            "usage": usage(prompt_ids, completions),
        }

    def opening(self, prompt_ids: np.ndarray, n: int) -> dict[str, Any]:
        """The first chunk of a stream: the role, before any token."""
        said = {"delta": {"role": "assistant", "content": ""}} if self.kind == "chat" else {"text": ""}
        choices = [{"index": i, **said, "finish_reason": None, "logprobs": None} for i in range(n)]
        return {**self._object(stream=True), "prompt_token_ids": prompt_ids.tolist(), "choices": choices}

    def chunk(self, index: int, piece: Piece, made: Completion | None) -> dict[str, Any]:
        """A further chunk. made: the whole completion, with the choice's last one."""
        if self.kind == "chat":
            delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
            if piece.tool_calls:
                delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(tool_calls(piece))]
            said: dict[str, Any] = {"delta": delta}
        else:
            said = {"text": piece.text}
        reason = finish_reason(made, piece.tool_calls) if made is not None else None
        return {**self._object(stream=True), "choices": [self._choice(index, said, piece, made, reason)]}

    def closing(self, prompt_ids: np.ndarray, completions: Sequence[Completion]) -> dict[str, Any]:
        """The chunk that `stream_options.include_usage` asks for."""
        return {**self._object(stream=True), "choices": [], "usage": usage(prompt_ids, completions)}

    def _object(self, *, stream: bool) -> dict[str, Any]:
        kind = _OBJECTS[self.kind, stream]
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _choice(
        self, index: int, said: dict[str, Any], piece: Piece, made: Completion | None, reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            **said,
            "finish_reason": reason,
            "logprobs": self._logprobs(piece) if self.logprobs else None,
            "token_ids": piece.token_ids.tolist(),
            "token_log_probs": [float(x) for x in piece.log_probs],
            "policy_versions": piece.policy_versions.tolist(),
            "engine_finish_reason": None if made is None else made.finish_reason,
        }

    def _message(self, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.tool_calls:
            message["content"] = piece.text or None
            message["tool_calls"] = tool_calls(piece)
        return message

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        texts = [self.tokenizer.decode([int(token)]) for token in piece.token_ids]
        numbers = [float(x) for x in piece.log_probs]
        if self.kind == "text":
            offsets = np.cumsum([0, *map(len, texts)])[:-1].tolist()
            return {"tokens": texts, "token_logprobs": numbers, "top_logprobs": None, "text_offset": offsets}
        content = [
            {"token": text, "logprob": number, "bytes": list(text.encode()), "top_logprobs": []}
            for text, number in zip(texts, numbers, strict=True)
        ]
        return {"content": content, "refusal": None}


def finish_reason(made: Completion, calls: Sequence[ToolCall]) -> str:
    """Says it in OpenAI's words."""
    return "tool_calls" if calls else "stop" if made.finish_reason == "stop" else "length"


def tool_calls(piece: Piece) -> list[dict[str, Any]]:
    """Writes tool calls as a message has them."""
    return [
        {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for name, call in zip(piece.call_ids, piece.tool_calls, strict=True)
    ]


def call_ids(made: Completion, number: int) -> tuple[str, ...]:
    """Nine letters and digits each (what Mistral's template wants), a function of the answer's tokens."""
    seen = made.prompt_ids.tobytes() + made.token_ids.tobytes()
    return tuple(hashlib.blake2b(seen + bytes([i % 256])).hexdigest()[:9] for i in range(number))


def usage(prompt_ids: np.ndarray, completions: Sequence[Completion]) -> dict[str, int]:
    made = sum(len(completion.token_ids) for completion in completions)
    given = len(prompt_ids)
    return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}
