"""The controller's stages around the advantages, on real batches: correction, preparation, advantages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rondo.algorithms import ActorLoss
from rondo.algorithms.registry import bind, bind_preparation
from rondo.config import load
from rondo.config.schema import (
    AlgorithmConfig,
    BypassConfig,
    ClusterConfig,
    ConstraintConfig,
    DivergenceRejectionConfig,
    FunctionConfig,
    ImportanceConfig,
    KlConfig,
    RatioRejectionConfig,
    RolloutCorrectionConfig,
)
from rondo.controller import Cluster, start_cluster
from rondo.core.batch import ROW_ID, Batch, BatchRef, ragged_rows
from rondo.core.errors import ConfigError, DataError, TrainError
from rondo.core.types import StepStats
from rondo.planning import effective_correction
from rondo.trainers.program.advantages import AdvantageStage
from rondo.trainers.program.plan import describe_correction
from rondo.trainers.program.stages import CorrectionStage, PreparationStage
from rondo.trainers.program.step import Stage, Step, attach, numbers, padded_columns
from tests.messages import full_text
from tests.trainers.conftest import registered_for_now, roles_without_models

# Four responses of lengths 2, 3, 1, 2; row 1 has a hole, row 3 no trained token.
MASK = [[1, 1], [1, 0, 1], [1], [0, 0]]
ROLLOUT = [[-1.0, -2.0], [-1.0, 0.0, -1.0], [-3.0], [0.0, 0.0]]
RATIOS = [[2.0, 0.5], [1.0, 1.0, 8.0], [4.0], [1.0, 1.0]]
OLD = [[r + float(np.log(x)) for r, x in zip(*row, strict=True)] for row in zip(ROLLOUT, RATIOS, strict=True)]
REF = [[-1.0, -1.0], [-1.0, 0.0, -1.0], [-1.0], [0.0, 0.0]]


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return asyncio.run(start_cluster(ClusterConfig(device="cpu", threads=1)))


def batch_of(cluster: Cluster, **per_row: Sequence[Any]) -> BatchRef:
    """The four rows, in two blocks of another order than the index's."""
    tokens = {"rollout_log_probs": ROLLOUT, "old_log_probs": OLD, "ref_log_probs": REF}
    columns = {
        ROW_ID: np.arange(4) + 10,
        "response_length": np.array([len(row) for row in MASK], np.int32),
        "num_trained_tokens": np.array([sum(row) for row in MASK], np.int32),
        "mini_batch": np.array([0, 1, 0, 1]),
        "step_index": np.zeros(4, np.int32),
        "group_id": np.array([7, 7, 3, 3]),
        "reward": np.array([1.0, 0.0, 1.0, 0.5], np.float32),
        **{name.replace("__", "/"): np.asarray(value) for name, value in per_row.items()},
    }
    index = tuple(columns)
    columns |= {name: ragged_rows(rows, np.float32) for name, rows in tokens.items()}
    whole = Batch.of({**columns, "response_mask": ragged_rows(MASK, np.uint8)})
    parts = [cluster.put(whole.take(rows), index) for rows in ([2, 0], [3, 1])]
    return BatchRef.concat(parts).take([1, 3, 0, 2])


def stepped(
    stage: Stage, batch: BatchRef, cluster: Cluster, *, seed: int = 0, **shared: Any
) -> tuple[BatchRef, StepStats]:
    """What a stage makes of the batch in a first step, and its metrics."""
    step = Step(0, seed, cluster, roles_without_models(cluster), **shared)
    return asyncio.run(_awaited(stage(batch, step))), step.stats


async def _awaited(call: Awaitable[BatchRef]) -> BatchRef:
    return await call


def fetched(batch: BatchRef, name: str) -> list[list[float]]:
    return [row.tolist() for row in asyncio.run(batch.fetch([name])).rows(name)]


def test_columns_go_out_and_back(cluster: Cluster) -> None:
    batch = batch_of(cluster, name=["b", "a", "b", "c"])
    assert batch.index.scalars("row_id").tolist() == [10, 11, 12, 13]
    columns = asyncio.run(padded_columns(batch, ["old_log_probs", "response_mask"]))
    assert columns["response_mask"].tolist() == [[1, 1, 0], [1, 0, 1], [1, 0, 0], [0, 0, 0]]
    assert numbers(batch.index, "name").tolist() == [1, 0, 1, 2]
    again = attach(
        batch, {"twice": 2 * columns["old_log_probs"], "row": columns["response_mask"].sum(1)}, cluster
    )
    for row, old in zip(fetched(again, "twice"), OLD, strict=True):
        np.testing.assert_allclose(row, [2 * x for x in old], rtol=1e-6)
    assert again.index.scalars("row").tolist() == [2, 2, 1, 0]
    with pytest.raises(TrainError, match=full_text("'wide' has the shape [4, 2]; a batch")):
        attach(batch, {"wide": torch.zeros(4, 2)}, cluster)
    with pytest.raises(DataError, match="there already"):
        attach(batch, {"old_log_probs": columns["old_log_probs"]}, cluster)


def test_correction_attaches_weights_and_shrinks_the_mask(cluster: Cluster) -> None:
    config = RolloutCorrectionConfig(
        importance=ImportanceConfig(upper=3.0), reject=(RatioRejectionConfig("k1", 5.0, lower=0.1),)
    )
    stage = CorrectionStage(config)
    batch, stats = stepped(stage, batch_of(cluster), cluster)
    assert stage.writes == ("rollout_weights",)
    weights = fetched(batch, "rollout_weights")
    np.testing.assert_allclose(np.concatenate(weights), [2, 0.5, 1, 0, 0, 3, 0, 0], rtol=1e-5)
    assert fetched(batch, "response_mask") == [[1, 1], [1, 0, 0], [1], [0, 0]]
    assert asyncio.run(batch.fetch(["response_mask"])).array("response_mask").type.value_type == "uint8"
    assert batch.index.scalars("num_trained_tokens").tolist() == [2, 1, 1, 0]
    assert stats.values()["rollout_correction/rejected_token_share"] == 1 / 5


NORMALIZED = RolloutCorrectionConfig(
    importance=ImportanceConfig(upper=8.0, normalize=True),
    reject=(RatioRejectionConfig("k1", 5.0, lower=0.1),),
)


def test_truncated_rows_that_carry_no_loss_are_in_no_mean(cluster: Cluster) -> None:
    """Row 1 is truncated: what remains has the ratios 2, 0.5 and 4."""
    reasons = np.array(["stop", "length", "stop", "stop"], object)
    stage = CorrectionStage(NORMALIZED, mask_truncated=True)
    batch, stats = stepped(stage, batch_of(cluster, finish_reason=reasons), cluster)
    mean = (2 + 0.5 + 4) / 3
    weights = np.concatenate(fetched(batch, "rollout_weights"))
    np.testing.assert_allclose(weights, np.array([2, 0.5, 0, 0, 0, 4, 0, 0]) / mean, rtol=1e-5)
    assert fetched(batch, "response_mask") == [[1, 1], [1, 0, 1], [1], [0, 0]]  # the ratio 8 is not looked at
    values = stats.values()
    assert values["rollout_correction/rejected_token_share"] == 0
    assert values["rollout_correction/kl"] == pytest.approx(-np.log([2, 0.5, 4]).mean(), rel=1e-5)
    unmasked, _ = stepped(CorrectionStage(NORMALIZED), batch_of(cluster, finish_reason=reasons), cluster)
    assert fetched(unmasked, "response_mask") == [[1, 1], [1, 0, 0], [1], [0, 0]]


def test_rows_that_were_drawn_repeatedly_are_in_the_means_as_often(cluster: Cluster) -> None:
    counts = np.array([2, 1, 3, 1], np.float32)
    batch, stats = stepped(CorrectionStage(NORMALIZED), batch_of(cluster, sample_weight=counts), cluster)
    mean = (2 * (2 + 0.5) + 1 + 3 * 4) / 8
    weights = np.concatenate(fetched(batch, "rollout_weights"))
    np.testing.assert_allclose(weights, np.array([2, 0.5, 1, 0, 0, 4, 0, 0]) / mean, rtol=1e-5)
    assert fetched(batch, "response_mask") == [[1, 1], [1, 0, 0], [1], [0, 0]]
    assert stats.values()["rollout_correction/rejected_token_share"] == pytest.approx(1 / 9)


def test_correction_that_only_measures(cluster: Cluster) -> None:
    before = batch_of(cluster)
    after, stats = stepped(CorrectionStage(RolloutCorrectionConfig()), before, cluster)
    assert after is before
    assert "rollout_correction/chi2_token" in stats.values()


TRUNCATED = RolloutCorrectionConfig("decoupled", ImportanceConfig("token", upper=2.0))
SEQUENCE = RolloutCorrectionConfig("decoupled", ImportanceConfig("sequence"))


@pytest.mark.parametrize(
    ("settings", "expected", "said"),
    [
        ([], None, "off (auto: trainer.max_staleness=0, rollout.engine=native)"),
        (
            ["trainer.max_staleness=2"],
            TRUNCATED,
            "importance weights per token, up to 2.0, truncated (auto: t",
        ),
        (["rollout.engine=vllm"], TRUNCATED, "rollout.engine=vllm)"),
        (["rollout.engine=transformers"], None, "off (auto: trainer.max_staleness=0, rollout.engine=transf"),
        (["importance={level: sequence}"], SEQUENCE, "per sequence, up to 2.0, truncated (auto"),
        (["trainer.max_staleness=2", "importance={level: sequence}"], SEQUENCE, "per sequence"),
        (["trainer.max_staleness=2", "=null"], None, "rollout correction: off"),
        (["trainer.max_staleness=2", "mode=bypass"], BypassConfig(), "correction: bypass"),
        (
            ["mode=bypass", "reject=[{statistic: k3, level: mean, upper: 0.1}]"],
            BypassConfig(reject=(DivergenceRejectionConfig("k3", 0.1, "mean"),)),
            "correction: bypass; reject k3 per mean",
        ),
        (
            ["trainer.max_staleness=2", "mode=decoupled"],
            RolloutCorrectionConfig("decoupled"),
            "measured only",
        ),
        (
            ["reject=[{statistic: k3, upper: 0.1, level: mean}]"],
            RolloutCorrectionConfig("decoupled", None, (DivergenceRejectionConfig("k3", 0.1, "mean"),)),
            "reject k3 per mean (auto",
        ),
    ],
)
def test_what_the_correction_becomes(
    settings: list[str], expected: RolloutCorrectionConfig | None, said: str
) -> None:
    key = "algorithm.rollout_correction"
    known = ("importance", "mode", "reject")
    given = [f"{key}.{s}" if s.startswith(known) else key + s if s.startswith("=") else s for s in settings]
    config = load([], ["model.path=m", "trainer.total_steps=1", *given]).config
    assert effective_correction(config) == expected
    assert said in describe_correction(config)


def rank_of(
    advantages: Tensor, old_log_probs: Tensor, response_mask: Tensor, seed: int, *, scale: float
) -> dict[str, Tensor]:
    """How many tokens of the mini-batch have a smaller advantage, times `scale`; and a drawn number."""
    counted = response_mask > 0
    assert not advantages[~counted].any()
    assert not old_log_probs[~counted].any()
    smaller = (advantages[None, None] < advantages[..., None, None]) & counted
    draw = torch.rand(advantages.shape, generator=torch.Generator().manual_seed(seed))
    return {"rank": scale * smaller.sum((2, 3)).float(), "drawn": draw}


def ranked(
    log_probs: Tensor, rank: Tensor, drawn: Tensor, *, scale: float, floor: float = 0.0
) -> tuple[Tensor, dict]:
    return -log_probs * rank * scale + floor, {}


RANKED, CONSTRAINED = "ranked", f"{__name__}.constrained"


@pytest.fixture
def with_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    """`@policy_loss("ranked", prepare=rank_of)`, for this test only."""
    registered_for_now(monkeypatch, "ranked", ranked, rank_of)


@pytest.mark.usefixtures("with_preparation")
def test_preparation_sees_one_mini_batch_at_a_time(cluster: Cluster) -> None:
    config = AlgorithmConfig(policy_loss=FunctionConfig(RANKED, {"scale": 10.0, "floor": 1.0}))
    stage = PreparationStage.of(config)
    assert stage is not None
    assert stage.columns == ("advantages", "old_log_probs", "response_mask")
    assert stage.writes == ("rank", "drawn")
    weights = [0.2, 0.5, 0.2, 0.0]
    batch = batch_of(cluster, advantages=np.array([0.5, 2.0, -1.0, 9.0], np.float32), loss_weight=weights)
    prepared, _ = stepped(stage, batch, cluster, seed=3)
    # mini-batch 0: rows 0 and 2, of 2 and 1 tokens; mini-batch 1: row 1 alone, since row 3 is masked
    assert fetched(prepared, "rank") == [[10, 10], [0, 0, 0], [0], [0, 0]]
    again, other = (fetched(stepped(stage, batch, cluster, seed=seed)[0], "drawn") for seed in (3, 4))
    assert fetched(prepared, "drawn") == again != other
    assert ActorLoss(config).columns.count("rank") == 1
    assert PreparationStage.of(AlgorithmConfig()) is None


@pytest.mark.usefixtures("with_preparation")
def test_options_of_a_loss_and_its_preparation_are_one_set() -> None:
    config = FunctionConfig(RANKED, {"scale": 2.0, "floor": 1.0})
    assert bind("policy_loss", config).keywords == {"scale": 2.0, "floor": 1.0}
    prepare = bind_preparation(config)
    assert prepare is not None
    assert prepare.keywords == {"scale": 2.0}
    for options, message in [({"scael": 1.0}, "did you mean 'scale'"), ({"floor": 1.0}, "needs the option")]:
        with pytest.raises(ConfigError, match=message):
            bind("policy_loss", FunctionConfig(RANKED, options))


# What the estimator under test was given, and gives back.
SEEN: dict[str, Tensor] = {}
ANSWER: list[Any] = []


def constrained(
    token_rewards: Tensor, token_costs: Tensor, response_mask: Tensor, scores: Tensor, multiplier: Tensor
) -> Any:
    SEEN.update(
        rewards=token_rewards, costs=token_costs, mask=response_mask, scores=scores, multiplier=multiplier
    )
    return ANSWER[0] if ANSWER else {"advantages": torch.ones_like(token_rewards), "extra": scores[:, 0]}


def stage_of(kl: KlConfig | None = None) -> AdvantageStage:
    constraint = ConstraintConfig(cost="harm")
    chosen = FunctionConfig(CONSTRAINED)
    return AdvantageStage(AlgorithmConfig(advantage=chosen, constraint=constraint, kl=kl))


HARM = {
    "score__harm": np.array([1, 2, 3, 4], np.float32),
    "score__a": np.array([0, 1, np.nan, 1], np.float32),
}


def advantages_of(cluster: Cluster, stage: AdvantageStage, answer: Any = None, **per_row: Any) -> BatchRef:
    ANSWER[:] = [] if answer is None else [answer]
    rows = batch_of(cluster, **{**HARM, **per_row})
    return stepped(stage, rows, cluster, coefficients={"kl_coef": 0.5, "multiplier": 2.0})[0]


def test_costs_scores_and_multiplier(cluster: Cluster) -> None:
    stage = stage_of()
    assert stage.columns == ("reward", "response_mask", "score/harm")
    batch = advantages_of(cluster, stage)
    assert SEEN["rewards"].tolist() == [[0, 1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert SEEN["costs"].tolist() == [[0, 1, 0], [0, 0, 2], [3, 0, 0], [0, 0, 0]]
    assert SEEN["multiplier"].item() == 2.0
    torch.testing.assert_close(
        SEEN["scores"], torch.tensor([[1, 0], [2, 1], [3, torch.nan], [4, 1]]), equal_nan=True
    )
    assert fetched(batch, "advantages") == [[1, 1], [1, 0, 1], [1], [0, 0]]
    assert batch.index.scalars("extra").tolist() == [1, 2, 3, 4]
    with pytest.raises(DataError, match="score/harm, the cost of"):
        advantages_of(cluster, stage, score__harm=np.array([1, np.nan, 3, 4], np.float32))
    with pytest.raises(ConfigError, match=r"set algorithm.constraint.cost"):
        AdvantageStage(AlgorithmConfig(advantage=FunctionConfig(CONSTRAINED)))


def test_the_kl_is_split_between_rewards_and_costs(cluster: Cluster) -> None:
    advantages_of(cluster, stage_of(KlConfig("k1", "reward", 0.5)))
    k1 = np.array(OLD[0]) - np.array(REF[0])
    np.testing.assert_allclose(SEEN["rewards"][0, :2], [0, 1] - 0.25 * k1, rtol=1e-6)
    np.testing.assert_allclose(SEEN["costs"][0, :2], [0, 1] + 0.25 * k1, rtol=1e-6)
    assert not SEEN["costs"][3].any()


def test_resampled_rows_count_as_often_as_they_were_drawn(cluster: Cluster) -> None:
    weight = np.array([2, 1, 3, 1], np.float32)
    advantages_of(cluster, stage_of(), sample_weight=weight)
    assert SEEN["mask"].tolist() == [[2, 2, 0], [1, 0, 1], [3, 0, 0], [0, 0, 0]]
    # a whitened estimator sees the batch that has the rows k times
    stage = AdvantageStage(AlgorithmConfig(advantage=FunctionConfig("reinforce_pp_baseline")))
    rows, _ = stepped(stage, batch_of(cluster, sample_weight=weight), cluster)
    once = rows.index.scalars("advantages")
    centred, tokens = np.array([0.5, -0.5, 0.25, -0.25]), np.array([4, 2, 3, 0])
    mean = (tokens * centred).sum() / 9
    std = np.sqrt((tokens * (centred - mean) ** 2).sum() / 8)
    np.testing.assert_allclose(once, np.where(tokens > 0, (centred - mean) / std, 0), rtol=1e-5)


def test_a_row_without_trained_tokens_keeps_its_reward_under_a_kl(cluster: Cluster) -> None:
    config = AlgorithmConfig(advantage=FunctionConfig("dr_grpo"), kl=KlConfig("k1", "reward", 1e-12))
    batch, _ = stepped(AdvantageStage(config), batch_of(cluster), cluster)
    np.testing.assert_allclose(batch.index.scalars("advantages"), [0.5, -0.5, 0.25, -0.25])


def values_read(values: Tensor) -> Tensor:
    return values


def test_what_an_estimator_must_return(cluster: Cluster) -> None:
    critic = AdvantageStage(AlgorithmConfig(advantage=FunctionConfig(f"{__name__}.values_read")))
    assert critic.writes == ("advantages", "returns")
    assert "returns" in critic.writes
    with pytest.raises(TrainError, match=r"'values' is missing|must return returns"):
        stepped(critic, attach(batch_of(cluster), {"values": torch.zeros(4, 3)}, cluster), cluster)
    check: Callable[[Any], BatchRef] = lambda answer: advantages_of(cluster, stage_of(), answer)  # noqa: E731
    with pytest.raises(TrainError, match=full_text("must return advantages; it returned")):
        check({"returns": torch.zeros(4)})
    with pytest.raises(TrainError, match=r"advantages as a tensor .* of shape \[3\]"):
        check(torch.zeros(3))
