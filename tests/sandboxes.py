"""Sandboxes of this machine. RONDO_REQUIRED_SANDBOXES names the back ends whose absence is a failure."""

from __future__ import annotations

import os

import pytest

from rondo.core.errors import SandboxError
from rondo_sandbox import check_sandbox


def need_sandbox(backend: str = "auto") -> None:
    """Skips the test where this machine has no such back end (auto: none at all). One that starts and does
    not answer is no fault of the machine's, and fails the test.
    """
    try:
        check_sandbox(backend)
    except SandboxError as error:
        required = os.environ.get("RONDO_REQUIRED_SANDBOXES", "").split()
        if backend in required or (backend == "auto" and required) or "did not answer" in str(error):
            raise
        pytest.skip(str(error))
