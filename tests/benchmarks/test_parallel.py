"""What moves along an axis is what docs/parallel.md says."""

from __future__ import annotations

import pytest

from parallel import formula, one_pass
from tests.ranks import run_ranks


@pytest.mark.slow
def test_a_layer_takes_four_all_reduces_along_tensor() -> None:
    """Of 32 tokens of width 16 in float32, two forward and two backward; each brings twice half of them."""
    (large, most), (small, fewer) = (run_ranks(2, one_pass, "tensor", layers, 32, 16)[0] for layers in (2, 1))
    moved = sum(large.values()) - sum(small.values())
    assert moved == 4 * 32 * 16 * 4 == formula("tensor", most - fewer, 32, 16)
