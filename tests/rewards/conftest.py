"""Trajectories for scorers, made by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rondo.core.types import Prompt, Row, Trajectory


def make_trajectory(text, sample_index=0, source="s", **fields):
    prompt = Prompt(0, f"{source}/0/0", source, np.zeros(1, np.int32), fields)
    ints = np.zeros(1, np.int32)
    return Trajectory(
        prompt=prompt,
        trajectory_id=f"0-{sample_index}",
        sample_index=sample_index,
        rows=(Row(ints, ints, np.ones(1, np.uint8), np.zeros(1, np.float32), ints, (), "stop"),),
        text=text,
    )


@pytest.fixture
def trajectory():
    return make_trajectory


@pytest.fixture
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file with the FUNCTIONS of the test's module."""
    file = tmp_path / "theirs.py"
    file.write_text(request.module.FUNCTIONS)
    return file
