"""The pages for those who change rondo name files and functions that are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("docs/architecture.md", "CONTRIBUTING.md")
# Where a path on these pages begins; a bare file name, beside one that was named before, is found anywhere.
STARTS = (
    ROOT,
    ROOT / "src",
    ROOT / "src/rondo",
    ROOT / "src/rondo/trainers",
    ROOT / "tests",
    ROOT / "tests/algorithms",
)


def _found(name: str) -> list[Path]:
    beside = (ROOT / "src").rglob(name) if "/" not in name.rstrip("/") else ()
    return [*(start / name for start in STARTS if (start / name).exists()), *beside]


def _named(text: str) -> Iterator[tuple[str, str]]:
    """(function or Class.method, file): `x` (`file.py` …) and `x` in `file.py`."""
    yield from re.findall(r"`([A-Za-z_.]+)`\s+(?:\(|in )`([\w/]+\.py)`", text)


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_are_there(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    names = re.findall(r"`((?:\w|[./])+(?:\.py|\.yaml|\.md|/))`", text)
    assert len(names) > 30
    assert [name for name in names if not _found(name)] == []


@pytest.mark.parametrize("page", PAGES)
def test_functions_that_a_page_names_are_in_those_files(page: str) -> None:
    for name, file in _named((ROOT / page).read_text(encoding="utf-8")):
        defined = set()
        for path in _found(file):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    defined.add(node.name)
                elif isinstance(node, ast.Assign | ast.AnnAssign):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    defined.update(target.id for target in targets if isinstance(target, ast.Name))
        assert set(name.split(".")) <= defined, (name, file)


def _anchors(page: Path) -> set[str]:
    """Returns the anchors that a repository's host gives the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"\[(.*?)\]\(.*?\)", r"\1", head).lower() for head in heads)
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in plain}


@pytest.mark.parametrize("page", ["README.md", "docs/features.md"])
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    """The site has no README; all pages of docs/ are checked where it is built (docs/site/check.py)."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", text)
    links = [link or source for link, source in found]
    assert len(links) > 30
    for link in links:
        file, _, anchor = link.partition("#")
        target = (ROOT / page).parent / file
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link
