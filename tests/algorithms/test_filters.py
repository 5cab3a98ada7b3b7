"""Filters of prompt groups."""

from __future__ import annotations

import numpy as np
import pytest

from rondo.algorithms import check_algorithm, lookup
from rondo.algorithms.filters import accuracy_range, mixed_accuracy
from rondo.config.schema import AlgorithmConfig, FilterConfig, FunctionConfig
from rondo.core.errors import ConfigError


@pytest.mark.parametrize(
    ("accuracy", "kept"),
    [
        ([1.0, 0.0, 0.0], True),
        ([1.0, -1.0], True),
        ([0.25, 0.5], True),
        ([1.0, 1.0, 1.0], False),
        ([0.0, 0.0], False),
        ([1.0], False),  # a group of one has no signal, whatever its accuracy
        ([], False),
    ],
)
def test_mixed_accuracy_drops_groups_without_signal(accuracy: list[float], kept: bool) -> None:
    assert (lookup("filter", "mixed_accuracy")(np.array(accuracy)) is None) == kept
    assert (mixed_accuracy(np.array(accuracy)) is None) == kept


def test_accuracy_range_includes_its_ends() -> None:
    kept = [accuracy_range(np.repeat([1.0, 0.0], [right, 5 - right])) is None for right in range(6)]
    assert kept == [False, True, True, True, True, False]
    assert accuracy_range(np.array([-1.0, 0.0, 2.0, 1.0]), low=0.5, high=0.5) is None  # right: above 0
    reason = accuracy_range(np.array([1.0, 0.0]), low=0.6, high=1.0)
    assert reason is not None
    assert "0.6 to 1.0" in reason


def test_options_out_of_range_are_refused_at_the_start_of_a_run() -> None:
    wrong = FilterConfig("accuracy_range", {"low": 0.8, "high": 0.2})
    with pytest.raises(ConfigError, match="accuracy_range needs 0 <= low"):
        check_algorithm(AlgorithmConfig(filter=wrong))
    with pytest.raises(ConfigError, match="pf_ppo has no strategy"):
        check_algorithm(AlgorithmConfig(resample=FunctionConfig("pf_ppo", {"strategy": "worst"})))
    fits = FilterConfig("mixed_accuracy"), FunctionConfig("pf_ppo", {"strategy": "power", "power": 2.0})
    check_algorithm(AlgorithmConfig(filter=fits[0], resample=fits[1]))
