"""The texts of errors that tests hold whole: messages.txt has them, one a line, and a test names one by words
that stand in it and in no other one:

    with pytest.raises(ConfigError, match=full_text("there is no folder nowhere")): ...

In messages.txt `…` stands for anything (a path, what another library wrote), `•` for a word of letters and
digits (a process's number, a hash), and `\\n` for the end of a line. Who changes a text changes it there.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

MESSAGES = Path(__file__).with_name("messages.txt")
LONGEST = 40  # characters of a pattern or of words that stand in a test


@cache
def texts() -> list[str]:
    """Returns the texts as they stand in messages.txt."""
    return MESSAGES.read_text(encoding="utf-8").rstrip("\n").split("\n")


def pattern(text: str) -> str:
    """Returns a regular expression for what a line of messages.txt stands for, from beginning to end."""
    escaped = re.escape(text.replace(r"\n", "\n")).replace("…", ".*").replace("•", r"\w+")
    return rf"(?s)\A{escaped}\Z"


def full_text(words: str) -> str:
    """Returns a regular expression for the one text in which the words stand.

    Raises:
        LookupError: no text has these words, or several have.
    """
    found = [text for text in texts() if words in text]
    if len(found) != 1:
        raise LookupError(f"{len(found)} texts of {MESSAGES.name} have the words {words!r}: {found[:3]}")
    return pattern(found[0])


def too_long(tests: Path) -> list[str]:
    """Returns the texts longer than LONGEST that are written as a `match=`, or as words of `full_text`."""
    return [
        f"{path.relative_to(tests).as_posix()}:{part.lineno} {part.value!r} is longer than "
        f"{LONGEST} characters: write match=full_text(words), and the whole text into {MESSAGES.name}"
        for path in sorted(tests.rglob("*.py"))
        if "match=" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.keyword) and node.arg == "match"
        for part in [node.value, *(node.value.args if isinstance(node.value, ast.Call) else ())]
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and len(part.value) > LONGEST
    ]
