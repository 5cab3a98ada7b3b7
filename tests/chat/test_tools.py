"""Tool calls in answers: every format's shapes, what is wrong with a call, and that no chunking shows a part
of one as text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rondo.chat import (
    MalformedCall,
    ParsedAnswer,
    ToolCall,
    ToolParser,
    call_opening,
    render,
    stop_token_ids,
    tool_format,
)
from rondo.chat.tools.formats import FORMATS
from rondo.config.schema.models import ModelConfig
from rondo.core.errors import ConfigError, DataError
from rondo.recipes.quickstart import tokenizer
from rondo.serving.text import TextStream, answer_text
from tests.messages import full_text

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "exact": {"type": "boolean"},
        "more": {"type": "object"},
        "note": {"type": ["string", "null"]},
    },
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "w", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "description": "n", "parameters": {"type": "object"}}},
]
# Unicode, nested JSON, a number as text, JSON as text, lines.
ARGUMENTS = {
    "city": 'Zürich "東京"\n<b>',
    "days": 3,
    "exact": True,
    "more": {"a": [1, None, {"b": "}"}]},
    "note": "3",
}
WRITTEN = json.dumps(ARGUMENTS, ensure_ascii=False)
XML = "".join(
    f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
    for key, value in ARGUMENTS.items()
)
GLM = "".join(
    f"<arg_key>{key}</arg_key>\n<arg_value>{value if isinstance(value, str) else json.dumps(value)}"
    "</arg_value>\n"
    for key, value in ARGUMENTS.items()
)
THOUGHT = "<think>\nThe weather?\n</think>\n\nLet me see.\n"
MARK = "<｜tool▁"
# Answers that say THOUGHT, call weather with ARGUMENTS and then, where the format can, now.
SHAPES: list[tuple[str, str]] = [
    (
        "hermes",
        f'{THOUGHT}<tool_call>\n{{"name": "weather", "arguments": {WRITTEN}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    (
        "qwen_xml",
        f"{THOUGHT}<tool_call>\n<function=weather>\n{XML}</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    ("glm4", f"{THOUGHT}<tool_call>weather\n{GLM}</tool_call>\n<tool_call>now\n</tool_call>"),
    ("glm4", f"{THOUGHT}<tool_call>weather{GLM}</tool_call><tool_call>now</tool_call>"),
    (
        "llama3",
        f'{THOUGHT}<|python_tag|>{{"name": "weather", "parameters": {WRITTEN}}}'
        '<|python_tag|>{"name": "now", "parameters": {}}',
    ),
    (
        "mistral",
        f'{THOUGHT}[TOOL_CALLS][{{"name": "weather", "arguments": {WRITTEN}, "id": "a12345678"}}, '
        '{"name": "now", "arguments": {}, "id": "b12345678"}]',
    ),
    ("mistral", f"{THOUGHT}[TOOL_CALLS]weather[ARGS]{WRITTEN}[TOOL_CALLS]now[CALL_ID]b12345678[ARGS]{{}}"),
    (
        "deepseek",
        f"{THOUGHT}{MARK}calls▁begin｜>{MARK}call▁begin｜>function{MARK}sep｜>weather\n```json\n{WRITTEN}\n```"
        f"{MARK}call▁end｜>\n{MARK}call▁begin｜>function{MARK}sep｜>now\n```json\n{{}}\n```{MARK}call▁end｜>"
        f"{MARK}calls▁end｜>",
    ),
    (
        "deepseek",
        f"{THOUGHT}{MARK}calls▁begin｜>{MARK}call▁begin｜>weather{MARK}sep｜>{WRITTEN}{MARK}call▁end｜>"
        f"{MARK}call▁begin｜>now{MARK}sep｜>{{}}{MARK}call▁end｜>{MARK}calls▁end｜>",
    ),
    (
        "kimi_k2",
        f"{THOUGHT}<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{WRITTEN}<|tool_call_end|><|tool_call_begin|>functions.now:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    (
        "gpt_oss",
        "<|channel|>analysis<|message|>The weather?<|end|><|start|>assistant<|channel|>commentary<|message|>"
        f"{THOUGHT}<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json"
        f"<|message|>{WRITTEN}<|call|><|start|>assistant to=functions.now<|channel|>commentary json"
        "<|message|>{}<|call|>",
    ),
]
CALLS = [("weather", ARGUMENTS), ("now", {})]


def parser_of(name: str, *, special: bool = False, **options: Any) -> ToolParser:
    """A parser of this format. special: its marks are special tokens."""
    tok = tokenizer()
    tok.tool_format = name
    known = next(known for known in FORMATS if known.name == name)
    if special:
        tok.add_tokens([*known.marks, *known.ends], special_tokens=True)
    return ToolParser(tok, TOOLS, **options)


PARSERS = {known.name: parser_of(known.name) for known in FORMATS}


def made(answer: ParsedAnswer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


@pytest.mark.parametrize(("name", "text"), SHAPES)
@pytest.mark.parametrize("special", [False, True])
def test_every_format(name: str, text: str, special: bool) -> None:
    """From token ids, whether or not the marks are special tokens; piece by piece as at once."""
    parser = parser_of(name, special=special)
    tok: Any = parser._tokenizer
    ids = tok(text, add_special_tokens=False)["input_ids"]
    whole, _ = answer_text(tok, ids, (), parser=parser)
    assert (whole.text, made(whole), whole.malformed) == (THOUGHT, CALLS, ())
    stream = TextStream(tok, (), parser=parser)
    shown = [stream.feed([token]) for token in ids]
    last = stream.finish()
    assert "".join(shown) in (THOUGHT, THOUGHT.rstrip())
    assert ("".join([*shown, last.text]), last.calls) == (THOUGHT, whole.calls)


@pytest.mark.parametrize(("name", "text"), [shape for shape in SHAPES if "</tool_call>" in shape[1]])
@pytest.mark.parametrize("stops", [["</tool_call>"], ["</tool", "</tool_call>"]])
def test_a_stop_string_that_ends_a_call(name: str, text: str, stops: list[str]) -> None:
    """The call is whole, with the longest stop string there; piece by piece as at once."""
    parser = PARSERS[name]
    tok: Any = parser._tokenizer
    ids = tok(text[: text.index("</tool_call>") + len("</tool_call>")], add_special_tokens=False)["input_ids"]
    whole, cut = answer_text(tok, ids, (), stops, parser)
    assert (whole.text, made(whole), whole.malformed, cut) == (THOUGHT, CALLS[:1], (), "</tool_call>")
    stream = TextStream(tok, (), stops, parser)
    shown = [stream.feed([token]) for token in ids]
    last = stream.finish()
    assert ("".join([*shown, last.text]), last.calls, last.malformed) == (THOUGHT, whole.calls, ())


def test_a_stop_string_inside_a_call_breaks_it() -> None:
    tok: Any = PARSERS["hermes"]._tokenizer
    ids = tok('<tool_call>{"name": "now", "arguments": {}', add_special_tokens=False)["input_ids"]
    whole, _ = answer_text(tok, ids, (), ['"arguments"'], PARSERS["hermes"])
    assert ([call.reason for call in whole.malformed], whole.calls) == (["not_closed"], ())


@pytest.mark.parametrize(("name", "text"), SHAPES)
def test_an_answer_that_was_cut_off_has_whole_calls_only(name: str, text: str) -> None:
    """At every place: calls are the first of the whole's, and there is at most one that is malformed."""
    seen = set()
    for end in range(text.rindex("now"), len(text)):
        answer = PARSERS[name].parse(text[:end])
        assert made(answer) in (CALLS, CALLS[:1], [])
        assert len(answer.malformed) <= 1
        seen |= {call.reason for call in answer.malformed}
    assert seen <= {"not_closed", "no_json", "no_name", "unknown_tool"}
    assert seen


def test_arguments_are_as_the_model_wrote_them() -> None:
    """Not as another writer of JSON writes them."""
    written = '{"days":  1.50e1,\t"note": "\\u00e9"}'
    for name, text in [
        ("hermes", f'<tool_call>{{"arguments" : {written} , "name": "now"}}</tool_call>'),
        ("mistral", f'[TOOL_CALLS] [ {{"name": "now", "arguments": {written} }} ]'),
        ("kimi_k2", f"<|tool_call_begin|>now<|tool_call_argument_begin|>{written}<|tool_call_end|>"),
    ]:
        assert PARSERS[name].parse(text).calls == (ToolCall("now", written),)


GOOD = '<tool_call>{"name": "now"}</tool_call>'
# What no client could send back.
DEEP = "[" * 20_000 + "]" * 20_000
# Format, a malformed call among text, its reason and what stays text of it.
MALFORMED = [
    ("hermes", '<tool_call>{"name": "now", </tool_call>', "no_json"),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>', "no_json"),
    ("hermes", f'<tool_call>{{"name": "now", "arguments": {{"a": {DEEP}}}}}</tool_call>', "no_json"),
    ("hermes", f'<tool_call>{{"name": "now", "arguments": {{"a": {"7" * 5000}}}}}</tool_call>', "no_json"),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "\\ud800"}}</tool_call>', "no_json"),
    ("mistral", f'[TOOL_CALLS]now[ARGS]{{"a": {DEEP}}}', "no_json"),
    ("hermes", "<tool_call>now()</tool_call>", "no_json"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "no_name"),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', "no_name"),
    ("hermes", "<tool_call>[]</tool_call>", "no_name"),
    ("hermes", '<tool_call>"now"</tool_call>', "no_name"),
    ("hermes", '<tool_call>{"name": ""}</tool_call>', "no_name"),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', "arguments_no_object"),
    ("hermes", '<tool_call>{"name": "later"}</tool_call>', "unknown_tool"),
    ("hermes", '<tool_call>{"name": "now"}', "not_closed"),
    ("qwen_xml", "<tool_call><function=now></tool_call>", "no_name"),
    ("qwen_xml", "<tool_call><function=now><parameter=a>3</function></tool_call>", "arguments_no_object"),
    ("qwen_xml", "<tool_call><function=></function></tool_call>", "no_name"),
    ("glm4", "<tool_call>now\n<arg_key>a</arg_key></tool_call>", "arguments_no_object"),
    ("glm4", "<tool_call>\n</tool_call>", "no_name"),
    ("llama3", "<|python_tag|>print(3)", "no_json"),
    ("llama3", '{"name": "now", "parameters": {"a"', "no_json"),
    ("mistral", "[TOOL_CALLS]now[ARGS]{", "no_json"),
    ("mistral", '[TOOL_CALLS][{"name": "now"}', "no_json"),
    ("deepseek", f"{MARK}call▁begin｜>now{MARK}call▁end｜>", "no_name"),
    ("deepseek", f"{MARK}call▁begin｜>now{MARK}sep｜>3{MARK}call▁end｜>", "arguments_no_object"),
    ("kimi_k2", "<|tool_call_begin|>functions.now:0<|tool_call_end|>", "no_name"),
    ("kimi_k2", "<|tool_call_begin|>x:0<|tool_call_argument_begin|>{}<|tool_call_end|>", "unknown_tool"),
    ("gpt_oss", "<|channel|>commentary to=functions.now", "not_closed"),
    ("gpt_oss", "<|channel|>commentary to=functions.now<|message|>{", "no_json"),
    ("gpt_oss", "<|channel|>analysis to=python code<|message|>1+1<|call|>", "no_json"),
]


@pytest.mark.parametrize(("name", "text", "reason"), MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_call_has_a_reason_and_stays_text(name: str, text: str, reason: str) -> None:
    assert PARSERS[name].parse(text) == ParsedAnswer(text, (), (MalformedCall(reason, text),))  # type: ignore[arg-type]


@pytest.mark.parametrize("index", [i for i, (name, _, _) in enumerate(MALFORMED) if name == "hermes"])
def test_a_malformed_call_does_not_touch_the_others(index: int) -> None:
    text = MALFORMED[index][1]
    answer = PARSERS["hermes"].parse(f"See: {GOOD}\n{text}\n{GOOD} Done.")
    assert answer.text.replace("\n", "") == f"See: {text} Done."
    assert (len(answer.calls), len(answer.malformed)) == (2, 1)
    listed = PARSERS["mistral"].parse('[TOOL_CALLS][{"name": "x"}, {"name": "now", "arguments": {}}]')
    assert listed == ParsedAnswer(
        '{"name": "x"}', (ToolCall("now", "{}"),), (MalformedCall("unknown_tool", '{"name": "x"}'),)
    )


def test_text_that_is_no_call_stays_as_it_is() -> None:
    for name, text in [
        ("llama3", '{"name": "Tom", "age": 3}'),
        ("llama3", ' {"answer": 7}'),
        ("hermes", "a < b </tool_call> <tool_cal"),
        ("mistral", "TOOL_CALLS [ARGS]"),
        ("gpt_oss", "just text"),
        ("gpt_oss", "<|channel|>final<|message|>7"),
    ]:
        assert PARSERS[name].parse(text) == ParsedAnswer(text.rpartition("<|message|>")[2])


def test_values_without_a_schema_are_text_but_objects_and_lists() -> None:
    text = "<tool_call>now" + "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
        for key, value in {"a": "3", "b": "[3]", "c": "{x", "d": "true"}.items()
    )
    (call,) = PARSERS["glm4"].parse(f"{text}</tool_call>").calls
    assert json.loads(call.arguments) == {"a": "3", "b": [3], "c": "{x", "d": "true"}
    text = "<tool_call><function=weather><parameter=exact>False</parameter><parameter=days>None</parameter>"
    text += "<parameter=note>None</parameter></function></tool_call>"
    (call,) = PARSERS["qwen_xml"].parse(text).calls
    assert json.loads(call.arguments) == {"exact": False, "days": None, "note": "None"}


def test_one_call_where_one_was_asked_for() -> None:
    second = '<tool_call>{"name": "weather"}</tool_call>'
    parser = parser_of("hermes", parallel=False)
    closing = parser._tokenizer.convert_tokens_to_ids("</tool_call>")
    assert parser.stop_ids == {closing}
    assert parser.parse(GOOD + second) == ParsedAnswer(
        second, (ToolCall("now", "{}"),), (MalformedCall("not_parallel", second),)
    )
    assert parser_of("mistral", special=True, parallel=False).stop_ids == frozenset()
    assert PARSERS["hermes"].stop_ids == frozenset()


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_an_answer_of_one_mark_over_and_over_is_read(name: str) -> None:
    """Its time grows with its length; with the square of it, this would not end."""
    known = PARSERS[name].format
    end = known.close or ""
    for mark in (known.open, *known.inside, "<parameter=a>", "to=a ", " \n"):
        text = mark * 10_000
        for answer in (
            text,
            f"{known.open}now{text}{end}",
            f"{known.open}<function=now>{text}</function>{end}",
        ):
            assert PARSERS[name].parse(answer).calls in ((), (ToolCall("now", "{}"),))


FRAGMENTS = st.lists(
    st.one_of(
        st.sampled_from(sorted({mark for known in FORMATS for mark in known.marks})),
        st.sampled_from(['{"name": "now", "parameters": {}}', "functions.now:0", " to=functions.now", "{"]),
        st.sampled_from(["<|channel|>final", "assistant", "<|channel|>commentary", "<", "[", "\n", " ", "}"]),
        st.text("ab<|[é", max_size=4),
    ),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("name", sorted(PARSERS))
@settings(max_examples=150, deadline=None)
@given(text=FRAGMENTS)
@example(text=' {"name": "now", "parameters": {}}')
@example(text="a<tool_call><tool_call>{}</tool_call> b")
def test_what_is_settled_is_how_the_answer_begins(name: str, text: str) -> None:
    """For every prefix: no chunking says anything but the whole's text."""
    parser = PARSERS[name]
    whole, before = parser.parse(text).text, ""
    for end in range(len(text) + 1):
        settled = parser.settled(text[:end])
        assert settled.startswith(before)
        before = settled
    assert whole.startswith(before)
    assert not any(mark in before for mark in (parser.format.open, *parser.format.around))


@pytest.mark.parametrize(
    ("name", "text", "settled"),
    [
        ("hermes", "7", 1),
        ("hermes", "7 <", 2),
        ("hermes", "7 <tool_cal", 2),
        ("hermes", "7 <tool_call>{", 2),
        ("hermes", "a < b", 5),
        ("deepseek", f"7 {MARK}calls", 2),
        ("kimi_k2", "7 <|tool_call_", 2),
        ("llama3", " {", 1),
        ("llama3", "7 {<|py", 3),
        ("mistral", "7 [TOOL_CALLS]", 2),
    ],
)
def test_what_may_become_a_call_waits(name: str, text: str, settled: int) -> None:
    assert PARSERS[name].settled(text) == text[:settled]


# ---- the template's own marks ----


def test_the_quickstarts_format_and_no_format() -> None:
    tok = tokenizer()
    assert tool_format(tok).name == "hermes"
    tok.chat_template = "{{ messages }}"
    with pytest.raises(ConfigError, match=full_text("deepseek, glm4, gpt_oss, hermes, kimi_k2")) as caught:
        tool_format(tok)
    assert caught.value.key == "model.tool_format"
    tok.tool_format = "mistral"
    assert tool_format(tok).name == "mistral"
    tok.tool_format, tok.chat_template = "auto", {"default": "", "tool_use": "{{ '[TOOL_CALLS]' }}"}
    assert tool_format(tok).name == "mistral"


def test_the_option_has_the_formats_names() -> None:
    names = get_args(get_type_hints(ModelConfig)["tool_format"])
    assert set(names) == {"auto", *(known.name for known in FORMATS)}


def test_an_answer_ends_where_the_format_ends_it() -> None:
    tok = tokenizer()
    before = set(stop_token_ids(tok))
    tok.add_tokens(["<|call|>", "<|eom_id|>"], special_tokens=True)
    assert set(stop_token_ids(tok)) == before
    for name, end in (("gpt_oss", "<|call|>"), ("llama3", "<|eom_id|>")):
        tok.tool_format = name
        assert set(stop_token_ids(tok)) == {*before, tok.convert_tokens_to_ids(end)}


TEMPLATES = {
    path.stem: path
    for path in sorted(
        Path(sys.prefix).parent.glob(".venv*/lib/python*/site-packages/trl/chat_templates/*.jinja")
    )
}
FOUND = {
    "deepseek_r1_distill": "deepseek",
    "deepseekv3": "deepseek",
    "glm4moe": "glm4",
    "gptoss": "gpt_oss",
    "llama3_1": "llama3",
    "llama3_2": "llama3",
    "nemotron_3_5_lightning": "qwen_xml",
    "nemotron_3_nano": "qwen_xml",
    "nemotron_3_super": "qwen_xml",
    "nemotron_3_ultra": "qwen_xml",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5_nothink": "qwen_xml",
    "qwen3_5_think": "qwen_xml",
    "qwen3_6": "qwen_xml",
    "qwen3_8": "qwen_xml",
    "qwen3_instruct_2507": "hermes",
    "qwen3_vl": "hermes",
}


@pytest.mark.skipif(not TEMPLATES, reason="TRL and its chat templates are not installed")
def test_formats_of_published_templates() -> None:
    """Found by their marks; those that write calls in no known way, or none, are an error."""
    tok, found = tokenizer(), {}
    for name, path in TEMPLATES.items():
        tok.chat_template = path.read_text()
        try:
            found[name] = tool_format(tok).name
        except ConfigError:
            continue
    assert {name: kind for name, kind in found.items() if not name.endswith("_training")} == FOUND
    assert {name.removesuffix("_training") for name in found} == set(FOUND)


@pytest.mark.skipif(not TEMPLATES, reason="TRL and its chat templates are not installed")
@pytest.mark.parametrize("name", sorted({*FOUND} - {"deepseek_r1_distill"}))  # does not render calls
def test_what_published_templates_write_is_read(name: str) -> None:
    """An assistant's message with calls, as the template writes it behind the user's, and parsed."""
    tok = tokenizer()
    tok.chat_template = TEMPLATES[name].read_text()
    parser = ToolParser(tok, TOOLS)
    one = parser.format.name in ("llama3", "gpt_oss")  # their templates write no more
    deepseek = parser.format.name == "deepseek"  # prints arguments as they are given
    calls = [
        {
            "type": "function",
            "function": {"name": called, "arguments": json.dumps(given) if deepseek else given},
        }
        for called, given in (CALLS[:1] if one else CALLS)
    ]
    asked = [{"role": "user", "content": "What is the weather?"}]
    said = {"role": "assistant", "content": "Let me see.", "tool_calls": calls}
    head = render(tok, asked, tools=TOOLS, generation=True)
    whole = render(tok, [*asked, said], tools=TOOLS, generation=False)
    same = next((i for i, (a, b) in enumerate(zip(head, whole, strict=False)) if a != b), len(head))
    answer = parser.parse(whole[same:].removesuffix("<|eot_id|>"))
    expected = CALLS[:1] if one else CALLS
    assert (made(answer), answer.malformed) == (expected, ())


@pytest.mark.skipif(not TEMPLATES, reason="TRL and its chat templates are not installed")
@pytest.mark.parametrize("name", sorted({*FOUND} - {"deepseek_r1_distill"}))
def test_how_an_answer_of_a_published_template_begins_that_calls(name: str) -> None:
    """What the template writes begins so, up to the name, and with the name up to the arguments."""
    tok = tokenizer()
    tok.chat_template = TEMPLATES[name].read_text()
    tok.add_tokens(["<|eot_id|>"], special_tokens=True)
    tools = [{**tool, "function": {**tool["function"], "description": ""}} for tool in TOOLS]
    asked = [{"role": "user", "content": "a"}]
    given = json.dumps({"days": 1}) if tool_format(tok).name == "deepseek" else {"days": 1}
    call = {"type": "function", "function": {"name": "weather", "arguments": given}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    head = render(tok, asked, tools=tools, generation=True)
    whole = render(tok, [*asked, said], tools=tools, generation=False)
    if not whole.startswith(head):
        with pytest.raises(DataError, match="cannot be kept with this chat template"):
            call_opening(tok, None)
        return
    first, named = call_opening(tok, None), call_opening(tok, "weather")
    assert whole.startswith(head + first)
    assert whole.startswith(head + named)
    assert "weather" not in first
    assert "weather" in named
    parser = ToolParser(tok, TOOLS, opening=named)
    rest = whole.removeprefix(head + named).removesuffix("<|eot_id|>")
    assert made(parser.parse(rest)) == [("weather", {"days": 1})]
