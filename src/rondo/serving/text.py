"""Token ids of an answer to its text, at once or as they come."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rondo.chat import ParsedAnswer, RunningText, ToolParser, before_stop, decode, length_before_stop


def answer_text(
    tokenizer: Any,
    token_ids: Sequence[int] | np.ndarray,
    stop_ids: Collection[int],
    stops: Sequence[str] = (),
    parser: ToolParser | None = None,
) -> tuple[ParsedAnswer, str]:
    """Returns the answer without special tokens, and without the stop token or stop string at the end; and
    what its tokens say from the stop string on. parser: of the tools that the model was offered.
    """
    ids = np.asarray(token_ids).tolist()
    ids = ids[:-1] if ids and ids[-1] in stop_ids else ids
    whole = decode(tokenizer, ids) if parser is None else parser.decode(ids)
    return _read(whole, stops, parser), whole[len(before_stop(whole, stops)) :]


def _read(text: str, stops: Sequence[str], parser: ToolParser | None) -> ParsedAnswer:
    """Returns what stands before the first stop string; with it, where it is the end of a tool call."""
    before = before_stop(text, stops)
    if parser is None:
        return ParsedAnswer(before)
    said = parser.parse(before)
    if said.malformed and len(before) < len(text):
        stop = max((stop for stop in stops if text.startswith(stop, len(before))), key=len)
        ended = parser.parse(before + stop)
        if len(ended.malformed) < len(said.malformed):
            return ended
    return said


class TextStream:
    """An answer's text piece by piece; the pieces together are `answer_text` of all its tokens.

    A piece ends where characters end: bytes of an unfinished character wait. What may become a stop string
    waits, too, and with a parser what may become a tool call, and all behind it, waits for the end.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_ids: Collection[int],
        stops: Sequence[str] = (),
        parser: ToolParser | None = None,
    ) -> None:
        self._running = RunningText(partial(decode, tokenizer) if parser is None else parser.decode)
        self._stop_ids = frozenset(stop_ids)
        self._stops = stops
        self._parser = parser
        self._text = ""
        self._sent = 0

    def feed(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Returns what can be said after these further tokens."""
        self._text += self._running.feed([int(one) for one in token_ids if int(one) not in self._stop_ids])
        text = self._text[: length_before_stop(self._text, self._stops)] if self._stops else self._text
        return self._send(text if self._parser is None else self._parser.settled(text))

    def finish(self) -> ParsedAnswer:
        """Returns the answer with the text that has not been said yet."""
        whole = _read(self._text + self._running.open, self._stops, self._parser)
        return replace(whole, text=self._send(whole.text))

    def _send(self, text: str) -> str:
        piece = text[self._sent :]
        self._sent = max(self._sent, len(text))
        return piece
