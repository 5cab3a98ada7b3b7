"""A CUDA device in host memory, and the tests that run on it: see README.md."""

from __future__ import annotations

import sys
from typing import Any

import pytest


def card() -> Any:
    """Returns card.py as this process has it; None in one without the host card."""
    return sys.modules.get("rondo_host_card_python")


on_the_host_card = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        card() is None, reason="runs on the host card: tests/host_card/test_suite.py starts it"
    ),
]
