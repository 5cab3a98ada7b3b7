"""Combinations that cannot work: each message names the keys, their values and where they were set."""

from __future__ import annotations

from pathlib import Path

import pytest

from rondo.config import load
from rondo.errors import ConfigError

MODEL, LENGTH = "model.path=model", "trainer.total_steps=10"
SCORER = "reward.functions=[gsm8k]"


def message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load([], overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("data.batch_size=0", "data.batch_size must be at least 1, got 0"),
        ("data.max_prompt_tokens=0", "data.max_prompt_tokens must be at least 1, got 0"),
        ("actor.optimizer.lr=0", "actor.optimizer.lr must be above 0, got 0.0"),
        ("critic.optimizer.lr=-1e-3", "critic.optimizer.lr must be above 0, got -0.001"),
        ("actor.optimizer.eps=0", "actor.optimizer.eps must be above 0, got 0.0"),
        (
            "actor.optimizer.grad_clip=0",
            "actor.optimizer.grad_clip must be above 0 (null: no clipping), got 0.0",
        ),
        ("actor.optimizer.weight_decay=-1", "actor.optimizer.weight_decay must be at least 0, got -1.0"),
        (
            "actor.optimizer.schedule.warmup_steps=-1",
            "actor.optimizer.schedule.warmup_steps must be at least 0, got -1",
        ),
        ("actor.epochs=0", "actor.epochs must be at least 1, got 0"),
        ("actor.token_budget=0", "actor.token_budget must be at least 1, got 0"),
        ("teacher.logits_chunk=0", "teacher.logits_chunk must be at least 1, got 0"),
        (
            "reward.models=[{path: x, token_budget: 0}]",
            "reward.models.0.token_budget must be at least 1, got 0",
        ),
        (
            "reward.models=[{path: x, name: critic}]",
            "reward.models.0.name must be another name than those of roles (actor, critic, cost_critic, "
            "reference, prm, teacher, rollout), got critic",
        ),
        (
            "data.pretrain_batch_size=4",
            "data.pretrain_batch_size = 4 (argument 'data.pretrain_batch_size=4') is for data.pretrain, "
            "which is empty; remove it",
        ),
        ("rollout.n=0", "rollout.n must be at least 1, got 0"),
        ("rollout.top_p=0", "rollout.top_p must be above 0 and at most 1, got 0.0"),
        ("rollout.top_p=1.5", "rollout.top_p must be above 0 and at most 1, got 1.5"),
        ("rollout.min_p=1", "rollout.min_p must be at least 0 and below 1, got 1.0"),
        ("rollout.top_k=-1", "rollout.top_k must be at least 0, got -1"),
        (
            "rollout.temperature=0",
            "rollout.temperature must be above 0 (training samples; for greedy answers in evaluation see "
            "trainer.evaluation.greedy), got 0.0",
        ),
        (
            "rollout.engine_options={swap_space: 4}",
            "rollout.engine_options are for other engines; the native one is governed by the keys of rollout "
            "itself. Remove them",
        ),
        ("rollout.replicas=0", "rollout.replicas must be at least 1, got 0"),
        ("rollout.bucket_bytes=4095", "rollout.bucket_bytes must be at least 4096, got 4095"),
        (
            "rollout.tensor_parallel=2",
            "rollout.tensor_parallel = 2 (argument 'rollout.tensor_parallel=2'), but the native engine runs "
            "on one device; use rollout.engine=vllm or sglang, or tensor_parallel=1",
        ),
        (
            "rollout.replicas=2",
            "rollout.replicas = 2 (argument 'rollout.replicas=2') needs a process for each: set "
            "rollout.process=own",
        ),
        ("reward.max_dropped_share=2", "reward.max_dropped_share must be between 0 and 1, got 2.0"),
        ("trainer.total_steps=0", "trainer.total_steps must be at least 1, got 0"),
        ("trainer.max_staleness=-1", "trainer.max_staleness must be at least 0, got -1"),
        (
            "trainer.on_update=resume",
            "trainer.on_update = resume (argument 'trainer.on_update=resume') has no meaning with "
            "trainer.max_staleness = 0 (default): nothing is in flight when weights arrive; set "
            "trainer.max_staleness, or remove it",
        ),
        (
            "trainer.max_aborts=3",
            "trainer.max_aborts = 3 (argument 'trainer.max_aborts=3') is for trainer.on_update=abort; remove "
            "it",
        ),
        (
            "trainer.order=completion",
            "trainer.order = completion (argument 'trainer.order=completion') has no meaning with "
            "trainer.max_staleness = 0 (default): every step trains on all that was started; set "
            "trainer.max_staleness, or remove it",
        ),
        ("cluster.pools={a: 0}", "cluster.pools.a is a number of devices, got 0"),
        (
            "cluster.pools={a: 1, b: 1}",
            "cluster.pools have 2 devices together, and cluster.devices = 1 (default); make them equal",
        ),
        (
            "cluster.placement={rollout: gpu}",
            "cluster.placement.rollout=gpu: there is no such pool (none is named in cluster.pools)",
        ),
        ("trainer.evaluation.every=0", "trainer.evaluation.every must be at least 1, got 0"),
        ("checkpoint.every=0", "checkpoint.every must be at least 1, got 0"),
        ("checkpoint.keep=0", "checkpoint.keep must be at least 1, got 0"),
        ("tracking.trackers=[wandb, wandb]", "tracking.trackers lists wandb twice; keep one"),
        (
            "cluster.devices=2",
            "cluster.devices = 2 needs one process per device, and cluster.backend = local (default) has "
            "one process; "
            "use cluster.backend=ray",
        ),
        (
            "actor.optimizer.schedule.min_ratio=0.1",
            "actor.optimizer.schedule.min_ratio has no meaning for the constant schedule; choose linear, "
            "cosine or wsd, "
            "or remove it",
        ),
        (
            "actor.optimizer.schedule={name: linear, decay_steps: 5}",
            "actor.optimizer.schedule.decay_steps is for schedule wsd only, not for linear",
        ),
        (
            "algorithm.kl={name: k3, where: loss, coef: 0}",
            "algorithm.kl.coef must be above 0 (no KL is algorithm.kl: null), got 0.0",
        ),
        (
            "algorithm.kl={name: k3, where: loss, coef: 1, target: 6}",
            "algorithm.kl.target is for the adaptive controller; set algorithm.kl.controller: adaptive, or "
            "remove it",
        ),
        ("data.train=[{type: jsonl}]", "data.train.0 is of type jsonl and needs the key 'path'"),
        (
            "data.train=[{type: function, path: x}]",
            "data.train.0 is of type function and needs the key 'task'",
        ),
        (
            "data.eval=[{type: jsonl, path: x, task: y}]",
            "data.eval.0.task has no meaning for a source of type jsonl; remove it",
        ),
        (
            "data.train=[{type: jsonl, path: x, weight: 0}]",
            "data.train.0.weight must be above 0 (leave a source out to switch it off), got 0.0",
        ),
        ("data.train=[{type: jsonl, path: x, size: 0}]", "data.train.0.size must be at least 1, got 0"),
        (
            "data.train=[{type: parquet, path: x, seed: 3}]",
            "data.train.0.seed has no meaning for a source of type parquet; remove it",
        ),
    ],
)
def test_one_key(argument: str, expected: str) -> None:
    assert message(MODEL, LENGTH, argument) == f"argument '{argument}': {expected}"


def test_mini_batches_divide_the_batch(in_tmp_path: Path) -> None:
    (in_tmp_path / "r.yaml").write_text("data:\n  batch_size: 12\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(["r.yaml"], [MODEL, LENGTH, "actor.mini_batch_size=8"])
    assert str(caught.value) == (
        "argument 'actor.mini_batch_size=8': actor.mini_batch_size = 8 does not divide data.batch_size = "
        "12 (r.yaml:2); "
        "both count prompt groups. Choose one of 1, 2, 3, 4, 6, 12"
    )
    assert load(["r.yaml"], [MODEL, LENGTH, "actor.mini_batch_size=4"]).config.actor.mini_batch_size == 4


def test_one_place_for_the_model() -> None:
    assert message(LENGTH).startswith("nothing says where the model comes from: set model.path")
    assert message(LENGTH, MODEL, "trainer.warm_start=sft.yaml") == (
        "argument 'trainer.warm_start=sft.yaml': model.path = model (argument 'model.path=model') and "
        "trainer.warm_start = sft.yaml (argument 'trainer.warm_start=sft.yaml') both say where the model "
        "comes from; "
        "keep one, set the other to null"
    )
    assert message(LENGTH, "model.config={hidden_size: 4}") == (
        "argument 'model.config={hidden_size: 4}': model.config lacks model_type (qwen3, llama, …), which "
        "chooses the "
        "model"
    )
    assert "set model.tokenizer" in message(LENGTH, "model.config={model_type: qwen3}")


def test_one_length() -> None:
    assert message(MODEL) == "nothing says how long to train: set trainer.total_steps or trainer.epochs"
    assert message(MODEL, LENGTH, "trainer.epochs=2") == (
        "argument 'trainer.epochs=2': trainer.epochs = 2.0 (argument 'trainer.epochs=2') and "
        "trainer.total_steps = 10 "
        "(argument 'trainer.total_steps=10') both say how long to train; keep one, set the other to null"
    )


def test_pretraining_rows_are_at_temperature_one() -> None:
    rows = ("data.pretrain=[{type: jsonl, path: x}]", "algorithm.pretrain_coef=0.1")
    assert load([], [MODEL, LENGTH, *rows]).config.algorithm.pretrain_coef == 0.1
    assert message(MODEL, LENGTH, *rows, "rollout.temperature=0.8").startswith(
        "argument 'algorithm.pretrain_coef=0.1': algorithm.pretrain_coef = 0.1 (argument "
        "'algorithm.pretrain_coef=0.1') and rollout.temperature = 0.8"
    )


def test_frozen_engines_have_nothing_of_training() -> None:
    assert load([], [MODEL, LENGTH, "critic.gradient_checkpointing=true"])
    for key in ("reference.gradient_checkpointing", "teacher.offload_optimizer"):
        assert f"unknown key '{key}'" in message(MODEL, LENGTH, f"{key}=true")


def test_backends() -> None:
    assert load([], [MODEL, LENGTH, "cluster.backend=ray", "cluster.devices=4"]).config.cluster.devices == 4
    assert "cluster.inline runs workers in this process" in message(
        MODEL, LENGTH, "cluster.backend=ray", "cluster.inline=true"
    )
    assert "use cluster.backend=ray, or remove it" in message(MODEL, LENGTH, "cluster.ray_address=auto")


def test_staleness_and_what_goes_with_it() -> None:
    stale = (MODEL, LENGTH, "trainer.max_staleness=2")
    assert load([], [*stale]).config.trainer.on_update is None
    for more in ("trainer.on_update=finish", "trainer.on_update=resume", "trainer.order=completion"):
        assert load([], [*stale, more]).config.trainer.max_staleness == 2
    abort = load([], [*stale, "trainer.on_update=abort", "trainer.max_aborts=0"])
    assert (abort.config.trainer.on_update, abort.config.trainer.max_aborts) == ("abort", 0)
    assert "must be at least 0, got -1" in message(*stale, "trainer.on_update=abort", "trainer.max_aborts=-1")
    assert "they go on then; use max_staleness=0, or sleep=false" in message(*stale, "rollout.sleep=true")


def test_engines_in_processes_of_their_own() -> None:
    vllm = (MODEL, LENGTH, "rollout.engine=vllm")
    config = load([], [*vllm, "rollout.replicas=2", "rollout.engine_options={swap_space: 4}"]).config
    assert (config.rollout.engine, config.rollout.engine_options["swap_space"]) == ("vllm", 4)
    assert "runs in a process of its own" in message(*vllm, "rollout.process=host")
    assert "rollout.decode = lean" in message(*vllm, "rollout.decode=lean")
    assert load([], [MODEL, LENGTH, "rollout.replicas=2", "rollout.process=own"]).config.rollout.replicas == 2


def test_pools() -> None:
    ray = (MODEL, LENGTH, "cluster.backend=ray", "cluster.devices=3", "cluster.pools={train: 2, rollout: 1}")
    placed = load([], [*ray, "cluster.placement={rollout: rollout}"]).config.cluster
    assert placed.placement == {"rollout": "rollout"}
    assert "there is no role 'sampler'; the roles are actor" in message(
        *ray, "cluster.placement={sampler: rollout}"
    )
    assert "there is no such pool (train, rollout)" in message(*ray, "cluster.placement={rollout: other}")


def test_estimators_without_groups_take_one_sample() -> None:
    assert load([], [MODEL, LENGTH, "rollout.n=1", "algorithm.advantage=gae"]).config.rollout.n == 1
