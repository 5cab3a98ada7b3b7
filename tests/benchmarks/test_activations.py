"""The memory of a pass is what docs/training.md plans, for rows that ranks divide, too."""

from __future__ import annotations

import pytest

from activations import SEEN, block_bytes, one_pass, planned
from tests.ranks import run_ranks

TOKENS = 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"hidden_size": 192},
        {"intermediate_size": 640},
        {"num_attention_heads": 8},
        {"num_hidden_layers": 5},
    ],
    ids=str,
)
def test_the_bytes_of_a_pass_are_those_that_are_planned(shape: dict[str, int]) -> None:
    (counted,) = run_ranks(1, one_pass, {}, TOKENS, shape)
    assert counted == pytest.approx(planned(TOKENS, shape), rel=0.02)
    (counted,) = run_ranks(1, one_pass, {}, TOKENS, shape, 128)
    plan = planned(TOKENS, shape, 128)
    assert 0.99 * plan < counted < 1.01 * plan + block_bytes(shape)


@pytest.mark.slow
def test_ranks_that_divide_a_long_row_have_their_part_of_it() -> None:
    """32,768 tokens on four; beside it what FSDP gathers, and columns of all tokens."""
    plan = planned(32_768 // 4, {})
    for counted in run_ranks(4, one_pass, {"context": 4}, 32_768, {}, timeout=300):
        assert plan < counted < 1.05 * plan


def _seen(rank: int, world: int) -> list[tuple[int, int]]:
    return [seen.bytes_of(3) for seen in SEEN]


@pytest.mark.slow
def test_what_a_tower_has_is_what_is_planned() -> None:
    """In a process of its own: what others leave in one may keep a tensor for longer."""
    (found,) = run_ranks(1, _seen)
    for seen, (counted, expected) in zip(SEEN, found, strict=True):
        assert expected == pytest.approx(counted, rel=0.05), seen
