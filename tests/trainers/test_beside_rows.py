"""What workers make of the rows that they hold, against the functions on the whole batch: on one host and on
two and three, in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from rondo.algorithms import kl_reward, lookup
from rondo.config.schema import (
    AlgorithmConfig,
    ClusterConfig,
    ConstraintConfig,
    DivergenceRejectionConfig,
    FunctionConfig,
    ImportanceConfig,
    KlConfig,
    LocalBackendConfig,
    ProcessBackendConfig,
    RolloutCorrectionConfig,
)
from rondo.controller import Cluster, start_cluster
from rondo.core.batch import ROW_ID, Batch, BatchRef, ragged_rows
from rondo.trainers.program.advantages import AdvantageStage
from rondo.trainers.program.stages import CorrectionStage
from rondo.trainers.program.step import Roles, Step
from rondo.workers.estimating import EstimatingWorker

N = 40
TOKENS = ("old_log_probs", "ref_log_probs", "rollout_log_probs", "teacher_log_probs", "values", "cost_values")


def rows() -> dict[str, Any]:
    """Forty responses of up to fifty tokens, ten prompts of four, holes in the mask, some without a token."""
    random = np.random.default_rng(3)
    lengths = random.integers(1, 51, N)
    made: dict[str, Any] = {
        ROW_ID: np.arange(N) * 7,
        "response_length": lengths.astype(np.int32),
        "prompt_length": np.full(N, 3, np.int32),
        "step_index": np.zeros(N, np.int32),
        "group_id": np.arange(N) // 4,
        "mini_batch": np.arange(N) // 20,
        "reward": random.random(N).astype(np.float32),
        "greedy_reward": random.random(N).astype(np.float32),
        "score/harm": random.random(N).astype(np.float32),
        "sample_weight": random.integers(1, 4, N).astype(np.float32),
    }
    for name in TOKENS:
        made[name] = [random.normal(-1.0, 0.5, length).astype(np.float32) for length in lengths]
    made["response_mask"] = [
        (random.random(n) < (i % 10 > 0) * 0.8).astype(np.uint8) for i, n in enumerate(lengths)
    ]
    made["num_trained_tokens"] = np.array([mask.sum() for mask in made["response_mask"]], np.int32)
    return made


ROWS = rows()
INDEX = tuple(name for name, column in ROWS.items() if isinstance(column, np.ndarray))


class Hosts:
    """A cluster on an event loop of its own, with an actor that has no model."""

    def __init__(self, devices: int) -> None:
        self.loop = asyncio.new_event_loop()
        backend = LocalBackendConfig() if devices == 1 else ProcessBackendConfig()
        config = ClusterConfig(device="cpu", devices=devices, threads=1, backend=backend)
        self.cluster: Cluster = self.run(start_cluster(config))
        self.roles = Roles(self.run(self.cluster.create_group("actor", EstimatingWorker)), None)

    def run(self, call: Awaitable[Any]) -> Any:
        async def awaited() -> Any:
            return await call

        return self.loop.run_until_complete(awaited())

    def batch(self) -> BatchRef:
        """The rows in blocks of a prompt each, the last one first."""
        columns = {
            name: column if name in INDEX else ragged_rows(column, column[0].dtype)
            for name, column in ROWS.items()
        }
        whole = Batch.of(columns)
        parts = [self.cluster.put(whole.take(np.arange(at, at + 4)), INDEX) for at in range(0, N, 4)]
        return BatchRef.concat(parts[::-1])

    def stepped(self, stage: Any) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """What a stage adds or makes anew, in the order of row ids, tokens behind each other; its metrics."""
        step = Step(0, 0, self.cluster, self.roles, coefficients={"kl_coef": 0.3, "multiplier": 0.5})
        made = self.run(stage(self.batch(), step))
        order = np.argsort(made.index.scalars(ROW_ID))
        names = (
            "advantages",
            "returns",
            "cost_returns",
            "rollout_weights",
            "response_mask",
            "num_trained_tokens",
        )
        fetched = self.run(made.take(order).fetch([name for name in names if name in made.columns]))
        columns = {
            name: fetched.scalars(name) if name in made.index.columns else fetched.ragged(name)[0].numpy()
            for name in fetched.columns
        }
        return columns, step.stats.values()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Mapping[int, Hosts]]:
    made = {devices: Hosts(devices) for devices in (1, 2, 3)}
    yield made
    for one in made.values():
        one.run(one.cluster.shutdown())
        one.loop.close()


def padded(name: str) -> torch.Tensor:
    """[B, T] float32."""
    whole = torch.zeros(N, 50)
    for row, column in enumerate(ROWS[name]):
        whole[row, : len(column)] = torch.from_numpy(column.astype(np.float32))
    return whole


def flat(column: torch.Tensor) -> np.ndarray:
    return np.concatenate([row[:n].numpy() for row, n in zip(column, ROWS["response_length"], strict=True)])


KL = KlConfig("k3", "reward", 0.3)
ESTIMATORS = {
    "gae": ({"gamma": 0.9, "lam": 0.8}, None),
    "gae, not whitened": ({"gamma": 0.9, "lam": 0.8, "whiten": False}, KL),
    "gae, lengths": ({"length_alpha": 0.05, "lam_critic": 1.0}, KL),
    "reinforce_pp": ({"gamma": 0.95}, KL),
    "remax": ({}, KL),
    "teacher_gap": ({}, None),
    "safe_rlhf": ({"gamma": 0.9}, KL),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ESTIMATORS)
def test_advantages_of_tokens_are_those_of_the_function_on_the_whole_batch(
    hosts: Mapping[int, Hosts], case: str
) -> None:
    """To the bit on any number of ranks; against the whole batch, too, but for the two sums of a whitening,
    which are summed in another order in float64."""
    name, (options, kl) = case.partition(",")[0], ESTIMATORS[case]
    constraint = ConstraintConfig(cost="harm") if name == "safe_rlhf" else None
    algorithm = AlgorithmConfig(advantage=FunctionConfig(name, options), kl=kl, constraint=constraint)
    found = {devices: one.stepped(AdvantageStage(algorithm)) for devices, one in hosts.items()}
    columns, metrics = found[1]
    for others, their_metrics in (found[2], found[3]):
        assert others.keys() == columns.keys()
        for one, column in columns.items():
            np.testing.assert_array_equal(others[one], column, err_msg=one)
        assert their_metrics == pytest.approx(metrics, rel=1e-6)

    function = lookup("advantage", name)
    given = {one: padded(one) for one in (*TOKENS, "response_mask")}
    given |= {one: torch.from_numpy(ROWS[one]) for one in ("reward", "greedy_reward")}
    coef = 0.15 if name == "safe_rlhf" else 0.3
    tokens = given["response_mask"], given["old_log_probs"], given["ref_log_probs"]
    estimator = None if kl is None else kl.name
    given["token_rewards"], _ = kl_reward(given["reward"], *tokens, estimator=estimator, coef=coef)
    costs = torch.from_numpy(ROWS["score/harm"])
    given["token_costs"], _ = kl_reward(costs, *tokens, estimator=estimator, coef=-coef)
    given["multiplier"] = torch.tensor(0.5)
    given["response_mask"] = given["response_mask"] * torch.from_numpy(ROWS["sample_weight"])[:, None]
    reads = function.__wrapped__.__code__.co_varnames[: function.__wrapped__.__code__.co_argcount]
    made = function(**{one: given[one] for one in reads}, **options)
    if not isinstance(made, dict):
        made = dict(
            zip(("advantages", "returns"), made if isinstance(made, tuple) else (made,), strict=False)
        )
    whitened = name in ("gae", "reinforce_pp") and options.get("whiten", True)
    for one, column in made.items():
        expected = flat(column)
        np.testing.assert_allclose(columns[one], expected, rtol=2e-7 if whitened else 0, atol=0)
        assert np.mean(columns[one] == expected) > 0.999
    assert metrics["actor/advantage_abs"] > 0


def test_a_kl_in_the_reward_of_whole_answers(hosts: Mapping[int, Hosts]) -> None:
    """The rewards less the KL of their tokens come from the workers, and GRPO has them on the controller."""
    algorithm = AlgorithmConfig(advantage=FunctionConfig("grpo"), kl=KL)
    found = {devices: one.stepped(AdvantageStage(algorithm)) for devices, one in hosts.items()}
    mask = padded("response_mask")
    tokens, _ = kl_reward(
        torch.from_numpy(ROWS["reward"]),
        mask,
        padded("old_log_probs"),
        padded("ref_log_probs"),
        estimator="k3",
        coef=0.3,
    )
    reward = torch.where((mask > 0).any(1), tokens.sum(1), torch.from_numpy(ROWS["reward"]))
    given = {"reward": reward, "group_id": torch.from_numpy(ROWS["group_id"])}
    expected = lookup("advantage", "grpo")(**given)
    for columns, metrics in found.values():
        np.testing.assert_array_equal(columns["advantages"], expected.numpy())
        assert metrics["actor/kl_reward"] == pytest.approx(found[1][1]["actor/kl_reward"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("normalize", [False, True])
def test_the_correction_is_the_same_on_any_number_of_ranks(
    hosts: Mapping[int, Hosts], level: str, normalize: bool
) -> None:
    """Weights, masks and counts to the bit, diagnostics to the order of their sums."""
    config = RolloutCorrectionConfig(
        importance=ImportanceConfig(level, upper=2.0, normalize=normalize),
        reject=(DivergenceRejectionConfig("k3", 0.6, "max"),),
    )
    found = {devices: one.stepped(CorrectionStage(config)) for devices, one in hosts.items()}
    columns, metrics = found[1]
    weights, mask = columns["rollout_weights"], columns["response_mask"]
    assert 0 < mask.sum() < flat(padded("response_mask")).sum()
    assert not weights[mask == 0].any()
    for others, their_metrics in (found[2], found[3]):
        for one, column in columns.items():
            np.testing.assert_array_equal(others[one], column, err_msg=one)
        assert their_metrics == pytest.approx(metrics, rel=1e-12)
    of_rows = np.split(mask, np.cumsum(ROWS["response_length"])[:-1])
    assert columns["num_trained_tokens"].tolist() == [int(row.sum()) for row in of_rows]
    if normalize:
        often = np.repeat(ROWS["sample_weight"], ROWS["response_length"])
        if level == "token":
            assert float((often * weights).sum() / (often * mask).sum()) == pytest.approx(1.0, rel=1e-6)
    else:
        ratio = np.exp(flat(padded("old_log_probs")).astype(np.float64) - flat(padded("rollout_log_probs")))
        if level == "token":
            expected = np.where(mask > 0, np.minimum(ratio, 2.0), 0.0).astype(np.float32)
            np.testing.assert_allclose(weights, expected, rtol=1e-6)
