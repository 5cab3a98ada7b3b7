"""Text and messages to token ids and back. Knows tokenizers and templates, nothing of rows, rewards or
engines.
"""

# ruff: noqa: F401
from __future__ import annotations

from rondo.chat.continuation import Continuation
from rondo.chat.continuation_check import checked_continuation, drops_thoughts, has_clock
from rondo.chat.conversations import Turns, encode_conversations, learns_to_end, loses_thoughts
from rondo.chat.encode import (
    check_written,
    decode,
    encode_piece,
    encode_prompt,
    encode_prompts,
    opening_of,
    render,
    tokenise_up_to,
)
from rondo.chat.messages import (
    FLAGS,
    Conversation,
    ImagePart,
    Message,
    MessageError,
    MessageReader,
    Messages,
    as_messages,
)
from rondo.chat.options import check_template_options, template_options, template_variables
from rondo.chat.stops import (
    RunningText,
    StopMatcher,
    before_stop,
    length_before_stop,
    split_stops,
    stop_token_ids,
)
from rondo.chat.strict_json import JsonError, read_json
from rondo.chat.template_keys import TemplateKeys, template_keys
from rondo.chat.tools import MalformedCall, ParsedAnswer, ToolCall, ToolParser, tool_format
from rondo.chat.tools.forced import call_opening
