"""Options of a chat template: which there are, and that everything that renders a conversation uses them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rondo.chat import (
    MessageReader,
    check_template_options,
    checked_continuation,
    encode_conversations,
    encode_prompt,
)
from rondo.core.errors import ConfigError
from tests.messages import full_text

# As Qwen3's: thinking is on unless it is turned off, and then every turn has an empty block.
TEMPLATE = """\
{%- macro opened() %}
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
{%- endmacro %}
{%- set effort = reasoning_effort or 'medium' %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{{ opened() }}{% generation %}{{ message.content }}{% endgeneration %}
{%- else %}{{ message.content }}{% endif %}{{ '<|im_end|>\\n' }}
{%- if loop.index > 100 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + opened() }}{% endif %}
{%- if documents or tools or bos_token is none %}{{ raise_exception(strftime_now(effort)) }}{% endif %}
"""
OFF = {"enable_thinking": False}
CONVERSATION = [
    {"role": "user", "content": "3+4?"},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "plus 2?"},
    {"role": "assistant", "content": "9"},
]


@pytest.fixture
def thinking(with_template: Any) -> Any:
    """The tokenizer with options of TEMPLATE."""

    def use(options: Mapping[str, Any], template: Any = TEMPLATE) -> Any:
        tokenizer = with_template(template)
        tokenizer.chat_template_options = options
        return tokenizer

    yield use
    with_template(None).chat_template_options = {}


def expected(tokenizer: Any, messages: Any, *, generation: bool, **options: Any) -> list[int]:
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=generation, **options
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("options", [{}, OFF, {"enable_thinking": True}])
def test_prompts_conversations_and_continuations_are_the_templates_own_tokens(
    thinking: Any, options: dict[str, Any]
) -> None:
    tok = thinking(options)
    asked = CONVERSATION[:3]
    prompt = expected(tok, asked, generation=True, **options)
    assert encode_prompt(tok, asked).tolist() == prompt
    assert (prompt == expected(tok, asked, generation=True, **OFF)) is (options == OFF)
    ((ids, mask),) = encode_conversations(tok, [MessageReader().read(CONVERSATION)])
    whole = expected(tok, CONVERSATION, generation=False, **options)
    assert ids.tolist() == whole[: len(ids)]
    assert tok.decode(whole[len(ids) :]).strip() == ""
    assert tok.decode(ids[mask.astype(bool)]) == "7<|im_end|>9<|im_end|>"
    first = [*encode_prompt(tok, CONVERSATION[:1]).tolist(), *tok("7<|im_end|>")["input_ids"]]
    behind = checked_continuation(tok).encode(asked, 1, last_token=first[-1])
    assert behind is not None
    assert [*first, *behind.tolist()] == prompt


def test_an_option_that_the_template_does_not_read_is_an_error(thinking: Any) -> None:
    check_template_options(thinking({}))
    check_template_options(thinking({"enable_thinking": False, "reasoning_effort": "high"}))
    said = r"'enable_thinkng' \(it reads enable_thinking, reasoning_effort\); did you mean 'enable_thinking'"
    with pytest.raises(ConfigError, match=said) as caught:
        check_template_options(thinking({"enable_thinkng": False}))
    assert caught.value.key == "model.chat_template_options.enable_thinkng"
    # transformers and rondo set these
    for name in ("messages", "tools", "documents", "bos_token", "add_generation_prompt", "tokenize"):
        with pytest.raises(ConfigError, match=f"no variable '{name}'"):
            check_template_options(thinking({name: "x"}))


def test_templates_of_other_kinds(thinking: Any) -> None:
    with pytest.raises(ConfigError, match=full_text("no variable 'enable_thinking'")):
        check_template_options(thinking(OFF, "{{ messages[0].content }}"))
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        check_template_options(thinking(OFF, None))
    with pytest.raises(ConfigError, match=full_text("model.chat_template: line 1")):
        check_template_options(thinking(OFF, "{% if %}"))
    check_template_options(thinking(OFF, {"default": "{{ messages }}", "tool_use": "{{ enable_thinking }}"}))
