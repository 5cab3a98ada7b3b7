"""What the fixture of every file of tests compares (tests/conftest.py)."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import pytest
import torch

from tests.process_state import differences, state, take_back


def test_what_is_left_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = state()
    assert differences(before, state()) == []
    monkeypatch.setenv("LEFT", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("rondo"), "propagate", False)
    torch.set_default_dtype(torch.float64)
    try:
        after = state()
    finally:
        torch.set_default_dtype(torch.float32)
    names = [line.partition(":")[0] for line in differences(before, after)]
    assert names == ["the folder", "torch's dtype", "the logger rondo", "the variable LEFT"]


def test_what_libraries_leave_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_THERE", "before")
    before = state()
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.environ.update(NVTE_FLASH_ATTN="1", RAY_THERE="after", LEFT="1")
    take_back(before)
    try:
        assert differences(before, state()) == ["the variable LEFT: None became '1'"]
    finally:
        del os.environ["LEFT"]
