"""What is known of MiniWoB's pages without a browser and the package: the solver's next action, by what
`state` says of a page; and the recipe's prompts, answers and words.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rondo.core.errors import ConfigError
from rondo.environments import Observation
from rondo_worlds.miniwob_adapter import next_action
from rondo_worlds.recipes import miniwob as recipe
from rondo_worlds.recipes.miniwob import click, demonstrations, prompt, tokenizer
from tests.messages import full_text

SUBMIT = {"ref": 9, "tag": "button", "text": "Submit"}
TABS = [{"ref": 4, "tag": "a", "text": "Tab #1"}, {"ref": 5, "tag": "a", "text": "Tab #2"}]
ENTER = 'Enter "Livia" into the text field and press Submit.'
LIST = "Select Rorie from the list and click Submit."
BOXES = "Select Ada, Bea and click Submit."


def _field(value: str) -> dict[str, Any]:
    return {"ref": 5, "tag": "input_text", "text": "", "value": value}


def _boxes(*ticked: bool) -> list[dict[str, Any]]:
    """Boxes with the labels Ada, Bob and Bea, each behind its box."""
    found: list[dict[str, Any]] = []
    for i, (label, value) in enumerate(zip(("Ada", "Bob", "Bea"), ticked, strict=True)):
        found += [{"ref": 2 * i, "tag": "input_checkbox", "text": "", "value": value}]
        found += [{"ref": 2 * i + 1, "tag": "label", "text": label}]
    return found


@pytest.mark.parametrize(
    ("task", "elements", "action"),
    [
        (ENTER, [_field(""), SUBMIT], "type[5] Livia"),
        (ENTER, [_field("Liv"), SUBMIT], "type[5] Livia"),
        (ENTER, [_field("Livia"), SUBMIT], "click[9]"),
        (LIST, [_field("Ada"), SUBMIT], "select[5] Rorie"),
        (LIST, [_field("Rorie"), SUBMIT], "click[9]"),
        (BOXES, [*_boxes(False, False, False), SUBMIT], "click[0]"),
        (BOXES, [*_boxes(True, False, False), SUBMIT], "click[4]"),
        (BOXES, [*_boxes(True, False, True), SUBMIT], "click[9]"),
        ("Focus into the textbox.", [SUBMIT, _field("")], "click[5]"),
        ('Close the dialog box by clicking the "x".', [{"ref": 7, "text": "Close"}], "click[7]"),
        ('Click on the "Submit" button.', [*TABS, SUBMIT], "click[9]"),
        ("Click on Tab #2.", TABS, "click[5]"),
        ("Click button ONE.", [{"ref": 3, "text": "ONE"}, {"ref": 4, "text": "TWO"}], "click[3]"),
        ("Click the button.", [{"ref": 6, "text": "Click Me!"}], "click[6]"),
    ],
)
def test_the_next_action(task: str, elements: list[dict[str, Any]], action: str) -> None:
    assert next_action({"task": task, "elements": elements}) == action


# ---- the recipe ----


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A package with a list of words, as that of the pages: capitals and signs do not count."""
    (tmp_path / "miniwob" / "html" / "common").mkdir(parents=True)
    (tmp_path / "miniwob" / "__init__.py").touch()
    script = 'var a = ["no"];\ncore.lorem_words = ["Sed,", "ut", "ut", "Eros."];\nvar b = ["nor this"];\n'
    (tmp_path / "miniwob" / "html" / "common" / "ui_utils.js").write_text(script)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    recipe._words.cache_clear()
    yield ["sed", "ut", "ut", "eros"]
    recipe._words.cache_clear()


def test_words_are_as_often_as_the_package_lists_them(words: list[str]) -> None:
    assert list(recipe._words()) == words


def test_each_word_is_a_token(words: list[str]) -> None:
    tok = tokenizer()
    assert [len(tok(word, add_special_tokens=False)["input_ids"]) for word in words] == [1, 1, 1, 1]


def test_demonstrations_have_the_words_of_the_package(words: list[str]) -> None:
    rows = demonstrations(200, seed=3)
    assert rows == demonstrations(200, seed=3)
    assert rows != demonstrations(200, seed=4)
    lines = [row["prompt"].split("\n") for row in rows]
    assert {(line[0], line[2]) for line in lines} == {("Click", "Links")}
    assert {word for line in lines for word in line[3:]} == set(words)
    assert all(row["response"] in (line[1], line[3]) for row, line in zip(rows, lines, strict=True))


def test_only_a_links_word_is_a_click() -> None:
    said = 'Task: Click on the link "Sed,.".\n[3] text "Ut amet"\n[4] span "eros"\n[5] span "Sed,."'
    seen = Observation(said)
    assert prompt("Click", (), seen) == "Click\nsed\nLinks\neros\nsed"
    assert [click(word, seen) for word in ("sed", "eros\n")] == ["click[5]", "click[4]"]
    assert [click(word, seen) for word in ("amet", "ut", "se", "sed eros", "5", "")] == [None] * 6


def test_another_page_is_refused() -> None:
    with pytest.raises(ConfigError, match=full_text("this one says: Task: Click button ONE.")):
        prompt("Click", (), Observation('Task: Click button ONE.\n[4] button "ONE"'))


@pytest.mark.parametrize("wrong", [{"right_share": 1.5}, {"size": 0}])
def test_what_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"need .*{next(iter(wrong))}"):
        demonstrations(**wrong)  # type: ignore[arg-type]
