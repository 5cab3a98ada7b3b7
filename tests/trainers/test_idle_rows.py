"""Rows whose advantage is 0 cost no gradient, and are in every metric as if nothing had been skipped."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from rondo.algorithms import ActorLoss, bind, lookup, loss_weights, names
from rondo.algorithms.registry import is_zero_at_zero_advantage
from rondo.config.schema import (
    AlgorithmConfig,
    ClusterConfig,
    EngineConfig,
    FunctionConfig,
    ImportanceConfig,
    OptimizerConfig,
    ProcessBackendConfig,
    RolloutCorrectionConfig,
)
from rondo.controller import start_cluster
from rondo.core.batch import ROW_ID, Batch, ragged_rows
from rondo.core.types import StepStats
from rondo.planning import plan_mini_batches
from rondo.trainers.program.stages import PreparationStage
from rondo.trainers.program.step import Roles, Step
from rondo.trainers.program.update import update_actor
from rondo.training import Engine, ModelSpec
from rondo.workers import ActorWorker
from tests.trainers.conftest import registered_for_now
from tests.training.helpers import VOCAB, source

GROUP = 4
HERE = ClusterConfig(device="cpu")
LOSSES = sorted(n for n in names("policy_loss") if is_zero_at_zero_advantage(lookup("policy_loss", n)))

PER_TOKEN = (
    "prompt_ids",
    "response_ids",
    "response_mask",
    "rollout_log_probs",
    "rollout_weights",
    "covariance_selected",
    "entropy_weight",
    "given_log_probs",
)


def rows_of_a_step() -> Batch:
    """Six groups of four: two without signal, of which one has one answer four times; a group with rows of
    advantage 0 among others; a row without trained tokens.
    """
    rng = np.random.default_rng(5)
    number = 6 * GROUP
    prompts = [prompt for i in range(6) for prompt in [rng.integers(0, VOCAB, 3 + i)] * GROUP]
    responses = [rng.integers(0, VOCAB, rng.integers(2, 9)) for _ in range(number)]
    responses[4:8] = [responses[4]] * 4
    masks = [(rng.random(len(response)) < 0.8).astype(np.uint8) for response in responses]
    masks[-1][:] = 0
    advantages = rng.standard_normal(number).astype(np.float32)
    advantages[4:12] = 0
    advantages[[13, 14]] = 0
    lengths = [len(response) for response in responses]
    return Batch.of(
        {
            ROW_ID: np.arange(number),
            "group_id": np.repeat(np.arange(6), GROUP),
            "prompt_ids": ragged_rows(prompts, np.int32),
            "response_ids": ragged_rows(responses, np.int32),
            "response_mask": ragged_rows(masks, np.uint8),
            "rollout_log_probs": ragged_rows([rng.normal(-3, 1, n) for n in lengths], np.float32),
            "rollout_weights": ragged_rows([rng.random(n) for n in lengths], np.float32),
            "covariance_selected": ragged_rows([rng.random(n) < 0.2 for n in lengths], np.float32),
            "entropy_weight": ragged_rows([2 * (np.arange(n) % 2) for n in lengths], np.float32),
            "given_log_probs": ragged_rows([rng.normal(-3, 1, n) for n in lengths], np.float32),
            "given": (np.arange(number) % GROUP == 1).astype(np.uint8),
            "replaying": np.ones(number, np.float32),
            "prompt_length": np.array([len(prompt) for prompt in prompts], np.int32),
            "response_length": np.array(lengths, np.int32),
            "num_trained_tokens": np.array([mask.sum() for mask in masks], np.int32),
            "advantages": advantages,
        }
    )


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many rows went through the model with a gradient, and without."""
    counted = {"trained": 0, "measured": 0}
    with_gradient, without = Engine.forward_backward, Engine.forward

    def forward_backward(self: Engine, batch: Batch, loss: Any) -> StepStats:
        counted["trained"] += len(batch)
        return with_gradient(self, batch, loss)

    def forward(self: Engine, batch: Batch, outputs: Any, **options: Any) -> Batch:
        counted["measured"] += len(batch)
        return without(self, batch, outputs, **options)

    monkeypatch.setattr(Engine, "forward_backward", forward_backward)
    monkeypatch.setattr(Engine, "forward", forward)
    return counted


def updated(
    name: str,
    *,
    skip: bool = False,
    mini_batch_size: int = 6,
    epochs: int = 1,
    old: bool = True,
    left_out: tuple[int, ...] = (),
    cluster: ClusterConfig = HERE,
) -> StepStats:
    """The metrics of an update of a fresh model. old: old_log_probs are computed before it, else it is the
    first step of policy gradients on them. left_out: rows that carry no loss, as those that were cut off.
    """
    correction = RolloutCorrectionConfig(importance=ImportanceConfig())
    config = AlgorithmConfig(policy_loss=FunctionConfig(name), rollout_correction=correction)
    loss = ActorLoss(config, on_policy=not old)
    assert loss.zero_where_advantage_is_zero or not skip
    loss.zero_where_advantage_is_zero = skip

    async def main() -> StepStats:
        async with await start_cluster(cluster) as running:
            engine = EngineConfig(token_budget=120, param_dtype="float64", compute_dtype="float64")
            model = ModelSpec(source(), engine, OptimizerConfig(lr=3e-2))
            kwargs = {"model": model, "losses": {"policy": loss}}
            actor = await running.create_group("actor", ActorWorker, kwargs=kwargs)
            rows = rows_of_a_step()
            batch = running.put(rows, [column for column in rows.columns if column not in PER_TOKEN])
            if old:
                batch = await actor.call(ActorWorker.compute_log_prob, batch)
            groups, tokens = (batch.index.scalars(column) for column in ("group_id", "num_trained_tokens"))
            mini_batch = plan_mini_batches(groups, mini_batch_size, seed=0, step=0)
            tokens = np.where(np.isin(np.arange(len(tokens)), left_out), 0, tokens)
            weights = loss_weights(bind("aggregation", FunctionConfig("token-mean")), tokens, mini_batch)
            batch = batch.with_index({"mini_batch": mini_batch, "loss_weight": weights})
            step = Step(0, 0, running, Roles(actor, None))
            preparation = PreparationStage.of(config) if name not in names("policy_loss") else None
            return await update_actor(
                actor, batch, loss, epochs, step, preparation=preparation, old_is_current=old
            )

    return asyncio.run(main())


def assert_same(skipping: StepStats, whole: StepStats) -> None:
    ours, theirs = ({k: v for k, v in x.values().items() if "perf/" not in k} for x in (skipping, whole))
    assert ours.keys() == theirs.keys()
    assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_every_metric_is_that_of_an_update_that_skips_nothing(name: str, passes: dict[str, int]) -> None:
    """Three mini-batches, at a rate that moves the policy far; for one loss, twice."""
    several = {"mini_batch_size": 2, "epochs": 1 + (name == "ppo_clip")}
    skipping = updated(name, skip=True, **several)
    assert passes["trained"] == several["epochs"] * (24 - 10)
    assert_same(skipping, updated(name, skip=False, **several))
    assert passes["trained"] == several["epochs"] * (24 - 10 + 24)


def test_rows_of_equal_tokens_are_computed_once(passes: dict[str, int]) -> None:
    assert_same(updated("ppo_clip", skip=True, old=False), updated("ppo_clip", skip=False, old=False))
    assert passes == {"trained": 14 + 24, "measured": 10 - 3}


@pytest.mark.parametrize("skip", [False, True])
def test_tokens_that_carry_no_loss_are_not_counted_as_trained(skip: bool) -> None:
    tokens, learns = (rows_of_a_step().scalars(name) for name in ("num_trained_tokens", "advantages"))
    trained = tokens[(learns != 0) | (not skip)].sum()
    assert updated("ppo_clip", skip=skip).sums["perf/trained_tokens"] == trained
    left = updated("ppo_clip", skip=skip, left_out=(0, 2)).sums["perf/trained_tokens"]
    assert left == trained - tokens[0] - tokens[2]


@pytest.mark.slow
def test_ranks_measure_what_one_measures() -> None:
    """Two processes, each with rows of either kind, three mini-batches: sums over both are those of one."""
    two = ClusterConfig(ProcessBackendConfig(), devices=2, device="cpu")
    assert_same(
        updated("ppo_clip", skip=True, mini_batch_size=2, cluster=two),
        updated("ppo_clip", skip=True, mini_batch_size=2),
    )


def test_known_log_probs_are_not_computed_again(passes: dict[str, int]) -> None:
    assert_same(updated("ppo_clip", skip=True), updated("ppo_clip", skip=False))
    assert passes == {"trained": 14 + 24, "measured": 24 + 24}  # old_log_probs, before either update


def test_a_mini_batch_without_signal_takes_no_step_and_is_measured(passes: dict[str, int]) -> None:
    skipping = updated("ppo_clip", skip=True, mini_batch_size=1)
    assert skipping.sums["actor/idle_mini_batches"] == 2
    assert skipping.means["actor/skipped_steps"][1] == 4
    trained = sum(int(mask.sum()) for mask in rows_of_a_step().rows("response_mask"))
    assert skipping.means["actor/entropy_sampled"][1] == trained


def as_it_is(log_probs: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"seen": log_probs}


def follows(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    seen: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The policy gradient, and how far prepared and old log-probs are from the current ones."""
    behind, moved = (((log_probs - x).abs() * response_mask).amax() for x in (seen, old_log_probs))
    return -advantages * log_probs, {"actor/behind": behind, "actor/moved": moved}


def test_a_preparation_sees_the_log_probs_of_each_optimizer_step(
    passes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three mini-batches twice; the first step's are old_log_probs, so that a pass is saved."""
    registered_for_now(monkeypatch, "follows", follows, as_it_is)
    stats = updated("follows", mini_batch_size=2, epochs=2)
    assert stats.maxima["actor/moved"] > 0.1
    assert stats.maxima["actor/behind"] < 1e-6  # they travel as float32
    assert passes == {"trained": 2 * 24, "measured": 24 + 2 * 24 - 8}
