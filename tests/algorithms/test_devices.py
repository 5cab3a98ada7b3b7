"""Functions of the user's that make tensors on another device than their columns'. The device is `meta`: like
a GPU it takes no tensor of the CPU, but for a number. (On a GPU: tests/gpu/test_training.py.)
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
    try_loss,
)
from rondo.algorithms.trial import call_once
from rondo.config.schema import AlgorithmConfig, FunctionConfig, KlConfig
from rondo.core.errors import ConfigError
from rondo.training import ModelSpec
from rondo.workers import ActorWorker
from rondo.workers import models as workers
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
