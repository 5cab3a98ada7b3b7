"""The losses over pairs: what a pair's numbers are made of, weights, masks, cuts, and what is refused."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rondo.algorithms.pair_objective import PreferenceLoss, RewardModelLoss
from rondo.config.schema import AlgorithmConfig, FunctionConfig
from rondo.core.errors import ConfigError, TrainError
from tests.messages import full_text

LENGTHS = [3, 2, 1, 4, 2, 2]  # three pairs
CUTS = ([[0, 1, 2]], [[0], [1], [2]], [[2, 0], [1]])


class Pairs:
    """Six rows of three pairs, float64, NaN where the mask is 0: a hole in row 0, the last token of row 3."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.row = torch.repeat_interleave(torch.arange(6), torch.tensor(LENGTHS))
        self.mask = torch.ones(len(self.row), dtype=torch.bool)
        self.mask[[1, 9]] = False

        def draw() -> Tensor:
            return torch.randn(len(self.row), generator=generator, dtype=torch.float64)

        hidden = torch.where(self.mask, 0.0, math.nan)
        self.outputs = {"log_probs": draw() + hidden, "scores": draw()}
        per_row = {
            "unit": torch.tensor([7, 7, 3, 3, 9, 9]),
            "loss_weight": torch.full((6,), 1 / 3, dtype=torch.float64),
            "margin": torch.tensor([0.5, 0.5, 0.0, 0.0, 1.0, 1.0]),
            "safe": torch.tensor([-1.0, 1.0, -1.0, -1.0, 1.0, 1.0]),
        }
        self.columns = {name: value[self.row] for name, value in per_row.items()}
        self.columns |= {"response_mask": self.mask.to(torch.uint8), "ref_log_probs": draw() + hidden}
        self.last = torch.tensor(np.cumsum(LENGTHS) - 1)

    def sums(self, name: str) -> Tensor:
        """Per row, over the mask, of outputs[name] (minus the reference's for log_ratio)."""
        values = self.outputs["log_probs"] - (self.columns["ref_log_probs"] if name == "log_ratio" else 0)
        return torch.stack([values[(self.row == i) & self.mask].sum() for i in range(6)])

    def run(self, loss: Any, cuts: Sequence[Sequence[int]]) -> tuple[float, Tensor, dict[str, float]]:
        """(Σ loss, gradient of its output, means of the metrics), micro-batches of pairs as in `cuts`."""
        leaf = self.outputs[loss.outputs[0]].clone().requires_grad_()
        total, sums = 0.0, dict[str, Any]()
        for pairs in cuts:
            rows = [row for pair in pairs for row in (2 * pair, 2 * pair + 1)]
            where = torch.cat([torch.nonzero(self.row == row).squeeze(1) for row in rows])
            bounds = torch.tensor([0, *np.cumsum([LENGTHS[row] for row in rows])], dtype=torch.int32)
            columns = {name: self.columns[name][where] for name in loss.columns}
            value, metrics = loss({loss.outputs[0]: leaf[where]}, columns, bounds)
            value.backward()
            total += value.item()
            for name, metric in metrics.items():
                sums[name] = sums.get(name, 0) + torch.stack(metric)
        return total, leaf.grad, {name: (pair[0] / pair[1]).item() for name, pair in sums.items()}


def both(function: str, **options: Any) -> FunctionConfig:
    return FunctionConfig(function, options)


LOSSES = [
    PreferenceLoss(both("dpo", beta=0.3)),
    PreferenceLoss(both("ipo", beta=0.3)),
    RewardModelLoss(both("bradley_terry")),
    RewardModelLoss(both("cost_bradley_terry")),
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss._config.name)
def test_cuts_change_nothing_and_the_mask_hides_everything(loss: Any) -> None:
    pairs = Pairs()
    whole, gradient, metrics = pairs.run(loss, CUTS[0])
    assert gradient.isfinite().all()
    if loss.outputs == ("log_probs",):
        assert bool((gradient[~pairs.mask] == 0).all())
        assert bool((gradient[pairs.mask] != 0).all())
    for cuts in CUTS[1:]:
        total, part, part_metrics = pairs.run(loss, cuts)
        assert total == pytest.approx(whole, rel=1e-12)
        torch.testing.assert_close(part, gradient, rtol=1e-12, atol=0)
        assert part_metrics == pytest.approx(metrics, rel=1e-12)


def test_dpo_is_the_mean_over_pairs_of_sums_over_trained_tokens() -> None:
    pairs = Pairs()
    ratio = pairs.sums("log_ratio")
    h = 0.3 * (ratio[0::2] - ratio[1::2])
    expected = -torch.nn.functional.logsigmoid(h).mean()
    total, gradient, metrics = pairs.run(LOSSES[0], CUTS[0])
    assert total == metrics["pair/loss"] == pytest.approx(expected.item())
    assert metrics["pair/margin"] == pytest.approx(h.mean().item())
    assert metrics["pair/accuracy"] == pytest.approx((h > 0).double().mean().item())
    slope = (0.3 * (torch.sigmoid(h) - 1) / 3).repeat_interleave(2) * torch.tensor([1.0, -1.0]).repeat(3)
    torch.testing.assert_close(gradient, slope[pairs.row] * pairs.mask)


def test_dpo_on_the_reference_is_log_2() -> None:
    pairs = Pairs()
    pairs.columns["ref_log_probs"] = pairs.outputs["log_probs"].clone()
    total, gradient, _ = pairs.run(LOSSES[0], CUTS[1])
    assert total == pytest.approx(math.log(2))
    assert gradient[0].item() == pytest.approx(-0.15 / 3)


def test_a_score_is_that_after_the_last_token_whatever_the_mask() -> None:
    pairs = Pairs()
    scores = pairs.outputs["scores"][pairs.last]
    difference = scores[0::2] - scores[1::2] - torch.tensor([0.5, 0.0, 1.0])
    elsewhere = torch.ones(len(pairs.row), dtype=torch.bool)
    elsewhere[pairs.last] = False
    pairs.outputs["scores"][elsewhere] = math.nan
    total, gradient, metrics = pairs.run(LOSSES[2], CUTS[0])
    assert total == pytest.approx(-torch.nn.functional.logsigmoid(difference).mean().item())
    assert bool((gradient[elsewhere] == 0).all())
    torch.testing.assert_close(gradient[pairs.last][0::2], (torch.sigmoid(difference) - 1) / 3)
    assert metrics["pair/accuracy"] == pytest.approx((scores[0::2] > scores[1::2]).double().mean().item())


def test_the_cost_model_reads_safe_of_both_rows() -> None:
    pairs = Pairs()
    cost = pairs.outputs["scores"][pairs.last]
    harm = -pairs.columns["safe"][pairs.last]
    log_sigmoid = torch.nn.functional.logsigmoid
    expected = -log_sigmoid(cost[0::2] - cost[1::2]) - log_sigmoid((harm * cost).reshape(3, 2)).sum(1)
    assert pairs.run(LOSSES[3], CUTS[0])[0] == pytest.approx(expected.mean().item())


def test_columns_follow_from_what_the_function_reads() -> None:
    algorithm = AlgorithmConfig()
    policy, scores = PreferenceLoss(algorithm.preference_loss), RewardModelLoss(algorithm.reward_model_loss)
    assert (policy.outputs, scores.outputs) == (("log_probs",), ("scores",))
    basic = ("response_mask", "loss_weight", "unit")
    assert policy.columns == (*basic, "ref_log_probs")
    assert scores.columns == (*basic, "margin")
    assert LOSSES[3].columns == (*basic, "safe")
    assert PreferenceLoss(both(f"{__name__}:free_of_reference")).columns == (*basic, "margin")


def free_of_reference(
    chosen_log_prob: Tensor,
    rejected_log_prob: Tensor,
    chosen_length: Tensor,
    rejected_length: Tensor,
    margin: Tensor,
    *,
    gamma: float = 1.0,
) -> tuple[Tensor, dict[str, Any]]:
    difference = chosen_log_prob / chosen_length - rejected_log_prob / rejected_length
    return torch.nn.functional.softplus(margin * gamma - difference), {}


def test_a_loss_of_ones_own_reads_any_quantity() -> None:
    pairs = Pairs()
    lengths = torch.tensor([2.0, 2, 1, 3, 2, 2])  # trained tokens
    mean = pairs.sums("log_prob") / lengths
    expected = torch.nn.functional.softplus(
        torch.tensor([0.5, 0.0, 1.0]) * 2 - (mean[0::2] - mean[1::2])
    ).mean()
    loss = PreferenceLoss(both(f"{__name__}:free_of_reference", gamma=2.0))
    assert pairs.run(loss, CUTS[2])[0] == pytest.approx(expected.item())


def lone_number(chosen_log_prob: Tensor, rejected_log_prob: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return (chosen_log_prob - rejected_log_prob).sum(), {}


def test_what_is_no_loss_per_pair_is_named() -> None:
    with pytest.raises(TrainError, match="lone_number"):
        Pairs().run(PreferenceLoss(both(f"{__name__}:lone_number")), CUTS[0])


@pytest.mark.parametrize("loss", LOSSES[::2], ids=lambda loss: loss._config.name)
def test_rows_that_are_no_pairs_are_refused(loss: Any) -> None:
    pairs = Pairs()
    columns = {name: pairs.columns[name] for name in loss.columns}
    outputs = {loss.outputs[0]: pairs.outputs[loss.outputs[0]]}
    bounds = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
    with pytest.raises(TrainError, match="not preference pairs"):  # shifted by one row
        loss({k: v[3:] for k, v in outputs.items()}, {k: v[3:] for k, v in columns.items()}, bounds[1:] - 3)
    with pytest.raises(TrainError, match="not preference pairs"):
        loss(outputs, columns | {"unit": torch.tensor([7, 3, 7, 3, 9, 9])[pairs.row]}, bounds)
    with pytest.raises(TrainError, match="no response tokens"):
        loss(outputs, columns, torch.cat([bounds, bounds[-1:]]))


@pytest.mark.parametrize(
    ("make", "name", "options", "message"),
    [
        (PreferenceLoss, "dpp", {}, r"algorithm\.preference_loss.*dpo"),
        (PreferenceLoss, "dpo", {"bata": 1.0}, r"algorithm\.preference_loss.*beta"),
        (PreferenceLoss, "dpo", {"beta": -1.0}, "dpo needs beta > 0, got -1.0"),
        (PreferenceLoss, "bradley_terry", {}, full_text("algorithm.preference_loss: bradley_terry")),
        (RewardModelLoss, "dpo", {}, full_text("algorithm.reward_model_loss: dpo reads")),
        (RewardModelLoss, "bradly", {}, full_text("algorithm.reward_model_loss: unknown")),
    ],
)
def test_what_does_not_fit_is_refused_at_the_start(
    make: Any, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(both(name, **options))


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss._config.name)
def test_losses_survive_pickling(loss: Any) -> None:
    copy = pickle.loads(pickle.dumps(loss))
    assert (type(copy), copy.outputs, copy.columns) == (type(loss), loss.outputs, loss.columns)
    pairs = Pairs()
    assert pairs.run(copy, CUTS[0])[0] == pairs.run(loss, CUTS[0])[0]


def test_float32_is_kept() -> None:
    pairs = Pairs()
    bounds = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
    for loss in LOSSES:
        columns = {name: pairs.columns[name] for name in loss.columns}
        name = loss.outputs[0]
        assert loss({name: pairs.outputs[name].float()}, columns, bounds)[0].dtype == torch.float32
