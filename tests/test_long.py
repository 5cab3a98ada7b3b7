"""What `.ci/run` leaves to `make test-long` is named: every line of tests/long.txt is about tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import LONG, long_tests

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("line", [pattern.pattern for pattern in long_tests()])
def test_a_line_names_tests(line: str) -> None:
    path, _, test = line.replace("\\.", ".").partition("::")
    names = re.findall(r"^def (test_\w+)", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    assert any(re.match(test.partition("\\[")[0], name) for name in names)


def test_every_group_has_its_reason() -> None:
    groups = re.split(r"^#\n", LONG.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert len(groups) == 12
    assert all(re.match(r"# [A-Z].*\n(.*\n)*?tests/", group) for group in groups)


def test_what_is_listed_is_marked_and_nothing_else(request: pytest.FixtureRequest) -> None:
    """Of the tests that were collected beside this one."""
    patterns = long_tests()
    for item in request.session.items:
        listed = any(pattern.match(item.nodeid) for pattern in patterns)
        assert (item.get_closest_marker("long") is not None) == listed, item.nodeid
