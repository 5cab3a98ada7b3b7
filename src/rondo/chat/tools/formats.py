"""How families of models write tool calls, as data.

A call is a region of the answer's text: what opens and closes it, and how name and arguments stand in it.
`calls.py` reads all of them; gpt-oss's channels are found by code of their own (`harmony.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rondo.core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ToolFormat:
    """How one family writes tool calls."""

    name: str
    """What a recipe calls the format."""
    template: tuple[str, ...]
    """Texts that the family's chat templates have, all of them."""
    open: str
    """Begins a call."""
    close: str | None
    """Ends a call; None: the next opening does, or the end of the answer."""
    around: tuple[str, ...] = ()
    """Marks around several calls, which are neither text nor calls."""
    inside: tuple[str, ...] = ()
    """Further marks that may be special tokens of the tokenizer and must be seen."""
    ends: tuple[str, ...] = ()
    """Special tokens that end an answer because it has a call."""
    body: re.Pattern[str] | None = None
    """What stands in a region, with the groups `name` and `arguments`. None, or where it does not match and
    `json` is true: a JSON object {name, arguments}, or a list of such.
    """
    json: bool = False
    """Whether a region may be JSON that names the tool and its arguments."""
    pair: re.Pattern[str] | None = None
    """One argument in `arguments`, with the groups `key` and `value` (text, cast by the tool's schema); None:
    the arguments are a JSON object.
    """
    bare: re.Pattern[str] | None = None
    """How an answer begins that is a call without an opening."""
    splitter: Literal["regions", "harmony"] = "regions"
    """The program that finds the calls in a text."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts that the reader must see, whether or not they are special tokens."""
        closing = () if self.close is None else (self.close,)
        return (self.open, *closing, *self.around, *self.inside)


# A model may write an opening ten thousand times: no pattern looks beyond the next one, nor takes the same
# white space in two ways.
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.DOTALL)


_SEPARATOR = "<｜tool▁sep｜>"

# In the order in which a template is looked at: the first whose texts it has.
FORMATS = (
    ToolFormat(
        "gpt_oss",
        template=("<|channel|>commentary", "<|call|>"),
        open="<|start|>",
        close="<|call|>",
        inside=("<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>"),
        ends=("<|call|>",),
        body=_pattern(r".*?to=(?:functions\.)?(?P<name>[^\s<]*).*?<\|message\|>(?P<arguments>.*)"),
        splitter="harmony",
    ),
    ToolFormat(
        "kimi_k2",
        template=("<|tool_calls_section_begin|>",),
        open="<|tool_call_begin|>",
        close="<|tool_call_end|>",
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        inside=("<|tool_call_argument_begin|>",),
        # functions.NAME:INDEX
        body=_pattern(
            r"(?:functions\.)?(?P<name>[^<]*?)(?::\d+)?<\|tool_call_argument_begin\|>(?P<arguments>.*)"
        ),
    ),
    ToolFormat(
        "deepseek",
        template=("<｜tool▁calls▁begin｜>",),
        open="<｜tool▁call▁begin｜>",
        close="<｜tool▁call▁end｜>",
        around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        inside=(_SEPARATOR,),
        # V3, R1: function, separator, name, JSON in a fence. V3.1: name, separator, JSON.
        body=_pattern(
            rf"(?:function{_SEPARATOR})?(?P<name>[^\n<]*?)(?:{_SEPARATOR}|\n```json\n)"
            r"(?P<arguments>.*?)(?:\n```)?"
        ),
    ),
    ToolFormat(
        "mistral",
        template=("[TOOL_CALLS]",),
        open="[TOOL_CALLS]",
        close=None,
        inside=("[ARGS]", "[CALL_ID]"),
        # Since v11 NAME[ARGS]{…}, before that a JSON list
        body=_pattern(r"(?P<name>[\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?P<arguments>\{.*)"),
        json=True,
    ),
    ToolFormat(
        "llama3",
        template=("<|start_header_id|>", '"parameters": '),
        open="<|python_tag|>",
        close=None,
        ends=("<|eom_id|>",),
        json=True,
        bare=_pattern(r'\{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"]*"\s*,\s*"parameters"\s*:'),
    ),
    ToolFormat(
        "glm4",
        template=("<tool_call>", "<arg_key>", "<arg_value>"),
        open="<tool_call>",
        close="</tool_call>",
        inside=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        body=_pattern(r"(?P<name>[^\n<]*)(?P<arguments>.*)"),
        pair=_pattern(
            r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>(?P<value>((?!<arg_key>).)*?)</arg_value>"
        ),
    ),
    ToolFormat(
        "qwen_xml",
        template=("<tool_call>", "<function=", "<parameter="),
        open="<tool_call>",
        close="</tool_call>",
        body=_pattern(r"<function=(?P<name>[^>\n]*)>(?P<arguments>.*)</function>"),
        pair=_pattern(r"<parameter=(?P<key>[^<>\n]*)>\n?(?P<value>((?!<parameter=).)*?)\n?</parameter>"),
    ),
    ToolFormat(
        "hermes",
        template=("<tool_call>", "arguments"),
        open="<tool_call>",
        close="</tool_call>",
        json=True,
    ),
)
_BY_NAME = {known.name: known for known in FORMATS}


def tool_format(tokenizer: PreTrainedTokenizerBase) -> ToolFormat:
    """Returns the format of the tokenizer's `tool_format` (model.tool_format), for `auto` the one whose marks
    its chat template has. Raises ConfigError where that is none.
    """
    asked = getattr(tokenizer, "tool_format", "auto")
    if asked != "auto":
        return _BY_NAME[asked]
    found = _of_template(tokenizer)
    if found is None:
        raise ConfigError(
            "the chat template has the marks of no known tool format, so calls in an answer cannot be told "
            f"from text; set model.tool_format to one of {', '.join(sorted(_BY_NAME))} if the model "
            "writes it, or use a template that writes tool calls (model.chat_template)",
            key="model.tool_format",
        )
    return found


def call_end_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Returns the tokens that end an answer because it has a call; () where the format has none."""
    asked = getattr(tokenizer, "tool_format", "auto")
    known = _of_template(tokenizer) if asked == "auto" else _BY_NAME[asked]
    vocabulary = tokenizer.get_added_vocab() if known and known.ends else {}
    return {vocabulary[end] for end in known.ends if end in vocabulary} if known else set()


def _of_template(tokenizer: PreTrainedTokenizerBase) -> ToolFormat | None:
    template = tokenizer.chat_template or ""
    text = "\n".join(template.values()) if isinstance(template, dict) else template
    return next((known for known in FORMATS if all(mark in text for mark in known.template)), None)
