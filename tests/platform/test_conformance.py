"""The CPU, and a platform that a path names, answer all that a platform is asked."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rondo.platform import Platform, planned, platform_of
from tests.platform.conformance import EACH
from tests.platform.test_choose import OWN


@pytest.fixture(params=["cpu", OWN])
def platform(request: pytest.FixtureRequest, only_here: None) -> Platform:
    return planned(request.param)


@EACH
def test_it_answers(platform: Platform, asks: Callable[[Platform], None]) -> None:
    asks(platform)
    assert platform_of("cpu") is platform
