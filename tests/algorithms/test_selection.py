"""Which groups of a step are trained on: the reference's examples, and what a step does with the choice."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rondo.algorithms.filters import reward_spread
from rondo.core.errors import ConfigError

SPREADS = [0.05, 0.5, 0.15, 0.3]
GROUPS = [9, 9, 4, 4, 7, 7, 1, 1]


def rewards(spreads: list[float]) -> torch.Tensor:
    """Two answers of each group, whose sample standard deviation is as given."""
    return torch.tensor([x for s in spreads for x in (0.0, s * math.sqrt(2))], dtype=torch.float64)


def kept(spreads: list[float], **options: Any) -> list[int]:
    """The groups that are kept, by their place."""
    chosen = reward_spread(rewards(spreads), torch.tensor(GROUPS), **options)
    assert chosen.dtype == torch.bool
    assert chosen[::2].tolist() == chosen[1::2].tolist()
    return torch.nonzero(chosen[::2])[:, 0].tolist()


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({}, [1, 2, 3]),  # the reference's: .9 · 1 - .01 = .89; .5 + .3 = .8 is not enough
        ({"share": 0.8}, [1, 3]),
        ({"by": "count", "share": 0.25}, [1]),
        ({"by": "count", "share": 0.01}, [1]),
        ({"by": "count", "share": 1.0}, [0, 1, 2, 3]),
        ({"by": "largest", "share": 0.6}, [1, 3]),
        ({"by": "largest", "share": 0.1}, [0, 1, 2, 3]),
        ({"by": "softmax", "share": 0.5}, [1, 3]),  # e^.5, e^.3 … : .316, .259, .223, .202
        ({"by": "softmax", "share": 0.6}, [1, 2, 3]),
    ],
)
def test_groups_of_largest_spread(options: dict[str, Any], groups: list[int]) -> None:
    assert kept(SPREADS, **options) == groups


def test_groups_without_spread_are_left_out_unless_all_are() -> None:
    assert kept([0.0, 0.5, 0.0, 0.5], share=1.0) == [1, 3]
    assert kept([0.0] * 4) == [0, 1, 2, 3]


@pytest.mark.parametrize("options", [{"by": "top"}, {"share": 0.0}, {"share": 1.5}])
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.select"):
        kept(SPREADS, **options)
