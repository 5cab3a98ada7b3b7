"""Experts taken apart are what transformers itself would save, and come back as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig

from rondo.errors import ConfigError
from rondo.models import ModelSource, build_model, load_model_config
from rondo.models.experts import separate
from rondo.models.family import FAMILIES
from rondo.rollout.third_party_engine import expected_weights
from rondo.training.checkpoint import export_folder

SHAPE: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
}
OWN = {
    "olmoe": {"num_experts": 3},
    "qwen2_moe": {"num_experts": 3, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12},
    "qwen3_moe": {"num_experts": 3, "moe_intermediate_size": 8, "head_dim": 8, "mlp_only_layers": [0]},
}


def test_each_family_is_tried() -> None:
    assert set(OWN) == {name for name, family in FAMILIES.items() if family.separate_experts}


@pytest.mark.parametrize("model_type", OWN)
def test_names_and_values_are_those_of_a_checkpoint(model_type: str, tmp_path: Path) -> None:
    source = ModelSource(config={"model_type": model_type, **SHAPE, **OWN[model_type]})
    model = build_model(source, torch.float32)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    ours = dict(separate(tensors.items()))
    model.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert sum("experts." in name for name in ours) == 9 * (1 if model_type == "qwen3_moe" else 2)
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    assert {tensor.untyped_storage().data_ptr() for tensor in ours.values()} == storages  # views

    copies = {name: tensor.clone() for name, tensor in ours.items()}
    export_folder(copies, source, str(tmp_path / "export"))
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert all(torch.equal(parameter, tensors[name]) for name, parameter in back.named_parameters())


def test_dense_tensors_pass_as_they_are() -> None:
    dense = [
        ("model.layers.0.mlp.gate_up_proj.weight", torch.ones(4, 2)),
        ("model.norm.weight", torch.ones(2)),
    ]
    assert [(name, id(tensor)) for name, tensor in separate(dense)] == [(name, id(t)) for name, t in dense]


def test_experts_under_unknown_names_are_refused_before_an_engine_starts() -> None:
    config = MixtralConfig(**SHAPE, num_local_experts=2)
    with pytest.raises(ConfigError, match=r"checkpoints of mixtral .*'model\.layers\.0\..*engine=native"):
        expected_weights(config)


def test_keys_of_a_mixture_that_its_config_class_does_not_declare() -> None:
    config = load_model_config(
        ModelSource(config={"model_type": "qwen3_moe", "head_dim": 128, "num_experts": 7})
    )
    assert (config.head_dim, config.num_experts) == (128, 7)
    with pytest.raises(ConfigError, match="no key 'num_expert'; did you mean 'num_experts'"):
        load_model_config(ModelSource(config={"model_type": "qwen3_moe", "num_expert": 7}))
