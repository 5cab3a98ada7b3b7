"""A model folder's list of tokens that end an answer ends rollouts, and goes along into the export."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from transformers import GenerationConfig

from tests.trainers.conftest import RECIPE, inline

ENDS = [2, *range(17, 100)]
SAID = {"eos_token_id": ENDS, "temperature": 0.6, "top_p": 0.95, "do_sample": True}


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
