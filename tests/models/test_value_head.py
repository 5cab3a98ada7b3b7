"""Value heads of others: by which names they are known, and that their numbers arrive."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rondo.core.errors import DataError
from rondo.models import ModelSource
from rondo.models.loading import build_empty, build_model
from rondo.models.value_head import FILE, replace_lm_head
from tests.planted.files import model_folder

WEIGHT, BIAS = torch.linspace(-1, 1, 32)[None], torch.tensor([0.25])


@pytest.mark.parametrize("prefix", ["v_head.summary.", "score.", "value_head."])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_heads_of_others_are_read(prefix: str, with_bias: bool, apart: bool, tmp_path: Path) -> None:
    named = {f"{prefix}weight": WEIGHT.bfloat16(), **({f"{prefix}bias": BIAS} if with_bias else {})}
    model_folder(tmp_path, added={} if apart else named)
    if apart:
        save_file(named, tmp_path / FILE)
    source = ModelSource(path=str(tmp_path))
    model = build_model(source, torch.float32, output_head=False)
    head = replace_lm_head(model, str(tmp_path), torch.float32)
    assert torch.equal(head.weight, WEIGHT.bfloat16().float())
    assert torch.equal(head.bias, BIAS if with_bias else torch.zeros(1))
    assert build_empty(source, torch.float32, output_head=False)[1] is not None  # rank by rank, too
    if not apart:
        with pytest.raises(DataError, match="that a qwen3 model does not have"):
            build_model(source, torch.float32)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"reward.weight": WEIGHT}, "no value head among reward.weight"),
        ({"score.weight": torch.zeros(2, 32)}, "has shape"),
    ],
)
def test_a_head_that_is_none_is_refused(tensors: dict[str, torch.Tensor], said: str, tmp_path: Path) -> None:
    model_folder(tmp_path)
    save_file(tensors, tmp_path / FILE)
    model = build_model(ModelSource(path=str(tmp_path)), torch.float32, output_head=False)
    with pytest.raises(DataError, match=said):
        replace_lm_head(model, str(tmp_path), torch.float32)


def test_a_head_that_an_export_has_lost_is_missed(tmp_path: Path) -> None:
    model_folder(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"files": {FILE: {}}}))
    model = build_model(ModelSource(path=str(tmp_path)), torch.float32, output_head=False)
    with pytest.raises(DataError, match=f"{FILE} is lost"):
        replace_lm_head(model, str(tmp_path), torch.float32)
