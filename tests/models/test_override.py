"""model.override: what is accepted, what is refused by name, and that all that is made of a model has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rondo.config.schema import FrozenEngineConfig
from rondo.core.errors import ConfigError, DataError
from rondo.models import ModelSource, build_model, load_model_config, longest_context
from rondo.models.override import overridden
from rondo.rollout import EngineSpec
from rondo.rollout.third_party_engine import model_folder
from rondo.training import ModelSpec, make_engine
from tests.messages import full_text
from tests.training.conftest import mesh  # noqa: F401 (a fixture)

BASE = {
    "model_type": "qwen3",
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_theta": 5e5,
}
YARN = {"rope_type": "yarn", "factor": 4.0}
STRETCHED = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5, "original_max_position_embeddings": 64}


def changed(override: dict[str, Any], **base: Any) -> Any:
    config = load_model_config(ModelSource(config={**BASE, **base}))
    return overridden(config, override, "model.override")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_model(ModelSource(config=BASE, seed=1), torch.float32).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "override",
    [
        {"rope_parameters": YARN},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        # The trained length is the folder's, not the one that is set beside it.
        {"rope_parameters": YARN, "max_position_embeddings": 256},
    ],
)
def test_a_rotary_embedding_is_stretched_and_keeps_its_base(override: dict[str, Any]) -> None:
    config = changed(override)
    assert config.rope_parameters == STRETCHED
    assert longest_context(config) == 256


def test_another_type_drops_what_was_the_old_ones() -> None:
    old = {**STRETCHED, "beta_fast": 20.0}
    assert changed({"rope_scaling": None}, rope_parameters=old).rope_parameters == {
        "rope_type": "default",
        "rope_theta": 5e5,
    }
    linear = {"rope_type": "linear", "factor": 2.0}
    assert changed({"rope_parameters": linear}, rope_parameters=old).rope_parameters == {
        **linear,
        "rope_theta": 5e5,
    }
    assert changed({"rope_parameters": {"factor": 8.0}}, rope_parameters=old).rope_parameters == {
        **old,
        "factor": 8.0,
    }
    assert changed({"rope_theta": 3.0}).rope_parameters == {"rope_type": "default", "rope_theta": 3.0}


def test_layers_with_embeddings_of_their_own_are_set_one_kind_at_a_time() -> None:
    gemma = load_model_config(ModelSource(config={"model_type": "gemma3_text"}))
    linear = {"rope_type": "linear", "factor": 8.0}
    made = overridden(gemma, {"rope_parameters": {"full_attention": linear}}, "model.override")
    assert made.rope_parameters["full_attention"] == {**linear, "rope_theta": 1e6}
    assert made.rope_parameters["sliding_attention"] == gemma.rope_parameters["sliding_attention"]
    for flat in ({"rope_scaling": linear}, {"rope_theta": 3.0}):
        with pytest.raises(ConfigError, match=full_text("rope_parameters with full_attention")):
            overridden(gemma, flat, "model.override")


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        ({"hiden_act": "x"}, "hiden_act", "no key 'hiden_act'; did you mean 'hidden_act'"),
        ({"num_attention_heads": "two"}, "num_attention_heads", "expected int, got str"),
        ({"rms_norm_eps": 1e-3, "use_cache": "no"}, "use_cache", "expected bool, got str"),
        (
            {"attention_dropout": 0.1},
            "attention_dropout",
            "rondo trains without dropout, because the log-probs",
        ),
        ({"dtype": "bfloat16"}, "dtype", "actor.param_dtype and rollout.dtype say it"),
        ({"rope_parameters": {"rope_type": "yern"}}, "rope_parameters.rope_type", "did you mean 'yarn'"),
        ({"rope_parameters": {**YARN, "facter": 2}}, "rope_parameters.facter", "did you mean 'factor'"),
        ({"rope_parameters": {**YARN, "factor": "4"}}, "rope_parameters.factor", "is a number, not '4'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters", "Missing required keys"),
        ({"rope_scaling": 4}, "rope_scaling", "is a mapping"),
    ],
)
def test_what_is_refused_names_its_key(override: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^model\.override\.{key}.*{said}|^model\.override.*{said}"
    ) as caught:
        changed(override)
    assert caught.value.key == f"model.override.{key}"


def test_no_dropout_is_no_error() -> None:
    assert changed({"attention_dropout": 0.0}, attention_dropout=0.1).attention_dropout == 0.0
    gpt2 = load_model_config(ModelSource(config={"model_type": "gpt2"}))
    other = overridden(gpt2, {"resid_pdrop": 0.0, "max_position_embeddings": 64}, "model.override")
    assert (other.resid_pdrop, other.n_positions) == (0.0, 64)  # by another of its names


def test_parts_of_a_config_are_checked_like_the_whole() -> None:
    gemma = load_model_config(ModelSource(config={"model_type": "gemma3"}))
    made = overridden(gemma, {"text_config": {"hidden_size": 64}}, "model.override")
    assert made.text_config.hidden_size == 64
    assert made.text_config.num_hidden_layers == gemma.text_config.num_hidden_layers
    with pytest.raises(ConfigError, match="a gemma3_text config has no key") as caught:
        overridden(gemma, {"text_config": {"hiden_size": 64}}, "model.override")
    assert caught.value.key == "model.override.text_config.hiden_size"


def test_trainer_export_and_engines_have_it(
    folder: Path,
    mesh: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The logits beyond the old positions are those of transformers with the same config."""
    source = ModelSource(path=str(folder), override={"rope_parameters": YARN})
    model = build_model(source, torch.float32, kernels="transformers")
    assert model.config.rope_parameters == STRETCHED
    make_engine(ModelSpec(source, FrozenEngineConfig()), mesh=mesh).export(str(tmp_path / "export"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert theirs.config.rope_parameters == STRETCHED
    old = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rotary = [one.model.rotary_emb.inv_freq for one in (model, theirs, old)]
    assert torch.equal(rotary[0], rotary[1])
    assert not torch.allclose(rotary[0], rotary[2])
    spec = EngineSpec("vllm", source, "float32", "cpu", 128, 1, 1, folder=str(tmp_path))
    said = json.loads((model_folder(spec) / "config.json").read_text())
    assert said["rope_parameters"] == STRETCHED


def test_a_config_that_is_no_mapping_names_its_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(DataError, match=f"{tmp_path}/config.json must hold a JSON object"):
        load_model_config(ModelSource(path=str(tmp_path)))
