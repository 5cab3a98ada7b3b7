"""A corpus, and a cache folder of the test's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.agents.conftest import run as run
from tests.trainers.conftest import recipe as recipe

ROWS = [
    {"id": 7, "title": "Moon", "text": "It goes around the earth, and has no air."},
    {"title": "Sun", "text": "The sun is a star. Stars shine."},
    {"id": "a", "contents": '"The "big" cheese"\nThe cheese is made of milk.\nIt is no star.'},
    {"text": "The earth goes\naround the sun."},
    {"contents": "A star without a title"},
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/rondo/search"


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    path = tmp_path / "passages.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)
