"""docs/verl.md lists what is translated, and the defaults that are applied."""

from __future__ import annotations

from pathlib import Path

from rondo.config.tree import shown
from rondo_verl.defaults import ASYNC_DEFAULTS, DEFAULTS
from rondo_verl.keys import TABLE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "verl.md"


def test_every_translated_key_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert not [key for key in TABLE if f"`{key}`" not in text]


def test_every_default_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = {f"| `{key}` | {shown(value)} |" for key, value in {**DEFAULTS, **ASYNC_DEFAULTS}.items()}
    assert not [row for row in rows if row not in text]
