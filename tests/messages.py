"""The texts of errors that tests hold whole: messages.txt has them, one a line, and a test names one by words
that stand in it and in no other one:

    with pytest.raises(ConfigError, match=full_text("there is no folder nowhere")): ...

In messages.txt `…` stands for anything (a path, what another library wrote), `•` for a word of letters and
digits (a process's number, a hash), and `\\n` for the end of a line. Who changes a text changes it there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
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


def _handed(tree: ast.Module) -> Iterator[ast.expr]:
    """Yields what a file gives to `match=`: the value itself, words of `full_text`, and for a name what the
    module sets it to, and the values of tables (`parametrize`) that have such a column.
    """
    constants = {
        target.id: statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "match":
            yield from [node.value, *(node.value.args if isinstance(node.value, ast.Call) else ())]
            if isinstance(node.value, ast.Name) and node.value.id in constants:
                yield constants[node.value.id]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = [one for one in ast.walk(node) if isinstance(one, ast.keyword) and one.arg == "match"]
            names = {one.value.id for one in inside if isinstance(one.value, ast.Name)}
            for table in node.decorator_list:
                yield from _cells(table, names)


def _cells(table: ast.expr, names: Collection[str]) -> Iterator[ast.expr]:
    """Yields the values in these columns of a table."""
    match table:
        case ast.Call(func=ast.Attribute(attr="parametrize"), args=[head, ast.List() | ast.Tuple() as rows]):
            columns = ast.literal_eval(head)
            columns = [columns] if isinstance(columns, str) else columns
            for row in rows.elts:
                is_param = isinstance(row, ast.Call) and getattr(row.func, "attr", "") == "param"
                cells = row.args if is_param else row.elts if isinstance(row, ast.Tuple) else [row]
                yield from (cell for name, cell in zip(columns, cells, strict=False) if name in names)


def too_long(tests: Path) -> list[str]:
    """Returns the texts longer than LONGEST that reach a `match=`, or are words of `full_text`; not
    f-strings, which hold values that the test computes.
    """
    return [
        f"{path.relative_to(tests).as_posix()}:{part.lineno} {part.value!r} is longer than "
        f"{LONGEST} characters: write match=full_text(words), and the whole text into {MESSAGES.name}"
        for path in sorted(tests.rglob("*.py"))
        if "match=" in (text := path.read_text(encoding="utf-8"))
        for part in sorted(_handed(ast.parse(text)), key=lambda part: part.lineno)
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and len(part.value) > LONGEST
    ]
