"""A model folder's list of tokens that end an answer ends rollouts, and goes along into the export."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import GenerationConfig

from tests.trainers.conftest import RECIPE, inline

ENDS = [2, *range(17, 100)]
SAID = {"eos_token_id": ENDS, "temperature": 0.6, "top_p": 0.95, "do_sample": True}


@pytest.mark.slow
def test_the_list_of_a_model_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    few = ("trainer.total_steps=1", "data.eval=[]", "trainer.evaluation.every=null")
    inline("train", str(recipe), f"trainer.run_dir={tmp_path / 'first'}", *few)
    model = tmp_path / "model"
    shutil.copytree(tmp_path / "first" / "export", model)
    (model / "manifest.json").unlink()
    (model / "generation_config.json").write_text(json.dumps(SAID))
    (model / "LICENSE").write_text("free")
    (model / "README.md").write_text("of the base")

    of_folder = (f"model.path={model}", "model.config=null", "model.tokenizer=null")
    caplog.set_level(logging.INFO)
    said = inline(
        "train",
        str(recipe),
        *of_folder,
        f"trainer.run_dir={tmp_path / 'run'}",
        "tracking.console=plain",
        *few,
    )
    export = tmp_path / "run" / "export"
    assert GenerationConfig.from_pretrained(export).eos_token_id == ENDS
    carried = {
        name: (export / name).read_text() for name in ("generation_config.json", "LICENSE", "README.base.md")
    }
    assert carried == {
        "generation_config.json": json.dumps(SAID),
        "LICENSE": "free",
        "README.base.md": "of the base",
    }
    assert f"the export has files of {model}: LICENSE, README.base.md, generation_config.json" in caplog.text
    assert (
        f"generation_config.json of {model}: temperature=0.6, top_p=0.95, do_sample=True"
        in said.stdout + said.stderr
    )

    table = pq.read_table(tmp_path / "run" / "rollouts" / "step-000001.parquet")
    rows = table.select(["response_ids", "finish_reason"]).to_pylist()
    ended = [row["response_ids"] for row in rows if row["finish_reason"] == "stop"]
    assert len(ended) >= 4  # of 16: each token has a chance of a fifth, and there are 8
    assert all(ids[-1] in ENDS and not set(ids[:-1]) & set(ENDS) for ids in ended)
    assert not any(set(row["response_ids"]) & set(ENDS) for row in rows if row["finish_reason"] == "length")


@pytest.mark.slow
def test_the_export_has_the_dtype_of_the_models_folder(tmp_path: Path) -> None:
    """It is said that the trained weights are rounded; a key, or an option of rondo export, keeps them."""
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    few = ("trainer.total_steps=1", "data.eval=[]", "trainer.evaluation.every=null", "checkpoint.every=1")
    said = "the exported weights are bfloat16 (as those of model.path), rounded from the float32 that was"

    def run(name: str, *overrides: str) -> tuple[dict[str, torch.Tensor], str]:
        folder, plain = tmp_path / name, "tracking.console=plain"
        told = inline("train", str(recipe), f"trainer.run_dir={folder}", plain, *few, *overrides)
        return load_file(folder / "export" / "model.safetensors"), told.stdout + told.stderr

    scratch, told = run("scratch")
    assert {one.dtype for one in scratch.values()} == {torch.float32}
    assert "the exported weights are" not in told
    refused = inline(
        "export", str(tmp_path / "scratch"), str(tmp_path / "bf16"), "--dtype", "bf16", check=False
    )
    assert refused.returncode == 2
    assert "dtype 'bf16': choose float32, bfloat16, float16, float64" in refused.stderr
    inline("export", str(tmp_path / "scratch"), str(tmp_path / "bf16"), "--dtype", "bfloat16")
    narrow = load_file(tmp_path / "bf16" / "model.safetensors")
    assert narrow.keys() == scratch.keys()
    assert all(torch.equal(narrow[name], one.bfloat16()) for name, one in scratch.items())

    of_folder = (f"model.path={tmp_path / 'bf16'}", "model.config=null", "model.tokenizer=null")
    rounded, told = run("rounded", *of_folder)
    assert f"{said} trained; checkpoint.export_dtype=float32 keeps them whole" in told
    again = inline("export", str(tmp_path / "rounded"), str(tmp_path / "again"))
    assert f"note: {said} trained" in again.stderr
    whole, told = run("whole", *of_folder, "checkpoint.export_dtype=float32")
    assert "the exported weights are" not in told
    assert {one.dtype for one in whole.values()} == {torch.float32}
    assert any(not torch.equal(one, one.bfloat16().float()) for one in whole.values())
    assert all(torch.equal(rounded[name], one.bfloat16()) for name, one in whole.items())
