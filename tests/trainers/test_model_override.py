"""model.override in runs: trainer, sampler and export have the same config, which a resumed run shares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, Qwen3Config

from rondo.config import load
from rondo.core.errors import ConfigError
from rondo.recipes.quickstart import tokenizer
from rondo.trainers.commands.check import check_rl
from rondo.trainers.program import source_of
from tests.messages import full_text
from tests.trainers.conftest import MODEL, RECIPE, inline

YARN = "model.override.rope_parameters={rope_type: yarn, factor: 4.0}"
PPO = ("algorithm.advantage=gae", "rollout.n=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe whose model has 64 positions, for 72 tokens."""
    path = tmp_path_factory.mktemp("override")
    fields = {name: value for name, value in MODEL.items() if name != "model_type"}
    torch.manual_seed(0)
    config = Qwen3Config(**{**fields, "max_position_embeddings": 64}, vocab_size=len(tokenizer()))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path / "model")
    tokenizer().save_pretrained(path / "model")
    recipe = {**RECIPE, "model": {"path": str(path / "model")}, "trainer": {"total_steps": 2}}
    (path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    return path


@pytest.mark.slow
def test_a_run_beyond_the_old_positions(folder: Path) -> None:
    recipe, run = str(folder / "tiny.yaml"), folder / "run"
    where = (f"trainer.run_dir={run}", "checkpoint.every=1", "data.eval=[]")
    done = inline("train", recipe, *where, check=False)
    assert done.returncode == 2
    assert "is 72 tokens, but model.path's model has positions for 64 tokens only" in done.stderr
    assert not run.exists()
    inline("train", recipe, *where, YARN)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(line["rollout/log_prob_gap_max"] < 1e-5 for line in lines)
    said = json.loads((run / "export" / "config.json").read_text())["rope_parameters"]
    assert (said["rope_type"], said["factor"], said["original_max_position_embeddings"]) == ("yarn", 4.0, 64)
    other = YARN.replace("4.0", "8.0")
    done = inline("train", recipe, *where, other, "trainer.total_steps=3", check=False)
    assert "model.override.rope_parameters.factor: 4.0 in the checkpoint, 8.0 now" in done.stderr


def test_a_wrong_key_is_named_where_it_was_set(folder: Path) -> None:
    recipe = str(folder / "tiny.yaml")
    wrong = "model.override.atention_dropout=0.0"
    with pytest.raises(
        ConfigError, match=rf"^argument '{wrong}': model.override.* did you mean 'attention_dro"
    ):
        check_rl(load([recipe], [wrong, "data.max_prompt_tokens=32"]))
    done = inline("serve", str(folder / "model"), wrong, check=False)
    assert f"argument '{wrong}': model.override.atention_dropout" in done.stderr


def test_other_models_have_their_own(folder: Path) -> None:
    """critic.path is another model than model.path, also where both are the same folder."""
    recipe, own = str(folder / "tiny.yaml"), f"critic.path={folder / 'model'}"
    with pytest.raises(ConfigError, match=full_text("is 72 tokens, but critic.path's model")):
        check_rl(load([recipe], [*PPO, own, YARN]))
    theirs = YARN.replace("model.", "critic.")
    loaded = load([recipe], [*PPO, own, YARN, theirs.replace("4.0", "2.0")])
    check_rl(loaded)
    factors = [
        source_of(role, loaded.config).override["rope_parameters"]["factor"] for role in ("actor", "critic")
    ]
    assert factors == [4.0, 2.0]
    assert source_of("reference", loaded.config).override == loaded.config.model.override
    with pytest.raises(ConfigError, match=full_text("initial one, for which")):
        load([recipe], [*PPO, YARN, theirs])


def test_a_new_model_has_its_values_in_its_config(folder: Path) -> None:
    new = ["model.path=null", f"model.config={MODEL}", "model.tokenizer=t", YARN]
    with pytest.raises(ConfigError, match=full_text("model.override is for the config.json")):
        load([str(folder / "tiny.yaml")], new)
