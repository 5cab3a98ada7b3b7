"""Trajectories of several rows: what counts trajectories, and what each row is credited with."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, cast

import numpy as np
import pytest
import torch

from rondo.agents.record import rows_of
from rondo.algorithms import bind
from rondo.config import Config
from rondo.config.schema import (
    AlgorithmConfig,
    ClusterConfig,
    FilterConfig,
    FunctionConfig,
    KlConfig,
    RewardModelConfig,
)
from rondo.controller import Cluster, start_cluster
from rondo.core.batch import ROW_ID, Batch, BatchRef, ragged_rows
from rondo.core.errors import DataError, TrainError
from rondo.core.types import Completion, PolicyCall, Prompt, StepStats, Trajectory
from rondo.data import firsts, is_cut_off, lasts, trajectory_of_rows
from rondo.data.rows import rows_from_trajectories
from rondo.trainers.loop.buffer import Group, failures, group_filter
from rondo.trainers.loop.records import describe_rows
from rondo.trainers.program.advantages import AdvantageStage
from rondo.trainers.program.stages import PreparationStage, Resampling, RewardModelScores, Selection
from rondo.trainers.program.step import Roles, Step
from rondo.trainers.program.update import ActorWeights
from tests.trainers.conftest import roles_without_models

# Two groups of two trajectories: of two, one, three and one rows. Rewards, and tokens of each row.
REWARDS = [1.0, 0.0, 0.25, 1.0]
LENGTHS = [[2, 1], [3], [1, 2, 1], [2]]
FINISH = [["stop", "length"], ["stop"], ["stop", "stop", "stop"], ["length"]]


def trajectory(number: int, **changes: Any) -> Trajectory:
    prompt = Prompt(number // 2, f"train/0/{number // 2}", "train", np.array([9], np.int32))
    calls = [
        PolicyCall(
            Completion(
                "r",
                np.array([10 * number + step], np.int32),
                np.arange(length, dtype=np.int32),
                np.full(length, -0.5, np.float32),
                np.full(length, 3, np.int32),
                finish,  # type: ignore[arg-type]
            )
        )
        for step, (length, finish) in enumerate(zip(LENGTHS[number], FINISH[number], strict=True))
    ]
    given: dict[str, Any] = {
        "reward": REWARDS[number],
        "scores": {"right": float(REWARDS[number] == 1.0)},
        **changes,
    }
    return Trajectory(prompt, f"t{number}", number % 2, tuple(rows_of(calls)), **given)


def rows(*numbers: int, **changes: Any) -> Batch:
    made = [trajectory(number, **changes) for number in numbers or range(4)]
    return rows_from_trajectories(made, {"score/right": "right"}, accuracy="right", of_agents=True)


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return asyncio.run(start_cluster(ClusterConfig(device="cpu", threads=1)))


PER_TOKEN = ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs", "policy_versions")
TURNS = ("turn_stops", "turn_kinds", "turn_rewards", "turn_flags")


def held(cluster: Cluster, batch: Batch, order: Any = None, **tokens: float) -> BatchRef:
    """As the loop holds it. tokens: further columns with the same number on each token."""
    lengths = batch.scalars("response_length")
    more = {k: ragged_rows([np.full(n, v) for n in lengths], np.float32) for k, v in tokens.items()}
    batch = batch.with_columns(more)
    index = [name for name in batch.columns if name not in (*PER_TOKEN, *TURNS, *tokens)]
    return cluster.put(batch.take(order if order is not None else np.arange(len(batch))), index)


def stepped(stage: Any, batch: BatchRef, cluster: Cluster, **shared: Any) -> tuple[BatchRef, StepStats]:
    roles = shared.pop("roles", None) or roles_without_models(cluster)
    step = Step(0, 0, cluster, roles, **shared)

    async def main() -> BatchRef:
        return cast(BatchRef, await stage(batch, step))

    return asyncio.run(main()), step.stats


def test_a_choice_sees_each_trajectory_once_and_takes_all_its_rows(cluster: Cluster) -> None:
    """In any order of the rows: those with a reward above 0 have two, three and one."""
    batch = held(cluster, rows(), np.array([6, 2, 0, 5, 1, 3, 4]))
    made, stats = stepped(Selection(FunctionConfig(f"{__name__}.chosen")), batch, cluster)
    assert made.index.scalars("trajectory_id").tolist() == ["t3", "t0", "t2", "t0", "t2", "t2"]
    assert stats.values()["buffer/selected_share"] == 0.75
    for wrong, says in (("none", "keeps none"), ("as_numbers", "a bool for each")):
        with pytest.raises(TrainError, match=says):
            stepped(Selection(FunctionConfig(f"{__name__}.{wrong}")), batch, cluster)


def chosen(reward: torch.Tensor) -> torch.Tensor:
    return reward > 0


def none(reward: torch.Tensor) -> torch.Tensor:
    return reward > 99


def as_numbers(reward: torch.Tensor) -> torch.Tensor:
    return (reward > 0).float()


def test_rows_of_trajectories() -> None:
    batch = rows()
    assert batch.scalars("trajectory_id").tolist() == ["t0", "t0", "t1", "t2", "t2", "t2", "t3"]
    assert batch.scalars("step_index").tolist() == [0, 1, 0, 0, 1, 2, 0]
    assert batch.scalars(ROW_ID).tolist() == [
        *(0, 1, 1 << 12),
        *(1 << 32, (1 << 32) + 1, (1 << 32) + 2, (1 << 32) + (1 << 12)),
    ]
    assert batch.scalars("reward").tolist() == [1, 1, 0, 0.25, 0.25, 0.25, 1]
    assert batch.scalars("step_reward").tolist() == [0, 1, 0, 0, 0, 0.25, 1]
    assert batch.scalars("finish_reason").tolist()[:2] == ["stop", "length"]
    assert [ids.tolist() for ids in batch.rows("prompt_ids")] == [[0], [1], [10], [20], [21], [22], [30]]
    assert [stops.tolist() for stops in batch.rows("turn_stops")] == [[2], [1], [3], [1], [2], [1], [2]]


def test_the_rows_of_a_trajectory_are_found_in_any_order() -> None:
    batch = rows().take([5, 0, 6, 3, 2, 1, 4])
    assert firsts(batch).tolist() == [1, 2, 3, 4]  # t0, t3, t2, t1
    assert trajectory_of_rows(batch).tolist() == [2, 0, 1, 2, 3, 0, 2]
    assert lasts(batch).tolist() == [5, 2, 0, 4]
    with pytest.raises(DataError, match="no first row"):
        trajectory_of_rows(rows().take([0, 1, 2, 4, 5, 6]))


def test_all_rows_of_an_episode_that_was_cut_off_are_cut_off(cluster: Cluster) -> None:
    """t0 ends with a row that was cut off, t3 is one; in t2 an answer was, and the episode went on."""
    made = [trajectory(number) for number in range(4)]
    cut = dataclasses.replace(made[2].rows[1], finish_reason="length")
    made[2] = dataclasses.replace(made[2], rows=(made[2].rows[0], cut, made[2].rows[2]))
    batch = rows_from_trajectories(made, {"score/right": "right"}, accuracy="right", of_agents=True)
    order = [5, 0, 6, 3, 2, 1, 4]
    expected = np.array([True, True, False, False, True, False, True])
    assert is_cut_off(batch).tolist() == expected.tolist()
    assert is_cut_off(batch.take(order)).tolist() == expected[order].tolist()
    config = Config(algorithm=AlgorithmConfig(mask_truncated=True))
    weighed, _ = stepped(
        ActorWeights(config),
        held(cluster, batch.with_columns({"mini_batch": np.zeros(7, np.int64)}), order),
        cluster,
    )
    weights = weighed.index.scalars("loss_weight")
    np.testing.assert_allclose(weights, np.where(expected, 0, 1 / 5)[order])  # 3 + 1 + 1 tokens are left


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo", "reinforce_pp_baseline", "gdpo", "passk"])
def test_an_estimator_of_responses_sees_each_trajectory_once(cluster: Cluster, name: str) -> None:
    """And all rows get what their trajectory got; in any order of rows."""
    stage = AdvantageStage(AlgorithmConfig(advantage=FunctionConfig(name)))
    whole = rows().take(firsts(rows()))
    whole = whole.with_columns({"num_trained_tokens": np.array([3, 3, 4, 2], np.int32)}, replace=True)
    alone, _ = stepped(stage, held(cluster, whole), cluster)
    expected = alone.index.scalars("advantages")
    order = [5, 0, 6, 3, 2, 1, 4]
    made, _ = stepped(stage, held(cluster, rows(), order), cluster)
    assert made.index.scalars("advantages").tolist() == expected[[0, 0, 1, 2, 2, 2, 3]][order].tolist()
    if name == "grpo":
        np.testing.assert_allclose(expected[:2], [0.70710, -0.70710], atol=1e-4)


def test_gdpo_does_not_pay_for_responses_that_spent_the_scorers_time(cluster: Cluster) -> None:
    """`…/timeout` is reported, and none of the scores that are added up."""
    stage = AdvantageStage(AlgorithmConfig(advantage=FunctionConfig("gdpo")))
    plain, _ = stepped(stage, held(cluster, rows(), range(7)), cluster)
    spent = rows().with_columns({"score/right/timeout": np.array([0, 0, 1, 1, 1, 1, 0], np.float32)})
    told, _ = stepped(stage, held(cluster, spent, range(7)), cluster)
    assert told.index.scalars("advantages").tolist() == plain.index.scalars("advantages").tolist()


def test_a_kl_in_the_reward_is_that_of_all_rows(cluster: Cluster) -> None:
    """k1 of 0.25 per token, coefficient 0.1: three tokens of the first trajectory, three of the second."""
    kl = KlConfig(name="k1", where="reward", coef=0.1)
    stage = AdvantageStage(AlgorithmConfig(advantage=FunctionConfig("dr_grpo"), kl=kl))
    batch = held(cluster, rows(), old_log_probs=-0.5, ref_log_probs=-0.75)
    made, _ = stepped(stage, batch, cluster, coefficients={"kl_coef": 0.1})
    rewards = np.array(REWARDS) - 0.1 * 0.25 * np.array([3, 3, 4, 2])
    means = rewards.reshape(2, 2).mean(1).repeat(2)
    expected = (rewards - means)[[0, 0, 1, 2, 2, 2, 3]]
    np.testing.assert_allclose(made.index.scalars("advantages"), expected, atol=1e-6)


def test_an_estimator_over_tokens_credits_each_row_with_the_outcome(cluster: Cluster) -> None:
    stage = AdvantageStage(AlgorithmConfig(advantage=FunctionConfig("gae", {"gamma": 1.0, "lam": 1.0})))
    made, _ = stepped(stage, held(cluster, rows(), values=0.0), cluster)
    returns = asyncio.run(made.fetch(["returns"])).rows("returns")
    assert [set(row.tolist()) for row in returns] == [{1.0}, {1.0}, {0.0}, {0.25}, {0.25}, {0.25}, {1.0}]


def test_an_estimator_of_turns_sees_each_outcome_once(cluster: Cluster) -> None:
    """Γ = ½ between turns, values 0, here a turn in each row: half of the outcome one row earlier; in any
    order of rows. A KL is every token's own: 0.1 · 0.25 is taken from each, and halved between turns, too.
    """
    chosen = FunctionConfig("bi_level_gae", {"high_level_gamma": 0.5})
    order = [5, 0, 6, 3, 2, 1, 4]
    made, _ = stepped(
        AdvantageStage(AlgorithmConfig(advantage=chosen)), held(cluster, rows(), order, values=0.0), cluster
    )
    returns = asyncio.run(made.fetch(["returns"])).rows("returns")
    expected = [{0.5}, {1.0}, {0.0}, {0.0625}, {0.125}, {0.25}, {1.0}]
    assert [set(row.tolist()) for row in returns] == [expected[row] for row in order]
    kl = KlConfig(name="k1", where="reward", coef=0.1)
    batch = held(cluster, rows(0), values=0.0, old_log_probs=-0.5, ref_log_probs=-0.75)
    made, _ = stepped(
        AdvantageStage(AlgorithmConfig(advantage=chosen, kl=kl)),
        batch,
        cluster,
        coefficients={"kl_coef": 0.1},
    )
    first, second = asyncio.run(made.fetch(["returns"])).rows("returns")
    np.testing.assert_allclose(second, [0.975], rtol=1e-6)
    np.testing.assert_allclose(first, [0.4875 - 0.025 - 0.025, 0.4875 - 0.025], rtol=1e-6)


def test_an_estimator_of_steps_sees_rows(cluster: Cluster) -> None:
    """GiGPO with γ = 0.5 and an anchor of its own for each prompt: the returns of steps 0.5, 1 against 0."""
    stage = AdvantageStage(
        AlgorithmConfig(advantage=FunctionConfig("gigpo", {"gamma": 0.5, "normalize_std": False}))
    )
    made, _ = stepped(stage, held(cluster, rows(0, 1)), cluster)
    episode = np.array([0.5, 0.5, -0.5])
    steps = np.array([0.5, 1.0, 0.0])
    np.testing.assert_allclose(made.index.scalars("advantages"), episode + steps - steps.mean(), atol=1e-6)


@pytest.mark.parametrize(
    ("stage", "who"),
    [
        (AdvantageStage(AlgorithmConfig(advantage=FunctionConfig("prime"))), "algorithm.advantage=prime"),
        (Resampling(FunctionConfig("pf_ppo", {"strategy": "best"})), "algorithm.resample=pf_ppo"),
        (
            PreparationStage.of(AlgorithmConfig(policy_loss=FunctionConfig("gvpo"))),
            "the preparation of the policy loss gvpo",
        ),
    ],
)
def test_what_compares_rows_refuses_several(cluster: Cluster, stage: Any, who: str) -> None:
    batch = held(cluster, rows(), process_rewards=0.0, old_log_probs=-0.5, ref_log_probs=-0.5)
    with pytest.raises(TrainError, match=f"{who} compares .*7 rows of 4"):
        stepped(stage, batch, cluster)


class Judge:
    """A worker group whose score is the first token of the row's prompt."""

    role = "judge"

    async def call(self, method: Any, batch: BatchRef) -> BatchRef:
        tokens = await batch.fetch(["prompt_ids"])
        scores = np.array([row[0] for row in tokens.rows("prompt_ids")], np.float32)
        return batch.with_index({"score/judge": scores})


def test_a_reward_model_reads_the_last_row(cluster: Cluster) -> None:
    stage = RewardModelScores(RewardModelConfig(name="judge", path="x", weight=2.0))
    roles = Roles(cast(Any, None), None, {"judge": cast(Any, Judge())})
    made, _ = stepped(stage, held(cluster, rows(), [5, 0, 6, 3, 2, 1, 4]), cluster, roles=roles)
    assert made.index.scalars("score/judge").tolist() == [22, 1, 30, 22, 10, 1, 22]
    assert made.index.scalars("reward").tolist() == [44.25, 3, 61, 44.25, 20, 3, 44.25]


def test_metrics_count_trajectories(cluster: Cluster) -> None:
    stats = StepStats()
    describe_rows(held(cluster, rows()), stats)
    values = stats.values()
    assert values["reward/mean"] == np.mean(REWARDS)
    assert values["rollout/response_length"] == np.mean([3, 3, 4, 2])
    assert values["rollout/response_length_max"] == 4
    assert values["rollout/truncated_share"] == 0.5
    assert values["rollout/rows_per_trajectory"] == 7 / 4
    assert values["reward/score/right"] == 0.5
    assert values["reward/constant_group_share"] == 0


def test_the_buffer_counts_trajectories(cluster: Cluster) -> None:
    failed = {"outcome": "rollout_error", "reward": float("nan"), "scores": {}}
    both = Batch.concat([rows(0), rows(1, **failed)])
    group = Group(0, 0, 3, held(cluster, both))
    assert group.rewards() == (1.0, 1)
    assert group.lengths == [3]
    assert failures(group.ref) == ["rollout_error"]
    several = Batch.concat([rows(1), rows(2, **failed)])
    assert failures(held(cluster, several)) == ["rollout_error"]


def test_a_filter_sees_each_trajectory_once(cluster: Cluster) -> None:
    """One of two is right; of the rows it would be two of three."""
    half = group_filter(cast(FilterConfig, FunctionConfig("accuracy_range", {"low": 0.5, "high": 0.5})))
    assert half(Group(0, 0, 3, held(cluster, rows(0, 1)))) is None


def test_the_weight_of_a_trajectory_does_not_depend_on_how_it_is_cut() -> None:
    """The same tokens in one row and in three weigh the same."""
    aggregate = bind("aggregation", FunctionConfig("trajectory-mean-token-mean"))
    one = aggregate(np.array([6.0, 4.0]), np.array([0, 1]))
    cut = aggregate(np.array([1.0, 2.0, 3.0, 4.0]), np.array([0, 0, 0, 1]))
    assert cut.tolist() == one[[0, 0, 0, 1]].tolist()
    assert torch.tensor(one).mul(torch.tensor([6.0, 4.0])).sum() == 1
