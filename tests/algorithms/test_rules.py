"""The rules that every built-in function keeps, whatever is added: exact zeros, masks, finiteness, no order,
and gradients that no split of the mini-batch changes. A new function is covered as soon as it is registered,
with a new column as soon as it is in the table of `rondo.algorithms.trial`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rondo.algorithms import ActorLoss, CriticLoss, kl_reward, names
from rondo.algorithms.aggregation import loss_weights, token_mean
from rondo.algorithms.registry import (
    Kind,
    bind,
    bind_preparation,
    columns_read,
    is_zero_at_zero_advantage,
    lookup,
)
from rondo.algorithms.trial import example_columns
from rondo.config.schema import AlgorithmConfig, FunctionConfig, KlConfig
from rondo.core.columns import TABLE

# Options that a function needs and has no default for.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "passk_analytic": {"k": 2},
    "chunk-mean-token-mean": {"rows": 2},
    "seq-mean-token-sum-norm": {"divisor": 8.0},
    "trajectory-mean-token-sum-norm": {"divisor": 8.0},
}
# Estimators for which equal rewards in a group are not "no signal".
NO_GROUP_BASELINE = {
    "gae": "the baseline is the critic's",
    "bi_level_gae": "likewise",
    "safe_rlhf": "the baselines are the critics'",
    "reinforce_pp": "the baseline is the mean of the whole batch",
    "teacher_gap": "reads no reward",
    "vineppo": "whitened over the whole batch",
    "tree_grpo": "an answer that is a group, or a tree, by itself has its reward",
    "treerl": "less the mean over the tokens of the whole batch",
}
few = settings(max_examples=6, deadline=None, derandomize=True)
group_sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4)
seeds = st.integers(0, 2**20)


def chosen(kind: Kind, name: str) -> FunctionConfig:
    return FunctionConfig(name, OPTIONS.get(name, {}))


# --- advantage estimators ---


def rows_of(sizes: Sequence[int], seed: int, num_equal: int = 0) -> dict[str, Tensor]:
    """Every column that an estimator may read, float64; a third of the rows has no trained token, and what
    stands where the mask is 0 is NaN. In the first `num_equal` groups, rewards are one (non-dyadic) number.
    Only what means more than a random number is spelt out.
    """
    random = np.random.default_rng(seed)
    group = np.repeat(np.arange(len(sizes)), sizes)
    equal = group < num_equal
    size, width = len(group), 5
    mask = (random.random((size, width)) < 0.7) & (random.random((size, 1)) < 0.67)
    of_group = random.choice([0.1, 0.9, 9.1, -100.7], len(sizes))[group]
    reward = np.where(equal, of_group, random.choice([-1.0, 0.3, 0.9], size))
    accuracy = np.where(equal, of_group > 0, random.integers(0, 2, size))
    level = np.repeat(of_group[:, None], width, 1)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.from_numpy(np.asarray(random.standard_normal(shape)))

    columns = example_columns(torch.from_numpy(mask).to(torch.float64), fill=draw) | {
        "reward": torch.from_numpy(reward),
        "accuracy": torch.from_numpy(np.asarray(accuracy, np.float64)),
        "greedy_reward": torch.from_numpy(of_group),
        "step_reward": torch.from_numpy(reward),
        "scores": torch.from_numpy(np.stack([reward, 3 * reward], 1)),
        "group_id": torch.from_numpy(group),
        "anchor_id": torch.from_numpy(random.integers(0, 2, size)),
        "num_trained_tokens": torch.from_numpy(mask.sum(1)),
        "multiplier": torch.tensor(0.7, dtype=torch.float64),
        "sum_p_squared": torch.from_numpy(random.random((size, width))),
        "tree_id": torch.from_numpy(group),
        "parent_id": torch.full((size,), -1),
        "branch_values": torch.where(
            torch.from_numpy(equal)[:, None], torch.from_numpy(level), draw((size, width))
        ),
        "process_rewards": torch.where(
            torch.from_numpy(equal)[:, None], torch.from_numpy(level), draw((size, width))
        ),
    }
    for name in (c.name for c in TABLE if c.per == "token" and c.is_float and c.name in columns):
        values = -columns[name].abs() if name.endswith("log_probs") else columns[name]
        columns[name] = torch.where(columns["response_mask"] > 0, values, torch.nan)
    for name in ("token_rewards", "token_costs"):
        columns[name] = kl_reward(columns["reward"], columns["response_mask"])[0]
    return columns


def estimate(name: str, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    function = bind("advantage", chosen("advantage", name))
    result = function(**{column: columns[column] for column in columns_read(function)})
    if isinstance(result, tuple):
        result = dict(zip(("advantages", "returns"), result, strict=True))
    return dict(result) if isinstance(result, Mapping) else {"advantages": result}


estimators = pytest.mark.parametrize("name", names("advantage"))


@pytest.mark.parametrize("name", [name for name in names("advantage") if name not in NO_GROUP_BASELINE])
@few
@given(sizes=group_sizes, seed=seeds)
def test_equal_rewards_give_exactly_nothing(name: str, sizes: list[int], seed: int) -> None:
    for dtype in (torch.float32, torch.float64):
        columns = {
            column: value.to(dtype) if value.is_floating_point() else value
            for column, value in rows_of(sizes, seed, num_equal=len(sizes)).items()
        }
        advantages = estimate(name, columns)["advantages"]
        assert torch.equal(advantages, torch.zeros_like(advantages))


@pytest.mark.parametrize("name", [name for name in names("advantage") if name not in NO_GROUP_BASELINE])
@few
@given(sizes=group_sizes, seed=seeds)
def test_a_group_without_signal_gets_exactly_nothing_among_others(
    name: str, sizes: list[int], seed: int
) -> None:
    """A constant group and a single response beside groups that differ (statistics of the batch mix them).

    Exceptions as above; the greedy answer (remax) has the reward of such a group here.
    """
    columns = rows_of([3, 1, *sizes, 4], seed, num_equal=2)
    advantages = estimate(name, columns)["advantages"]
    assert not advantages[:4].any()


@estimators
@few
@given(sizes=group_sizes, seed=seeds)
def test_finite_and_zero_where_masked(name: str, sizes: list[int], seed: int) -> None:
    """Groups of one, rows and whole batches without trained tokens, NaN where the mask is 0."""
    columns = rows_of(sizes, seed)
    masked = {
        "response_mask": 0 * columns["response_mask"],
        "num_trained_tokens": 0 * columns["num_trained_tokens"],
    }
    nothing = columns | masked | {"token_rewards": 0 * columns["token_rewards"]}
    for given_columns in (columns, nothing, {**rows_of([1], seed)}):
        mask = given_columns["response_mask"]
        for value in estimate(name, given_columns).values():
            assert value.shape in (mask.shape, mask.shape[:1])
            assert bool(value.isfinite().all())
            if value.ndim == 2:
                assert not value[mask == 0].any()


@estimators
@few
@given(sizes=group_sizes, seed=seeds)
def test_neither_the_order_of_rows_nor_the_names_of_groups_matter(
    name: str, sizes: list[int], seed: int
) -> None:
    columns = rows_of(sizes, seed)
    random = np.random.default_rng(seed)
    order = torch.from_numpy(random.permutation(sum(sizes)))
    labels = {
        "group_id": torch.from_numpy(random.permutation(1000)[: len(sizes)] - 500),
        "trajectory_id": torch.from_numpy(random.permutation(1000)[: sum(sizes)]),
        "anchor_id": torch.tensor([40, -3]),
    }
    moved = {
        column: labels[column][value] if column in labels else value for column, value in columns.items()
    }
    moved = {column: value[order] if value.ndim else value for column, value in moved.items()}
    before, after = estimate(name, columns), estimate(name, moved)
    assert before.keys() == after.keys()
    for column, value in before.items():
        torch.testing.assert_close(after[column], value[order], rtol=1e-9, atol=1e-9)


# --- losses ---

LENGTHS = [3, 1, 4, 2, 5, 3]


class MiniBatch:
    """Six packed responses, float64: row 1 has no trained token, rows 0 and 4 have holes. NaN where the mask
    is 0, in outputs and columns alike.
    """

    def __init__(self, seed: int, gap: float = 0.3) -> None:
        random = np.random.default_rng(seed)
        self.row = torch.repeat_interleave(torch.arange(6), torch.tensor(LENGTHS))
        size = len(self.row)
        self.mask = torch.ones(size, dtype=torch.bool)
        self.mask[[1, 3, 12]] = False

        def draw(scale: float = 1.0, *shape: int) -> Tensor:
            return torch.from_numpy(scale * random.standard_normal((size, *shape)))

        old = -draw().abs()
        tokens = torch.zeros(6).index_add(0, self.row, self.mask.float()).numpy()
        weight = torch.from_numpy(loss_weights(token_mean, tokens, np.zeros(6)))[self.row]
        advantages = torch.from_numpy(random.standard_normal(6))[self.row]
        self.outputs = {
            "log_probs": old + draw(gap),
            "entropy": draw().abs(),
            "values": draw(),
            "topk_log_probs": -draw(1.0, 3).abs() + gap,
        }
        given = example_columns(self.mask.double(), fill=lambda shape: draw(1.0, *shape[1:]))
        self.columns = {name: given[name] for name in given if len(given[name]) == size} | {
            "advantages": advantages,
            "loss_weight": weight,
            "critic_loss_weight": weight,
            "old_log_probs": old,
            "rollout_log_probs": old + draw(0.01),
            "ref_log_probs": old + draw(0.2),
            "teacher_log_probs": old + draw(0.2),
            "teacher_topk_log_probs": -draw(1.0, 3).abs() - gap,
        }
        for table in (self.outputs, self.columns):
            for name, value in table.items():
                mask = self.mask if value.ndim == 1 else self.mask[:, None]
                table[name] = value if "weight" in name else torch.where(mask, value, torch.nan)
        self.columns["response_mask"] = self.mask.to(torch.uint8)
        self.columns["given"] = (self.row % 2).to(torch.uint8)
        self.columns["given_log_probs"] = torch.where(self.mask & (self.row % 2 == 1), old + draw(0.2), 0.0)
        self.columns["replaying"] = torch.ones(size, dtype=torch.float64)
        self.columns["teacher_topk_ids"] = torch.zeros(size, 3, dtype=torch.int32)

    def prepare(self, policy_loss: FunctionConfig) -> None:
        """What the loss's preparation makes of the mini-batch, if it has one, as columns."""
        prepare = bind_preparation(policy_loss)
        if prepare is None:
            return
        there = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
        given_columns: dict[str, Any] = {}
        for name in set(columns_read(prepare)) - {"seed"}:
            flat = torch.where(self.mask, self.columns[name].to(torch.float64), 0.0)
            given_columns[name] = torch.zeros(there.shape, dtype=torch.float64).masked_scatter(there, flat)
        seed = {"seed": 5} if "seed" in inspect.signature(prepare).parameters else {}
        made = prepare(**given_columns, **seed)
        self.columns |= {name: column[there] for name, column in made.items()}

    def gradients(self, loss: Any, parts: list[list[int]]) -> tuple[float, dict[str, Tensor]]:
        """(Σ loss, gradient of each of the loss's outputs), with the rows processed in `parts`."""
        leaves = {name: self.outputs[name].clone().requires_grad_() for name in loss.outputs}
        total = 0.0
        for rows in parts:
            where = torch.cat([torch.nonzero(self.row == row).squeeze(1) for row in rows])
            bounds = torch.tensor([0, *np.cumsum([LENGTHS[row] for row in rows])], dtype=torch.int32)
            value, metrics = loss(
                {name: leaf[where] for name, leaf in leaves.items()},
                {name: self.columns[name][where] for name in loss.columns},
                bounds,
            )
            assert all(
                torch.stack([*m] if isinstance(m, tuple) else [m]).isfinite().all() for m in metrics.values()
            )
            if value.requires_grad:
                value.backward()
            total += value.item()
        return total, {name: _gradient(leaf) for name, leaf in leaves.items()}


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


WHOLE = [[0, 1, 2, 3, 4, 5]]
SPLITS = ([[0], [1], [2], [3], [4], [5]], [[5, 1], [3, 0, 4], [2]])


def check_gradients(loss: Any, batch: MiniBatch) -> None:
    """Finite, exactly 0 where the mask is 0, and the same however the mini-batch is cut."""
    total, whole = batch.gradients(loss, WHOLE)
    assert np.isfinite(total)
    for gradient in whole.values():
        assert bool(gradient.isfinite().all())
        assert not gradient[~batch.mask].any()
    for split in SPLITS:
        again, parts = batch.gradients(loss, split)
        assert again == pytest.approx(total, rel=1e-12, abs=1e-12)
        for name, gradient in whole.items():
            torch.testing.assert_close(parts[name], gradient, rtol=1e-12, atol=1e-12)


policy_losses = pytest.mark.parametrize("name", names("policy_loss"))


def actor(name: str, kl: KlConfig | None = None) -> Any:
    return ActorLoss(AlgorithmConfig(policy_loss=chosen("policy_loss", name), kl=kl))


@policy_losses
@few
@given(seed=seeds)
def test_policy_losses_respect_masks_and_splits(name: str, seed: int) -> None:
    batch = MiniBatch(seed)
    batch.prepare(chosen("policy_loss", name))
    check_gradients(actor(name), batch)


@policy_losses
@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_policy_losses_are_finite_at_huge_log_ratios(name: str, gap: float) -> None:
    batch = MiniBatch(0)
    for column in ("old_log_probs", "teacher_log_probs", "ref_log_probs"):
        batch.columns[column] = torch.where(
            torch.arange(len(batch.row)) % 3 > 0, batch.columns[column] - gap, -1.0
        )
    batch.columns["teacher_topk_log_probs"] -= abs(gap)
    batch.prepare(chosen("policy_loss", name))
    total, gradients = batch.gradients(actor(name), WHOLE)
    assert np.isfinite(total)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values())


@policy_losses
def test_rows_without_advantage_have_no_part_where_that_is_claimed(name: str) -> None:
    if not is_zero_at_zero_advantage(lookup("policy_loss", name)):
        return
    batch = MiniBatch(1)
    batch.columns["advantages"] = torch.where(
        (batch.row == 2) | ~batch.mask, 0.0, batch.columns["advantages"]
    )
    batch.prepare(chosen("policy_loss", name))
    for gradient in batch.gradients(actor(name), WHOLE)[1].values():
        assert not gradient[batch.row == 2].any()
        if name != "top_entropy":  # which keeps tokens of other rows, perhaps of this one alone
            assert gradient[batch.row == 5].any()
    assert batch.gradients(actor(name), [[2]])[0] == 0.0


@pytest.mark.parametrize("name", [name for name in names("kl") if name != "k1"])
@few
@given(seed=seeds)
def test_kl_in_the_loss_respects_masks_and_splits(name: str, seed: int) -> None:
    check_gradients(actor("ppo_clip", KlConfig(name, "loss", 0.1)), MiniBatch(seed))


@pytest.mark.parametrize("name", names("kl"))
def test_kl_estimators_are_zero_at_equality_and_finite_far_away(name: str) -> None:
    function = lookup("kl", name)
    for gap, is_far in ((0.0, False), (1e4, True), (-1e4, True)):
        log_probs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
        same = log_probs.detach()
        table = {"log_probs": log_probs, "ref_log_probs": same - gap, "old_log_probs": same - gap}
        value = function(**{column: table[column] for column in columns_read(function)})
        value.sum().backward()
        assert log_probs.grad is not None
        assert bool(value.isfinite().all() & log_probs.grad.isfinite().all())
        assert is_far or not value.any()


@pytest.mark.parametrize("name", names("value_loss"))
@few
@given(seed=seeds)
def test_value_losses_respect_masks_and_splits(name: str, seed: int) -> None:
    loss = CriticLoss(chosen("value_loss", name))
    check_gradients(loss, MiniBatch(seed))
    far = MiniBatch(seed)
    far.columns["returns"] = 1e4 * far.columns["returns"]
    assert bool(far.gradients(loss, WHOLE)[1]["values"].isfinite().all())


# Chunks are of rows in their order.
@pytest.mark.parametrize("name", [name for name in names("aggregation") if name != "chunk-mean-token-mean"])
@few
@given(tokens=st.lists(st.integers(0, 9), max_size=6), seed=seeds)
def test_aggregations_ignore_empty_rows_and_order(name: str, tokens: list[int], seed: int) -> None:
    chosen_mode = bind("aggregation", chosen("aggregation", name))
    lengths = np.array(tokens, np.float64)
    owners = np.random.default_rng(seed).integers(0, 3, len(tokens) + 1)

    def aggregate(rows: np.ndarray, of: np.ndarray) -> np.ndarray:
        return loss_weights(chosen_mode, rows, np.zeros(len(rows)), of)

    weights = aggregate(lengths, owners[:-1])
    assert weights.shape == lengths.shape
    assert np.isfinite(weights).all()
    assert not weights[lengths == 0].any()
    assert (weights[lengths > 0] > 0).all()
    order = np.random.default_rng(seed).permutation(len(lengths))
    np.testing.assert_allclose(aggregate(lengths[order], owners[order]), weights[order], rtol=1e-12)
    with_empty = aggregate(np.append(lengths, 0.0), owners)
    np.testing.assert_allclose(with_empty, np.append(weights, 0.0), rtol=1e-12)


def test_the_exceptions_still_exist() -> None:
    assert set(NO_GROUP_BASELINE) <= set(names("advantage"))
    assert set(OPTIONS) <= set(names("advantage")) | set(names("aggregation")) | set(names("policy_loss"))
