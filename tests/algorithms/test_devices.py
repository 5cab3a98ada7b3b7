"""Functions of the user's that make tensors on another device than their columns'. The device is `meta`: like
a GPU it takes no tensor of the CPU, but for a number. (On a GPU: tests/gpu/test_training.py.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rondo.algorithms import (
    ActorLoss,
    CriticLoss,
    PreferenceLoss,
    PrmLoss,
    RewardModelLoss,
    SftLoss,
    lookup,
    names,
    trial,
    try_functions,
    try_loss,
)
from rondo.algorithms.trial import call_once
from rondo.config.schema import AlgorithmConfig, FilterConfig, FunctionConfig, KlConfig
from rondo.core.errors import ConfigError, WrongDeviceError
from rondo.trainers.program import create_model
from rondo.training import ModelSpec
from rondo.workers import ActorWorker
from rondo.workers import models as workers
from tests.trainers.conftest import registered_for_now
from tests.training.helpers import source

META = torch.device("meta")
MINE = """
import torch

def adds(log_probs, advantages):
    return -advantages * log_probs + torch.zeros(len(log_probs)), {}

def returns(log_probs, advantages):
    return torch.zeros(len(log_probs)), {}

def counts(log_probs, advantages):
    return -advantages * log_probs, {"mine": torch.ones(()), "mean": (log_probs.sum(), torch.tensor(3.0))}

def reports(log_probs, advantages):
    return -advantages * log_probs, {"mine": (torch.ones(2), log_probs.sum())}

def refuses(log_probs, advantages):
    raise RuntimeError("nothing like this comes")

def kl(log_probs, ref_log_probs):
    return torch.zeros(len(log_probs))

def values(values, old_values, returns):
    return torch.ones(len(values)) * (values - returns) ** 2, {}

def estimator(reward):
    return torch.empty(len(reward), device="meta")
"""
CALLS = []
"""What the functions below are called with."""


def _centred(reward: torch.Tensor, group_id: torch.Tensor, mine_alone: torch.Tensor) -> torch.Tensor:
    CALLS.append((reward.tolist(), group_id.tolist(), tuple(mine_alone.shape)))
    return torch.zeros(2, device="meta") if reward.std() == 0 else reward - reward.mean()


def _adds_meta(reward: torch.Tensor) -> torch.Tensor:
    return reward + torch.zeros(2, device="meta")


def _of_three(reward: torch.Tensor) -> torch.Tensor:
    if len(reward) != 3:
        raise ConfigError("there are three samples of each prompt")
    return torch.zeros(3, device="meta")


def _twice_on_meta(num_trained_tokens: np.ndarray) -> torch.Tensor:
    return torch.empty(len(num_trained_tokens), device="meta")


def _reads_meta(accuracy: np.ndarray) -> str | None:
    return "mixed" if np.mean(torch.tensor(accuracy, device="meta").numpy()) else None


def _half(reward: torch.Tensor) -> torch.Tensor:
    return torch.full((len(reward),), 0.5, device="meta")


def _kl(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    return torch.zeros(log_probs.shape, device="meta")


def _loss(log_probs: torch.Tensor, advantages: torch.Tensor) -> Any:
    return -advantages * log_probs, {}


def _prepare(old_log_probs: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    assert seed == 0
    assert old_log_probs.shape == (2, 2)
    return {"mine": torch.zeros(2, 2, device="meta")}


REWARD_KL = KlConfig(name=f"{__name__}._kl", where="reward", coef=0.1)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def loss_of(name: str, **changes: Any) -> ActorLoss:
    return ActorLoss(AlgorithmConfig(policy_loss=FunctionConfig(name), **changes))


@pytest.mark.parametrize("name", ["adds", "returns", "reports"])
def test_a_tensor_on_another_device_is_named(mine: Path, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        try_loss(loss_of(f"{mine}:{name}"), META)
    assert caught.value.key == "algorithm.policy_loss"
    said = str(caught.value)
    assert said.startswith(f"algorithm.policy_loss: the policy_loss function {mine}:{name} r")
    assert said.endswith(
        "; its columns are on meta, and so must be what it makes: x.new_zeros(…), torch.zeros(…, "
        "device=x.device)"
    )
    what = {
        "adds": "(mine.py, line 5)",
        "returns": "returned a tensor of shape [3] on cpu",
        "reports": "returned a tensor of shape [2] on cpu",
    }
    assert what[name] in said


def test_a_number_on_the_cpu_does_no_harm(mine: Path) -> None:
    total, metrics = call_once(loss_of(f"{mine}:counts"), META)
    try_loss(loss_of(f"{mine}:counts"), META)
    assert total.device == META
    assert metrics["mine"].device == torch.device("cpu")


def test_what_goes_wrong_with_made_up_rows_only_is_no_refusal(
    mine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "rondo.algorithms.trial"):
        try_loss(loss_of(f"{mine}:refuses"), META)
    assert "raised RuntimeError: nothing like this comes (mine.py, line 17)" in caplog.text


class OwnLoss:
    """A loss of a program's, which nothing of rondo's is around."""

    outputs = ("log_probs",)
    columns = ("reward", "response_mask")

    def __init__(self, made: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._made = made

    def __call__(self, outputs: Any, columns: Any, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (outputs["log_probs"] + self._made(columns["reward"])).sum(), {}


def test_a_loss_that_is_an_object_is_tried_too(caplog: pytest.LogCaptureFixture) -> None:
    try_loss(OwnLoss(lambda reward: -reward), META)
    with pytest.raises(WrongDeviceError, match=r"the loss OwnLoss raised RuntimeError: .*") as caught:
        try_loss(OwnLoss(lambda reward: torch.zeros(len(reward))), META)
    assert "(test_devices.py, line " in str(caught.value)
    assert "; its columns are on meta" in str(caught.value)
    with caplog.at_level("INFO", "rondo.algorithms.trial"):
        try_loss(OwnLoss(lambda reward: reward[7]), META)
    assert "the loss OwnLoss could not be tried with two made-up rows: the loss" in caplog.text


def test_every_kind_of_function_is_named_by_its_key(mine: Path) -> None:
    with pytest.raises(ConfigError, match=r"the kl function .*:kl returned") as caught:
        try_loss(loss_of("ppo_clip", kl=KlConfig(name=f"{mine}:kl", where="loss", coef=0.1)), META)
    assert caught.value.key == "algorithm.kl"
    with pytest.raises(ConfigError, match=r"the value_loss function .*:values raised") as caught:
        try_loss(CriticLoss(FunctionConfig(f"{mine}:values")), META)
    assert caught.value.key == "algorithm.value_loss"
    with pytest.raises(ConfigError, match=r"on meta; its columns are on cpu") as caught:
        lookup("advantage", f"{mine}:estimator")(torch.zeros(2))
    assert caught.value.key == "algorithm.advantage"


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "advantage": (_adds_meta, "_adds_meta raised RuntimeError: "),
    "aggregation": (_twice_on_meta, "_twice_on_meta returned a tensor of shape [2] on meta"),
    "filter": (_reads_meta, "_reads_meta raised TypeError: "),
    "resample": (_half, "_half returned a tensor of shape [2] on meta"),
}


@pytest.mark.parametrize("kind", list(WRONG))
def test_functions_of_rows_are_tried_on_the_cpu_where_they_run(kind: str) -> None:
    function, said = WRONG[kind]
    chosen = FilterConfig if kind == "filter" else FunctionConfig
    of_kind: Any = {kind: chosen(f"{__name__}.{function.__name__}")}
    algorithm = AlgorithmConfig(**of_kind)
    try_functions(algorithm, "cpu")
    with pytest.raises(WrongDeviceError) as caught:
        try_functions(algorithm, "cuda:0")
    assert caught.value.key == f"algorithm.{kind}"
    assert str(caught.value).startswith(f"algorithm.{kind}: the {kind} function {__name__}.{said}")
    assert "; its columns are on cpu, and so must be what it makes" in str(caught.value)


def test_a_kl_in_the_reward_and_a_preparation_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WrongDeviceError, match=r"_kl returned a tensor of shape \[2, 2\]") as caught:
        try_functions(AlgorithmConfig(kl=REWARD_KL), "cuda")
    assert caught.value.key == "algorithm.kl"
    in_loss = KlConfig(name=REWARD_KL.name, where="loss", coef=0.1)
    try_functions(AlgorithmConfig(kl=in_loss), "cuda")  # it is given what lies on the GPU: `try_loss`
    registered_for_now(monkeypatch, "prepared_on_meta", _loss, _prepare)
    with pytest.raises(WrongDeviceError, match=r"\(prepare\) returned a tensor") as caught:
        try_functions(AlgorithmConfig(policy_loss=FunctionConfig("prepared_on_meta")), "cuda")
    assert caught.value.key == "algorithm.policy_loss"


def test_rows_that_are_tried_are_two_samples_of_one_prompt_with_different_rewards() -> None:
    CALLS.clear()
    chosen = AlgorithmConfig(advantage=FunctionConfig(f"{__name__}._centred"))
    try_functions(chosen, "cpu")
    assert CALLS == []
    try_functions(chosen, "cuda")
    assert CALLS == [([0.0, 1.0], [0, 0], (2, 2))]


def test_a_function_may_refuse_rows_that_are_made_up(caplog: pytest.LogCaptureFixture) -> None:
    """Also by a ConfigError: only what is said of devices stops a run."""
    with caplog.at_level("INFO", "rondo.algorithms.trial"):
        try_functions(AlgorithmConfig(advantage=FunctionConfig(f"{__name__}._of_three")), "cuda")
    assert "_of_three could not be tried with two made-up rows: there are three samples" in caplog.text


def test_functions_of_rondos_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """`check_algorithm` has called them."""
    monkeypatch.setattr(trial, "_tried", lambda *_: pytest.fail("it was"))
    kl = KlConfig(name="k3", where="reward", coef=0.1)
    of_groups: Any = {"filter": FilterConfig("mixed_accuracy"), "resample": FunctionConfig("pf_ppo")}
    try_functions(AlgorithmConfig(policy_loss=FunctionConfig("clip_cov"), kl=kl, **of_groups), "cuda")


def test_a_run_says_so_before_its_models_are_there() -> None:
    cluster: Any = SimpleNamespace(device="cuda")
    absent: Any = None
    losses: dict[str, Any] = {"policy": loss_of("ppo_clip", kl=REWARD_KL)}
    with pytest.raises(WrongDeviceError, match=r"_kl returned"):
        asyncio.run(create_model(cluster, "actor", absent, losses))


def test_a_worker_says_so_before_its_model_is_there(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(workers, "make_engine")  # nobody comes so far
    context: Any = SimpleNamespace(device="meta", rank=0, role="actor")
    spec: Any = ModelSpec(source(), AlgorithmConfig)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"function .*:adds raised"):
        ActorWorker(context, model=spec, losses={"policy": loss_of(f"{mine}:adds")})


def test_no_loss_of_rondos_reads_a_number_of_its_columns() -> None:
    """A tensor on meta has none: on a GPU each would be waited for, in every micro-batch."""
    losses: list[Any] = [PrmLoss(1.0), SftLoss()]
    losses += [CriticLoss(FunctionConfig(name)) for name in names("value_loss")]
    for name in names("policy_loss"):
        chosen = AlgorithmConfig(policy_loss=FunctionConfig(name))
        losses += [ActorLoss(chosen), ActorLoss(chosen, on_policy=True)]
    assert len(losses) > 20
    for loss in losses:
        assert call_once(loss, META)[0].shape == ()


@pytest.mark.parametrize("name", names("pair_loss"))
def test_a_pair_can_be_made_up(name: str) -> None:
    of_scores = name.endswith("bradley_terry")
    loss = (RewardModelLoss if of_scores else PreferenceLoss)(FunctionConfig(name))
    assert call_once(loss, torch.device("cpu"))[0].isfinite()
