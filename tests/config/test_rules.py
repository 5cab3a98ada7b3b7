"""Combinations that work; those that cannot are in test_messages.py."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rondo.config import load
from rondo.config.schema import (
    AbortConfig,
    AlgorithmConfig,
    ClusterConfig,
    FunctionConfig,
    KeepConfig,
    NativeEngineConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
    SglangEngineConfig,
    TrackingConfig,
    TrainerConfig,
    TransformersEngineConfig,
    VllmEngineConfig,
)
from rondo.core.errors import ConfigError
from tests.messages import full_text

MODEL, LENGTH = "model.path=model", "trainer.total_steps=10"


def test_mini_batches_divide_the_batch(in_tmp_path: Path) -> None:
    (in_tmp_path / "r.yaml").write_text("data:\n  batch_size: 12\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"data.batch_size = 12 \(r.yaml:2\)"):
        load(["r.yaml"], [MODEL, LENGTH, "actor.mini_batch_size=8"])
    assert load(["r.yaml"], [MODEL, LENGTH, "actor.mini_batch_size=4"]).config.actor.mini_batch_size == 4


def test_pretraining_rows_are_at_temperature_one() -> None:
    rows = ("data.pretrain=[{type: jsonl, path: x}]", "algorithm.pretrain_coef=0.1")
    assert load([], [MODEL, LENGTH, *rows]).config.algorithm.pretrain_coef == 0.1


def test_a_recipes_evaluation_is_switched_off_as_the_errors_say() -> None:
    """Nothing held out, and null for every: both ways to that say it."""
    with pytest.raises(ConfigError, match="or evaluate nothing"):
        load(["quickstart"], ["data.eval=[]"])
    for wrong in ("trainer.evaluation=null", "trainer.evaluation.every=0"):
        with pytest.raises(ConfigError, match=r"null"):
            load(["quickstart"], [wrong])
    with pytest.raises(ConfigError, match=r"data\.eval=\[\], and every=null"):
        load(["quickstart"], ["trainer.evaluation=null"])
    config = load(["quickstart"], ["data.eval=[]", "trainer.evaluation.every=null"]).config
    assert (config.data.eval, config.trainer.evaluation.every) == ((), None)


def test_gdpo_says_its_own_weights() -> None:
    functions = "reward.functions=[{name: a.py:f}, {name: a.py:g, weight: 0.5}]"
    with pytest.raises(ConfigError, match=full_text("reward.functions.1.weight = 0.5")):
        load([], [MODEL, LENGTH, functions, "algorithm.advantage=gdpo"])
    assert load([], [MODEL, LENGTH, functions, "algorithm.advantage={name: gdpo, weights: [1.0, 0.5]}"])
    assert load([], [MODEL, LENGTH, functions.replace("0.5", "1"), "algorithm.advantage=gdpo"])
    assert load([], [MODEL, LENGTH, functions, "algorithm.advantage=grpo"])


def test_frozen_engines_have_nothing_of_training() -> None:
    assert load([], [MODEL, LENGTH, "critic.gradient_checkpointing=true"])


def test_backends() -> None:
    assert load([], [MODEL, LENGTH, "cluster.backend=ray", "cluster.devices=4"]).config.cluster.devices == 4


def test_staleness_and_what_goes_with_it() -> None:
    stale = (MODEL, LENGTH, "trainer.max_staleness=2")
    assert load([], [*stale]).config.trainer.on_update == KeepConfig("auto")
    for more in ("trainer.on_update=finish", "trainer.on_update=resume", "trainer.order=completion"):
        assert load([], [*stale, more]).config.trainer.max_staleness == 2
    abort = load([], [*stale, "trainer.on_update={name: abort, max_aborts: 0}"])
    assert abort.config.trainer.on_update == AbortConfig(max_aborts=0)


def test_engines_in_processes_of_their_own() -> None:
    vllm = (MODEL, LENGTH, "rollout.engine=vllm")
    config = load([], [*vllm, "rollout.replicas=2", "rollout.engine={swap_space: 4}"]).config
    assert config.rollout.engine == VllmEngineConfig(options={"swap_space": 4})
    wide = load([], [*vllm, "rollout.engine={name: vllm, tensor_parallel: 2, x: {y: 1}}"]).config
    assert wide.rollout.engine == VllmEngineConfig(tensor_parallel=2, options={"x": {"y": 1}})


def test_another_engine_replaces_all_of_the_other_ones_keys(in_tmp_path: Path) -> None:
    (in_tmp_path / "r.yaml").write_text("rollout: {engine: {name: vllm, tensor_parallel: 2, a: 1}}\n")

    def engine(*arguments: str) -> object:
        return load(["r.yaml"], [MODEL, LENGTH, *arguments]).config.rollout.engine

    assert engine("rollout.engine.b=2") == VllmEngineConfig(tensor_parallel=2, options={"a": 1, "b": 2})
    for written in ("rollout.engine=sglang", "rollout.engine.name=sglang", "rollout.engine={name: sglang}"):
        assert engine(written) == SglangEngineConfig()
    assert engine("rollout.engine=native", "rollout.engine.decode=lean") == NativeEngineConfig(decode="lean")
    chosen = engine("rollout.engine=transformers", "rollout.engine.cache_bytes=1073741824")
    assert chosen == TransformersEngineConfig(cache_bytes=1 << 30)
    assert load(
        [], [MODEL, LENGTH, "rollout.engine.decode=lean", "rollout.engine=vllm"]
    ).config.rollout.engine == (VllmEngineConfig())


def test_pools() -> None:
    ray = (MODEL, LENGTH, "cluster.backend=ray", "cluster.devices=3", "cluster.pools={train: 2, rollout: 1}")
    placed = load([], [*ray, "cluster.placement={rollout: rollout}"]).config.cluster
    assert placed.placement == {"rollout": "rollout"}


def test_estimators_without_groups_take_one_sample() -> None:
    assert load([], [MODEL, LENGTH, "rollout.n=1", "algorithm.advantage=gae"]).config.rollout.n == 1


@pytest.mark.parametrize(
    ("in_a_program", "arguments", "key"),
    [
        (lambda: ClusterConfig(backend="ray"), ["cluster.backend=ray"], "cluster"),
        (
            lambda: RolloutConfig(engine="vllm", agent="m.f"),
            ["rollout={engine: vllm, agent: m.f}"],
            "rollout",
        ),
        (
            lambda: TrainerConfig(1, on_update="resume", max_staleness=1),
            ["trainer.on_update=resume"],
            "trainer",
        ),
        (lambda: OptimizerConfig(schedule="cosine"), ["actor.optimizer.schedule=cosine"], "actor.optimizer"),
        (
            lambda: AlgorithmConfig(advantage="gae", filter="mixed_accuracy", rollout_correction="bypass"),
            ["algorithm={advantage: gae, filter: mixed_accuracy, rollout_correction: bypass}"],
            "algorithm",
        ),
        (lambda: RewardConfig(functions=("gsm8k",)), ["reward.functions=[gsm8k]"], "reward"),
        (lambda: TrackingConfig(trackers=("wandb",)), ["tracking.trackers=[wandb]"], "tracking"),
    ],
)
def test_the_name_of_a_choice_stands_for_it_in_a_program_as_in_a_recipe(
    in_a_program: Callable[[], Any], arguments: list[str], key: str
) -> None:
    loaded = load([], ["model.path=m", "trainer.total_steps=1", "trainer.max_staleness=1", *arguments])
    assert in_a_program() == operator.attrgetter(key)(loaded.config)


def test_a_program_may_give_the_function_itself() -> None:
    assert AlgorithmConfig(advantage=len).advantage == FunctionConfig(len)


def test_a_program_that_names_no_choice_is_told_the_choices() -> None:
    with pytest.raises(ValidationError, match="must be one of local, process, ray"):
        ClusterConfig(backend="rya")
