"""The back ends of this machine."""

from __future__ import annotations

import pytest

from tests.sandboxes import need_sandbox


@pytest.fixture(scope="session", params=["bubblewrap", "landlock"])
def backend(request: pytest.FixtureRequest) -> str:
    """The name of each that holds programs here."""
    name: str = request.param
    need_sandbox(name)
    return name
