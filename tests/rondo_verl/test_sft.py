"""verl's supervised training: its two programs' keys in rondo's words, and a run of each spelling."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rondo.cli.main import main
from rondo.config import Config
from rondo.config.load import load
from rondo.config.schema import FunctionConfig
from rondo.core.errors import ConfigError
from rondo_verl import launch
from tests.models.test_shards import checkpoint
from tests.rondo_verl.launched import refused, script
from tests.sandboxes import need_sandbox

MAIN, OLDER = "verl.trainer.sft_trainer", "verl.trainer.fsdp_sft_trainer"
ROWS = ["data.train_files=a.parquet", "trainer.default_local_dir=runs/one"]
ENGINE = [*ROWS, "model.path=m", "engine=fsdp"]
SINGLE = [*ROWS, "model.partial_pretrain=m", "data.prompt_key=extra_info", "data.response_key=extra_info"]
DICTS = ["data.prompt_dict_keys=[question]", "+data.response_dict_keys=[answer]"]


def config(program: str, *written: str) -> Config:
    loaded = load([program], written)
    assert loaded.command == "sft"
    return loaded.config


def test_the_trainer_of_engines() -> None:
    optim = ["optim.lr_scheduler_type=cosine", "optim.lr_warmup_steps_ratio=0.2", "optim.min_lr_ratio=0.1"]
    c = config(MAIN, *ENGINE, *optim, "data.val_files=b.parquet", "trainer.test_freq=after_each_epoch")
    assert (c.data.batch_size, c.data.max_tokens, c.data.max_prompt_tokens) == (256, 1024, 1024)
    assert (c.data.turns, c.data.drop_last, c.data.overlong_prompts) == ("template", True, "error")
    assert [(one.messages_key, one.response_key) for one in c.data.train] == [("messages", "response")]
    schedule = c.actor.optimizer.schedule
    assert (schedule.name, schedule.warmup_ratio, schedule.warmup_steps) == ("cosine", 0.2, 0)
    assert (c.actor.optimizer.lr, c.actor.optimizer.betas) == (1e-3, (0.9, 0.999))
    assert (c.actor.token_budget, c.actor.param_dtype, c.actor.compute_dtype) == (8192, "float32", "bfloat16")
    assert (c.trainer.epochs, c.trainer.total_steps, c.trainer.evaluation.each_epoch) == (4.0, None, True)
    assert c.algorithm.aggregation == FunctionConfig("token-mean")


def test_the_older_trainer_takes_means_of_micro_batches() -> None:
    c = config(OLDER, *SINGLE, *DICTS, "data.micro_batch_size_per_gpu=8", "optim.lr_scheduler=cosine")
    assert c.algorithm.aggregation == FunctionConfig("chunk-mean-token-mean", {"rows": 8})
    assert (c.data.train[0].prompt_key, c.data.train[0].response_key) == (
        "extra_info.question",
        "extra_info.answer",
    )
    assert (c.data.turns, c.actor.token_budget) == ("eos", 8 * 1024)
    assert (c.model.path, c.actor.optimizer.lr, c.actor.optimizer.betas) == ("m", 1e-5, (0.9, 0.95))
    assert (c.actor.optimizer.schedule.name, c.actor.optimizer.schedule.warmup_ratio) == ("cosine", 0.1)
    notes = load([OLDER], [*SINGLE, *DICTS]).notes
    assert any("learns the last token of the prompt" in note for note in notes)
    several = ["data.multiturn.enable=true", "data.multiturn.messages_key=prompt"]
    c = config(OLDER, *SINGLE, *several)
    assert (c.data.turns, c.data.train[0].messages_key) == ("template", "prompt")


def test_keys_that_mean_something_of_their_own() -> None:
    assert config(MAIN, *ENGINE, "data.ignore_input_ids_mismatch=True").data.turns == "messages"
    fixed = config(MAIN, *ENGINE, "data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=2")
    assert fixed.actor.token_budget == 2048
    assert config(MAIN, *ENGINE, "data.truncation=left").data.overlong_prompts == "truncate_right"
    older = config(MAIN, *ENGINE, "verl.version=0.6.1")  # which cuts what is not padded
    assert older.data.overlong_prompts == "truncate_right"
    assert config(MAIN, *ENGINE, "data.train_max_samples=9").data.train[0].size == 9
    several = config(MAIN, *ENGINE, "data.train_files=[a.parquet, b.parquet]").data.train
    assert [one.weight for one in several] == [None, None]
    lora = config(OLDER, *SINGLE, "model.lora_rank=32").actor.lora
    assert lora is not None
    assert (lora.rank, lora.alpha) == (32, 16)
    axes = config(MAIN, *ENGINE, "engine.ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=4")
    assert (axes.actor.parallel.context, axes.cluster.devices) == (2, 4)


def test_a_share_of_the_run_is_a_share_of_its_steps() -> None:
    share = "optim.lr_warmup_steps_ratio=0.2"
    schedule = config(MAIN, *ENGINE, share, "trainer.total_training_steps=9").actor.optimizer.schedule
    assert (schedule.warmup_steps, schedule.warmup_ratio) == (1, 0.0)


@pytest.mark.parametrize(
    ("program", "written", "key", "words"),
    [
        (MAIN, "engine=megatron", "engine@engine", "trains with FSDP2"),
        (MAIN, "engine.tensor_parallel=2", "engine.tensor_parallel", "does not translate it"),
        (MAIN, "engine.strategy=megatron", "engine.strategy", "trains with FSDP2"),
        (MAIN, "optim.optimizer=SGD", "optim.optimizer", "trains with AdamW"),
        (MAIN, "optim.lr_scheduler_type=wsd", "optim.lr_scheduler_type", "use one of constant, cosine"),
        (MAIN, "data.tools_key=mine", "data.tools_key", "name the column tools"),
        (
            MAIN,
            "data.enable_thinking_default=false",
            "data.enable_thinking_default",
            "apply_chat_template_kwargs",
        ),
        (MAIN, "trainer.save_freq=after_each_epoch", "trainer.save_freq", "give a whole number"),
        (MAIN, "trainer.test_freq=often", "trainer.test_freq", "after_each_epoch"),
        (OLDER, "data.truncation=left", "data.truncation", "cuts the end"),
        (OLDER, "data.balance_dp_token=True", "data.balance_dp_token", "chunk-mean-token-mean"),
        (OLDER, "trainer.total_training_steps=1", "trainer.total_training_steps", "set trainer.total_epochs"),
    ],
)
def test_what_has_no_counterpart_is_refused(program: str, written: str, key: str, words: str) -> None:
    given = ENGINE if program == MAIN else SINGLE
    with pytest.raises(ConfigError) as caught:
        load([program], [*given, written])
    assert [problem.key for problem in caught.value.problems] == [key]
    assert words in str(caught.value)
    assert "actor_rollout_ref" not in str(caught.value)


def test_the_command_of_a_program_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", MAIN, *ENGINE]) == 2
    assert "`rondo sft` stands for, and not `rondo train`" in capsys.readouterr().err
    assert (
        main(
            ["sft", "verl.trainer.main_ppo", "actor_rollout_ref.model.path=m", "algorithm.adv_estimator=grpo"]
        )
        == 2
    )
    assert "`rondo train` stands for, and not `rondo sft`" in capsys.readouterr().err


def test_a_config_as_hydra_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "data: {train_files: a.parquet, train_batch_size: 256, max_length: 99}\n"
    Path("config.yaml").write_text(
        text + "optim: {lr: 0.001}\nmodel: {path: m, lora_rank: 0}\nengine: {fsdp_size: -1}\n"
    )
    loaded = launch.load("config.yaml")
    assert (loaded.command, loaded.config.data.max_tokens) == ("sft", 99)
    assert loaded.origins["data.max_tokens"].where.startswith("config.yaml:1")
    Path("config.yaml").write_text("data: {train_files: a.parquet}\n")
    assert "it has neither actor_rollout_ref nor optim" in refused("config.yaml")


RUN = """\
#!/bin/bash
set -eu
torchrun --standalone --nnodes=1 --nproc_per_node=1 -m verl.trainer.fsdp_sft_trainer \\
    data.train_files=$PWD/train.parquet data.val_files=$PWD/train.parquet \\
    data.prompt_key=extra_info data.prompt_dict_keys=['question'] \\
    data.response_key=extra_info data.response_dict_keys=['answer'] \\
    data.train_batch_size=4 data.micro_batch_size_per_gpu=2 data.max_length=16 \\
    model.partial_pretrain=$PWD/global_step_4/actor optim.lr=1e-3 trainer.total_epochs=2 \\
    trainer.test_freq=after_each_epoch "$@"
"""
MINE = ["cluster.device=cpu", "model.chat_template=template.jinja", "trainer.run_dir=theirs"]
OURS = """\
model: {path: global_step_4/actor, chat_template: template.jinja}
data:
  train: &rows
  - {type: parquet, path: train.parquet, prompt_key: extra_info.question, response_key: extra_info.answer}
  eval: *rows
  batch_size: 4
  max_tokens: 16
  max_prompt_tokens: 16
  overlong_prompts: error
  turns: eos
  drop_last: true
actor:
  token_budget: 32
  gradient_checkpointing: true
  compute_dtype: bfloat16
  optimizer:
    {lr: 1e-3, betas: [0.9, 0.95], weight_decay: 0.01, schedule: {name: cosine, warmup_ratio: 0.1}}
algorithm: {aggregation: {name: chunk-mean-token-mean, rows: 2}}
trainer: {epochs: 2, run_dir: ours, evaluation: {each_epoch: true}}
cluster: {device: cpu}
"""


@pytest.mark.slow
def test_a_script_trains_as_the_recipe_in_ones_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need_sandbox()
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path)
    rows = [{"question": "a b"[: 1 + 2 * (i % 2)], "answer": "b a b"[: 1 + 2 * (i % 3)]} for i in range(10)]
    pq.write_table(pa.table({"extra_info": rows}), "train.parquet")
    Path("template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    path = script(tmp_path, RUN)
    assert main(["sft", "--verl", path, *MINE]) == 0
    Path("ours.yaml").write_text(OURS)
    assert main(["sft", "ours.yaml"]) == 0

    def learnt(run: str) -> list[list[float]]:
        lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
        names = ("sft/loss", "actor/grad_norm", "actor/lr")
        return [[line[name] for name in names] for line in lines if "sft/loss" in line]

    assert len(learnt("theirs")) == 4  # 2 batches of 4 of 10 rows, twice
    assert learnt("theirs") == learnt("ours")
    lines = [json.loads(line) for line in Path("ours/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval/sft/loss" in line] == [2, 4]
    capsys.readouterr()
    assert main(["config", "translate", path, *MINE]) == 0
    Path("recipe.yaml").write_text(capsys.readouterr().out)
    assert load(["recipe.yaml"]).config == launch.load(path, MINE).config
    assert main(["check", "--verl", path, *MINE, "trainer.run_dir=new"]) == 0
    assert "rondo sft takes this recipe" in capsys.readouterr().out
    assert main(["train", "--verl", path, *MINE]) == 2
    assert "`rondo sft` stands for" in capsys.readouterr().err
