"""Tool calls in an answer, of the format that a model's family writes.

token ids ── text: marks kept ── regions / harmony: texts and calls ── calls: name, arguments, or a reason
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rondo.chat.encode import decode
from rondo.chat.tools.calls import MalformedCall, ToolCall, read_calls, regions, settled_text
from rondo.chat.tools.formats import ToolFormat, tool_format
from rondo.chat.tools.harmony import harmony_pieces, join_harmony, settled_harmony

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ParsedAnswer:
    """What an answer says and asks for."""

    text: str
    """All that is no call. Malformed calls stay in it as the model wrote them."""
    calls: tuple[ToolCall, ...] = ()
    """The calls that can be made, in the order of the text."""
    malformed: tuple[MalformedCall, ...] = ()
    """The calls that cannot be made."""


class ToolParser:
    """Reads the answers of a model that was offered `tools` ({type: function, function: {name, parameters}},
    or the function alone). parallel: whether an answer may have several calls. opening: how answers begin
    that are read without it (see `forced.py`).

    Raises ConfigError where it is not known how the model writes calls.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Mapping[str, Any]],
        *,
        parallel: bool = True,
        opening: str = "",
    ) -> None:
        self.format: ToolFormat = tool_format(tokenizer)
        self._parallel = parallel
        self._opening = opening
        functions = [tool.get("function", tool) for tool in tools]
        self._tools = {function["name"]: function.get("parameters") or {} for function in functions}
        self._tokenizer = tokenizer
        special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        vocabulary = tokenizer.get_added_vocab()
        # Of the format: a response that ends with one, as a stop token, ends with it for the parser, too.
        self.mark_ids = frozenset(vocabulary[mark] for mark in self.format.marks if mark in vocabulary)
        self._marks = self.mark_ids & special
        self._hidden = special - self._marks
        closing = vocabulary.get(self.format.close or "")
        # Tokens at which an answer must end so that it has one call only, where that can be told.
        self.stop_ids = frozenset() if parallel or closing is None else frozenset({closing})

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text without special tokens other than the format's marks."""
        if not self._marks:
            return decode(self._tokenizer, token_ids)
        return decode(self._tokenizer, [i for i in token_ids if i not in self._hidden], special=True)

    def settled(self, text: str) -> str:
        """Returns the beginning of `parse(…).text` that an unfinished answer will have however it goes on."""
        text = self._opening + text
        if self.format.splitter == "harmony":
            return settled_harmony(text)
        return settled_text(self.format, text)

    def parse(self, text: str) -> ParsedAnswer:
        """Reads a whole answer. A malformed call does not touch the others."""
        text = self._opening + text
        harmony = self.format.splitter == "harmony"
        pieces = harmony_pieces(text) if harmony else regions(self.format, text)
        said: list[str] = []
        calls: list[ToolCall] = []
        malformed: list[MalformedCall] = []
        for piece in pieces:
            if isinstance(piece, str):
                if piece.strip() or not said:
                    said.append(piece)
                continue
            for call in read_calls(self.format, piece, self._tools):
                if isinstance(call, ToolCall) and calls and not self._parallel:
                    call = MalformedCall("not_parallel", piece.raw)
                if isinstance(call, ToolCall):
                    calls.append(call)
                else:
                    malformed.append(call)
                    said.append(call.text)
        if harmony:
            return ParsedAnswer(join_harmony(said), tuple(calls), tuple(malformed))
        return ParsedAnswer("".join(said) if calls else text, tuple(calls), tuple(malformed))
