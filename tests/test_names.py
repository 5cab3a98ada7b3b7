"""Dotted names of ours, wherever they are written as text: in strings (loggers, roles, programs), docstrings,
recipes, the documentation and the examples. Each leads to something.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rondo.core.errors import our_folders
from rondo.system.names import KINDS
from tests.house import ROOT, SRC, read

OURS = "|".join(Path(folder).name for folder in our_folders())
DOTTED = re.compile(rf"(?<![\w./@-])(?:{OURS})(?:\.[A-Za-z_]\w*)+")
PLACES = ("src", "docs", "examples", "benchmarks")
FILES = sorted(
    path
    for place in PLACES
    for path in (ROOT / place).rglob("*")
    if path.suffix in (".py", ".md", ".yaml") and "egg-info" not in str(path)
)
FILES += sorted(ROOT.glob("*.md")) + sorted((ROOT / "tests").glob("*.t*t"))
GROUPS = {f"rondo.{kind}" for kind in KINDS}
"""Of entry points: no modules."""
OLD = {"CHANGELOG.md", "docs/moved.md", "src/rondo/cli/renaming.py"}
"""What is said of names that there were."""


def leads_somewhere(dotted: str) -> bool:
    """Whether it is a module, or something that a module defines or offers (and whatever that has)."""
    modules = {file.module: file for file in read(SRC).files.values()}
    parts = dotted.split(".")
    known = max(n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in modules)
    rest = parts[known:]
    return not rest or rest[0].startswith("__") or rest[0] in modules[".".join(parts[:known])].names


def test_every_name_leads_somewhere() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1} {found[0]}"
        for path in FILES
        if str(path.relative_to(ROOT)) not in OLD
        for text in [path.read_text(encoding="utf-8")]
        for found in DOTTED.finditer(text)
        if found[0] not in GROUPS and not leads_somewhere(found[0])
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("dotted", "leads"),
    [
        ("rondo.core.errors.ConfigError", True),
        ("rondo.trainers.commands.train", True),
        ("rondo.train", True),
        ("rondo.config.load", True),  # by a façade
        ("rondo.nothing", False),
        ("rondo.core.errors.NoError", False),
        ("rondo.errors.ConfigError", False),
    ],
)
def test_what_leads_somewhere(dotted: str, leads: bool) -> None:
    assert leads_somewhere(dotted) is leads


def test_names_are_found_in_text() -> None:
    text = "`rondo.a.B`, see rondo.c.d; rondo/e.f, x.rondo.g, rondo-rl.h and rondo. An end"
    assert DOTTED.findall(text) == ["rondo.a.B", "rondo.c.d"]
