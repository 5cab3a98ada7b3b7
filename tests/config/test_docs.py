"""docs/config.md lists what is translated."""

from __future__ import annotations

from pathlib import Path

from rondo.compat.verl import TABLE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "config.md"


def test_every_translated_key_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert not [key for key in TABLE if f"`{key}`" not in text]
