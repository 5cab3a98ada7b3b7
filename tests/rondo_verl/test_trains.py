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
from tests.rondo_verl.test_multi_turn import write_own
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


TURNS = """\
#!/bin/bash
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=4 \\
    data.train_files=$PWD/train.parquet data.max_prompt_length=400 data.max_response_length=64 \\
    data.return_raw_chat=True actor_rollout_ref.actor.ppo_mini_batch_size=4 \\
    actor_rollout_ref.model.path=$PWD/global_step_4/actor \\
    actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.mode=async actor_rollout_ref.rollout.n=2 \\
    actor_rollout_ref.rollout.multi_turn.enable=True \\
    actor_rollout_ref.rollout.multi_turn.max_user_turns=2 \\
    actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml \\
    actor_rollout_ref.rollout.multi_turn.interaction_config_path=riddles.yaml \\
    custom_reward_function.path=scores.py \\
    trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.total_training_steps=1
"""
SCORES = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    turns, said = extra_info["num_turns"], len(extra_info["turn_scores"])
    return {"score": len(solution_str) % 3, "turns": turns, "said": said}
"""
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.slow
def test_a_script_with_tools_and_an_interaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model writes no calls, so that each answer is replied to."""
    need_sandbox()
    write_own(tmp_path, monkeypatch)
    checkpoint(tmp_path)
    about = {"interaction_kwargs": {"name": "riddle", "ground_truth": "never said"}}
    rows = {
        "prompt": [[{"role": "user", "content": "a b"}]] * 4,
        "data_source": ["own"] * 4,
        "reward_model": [{"style": "rule", "ground_truth": "b"}] * 4,
        "agent_name": ["tool_agent"] * 4,
        "extra_info": [about] * 4,
    }
    pq.write_table(pa.table(rows), "train.parquet")
    Path("template.jinja").write_text(TEMPLATE)
    Path("scores.py").write_text(SCORES)
    script(tmp_path, TURNS)
    mine = ["cluster.device=cpu", "model.chat_template=template.jinja", "trainer.run_dir=run"]
    assert main(["train", "--verl", "run.sh", *mine]) == 0
    lines = [json.loads(line) for line in Path("run", "metrics.jsonl").read_text().splitlines()]
    (step,) = [line for line in lines if "actor/loss" in line]
    assert 1 < step["agent/calls"] <= 3
    (file,) = Path("run", "rollouts").glob("step-??????.parquet")
    rows = pq.read_table(file)
    assert max(rows.column("step_index").to_pylist()) == 2  # a context for each answer, as the template wants
    assert "[context]" in "".join(rows.column("transcript").to_pylist())
