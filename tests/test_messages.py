"""That messages.txt has the texts that tests name, and no other ones; and what its two signs stand for."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.messages import full_text, pattern, texts, too_long

TESTS = Path(__file__).parent


def named() -> list[str]:
    """Returns the words by which tests name texts."""
    return [
        str(ast.literal_eval(node.args[0]))
        for path in TESTS.rglob("*.py")
        if path != Path(__file__) and "full_text(" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "full_text"
    ]


def test_every_text_is_named_and_all_are_in_order() -> None:
    found = {full_text(words) for words in named()}
    assert [text for text in texts() if pattern(text) not in found] == []
    assert texts() == sorted(set(texts()))


def test_a_text_is_asserted_from_its_beginning_to_its_end() -> None:
    of = re.compile(pattern(r"…/a.txt: line • of 3 (pid •)\nis wrong"))
    assert of.search("/tmp/a.txt: line 2 of 3 (pid 17)\nis wrong")
    assert of.search("s3://b\n/a.txt: line 0x2f of 3 (pid a_1)\nis wrong")
    assert not of.search("/tmp/a.txt: line 2 of 3 (pid 17)\nis wrong.")
    assert not of.search("/tmp/a.txt: line  of 3 (pid 17)\nis wrong")
    assert not of.search("/tmp/a.txt: line 2 of 3 (pid 1 7)\nis wrong")
    assert not of.search("/tmp/a+txt: line 2 of 3 (pid 17)\nis wrong")
    assert not re.search(pattern("a"), "ba")


@pytest.mark.parametrize(("words", "count"), [("these words stand nowhere", 0), ("", len(texts()))])
def test_words_that_no_text_has_or_several_are_refused(words: str, count: int) -> None:
    with pytest.raises(LookupError, match=rf"^{count} texts of messages\.txt have the words"):
        full_text(words)


def test_long_texts_stand_in_messages_txt() -> None:
    wrong = too_long(TESTS)
    assert not wrong, "\n".join(wrong)


def test_a_long_text_in_a_test_is_found(tmp_path: Path) -> None:
    long = "b" * 41
    (tmp_path / "test_a.py").write_text(
        f"raises(E, match='{'a' * 40}')\nraises(E, match='{long}')\nraises(E, match=said('{long}'))\n"
    )
    assert [line.partition(" is")[0] for line in too_long(tmp_path)] == [
        f"test_a.py:2 '{long}'",
        f"test_a.py:3 '{long}'",
    ]
    table = f"[(1, '{long}'), pytest.param(2, '{'c' * 41}'), (3, '{'d' * 40}')]"
    (tmp_path / "test_a.py").write_text(
        f"SAID = '{'e' * 41}'\nraises(E, match=SAID)\n\n"
        f"@pytest.mark.parametrize(('{'x' * 41}', 'said'), {table})\n"
        f"@pytest.mark.parametrize('other', ['{'f' * 41}'])\n"
        "def test(x, said, other):\n    raises(E, match=said)\n"
    )
    assert [line.partition(" is")[0] for line in too_long(tmp_path)] == [
        f"test_a.py:1 '{'e' * 41}'",
        f"test_a.py:4 '{long}'",
        f"test_a.py:4 '{'c' * 41}'",
    ]
