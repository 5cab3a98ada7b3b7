"""What a chat template leaves out is an error, or a warning, before anything is learnt from it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from rondo.chat import check_written, encode_conversations, encode_prompts
from rondo.chat.messages import Conversation
from rondo.core.errors import DataError
from tests.chat.test_continuation import CALLS_ONLY_TEMPLATE

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
ASK = {"role": "user", "content": "Where?"}
SAY = {"role": "assistant", "content": "Here."}
# As Qwen3's: other roles are passed over. And one that writes neither calls nor tools; one that has a system
# message at the beginning only; and one that keeps the end of what an answer says.
FOUR_ROLES = """{% for m in messages %}{% if m.role in ('user', 'system', 'assistant', 'tool') -%}
<{{ m.role }}>{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}
{% endif %}{% endfor %}{{ tools | tojson if tools }}{{ '<assistant>' if add_generation_prompt }}"""
TEXTS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
FIRST = """{% if messages[0].role == 'system' %}<<{{ messages[0].content }}>>{% endif %}
{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content | trim }}
{% endfor %}{{ '<assistant>' if add_generation_prompt }}"""
THOUGHTS = """{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}
{% endfor %}{{ '<assistant>' if add_generation_prompt }}"""


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        (
            FOUR_ROLES,
            [{"role": "developer", "content": "In French."}, ASK],
            "messages of the role developer say",
        ),
        (FOUR_ROLES, [{"role": "human", "content": "Where?"}], "messages of the role human say"),
        (FOUR_ROLES, [ASK, {**SAY, "role": "User"}], "messages of the role User say"),
        (FOUR_ROLES, [ASK, SAY, ASK], ""),
        (FOUR_ROLES, [ASK, {**SAY, "content": "", "tool_calls": [CALL]}, {**ASK, "role": "tool"}], ""),
        (FOUR_ROLES, [{"role": "developer", "content": " "}, ASK], ""),  # it says nothing
        (TEXTS, [ASK, {**SAY, "tool_calls": [CALL]}, ASK], r"the calls of an answer \(tool_calls\)"),
        (FIRST, [{"role": "system", "content": " In French.\n"}, ASK], ""),
        (
            FIRST,
            [ASK, SAY, {"role": "system", "content": "In French."}, ASK],
            "messages of the role system say",
        ),
        (THOUGHTS, [ASK, {**SAY, "content": "<think>Hm.</think>Here."}, ASK], ""),
    ],
)
def test_what_a_template_leaves_out_is_refused(
    with_template: Any, template: str, messages: list[Any], says: str
) -> None:
    tok = with_template(template)
    for _ in range(2):  # it is known from the first time on
        if not says:
            check_written(tok, messages)
            continue
        with pytest.raises(DataError, match=says):
            encode_prompts(tok, [messages])


def test_what_is_learnt_beside_calls_is_refused_and_else_told_once(
    with_template: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Of Llama 3.1's, which writes calls alone; and tools, which a message may describe."""
    tok, answer = with_template(CALLS_ONLY_TEMPLATE), {**SAY, "tool_calls": [CALL]}
    with caplog.at_level(logging.WARNING, logger="rondo.chat.written"):
        for _ in range(2):
            encode_prompts(tok, [[ASK, answer, {**ASK, "role": "tool"}]], tools=[[TOOL]])
    said = sorted(record.getMessage().split(":")[0] for record in caplog.records)
    assert said == [
        "the chat template leaves out the tools that it is given",
        "the chat template leaves out what an answer says beside its calls of tools",
    ]
    with pytest.raises(DataError, match="beside its calls of tools"):
        encode_conversations(tok, [Conversation((ASK, answer))])
    encode_conversations(tok, [Conversation((ASK, {**answer, "content": ""}))])


def test_messages_that_were_looked_at_are_not_again(with_template: Any) -> None:
    tok = with_template(FOUR_ROLES)
    lost = {"role": "developer", "content": "In French."}
    check_written(tok, [lost, ASK], first=1)
    with pytest.raises(DataError, match="messages of the role developer say"):
        check_written(tok, [ASK, lost], first=1)
