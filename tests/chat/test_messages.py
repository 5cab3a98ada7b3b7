"""The one reader of conversations: what a message may say, how it is read, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from rondo.chat import MessageError, MessageReader, TemplateKeys, template_keys
from rondo.recipes import quickstart
from tests.messages import full_text

USER = {"role": "user", "content": "Rome?"}


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function, **more}]}


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    return {**call(arguments, **more), "content": ""}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (USER, USER),
        ({**USER, "name": "Ann", "refusal": None, "annotations": [], "audio": {}}, {**USER, "name": "Ann"}),
        (
            {"role": "user", "content": [{"type": "text", "text": "Ro"}, {"type": "text", "text": "me?"}]},
            USER,
        ),
        ({"role": "user", "content": [{"type": "text", "text": "Rome?", "image_url": None}]}, USER),
        (call({"city": "Rome", "day": None}), called({"city": "Rome", "day": None})),
        (call('{"city": "Rome", "day": null}'), called({"city": "Rome", "day": None})),
        (call(""), called({})),
        (call(None, id="a", index=None), called({}, id="a")),
        ({"role": "assistant", "tool_calls": [{"name": "weather", "arguments": {"a": 1}}]}, called({"a": 1})),
        ({"role": "tool", "content": "sun", "tool_call_id": "a"},) * 2,
        ({**USER, "id": 7, "timestamp": "now"}, USER),
    ],
)
def test_what_a_message_says(given: dict[str, Any], read: dict[str, Any]) -> None:
    reader = MessageReader(ignored=frozenset({"id", "timestamp"}))
    assert reader.read([given]).messages == (read,)
    assert reader.read([read]).messages == (read,)  # what was read is read as it is


@pytest.mark.parametrize(
    ("given", "path", "code", "words"),
    [
        ("hi", (0,), "invalid_type", "must be a valid dictionary"),
        ({"content": "hi"}, (0, "role"), "missing", "there is content"),
        ({"role": 3, "content": "hi"}, (0, "role"), "invalid_type", "valid string"),
        ({"role": "user"}, (0, "content"), "missing", "is missing"),
        ({"role": "user", "content": 5}, (0, "content"), "invalid_type", "a string or a list of parts"),
        ({**USER, "content": ["a"]}, (0, "content", 0, "type"), "unsupported_value", "must be 'text'"),
        (
            {**USER, "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]},
            (0, "content", 1, "type"),
            "unsupported_value",
            "got 'image_url': pictures",
        ),
        ({**USER, "content": [{"type": "text"}]}, (0, "content", 0, "text"), "invalid_type", "valid string"),
        (
            {**USER, "content": [{"type": "text", "text": "a", "cache": 1}]},
            (0, "content", 0, "cache"),
            "unknown_parameter",
            "no meaning",
        ),
        ({**USER, "timestamp": 3}, (0, "timestamp"), "unknown_parameter", "role 'user'"),
        ({**USER, "tool_calls": [{}]}, (0, "tool_calls"), "unknown_parameter", "role 'user'"),
        ({**USER, "reasoning_content": "hm"}, (0, "reasoning_content"), "unknown_parameter", "does not read"),
        ({**USER, "name": 3}, (0, "name"), "invalid_type", "valid string"),
        (call(3), (0, "tool_calls", 0), "invalid_type", "function: {name, arguments}"),
        (call({}, type="code"), (0, "tool_calls", 0), "invalid_type", "function: {name, arguments}"),
        ({"role": "assistant", "tool_calls": "f()"}, (0, "tool_calls"), "invalid_type", "valid list"),
        (call("{"), (0, "tool_calls", 0, "function", "arguments"), "invalid_type", "is no JSON"),
        (call("[1]"), (0, "tool_calls", 0, "function", "arguments"), "invalid_type", "is a list"),
        ({**USER, "weight": 0}, (0, "weight"), "unknown_parameter", "nothing of it is learnt here"),
        ({**USER, "loss_mask": 0.5}, (0, "loss_mask"), "invalid_value", "must be 0 or 1"),
    ],
)
def test_what_has_no_meaning_is_refused(given: Any, path: tuple[Any, ...], code: str, words: str) -> None:
    with pytest.raises(MessageError, match=words.replace("(", r"\(")) as caught:
        MessageReader().read([given])
    assert (caught.value.path, caught.value.code) == (path, code)


@pytest.mark.parametrize("given", ["hi", {"role": "user"}, 5, None])
def test_messages_are_a_list(given: Any) -> None:
    with pytest.raises(MessageError, match="must be a list of mappings"):
        MessageReader().read(given)


def test_a_client_may_repeat_a_call_whose_arguments_are_no_json() -> None:
    reader = MessageReader(takes_broken_arguments=True)
    assert reader.read([call('{"city"')]).messages == (called('{"city"'),)


def test_flags_say_which_turns_are_learnt() -> None:
    answer = {"role": "assistant", "content": "sun"}
    flags: list[dict[str, Any]] = [
        {},
        {"weight": 0},
        {"loss_mask": 0.0},
        {"trainable": False},
        {"weight": 1, "trainable": True},
        {"weight": 0, "loss_mask": 0},
        {"weight": None},
    ]
    read = MessageReader(takes_flags=True).read([{**answer, **flag} for flag in flags])
    assert read.messages == (answer,) * len(flags)
    assert read.unlearnt == {1, 2, 3, 5}
    assert read.behind("Be short.").unlearnt == {2, 3, 4, 6}
    assert MessageReader(takes_flags=True).read([{**USER, "weight": 0}]).messages == (USER,)
    with pytest.raises(MessageError, match=full_text("both that it is learnt")):
        MessageReader(takes_flags=True).read([{**answer, "weight": 1, "trainable": False}])
    with pytest.raises(MessageError, match="only the assistant's are learnt"):
        MessageReader(takes_flags=True).read([{**USER, "weight": 1}])


def test_a_key_that_the_template_reads_is_kept_even_one_that_is_a_flag_elsewhere() -> None:
    reader = MessageReader(TemplateKeys(frozenset({"reasoning_content", "weight"})))
    message = {"role": "assistant", "content": "a", "reasoning_content": "hm", "weight": 0.5}
    assert reader.read([message]).messages == (message,)


BY_ATTRIBUTE = "{% for m in messages %}{{ m.role }}{{ m.content }}{% if m.thinking %}x{% endif %}{% endfor %}"
BY_KEY = (
    "{% for m in messages[1:] %}{{ m['role'] }}{{ m.get('thinking', '') }}"
    "{% if 'other' in m %}{% endif %}{% endfor %}"
)
BY_INDEX = "{% set ns = namespace(last=messages[-1]) %}{{ messages[0]['role'] }}{{ ns.last.thinking }}"
BY_MACRO = (
    "{% macro write(it) %}{{ it.thinking }}{% endmacro %}{% for m in messages %}{{ write(m) }}{% endfor %}"
)
WHOLE = "{% for message in messages %}{{ message | tojson }}{% endfor %}"
COMPUTED = "{% for message in messages %}{% for k in ['a'] %}{{ message[k] }}{% endfor %}{% endfor %}"
ITEMS = "{% for message in messages %}{% for k, v in message.items() %}{{ k }}{% endfor %}{% endfor %}"
ALL_AT_ONCE = "{{ messages | tojson }}"


@pytest.mark.parametrize("template", [BY_ATTRIBUTE, BY_KEY, BY_INDEX, BY_MACRO])
def test_keys_that_a_template_names(template: str) -> None:
    keys = template_keys(quickstart.fast_tokenizer(quickstart._word_problem_bpe(), template))
    assert keys.reads("thinking")
    assert not keys.reads("timestamp")
    assert keys.reads("other") == (template is BY_KEY)


@pytest.mark.parametrize("template", [WHOLE, COMPUTED, ITEMS, ALL_AT_ONCE])
def test_a_template_that_prints_whole_messages_reads_every_key(template: str) -> None:
    assert template_keys(quickstart.fast_tokenizer(quickstart._word_problem_bpe(), template)).reads(
        "anything"
    )


def test_without_a_template_no_key_is_read() -> None:
    tokenizer = quickstart.fast_tokenizer(quickstart._word_problem_bpe(), None)
    assert template_keys(tokenizer) == TemplateKeys()
