"""Names, signatures and options: what is chosen in a recipe is found, and what does not fit is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rondo.algorithms import (
    ActorLoss,
    bind,
    check_algorithm,
    columns_read,
    lookup,
    names,
    registry,
)
from rondo.algorithms.advantages.group import grpo
from rondo.algorithms.arguments import require
from rondo.algorithms.registry import advantage, is_zero_at_zero_advantage
from rondo.config.schema import AdaptiveKlConfig, AlgorithmConfig, FunctionConfig, KlConfig
from rondo.core.errors import ConfigError

CUSTOM = '''
import torch

def centred(reward, group_id, *, scale: float = 2.0):
    """Reward minus the batch mean."""
    return scale * (reward - reward.mean())

def weighted_loss(log_probs, advantages, my_column, entropy, cu_seqlens, *, power: int):
    return -advantages * log_probs * my_column ** power, {"actor/mine": (my_column.sum(), torch.tensor(1.0))}
'''


@pytest.fixture
def custom(tmp_path: Path) -> str:
    path = tmp_path / "custom.py"
    path.write_text(CUSTOM)
    return str(path)


def test_parameters_before_the_star_are_columns() -> None:
    assert columns_read(grpo) == ("reward", "group_id")
    assert columns_read(lookup("policy_loss", "gspo"))[-1] == "cu_seqlens"
    assert columns_read(bind("advantage", FunctionConfig("grpo", {"eps": 0.1}))) == ("reward", "group_id")


def test_signatures_that_do_not_say_what_they_read_are_refused() -> None:
    with pytest.raises(ConfigError, match="after"):
        columns_read(lambda reward, scale=1.0: reward)
    with pytest.raises(ConfigError, match="columns"):
        columns_read(lambda *columns: columns)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalise_std": True}, "normalize_std"),
        ({"eps": "1e-6"}, "float"),
        ({"normalize_std": 1}, "bool"),
        ({"reward": 1.0}, "reward"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        bind("advantage", FunctionConfig("grpo", options))
    assert "algorithm.advantage" in str(caught.value)


def test_a_required_option_must_be_given() -> None:
    with pytest.raises(ConfigError, match="divisor"):
        bind("aggregation", FunctionConfig("seq-mean-token-sum-norm"))


def test_unknown_names_name_the_nearest_and_the_key() -> None:
    with pytest.raises(ConfigError, match="'grpo'") as caught:
        lookup("advantage", "grppo")
    assert "algorithm.advantage" in str(caught.value)


@pytest.mark.parametrize(
    ("bounds", "value", "message"),
    [
        ({"above": 0}, 0.0, "f needs x > 0, got 0.0"),
        ({"at_least": 0, "at_most": 1}, 1.5, "f needs x >= 0 and <= 1, got 1.5"),
        ({"at_least": 0, "below": 0.5}, 0.5, "f needs x >= 0 and < 0.5, got 0.5"),
        ({"at_least": 0}, math.nan, "f needs x >= 0, got nan"),
    ],
)
def test_an_option_out_of_bounds_is_named_with_them(
    bounds: dict[str, float], value: float, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        require("f", **bounds, x=value)
    assert str(caught.value) == message
    require("f", **bounds, x=None, y=0.25)


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ConfigError, match="grpo"):

        @advantage("grpo")
        def mine(reward: Tensor) -> Tensor:
            return reward


def test_functions_from_a_file(custom: str) -> None:
    estimator = bind("advantage", FunctionConfig(f"{custom}:centred", {"scale": 3.0}))
    assert estimator(torch.tensor([0.0, 2.0]), torch.tensor([0, 0])).tolist() == [-3.0, 3.0]
    config = AlgorithmConfig(policy_loss=FunctionConfig(f"{custom}:weighted_loss", {"power": 2}))
    loss = ActorLoss(config)
    assert loss.outputs == ("log_probs", "entropy")  # it reads the current policy's entropy
    assert set(loss.columns) == {
        "response_mask",
        "loss_weight",
        "rollout_log_probs",
        "advantages",
        "my_column",
    }
    assert not is_zero_at_zero_advantage(lookup("policy_loss", f"{custom}:weighted_loss"))
    ones = torch.ones(2)
    columns = dict.fromkeys(loss.columns, ones) | {"my_column": torch.tensor([2.0, 3.0])}
    value, metrics = loss(
        {"log_probs": -ones, "entropy": ones}, columns, torch.tensor([0, 2], dtype=torch.int32)
    )
    assert value.item() == 13.0
    assert metrics["actor/mine"][0].item() == 5.0
    check_algorithm(config)
    with pytest.raises(ConfigError, match="power"):
        ActorLoss(AlgorithmConfig(policy_loss=FunctionConfig(f"{custom}:weighted_loss")))


def test_a_registered_function_of_the_users_is_neither_built_in_nor_called_by_the_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mine(my_column: Tensor) -> Tensor:
        raise AssertionError("called")

    monkeypatch.setitem(registry._FUNCTIONS["advantage"], "mine", mine)
    assert "mine" not in names("advantage")
    assert lookup("advantage", "mine") is mine
    check_algorithm(AlgorithmConfig(advantage=FunctionConfig("mine")))


@pytest.mark.parametrize("name", names("advantage"))
def test_every_estimator_passes_the_check_by_name(name: str) -> None:
    options = {"k": 2} if name == "passk_analytic" else {}
    check_algorithm(AlgorithmConfig(advantage=FunctionConfig(name, options)))


@pytest.mark.parametrize("name", names("policy_loss"))
@pytest.mark.parametrize(
    "kl", [None, KlConfig("k3+", "loss", 0.1), KlConfig("k1", "reward", 0.1, AdaptiveKlConfig())]
)
def test_every_loss_passes_the_check_by_name(name: str, kl: KlConfig | None) -> None:
    check_algorithm(AlgorithmConfig(policy_loss=FunctionConfig(name), kl=kl, entropy_coef=0.01))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AlgorithmConfig(policy_loss=FunctionConfig("ppo_clip", {"dual_clip": 0.5})), "dual_clip"),
        (AlgorithmConfig(advantage=FunctionConfig("gae", {"lam": 2.0})), "lam"),
        (AlgorithmConfig(value_loss=FunctionConfig("clipped_value", {"clip": -1.0})), "clip"),
        (AlgorithmConfig(aggregation=FunctionConfig("seq-mean-token-sum-norm", {"divisor": 0.0})), "divisor"),
        (AlgorithmConfig(aggregation=FunctionConfig("token_mean")), "token-mean"),
        (AlgorithmConfig(kl=KlConfig("k4", "reward", 0.1)), "k3"),
        (AlgorithmConfig(kl=KlConfig("k1", "loss", 0.1)), "noise"),
    ],
)
def test_the_check_finds_what_cannot_work(config: AlgorithmConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_algorithm(config)
