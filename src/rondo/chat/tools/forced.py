"""How an answer begins that calls a tool, as the chat template writes it: for `tool_choice`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

from rondo.chat.encode import common_start, encode_piece, render
from rondo.chat.tools import ToolParser
from rondo.core.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUESTION = {"role": "user", "content": "a"}
# Functions and an argument whose names no text begins alike with.
_NAMES = ("rondo", "other")


def call_opening(tokenizer: PreTrainedTokenizerBase, name: str | None) -> str:
    """Returns the text up to the name of a function, or of the function `name` up to its arguments.

    It is what two answers have in common that the template has written: of two functions, or of one with and
    without an argument. Raises DataError where the template's answers cannot be begun so, or the reader of
    calls does not find them; ConfigError where the tool format is not known.
    """
    if name is None:
        written = [_written(tokenizer, each, {}) for each in _NAMES]
    else:
        written = [_written(tokenizer, name, arguments) for arguments in ({}, {_NAMES[0]: _NAMES[1]})]
    return common_start(*written).rstrip("{< ")


def _written(tokenizer: PreTrainedTokenizerBase, name: str, arguments: Mapping[str, Any]) -> str:
    """Returns an answer that is this call, behind the beginning of the assistant's turn."""
    function = {"name": name, "description": "", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    parser = ToolParser(tokenizer, tools)
    asked = render(tokenizer, [_QUESTION], tools=tools, generation=True)
    # As Kimi's template wants the call's name, and as Mistral's; arguments as most do, and as DeepSeek's.
    for call_id, given in product((f"functions.{name}:0", "rondo1234"), (arguments, json.dumps(arguments))):
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            text = render(tokenizer, [_QUESTION, answer], tools=tools, generation=False)
        except DataError:
            continue
        said = text.removeprefix(asked)
        read = parser.parse(parser.decode(encode_piece(tokenizer, said)))  # without the end of the turn
        if said != text and [found.name for found in read.calls] == [name]:
            return said
    raise DataError(
        "cannot be kept with this chat template: it does not write an answer that calls a tool as the model "
        "would begin one; use auto"
    )
