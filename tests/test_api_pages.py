"""What is made of the code in docs/ is as the code is."""

from __future__ import annotations

import ast

import pytest

from tests.api_pages import PAGES, ROOT, page, signature_of, undocumented


@pytest.mark.parametrize("path", PAGES)
def test_the_page_is_made_of_the_code(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == page(path), "python -m tests.api_pages write"


def test_all_that_it_shows_has_a_text() -> None:
    assert undocumented() == []


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("def at(self, a: list[int], *, n: int = 1) -> X: ...", "def at(a: list[int], *, n: int = 1) -> X"),
        ("@property\ndef step(self) -> int: ...", "step: int"),
        ("@staticmethod\nasync def of(x, *y, **z): ...", "async def of(x, *y, **z) -> None"),
        ("@classmethod\ndef read(cls, file: str) -> Batch: ...", "def read(file: str) -> Batch"),
    ],
)
def test_a_signature_is_that_of_a_call(code: str, shown: str) -> None:
    (node,) = ast.parse(code).body
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    assert signature_of(node) == shown
