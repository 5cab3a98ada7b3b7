"""What sections say of themselves: what follows from their fields alone."""

from __future__ import annotations

from typing import Literal

import pytest

from rondo.config.schema import (
    BestConfig,
    ExpertBalanceConfig,
    NativeEngineConfig,
    RouterConfig,
    TransformersEngineConfig,
)


@pytest.mark.parametrize(
    ("balance", "bias_speed", "balances"),
    [
        (None, 0.0, False),
        (ExpertBalanceConfig(), 0.0, True),
        (None, 1e-3, True),
        (ExpertBalanceConfig(), 1e-3, True),
    ],
)
def test_a_loss_or_a_bias_balances_experts(
    balance: ExpertBalanceConfig | None, bias_speed: float, balances: bool
) -> None:
    assert RouterConfig(balance=balance, bias_speed=bias_speed).balances is balances


@pytest.mark.parametrize(
    ("metric", "auto"),
    [
        ("eval/greedy/reward/mean", 1),
        ("eval/greedy/score/exact/train", 1),
        ("eval/sampled/best@4", 1),
        ("eval/sampled/majority@4/train", 1),
        ("eval/preference/accuracy", 1),
        ("eval/preference/margin", 1),
        ("eval/loss", -1),
        ("eval/loss/train", 0),
        ("eval/greedy/length", 0),
        (None, 0),
    ],
)
def test_the_better_of_two_by_a_metric(metric: str | None, auto: int) -> None:
    modes: tuple[Literal["auto", "max", "min"], ...] = ("auto", "max", "min")
    assert [BestConfig(metric=metric, mode=mode).sign for mode in modes] == [auto, 1, -1]


def test_own_engines_have_their_arguments_as_others_do() -> None:
    assert TransformersEngineConfig(cache_bytes=4096).options == {"cache_bytes": 4096}
    assert NativeEngineConfig(cache_bytes=4096, decode="lean").options == {
        "cache_bytes": 4096,
        "decode": "lean",
    }
