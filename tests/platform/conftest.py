from __future__ import annotations

from collections.abc import Iterator

import pytest

from rondo.platform import planned


@pytest.fixture
def only_here() -> Iterator[None]:
    """What a test names is not the platform of the tests after it."""
    yield
    planned("cpu")
