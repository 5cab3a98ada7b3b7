"""A run from a launch script of verl, whose model is an FSDP checkpoint of verl, by the command."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rondo.cli.main import main
from tests.models.test_shards import checkpoint
from tests.rondo_verl.launched import script
from tests.sandboxes import need_sandbox

RUN = """\
#!/bin/bash
set -eu
MODEL=$PWD/global_step_4/actor
SIZES=(data.train_batch_size=4 actor_rollout_ref.actor.ppo_mini_batch_size=2)
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "${SIZES[@]}" \\
    data.train_files=$PWD/train.parquet \\
    data.max_prompt_length=16 data.max_response_length=8 \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.n=2 \\
    trainer.val_before_train=False \\
    trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.total_training_steps=2 "$@" 2>&1 | tee log
"""
MINE = ["reward.functions=[{name: exact_match}]", "cluster.device=cpu", "model.chat_template=template.jinja"]


@pytest.mark.slow
def test_a_script_and_its_recipe_train_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need_sandbox()
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path)
    rows = {"prompt": [[{"role": "user", "content": "a b"}]] * 8, "answer": ["b"] * 8}
    pq.write_table(pa.table(rows), "train.parquet")
    Path("template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    script(tmp_path, RUN)
    assert main(["train", "--verl", "run.sh", *MINE, "trainer.run_dir=one"]) == 0
    capsys.readouterr()
    assert main(["config", "translate", "run.sh", *MINE, "trainer.run_dir=other"]) == 0
    Path("recipe.yaml").write_text(capsys.readouterr().out)
    assert main(["train", "recipe.yaml"]) == 0

    def learnt(run: str) -> list[tuple[float, float, float]]:
        lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
        names = ("reward/mean", "actor/loss", "actor/grad_norm")
        return [tuple(line[name] for name in names) for line in lines if "actor/loss" in line]  # type: ignore[misc]

    assert len(learnt("one")) == 2
    assert learnt("one") == learnt("other")
