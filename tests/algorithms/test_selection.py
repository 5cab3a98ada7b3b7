"""Which groups of a step are trained on: the reference's examples, and what a step does with the choice."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rondo.algorithms.filters import resample_on_correct, reward_spread
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


@pytest.mark.parametrize(
    ("wrong", "right", "kept_wrong", "kept_right"),
    [
        (20, 12, 10, 6),  # the reference's three
        (29, 3, 14, 2),
        (31, 1, 15, 1),
        (1, 31, 1, 15),
        (2, 30, 2, 14),  # 1 of the wrong ones is fewer than there should be
        (16, 16, 8, 8),
    ],
)
def test_as_many_of_each_kind_as_in_the_group(
    wrong: int, right: int, kept_wrong: int, kept_right: int
) -> None:
    reward = torch.tensor([0.0] * wrong + [1.0] * right)
    penalty = torch.arange(len(reward), 0, -1, dtype=torch.float32)  # the last are the best
    chosen = resample_on_correct(reward, torch.full((len(reward),), 7), penalty, keep=16)
    assert torch.nonzero(chosen)[:, 0].tolist() == [
        *range(kept_wrong),
        *range(len(reward) - kept_right, len(reward)),
    ]


def test_prompts_with_equal_rewards_or_too_few_answers_are_left_out() -> None:
    reward = torch.tensor([0.0, 1, 1, 1, 0, 0, 1, 0])
    groups, penalty = torch.tensor([3, 3, 3, 5, 5, 5, 3, 1]), torch.tensor([0.0, 0.4, 0.1, 0, 0, 0, 0.2, 0])
    chosen = resample_on_correct(reward, groups, penalty, keep=3, least=1)
    assert chosen.tolist() == [True, False, True, True, True, True, True, False]
    assert resample_on_correct(reward, groups, penalty, keep=4, least=1).tolist() == [
        *([True] * 3),
        *([False] * 3),
        True,
        False,
    ]
    assert resample_on_correct(reward, groups, penalty, keep=5).all()  # nothing tells them apart
    with pytest.raises(ConfigError, match="keep"):
        resample_on_correct(reward, groups, penalty, keep=0)
