"""docs/verl.md lists what is translated, and the defaults that are applied."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.verl_launches import ACCEPTED, CAPABILITIES, COLUMNS
from rondo_verl.table import TABLE
from tests.rondo_verl.page import PAGE, launches, markers, tables


def test_every_translated_key_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert not [key for key in TABLE if f"`{key}`" not in text]


@pytest.mark.parametrize("name", tables())
def test_the_tables_that_are_data(name: str) -> None:
    begin, end = markers(name)
    assert PAGE.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0] == tables()[name]


def test_launches_of_verls_own() -> None:
    """The table that benchmarks/verl_launches.py wrote: all launches, each accepted or for what it lacks."""
    heads, *rows = launches()
    assert tuple(heads) == COLUMNS
    assert len({tuple(row[:3]) for row in rows}) == len(rows) == 525
    counts = Counter(row[4] for row in rows)
    assert counts.keys() <= {ACCEPTED, *CAPABILITIES}
    for *_, result, key, lacking in rows:
        needed = lacking.split(", ") if lacking else []
        assert (result == ACCEPTED) == (not key) == (not needed)
        assert result in (ACCEPTED, *needed)
        assert set(needed) <= CAPABILITIES.keys()
