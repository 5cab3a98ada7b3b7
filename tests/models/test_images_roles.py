"""Models beside the policy that see: critics, reward models, pairs and teachers, against transformers' own
forward and gradients.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import logsigmoid

from rondo.algorithms import PreferenceLoss, RewardModelLoss
from rondo.config.schema import EngineConfig, FrozenEngineConfig, FunctionConfig, OptimizerConfig
from rondo.core.batch import ragged_rows
from rondo.models import ModelSource
from rondo.models.pixels import settings_of
from rondo.models.value_head import FILE
from rondo.training import Loss, ModelSpec, make_engine
from tests.models.families import reader_of, shown_to, write
from tests.models.test_images import Row, batch_of, limits_of, rows_with_images
from tests.training.conftest import mesh  # noqa: F401 (a fixture)
from tests.training.helpers import ValueLoss

FAMILY = "qwen3_vl"


class Model:
    """A model in a folder, in float64, with a value head."""

    def __init__(self, folder: Path, family: str = FAMILY) -> None:
        self.lm = write(family, folder).double()
        self.head = torch.randn(32, generator=torch.Generator().manual_seed(5)).double().requires_grad_()
        self.source = ModelSource(path=str(folder), **limits_of(family))
        settings = settings_of(ModelSource(config={}), self.lm.config)
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
        head = {"weight": self.head.detach()[None].clone(), "bias": torch.zeros(1, dtype=torch.float64)}
        save_file(head, folder / FILE)

    def _given(self, row: Row) -> dict[str, Any]:
        ids = torch.from_numpy(np.concatenate([row.prompt, row.response]))[None]
        return {"input_ids": ids, **shown_to(self.lm, ids, row.images, row.reader)}

    def logits(self, row: Row) -> torch.Tensor:
        """Returns those that predict the response."""
        return self.lm(**self._given(row), use_cache=False).logits[0, len(row.prompt) - 1 : -1]

    def log_probs(self, row: Row) -> torch.Tensor:
        answer = torch.from_numpy(row.response)[:, None]
        return self.logits(row).log_softmax(-1).gather(1, answer)[:, 0]

    def values(self, row: Row) -> torch.Tensor:
        """Returns those of the state before each response token, and of the last one behind it."""
        hidden = self.lm.model(**self._given(row), use_cache=False).last_hidden_state[0]
        return hidden[len(row.prompt) - 1 :] @ self.head


def _critic(model: Model, rows: list[Row]) -> torch.Tensor:
    returns = np.arange(len(rows)) / 4
    terms = [(model.values(row)[:-1] - at) ** 2 for row, at in zip(rows, returns, strict=True)]
    return torch.cat(terms).sum()


def _over_pairs(of_row: Callable[[Row], torch.Tensor], rows: list[Row]) -> torch.Tensor:
    pairs = zip(rows[::2], rows[1::2], strict=True)
    margins = [of_row(chosen) - of_row(rejected) for chosen, rejected in pairs]
    return -logsigmoid(torch.stack(margins)).mean()


def _bradley_terry(model: Model, rows: list[Row]) -> torch.Tensor:
    return _over_pairs(lambda row: model.values(row)[-1], rows)


def _dpo(model: Model, rows: list[Row]) -> torch.Tensor:
    """Its reference is as likely to say each token as not to."""
    return _over_pairs(lambda row: 0.1 * (model.log_probs(row) + math.log(2)).sum(), rows)


LOSSES: dict[str, tuple[Any, Loss, Callable[[Model, list[Row]], torch.Tensor]]] = {
    "critic": ("value", ValueLoss(), _critic),
    "reward model": ("value", RewardModelLoss(FunctionConfig("bradley_terry")), _bradley_terry),
    "preference": ("lm", PreferenceLoss(FunctionConfig("dpo", {"beta": 0.1})), _dpo),
}


@pytest.mark.parametrize("family", [FAMILY, "idefics3"])
@pytest.mark.parametrize("task", LOSSES)
def test_gradients_are_those_of_transformers_own_forward(
    task: str,
    family: str,
    mesh: DeviceMesh,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Tower, projector, language model and head; the images of a pair are those of both answers."""
    model = Model(tmp_path, family)
    head, loss, by_hand = LOSSES[task]
    rows = rows_with_images(reader_of(model.source), tmp_path)[:6]
    expected = by_hand(model, rows)
    expected.backward()
    wanted = {name: one.grad for name, one in model.lm.named_parameters() if one.grad is not None}
    budget = 100 if family == FAMILY else 500
    config = EngineConfig(token_budget=budget, param_dtype="float64", compute_dtype="float64")
    engine = make_engine(ModelSpec(model.source, config, OptimizerConfig(), head=head), mesh=mesh)
    lengths = [len(row.response) for row in rows]
    columns = {
        "response_mask": ragged_rows([np.ones(length) for length in lengths], np.uint8),
        "advantages": np.arange(6) / 4,
        "ref_log_probs": ragged_rows([np.full(length, -math.log(2)) for length in lengths], np.float64),
        "unit": np.arange(6) // 2,
        "margin": np.zeros(6, np.float32),
        "loss_weight": np.full(6, 1 / 3),
    }
    batch = batch_of(rows).with_columns(columns)
    if task == "critic":
        batch = batch.without("unit")
    engine.forward_backward(batch, loss)
    found = {name: one.grad for name, one in engine.backend.by_name.items() if one.grad is not None}
    if head == "value":
        wanted["value_head.weight"] = model.head.grad
        found.pop("value_head.bias")
    assert found.keys() == wanted.keys()
    assert any("visual" in name or "vision" in name for name in wanted)
    for name, theirs in wanted.items():
        ours = found[name].reshape(theirs.shape)
        if name.endswith("k_proj.bias"):  # rounding: what all keys have in common is nothing to softmax
            continue
        assert float((ours - theirs).norm()) <= 1e-5 * float(theirs.norm()) + 1e-9, name


def test_teachers_and_reward_models_say_what_transformers_does(
    mesh: DeviceMesh,  # noqa: F811
    tmp_path: Path,
) -> None:
    model = Model(tmp_path)
    rows = rows_with_images(reader_of(model.source), tmp_path)
    config = FrozenEngineConfig(token_budget=100, param_dtype="float64", compute_dtype="float64")
    teacher, judge = (
        make_engine(ModelSpec(model.source, config, None, head=head), mesh=mesh) for head in ("lm", "value")
    )
    said = teacher.forward_topk(batch_of(rows), 4)
    scores = judge.forward_scores(batch_of(rows), "score/judge").scalars("score/judge")
    for number, row in enumerate(rows):
        with torch.no_grad():
            likeliest = model.logits(row).log_softmax(-1).topk(4)
            log_probs, value = model.log_probs(row), model.values(row)[-1]
        np.testing.assert_allclose(said.rows("teacher_log_probs")[number], log_probs, atol=1e-5, rtol=0)
        np.testing.assert_allclose(
            said.rows("teacher_topk_log_probs")[number], likeliest.values, atol=1e-5, rtol=0
        )
        np.testing.assert_array_equal(said.rows("teacher_topk_ids")[number], likeliest.indices)
        assert scores[number] == pytest.approx(float(value), abs=1e-4)
