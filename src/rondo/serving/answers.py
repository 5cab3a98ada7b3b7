"""OpenAI's answer objects, with the exact tokens beside the text where they are asked for.

Beyond OpenAI's fields: per choice `engine_finish_reason` (stop, length, deadline) and, where there are any,
`malformed_tool_calls`. With `return_token_ids`: `prompt_token_ids` of the answer, and per choice `token_ids`,
`token_log_probs` and `policy_versions`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rondo.chat import MalformedCall, ToolCall, decode
from rondo.core.types import Completion
from rondo.serving.requests import Kind
from rondo.serving.sessions import exact_tokens

_OBJECTS = {
    ("chat", False): "chat.completion",
    ("chat", True): "chat.completion.chunk",
    ("text", False): "text_completion",
    ("text", True): "text_completion",
}
# By the letter that stands for it in the vocabularies of GPT-2 and its heirs: itself where it can be printed.
_PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTED)
_BYTES = {chr(byte): byte for byte in _PRINTED} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}


@dataclass(frozen=True)
class AnswerPiece:
    """Some of a choice's tokens, and what they say."""

    made: Completion
    """The tokens, with their log-probs and versions."""
    text: str
    """What the client reads: without tool calls, stop strings and hidden tokens."""
    tool_calls: Sequence[dict[str, Any]] = ()
    """As a message has them; see `tool_calls`."""
    malformed: Sequence[MalformedCall] = ()
    """What was meant as a tool call and cannot be read as one."""
    cut: str = ""
    """What its tokens say behind the text: the stop string that ended it, and what came with it."""
    has_begun: bool = False
    """Whether tokens of the choice came before these."""


@dataclass(frozen=True)
class AnswerWriter:
    """Writes the objects of one answer, which share these fields."""

    kind: Kind
    """Whether it answers a chat or a text completion."""
    id: str
    """The same in all chunks of a stream: `chatcmpl-…` or `cmpl-…`."""
    created: int
    """Seconds since the epoch."""
    model: str
    """The name by which requests ask for it."""
    tokenizer: Any
    """Decodes single tokens, where their log-probs are asked for."""
    logprobs: bool
    """Whether the log-probs of the tokens are asked for."""
    token_ids: bool
    """Whether the exact tokens are asked for."""

    def whole(
        self, prompt_ids: np.ndarray, pieces: Sequence[AnswerPiece], completions: Sequence[Completion]
    ) -> dict[str, Any]:
        """Writes the answer to a request that does not stream."""
        choices = []
        for index, (piece, made) in enumerate(zip(pieces, completions, strict=True)):
            said = {"message": self._message(piece)} if self.kind == "chat" else {"text": piece.text}
            choices.append(self._choice(index, said, piece, made))
        return {
            **self._object(stream=False),
            **self._prompt(prompt_ids),
            "choices": choices,
            "usage": usage(prompt_ids, completions),
        }

    def opening(self, prompt_ids: np.ndarray, n: int) -> dict[str, Any]:
        """Writes the first chunk of a stream: the role, before any token."""
        said = {"delta": {"role": "assistant", "content": ""}} if self.kind == "chat" else {"text": ""}
        choices = [{"index": i, **said, "finish_reason": None, "logprobs": None} for i in range(n)]
        return {**self._object(stream=True), **self._prompt(prompt_ids), "choices": choices}

    def chunk(self, index: int, piece: AnswerPiece, made: Completion | None) -> dict[str, Any]:
        """Writes a further chunk. made: the whole completion, with the choice's last one."""
        if self.kind == "chat":
            delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
            if piece.tool_calls:
                delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(piece.tool_calls)]
            said: dict[str, Any] = {"delta": delta}
        else:
            said = {"text": piece.text}
        return {**self._object(stream=True), "choices": [self._choice(index, said, piece, made)]}

    def closing(self, prompt_ids: np.ndarray, completions: Sequence[Completion]) -> dict[str, Any]:
        """Writes the chunk that `stream_options.include_usage` asks for."""
        return {**self._object(stream=True), "choices": [], "usage": usage(prompt_ids, completions)}

    def _object(self, *, stream: bool) -> dict[str, Any]:
        kind = _OBJECTS[self.kind, stream]
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _prompt(self, prompt_ids: np.ndarray) -> dict[str, Any]:
        return {"prompt_token_ids": prompt_ids.tolist()} if self.token_ids else {}

    def _choice(
        self, index: int, said: dict[str, Any], piece: AnswerPiece, whole: Completion | None
    ) -> dict[str, Any]:
        """Writes one of `choices`. whole: the choice's completion, with its last piece; None: more is to
        come.
        """
        malformed = malformed_calls(piece)
        return {
            "index": index,
            **said,
            **({"malformed_tool_calls": malformed} if malformed else {}),
            "finish_reason": None if whole is None else finish_reason(piece, whole),
            "logprobs": self._logprobs(piece) if self.logprobs else None,
            **(exact_tokens(piece.made) if self.token_ids else {}),
            "engine_finish_reason": None if whole is None else whole.finish_reason,
        }

    def _message(self, piece: AnswerPiece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.tool_calls:
            message["content"] = piece.text or None
            message["tool_calls"] = piece.tool_calls
        return message

    def _logprobs(self, piece: AnswerPiece) -> dict[str, Any]:
        ids, numbers = piece.made.token_ids.tolist(), piece.made.log_probs.tolist()
        said = _token_bytes(self.tokenizer, ids, piece.has_begun)
        texts = [
            decode(self.tokenizer, [token], special=True) if own is None else own.decode(errors="replace")
            for token, own in zip(ids, said, strict=True)
        ]
        if self.kind == "text":
            offsets = np.cumsum([0, *map(len, texts)])[:-1].tolist()
            return {"tokens": texts, "token_logprobs": numbers, "top_logprobs": None, "text_offset": offsets}
        shown = [None if own is None else list(own) for own in said]
        content = [
            {"token": text, "logprob": number, "bytes": own, "top_logprobs": []}
            for text, number, own in zip(texts, numbers, shown, strict=True)
        ]
        return {"content": content, "refusal": None}


def _token_bytes(tokenizer: Any, ids: Sequence[int], has_begun: bool) -> list[bytes | None]:
    """Returns the bytes that each token adds to an answer's text: joined they are its UTF-8. None: it adds
    none, as special tokens, or it cannot be known. has_begun: whether tokens came before.
    """
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    found: list[bytes | None] = []
    for token in ids:
        alone, name = decode(tokenizer, [token]), tokenizer.convert_ids_to_tokens(token)
        if not alone and decode(tokenizer, [token], special=True):
            found.append(None)
            continue
        if decoder is not None and name is not None and has_begun:  # some leave out the first one's space
            alone = decoder.decode(["a", name]).removeprefix("a")
        has_begun = True
        found.append(_bytes_of(alone, name))
    return found


def _bytes_of(text: str, name: str | None) -> bytes | None:
    """Returns the bytes of a token with this text. name: what the vocabulary calls it, which says what the
    bytes are where they are a part of a character; None: it has none.
    """
    if "\ufffd" not in text or (name and "\ufffd" in name):
        return text.encode()
    as_number = re.fullmatch("<0x([0-9A-F]{2})>", name or "")
    if as_number:
        return bytes([int(as_number[1], 16)])
    return bytes(_BYTES[letter] for letter in name) if name and _BYTES.keys() >= set(name) else None


def finish_reason(piece: AnswerPiece, whole: Completion) -> str:
    """Says why a choice ended, in OpenAI's words. piece: its last one, or all of it."""
    if piece.tool_calls:
        return "tool_calls"
    return "stop" if whole.finish_reason == "stop" else "length"


def malformed_calls(piece: AnswerPiece) -> list[dict[str, str]]:
    """Writes what was meant as a call and is none."""
    return [{"reason": call.reason, "text": call.text} for call in piece.malformed]


def tool_calls(made: Completion, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Writes the calls of an answer as a message has them. Ids are nine letters and digits (what Mistral's
    template wants), and a function of all of the answer's tokens.
    """
    if not calls:
        return []
    seen = made.prompt_ids.tobytes() + made.token_ids.tobytes()
    ids = (hashlib.blake2b(seen + bytes([i % 256])).hexdigest()[:9] for i in range(len(calls)))
    return [
        {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for name, call in zip(ids, calls, strict=True)
    ]


def usage(prompt_ids: np.ndarray, completions: Sequence[Completion]) -> dict[str, int]:
    """Counts tokens; the prompt's once for all choices."""
    made = sum(len(completion.token_ids) for completion in completions)
    given = len(prompt_ids)
    return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}
