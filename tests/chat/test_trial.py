"""What a chat template may take: time, memory, depth and length, whatever it is."""

from __future__ import annotations

from typing import Any

import pytest

from rondo.chat import check_template_options, encode, render, template_keys
from rondo.core.errors import ConfigError, DataError
from rondo.recipes.quickstart import CHAT_TEMPLATE
from tests.chat.test_options import CONVERSATION, TEMPLATE
from tests.messages import full_text

QUESTION: Any = [{"role": "user", "content": "Tom has 3 pens"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set x = namespace(v='aa') %}{% for i in range(40) %}{% set x.v = x.v + x.v %}{% endfor %}"
TIME = "rendering a first row took more than 1 s of processor time, and was ended"
MEMORY = "rendering a first row took more than 512 MiB of memory"
# Each is refused before this process renders it.
HOSTILE = {
    "loops": (LOOPS, ConfigError, TIME),
    "loops for tools": ("{% if tools %}" + LOOPS + "{% endif %}", ConfigError, TIME),
    "loops for an option": ("{% if effort == 'high' %}" + LOOPS + "{% endif %}", ConfigError, TIME),
    "loops for a header": ("{% if add_generation_prompt %}" + LOOPS + "{% endif %}", ConfigError, TIME),
    "a number": ("{{ 9 ** (9 ** 9) }}", ConfigError, TIME),
    "a text": ("{{ 'a' * 10**11 }}", ConfigError, MEMORY),
    "texts": (DOUBLED, ConfigError, MEMORY),
    "a long text": (
        "{{ 'a' * 10**7 }}",
        DataError,
        "writes 10000000 characters where messages and tools hold",
    ),
}
NESTED = {
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "a sum": "{{ " + "+".join(["a"] * 5000) + " }}",
    "blocks": "{% if a %}" * 1000 + "{% endif %}" * 1000,
}


@pytest.fixture
def strange(with_template: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives a template to a tokenizer as `open_tokenizer` opens it, for the first time in this process."""
    monkeypatch.setattr(encode, "_tried", set())
    tok = with_template(None)
    tok.try_chat_template = True
    tok.chat_template_options = {"effort": "high"}
    yield with_template
    del tok.try_chat_template
    tok.chat_template_options = {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_template_without_end_is_ended_elsewhere(
    strange: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    template, error, said = HOSTILE[kind]
    if said is TIME:  # to fill the memory may take longer on a busy machine
        monkeypatch.setattr(encode, "_TRIAL_SECONDS", 1)
    tok = strange(template)
    monkeypatch.setattr(type(tok), "apply_chat_template", lambda *a, **k: pytest.fail("it was rendered here"))
    with pytest.raises(error, match=said) as caught:
        render(tok, QUESTION, tools=TOOLS, generation=True)
    if error is ConfigError:
        assert caught.value.key == "model.chat_template"


@pytest.mark.slow
def test_a_template_without_end_for_parts_is_ended_elsewhere(
    strange: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which writes no text, so that contents are given to it as lists of parts."""
    monkeypatch.setattr(encode, "_TRIAL_SECONDS", 1)
    tok = strange("{% if messages[0].content is not string %}" + LOOPS + "{% endif %}")
    with pytest.raises(ConfigError, match="took more than 1 s of processor time"):
        render(tok, QUESTION, generation=True)


@pytest.mark.parametrize(
    ("template", "tools"),
    [(TEMPLATE, None), (CHAT_TEMPLATE, TOOLS), ({"default": TEMPLATE, "tool_use": CHAT_TEMPLATE}, TOOLS)],
)
def test_a_trial_writes_what_transformers_writes(strange: Any, template: Any, tools: Any) -> None:
    """By its length; then it is not made again."""
    tok = strange(template)
    lengths: list[int | None] = []
    tried = encode._length_in_a_trial

    def noted(request: Any) -> int | None:
        lengths.append(tried(request))
        return lengths[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "_length_in_a_trial", noted)
        for _ in range(2):
            text = render(tok, CONVERSATION, tools=tools, generation=True)  # type: ignore[arg-type]
    assert lengths == [len(text)]
    assert text == tok.apply_chat_template(
        CONVERSATION, tools=tools, tokenize=False, add_generation_prompt=True, effort="high"
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system') }}",
        {"rag": TEMPLATE},
        "{{ messages[7].content }}",
        "{{ nothing() }}",
        "{% nope %}",
    ],
)
def test_what_a_template_raises_is_told_by_who_renders_it(strange: Any, template: Any) -> None:
    with pytest.raises(DataError, match=r"refuses messages with roles \['user'\]: "):
        render(strange(template), QUESTION, generation=True)


def test_the_length_is_bounded_of_later_rows_too(with_template: Any) -> None:
    """16 times what messages and tools hold, and a million; a long row has a long text."""
    tok = with_template("{% for m in messages %}{{ m.content * 20 }}{% endfor %}")
    assert len(render(tok, [{"role": "user", "content": "a" * 50_000}], generation=True)) == 10**6
    with pytest.raises(DataError, match=full_text("writes 20000000 characters where")):
        render(tok, [{"role": "user", "content": "a" * 10**6}], generation=True)
    tok = with_template("{% for m in messages %}{{ m.content * 15 }}{% endfor %}")
    assert len(render(tok, [{"role": "user", "content": "a" * 10**6}], generation=True)) == 15 * 10**6


@pytest.mark.parametrize("kind", NESTED)
@pytest.mark.parametrize("reader", [check_template_options, template_keys])
def test_a_template_that_is_nested_too_deep_is_a_named_error(
    with_template: Any, kind: str, reader: Any
) -> None:
    tok = with_template(NESTED[kind])
    tok.chat_template_options = {}
    with pytest.raises(ConfigError, match=r"model\.chat_template: .*nested too deep") as caught:
        reader(tok)
    assert caught.value.key == "model.chat_template"


def test_a_trial_that_cannot_be_made_is_said(strange: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode.markupsafe, "__file__", "/nowhere/markupsafe/__init__.py")
    monkeypatch.setattr(encode.jinja2, "__file__", "/nowhere/jinja2/__init__.py")
    with pytest.raises(ConfigError, match=full_text("cannot be tried in a process of its own")):
        render(strange(TEMPLATE), QUESTION, generation=True)
