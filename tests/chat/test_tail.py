"""The end of a conversation without its beginning is what the whole ends with, or is not rendered so."""

from __future__ import annotations

import logging
from typing import Any

import jinja2.nodes
import pytest

from rondo.chat import checked_continuation, render
from rondo.chat.continuation_check import history
from rondo.chat.tail import _changed, tail_template
from rondo.recipes.quickstart import CHAT_TEMPLATE
from tests.chat.test_continuation import CALLS_ONLY_TEMPLATE, PLAIN_TEMPLATE
from tests.chat.test_encode import IN_PARTS
from tests.chat.test_options import TEMPLATE as BREAKING_TEMPLATE

SAYS = "{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
CALLS = "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
END = "{{ '<|im_end|>\\n' }}"
OPENS = "{{ '<|im_start|>assistant\\n' if add_generation_prompt }}"


def loop(before: str = "", after: str = "", over: str = "message in messages") -> str:
    """A template with something before each message, and behind the loop."""
    return f"{{% for {over} %}}{before}{SAYS}{CALLS}{END}{{% endfor %}}{after}{OPENS}"


# As Qwen3's: looks backwards for the last question, and drops the thoughts of answers before it.
BACKWARDS = (
    """\
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if '</think>' in content and loop.index0 <= ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}"""
    + OPENS
)
HEAD = """\
{%- if messages[0].role == 'system' %}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}"""
WAYS = (
    ("{% if tools %}", ""),
    ("{% elif messages|length > 4 %}", "{{ loop.index }}"),
    ("{% else %}", "-"),
)
COUNTING = "{% macro m() %}{% set ns.n = ns.n + 1 %}{% endmacro %}"

WITH_TAIL = {
    "quickstart": CHAT_TEMPLATE,
    "calls only": CALLS_ONLY_TEMPLATE,
    "no end of turn": PLAIN_TEMPLATE,
    "numbers": loop("{{ loop.index }}/{{ loop.index0 }}/{{ loop.length }}/{{ loop.revindex }} "),
    "first and last": loop("{{ 'F' if loop.first }}{{ 'L' if loop.last }}"),
    "neighbours": loop(
        "{{ messages[loop.index0 - 1].role }}{{ loop.nextitem.role if loop.nextitem }}"
        "{{ messages[loop.index0 + 1].role if not loop.last }}"
    ),
    "the one before": loop("{{ loop.previtem.role if loop.previtem }}"),
    "a name for the rest": HEAD + loop("{{ loop.index0 }}", over="message in rest"),
    "another list by the same name": "{% set messages = messages[1:] %}" + loop("{{ loop.index0 }}"),
    "backwards": BACKWARDS,
    "forwards": BACKWARDS.replace("[::-1]", "").replace("(messages|length - 1) - ", ""),
    "to the first one": BACKWARDS.replace("{%- set ns.searching = false %}", ""),
    "and goes on": BACKWARDS.replace("= index", "= index %}{% set ns.searching = true"),
    "and counts": BACKWARDS.replace("{%- endfor %}", "{%- set ns.last = ns.last + 0.1 %}{%- endfor %}", 1),
    "and says so": BACKWARDS.replace("{%- endfor %}", "{{- 'x' }}{%- endfor %}", 1),
    "in parts": IN_PARTS,
    "three ways": "".join(when + loop(before) for when, before in WAYS) + "{% endif %}",
    "a filter": loop(over="message in messages if message.role != 'system'"),
    "a macro": "{% macro m(message) %}{{ message.role }}{% endmacro %}" + loop("{{ m(message) }}"),
    "of all": loop("", "{{ messages|length }}{{ messages[0].content }}"),
    "how many tools": loop("{% for m in messages %}{{ loop.index0 }}{% endfor %}"),
}
WITHOUT = {
    "remembers": "{% set ns = namespace(n=0) %}" + loop("{% set ns.n = ns.n + 1 %}{{ ns.n }}"),
    "remembers in a macro": "{% set ns = namespace(n=0) %}" + COUNTING + loop("{{ m() }}{{ ns.n }}"),
    "joins": "{% set sep = joiner(',') %}" + loop("{{ sep() }}"),
    "cycles": loop("{{ loop.cycle('a', 'b') }}"),
    "changes": loop("{{ loop.changed(message.role) }}"),
    "breaks": BREAKING_TEMPLATE,
    "caught": "{% set all %}" + loop() + "{% endset %}{{ all|length }}{{ all }}",
    "a filter that counts": loop("{{ loop.index }}", over="message in messages if message.role != 'system'"),
    "hands its loop on": "{% macro m(l) %}{{ l.index }}{% endmacro %}" + loop("{{ m(loop) }}"),
}
# Has a loop that could pass over messages, and then what it cannot pass over: decided for each conversation.
AT_ONCE = {
    "all twice": loop() + loop(),
    "the answer before": "{% for m in messages[-3:] %}{{ m.content }}{% endfor %}" + loop(),
    "the last ones before": loop(over="message in messages[-3:]") + loop(over="message in messages[:-3]"),
    "the system behind": loop() + "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}",
    "backwards only": loop(over="message in messages|reverse|list"),
    "some only": loop(over="message in messages|selectattr('role', 'ne', 'tool')|list"),
}


def ends(continuation: Any) -> int:
    """Compares, with as much left out as may be; returns how many ends were rendered without a beginning."""
    short = 0
    for seed in range(60):
        for kind in ("text", "calls"):
            messages, turn, tools = history(seed, kind)  # type: ignore[arg-type]
            if kind not in continuation.ends:
                continue
            whole = continuation.text(messages, turn, tools)
            for written in range(1, turn):
                assert continuation.text(messages, turn, tools, written=written, is_sample=False) == whole
                tail = continuation.tails[continuation.tokenizer.chat_template]
                if tail is not None:  # whatever the template makes of the answer
                    marked = [*messages[:turn], {"role": "user", "content": "MARK"}, *messages[turn + 1 :]]
                    text = tail.render(marked, tools, first=written, marker="MARK")
                    rendered = render(continuation.tokenizer, marked, tools=tools, generation=True)
                    assert text in (None, rendered.partition("MARK")[2])
                    short += text is not None
    return short


@pytest.mark.parametrize("name", WITH_TAIL)
def test_an_end_is_that_of_the_whole(with_template: Any, name: str) -> None:
    continuation = checked_continuation(with_template(WITH_TAIL[name]))
    assert continuation.has_tail(None)
    assert ends(continuation) > 100


@pytest.mark.parametrize("name", WITH_TAIL)
def test_a_search_ends_where_it_has_found_something(name: str) -> None:
    """And a loop that does anything else as well goes to its end."""
    tree = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).parse(WITH_TAIL[name])
    _changed(tree.body)
    assert len(list(tree.find_all(jinja2.nodes.Break))) == (name in ("backwards", "forwards"))


@pytest.mark.parametrize("name", WITHOUT)
def test_what_an_iteration_could_leave_behind_is_rendered_whole(with_template: Any, name: str) -> None:
    assert tail_template(with_template(WITHOUT[name]), None) is None


@pytest.mark.parametrize("name", AT_ONCE)
def test_what_stands_behind_what_was_left_out_is_right(with_template: Any, name: str) -> None:
    ends(checked_continuation(with_template(AT_ONCE[name])))


def test_a_tokenizer_that_renders_itself_is_asked(with_template: Any) -> None:
    tok = with_template(CHAT_TEMPLATE)
    own = type("Own", (type(tok),), {"apply_chat_template": lambda self, *a, **k: "own"})
    tok = own(tokenizer_object=tok.backend_tokenizer, chat_template=CHAT_TEMPLATE)
    assert tail_template(tok, None) is None


def test_an_end_that_differs_is_never_taken_again(
    with_template: Any, caplog: pytest.LogCaptureFixture
) -> None:
    other = tail_template(with_template(CHAT_TEMPLATE.replace("user", "User") + "!"), None)
    continuation = checked_continuation(with_template(CHAT_TEMPLATE))
    messages, turn, tools = next(h for h in (history(i, "text") for i in range(9)) if h[1] > 2)
    whole = continuation.text(messages, turn, tools)
    continuation.tails[CHAT_TEMPLATE] = other
    assert continuation.text(messages, turn, tools, written=1, is_sample=False) == f"{whole}!"
    with caplog.at_level(logging.WARNING):
        assert continuation.text(messages, turn, tools, written=1, is_sample=True) == whole
    assert "rendered whole from now on" in caplog.text
    assert continuation.text(messages, turn, tools, written=1, is_sample=False) == whole
    assert not continuation.has_tail(tools)


def test_what_the_template_refuses_is_refused_by_the_whole(with_template: Any) -> None:
    """A fault in the end is no fault of the end alone: the template says it with all messages."""
    refuses = "{{ raise_exception('no turn ' ~ loop.index) if message.content == 'no' }}"
    continuation = checked_continuation(with_template(loop(refuses)))
    messages, turn, tools = next(h for h in (history(i, "text") for i in range(9)) if h[1] > 2)
    messages = [*messages[:-1], {"role": "user", "content": "no"}]
    with pytest.raises(Exception, match=f"no turn {len(messages)}"):
        continuation.text(messages, turn, tools, written=turn, is_sample=False)
