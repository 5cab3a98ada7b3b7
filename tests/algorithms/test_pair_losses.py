"""Losses of preference pairs: values and gradients by hand, identities, extremes."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rondo.algorithms import columns_read, lookup, names
from rondo.core.errors import ConfigError

D = functools.partial(torch.tensor, dtype=torch.float64)


def evaluate(name: str, chosen: Tensor, rejected: Tensor, *others: Tensor, **options: Any) -> Any:
    """(loss, gradient of chosen, gradient of rejected, means of the metrics)."""
    leaves = chosen.clone().requires_grad_(), rejected.clone().requires_grad_()
    loss, metrics = lookup("pair_loss", name)(*leaves, *others, **options)
    means = {key: (total / number).item() for key, (total, number) in metrics.items()}
    return loss.detach(), *torch.autograd.grad(loss.sum(), leaves), means


def dpo(chosen: Tensor, rejected: Tensor, name: str = "dpo", **options: Any) -> Any:
    """As `evaluate`, where lengths have no part."""
    lengths = [] if name == "spin" else [torch.full_like(chosen, 7.0), torch.full_like(chosen, 3.0)]
    return evaluate(name, chosen, rejected, *lengths, **options)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("name", ["dpo", "spin"])
def test_where_nothing_moved_dpo_is_log_2_with_half_of_beta_as_gradient(name: str) -> None:
    loss, chosen, rejected, metrics = dpo(D([0.0, 3.0]), D([0.0, 3.0]), name, beta=0.4)
    assert loss.tolist() == pytest.approx([math.log(2)] * 2)
    assert chosen.tolist() == pytest.approx([-0.2, -0.2])
    assert rejected.tolist() == pytest.approx([0.2, 0.2])
    assert metrics["pair/accuracy"] == 0  # a tie is wrong
    assert metrics["pair/margin"] == 0


def test_dpo_by_hand() -> None:
    """h = .5 · (1 - (-2)) = 1.5 and .5 · (-1 - 0) = -.5."""
    loss, chosen, rejected, metrics = dpo(D([1.0, -1.0]), D([-2.0, 0.0]), beta=0.5)
    assert loss.tolist() == pytest.approx([-math.log(sigmoid(1.5)), -math.log(sigmoid(-0.5))])
    assert chosen.tolist() == pytest.approx([0.5 * (sigmoid(1.5) - 1), 0.5 * (sigmoid(-0.5) - 1)])
    torch.testing.assert_close(rejected, -chosen)
    assert metrics == pytest.approx(
        {"pair/accuracy": 0.5, "pair/margin": 0.5, "pair/chosen": 0.0, "pair/rejected": -0.5}
    )


def test_smoothed_labels_mix_both_orders() -> None:
    chosen, rejected = D([1.0, -0.3]), D([-2.0, 0.4])
    mixed = dpo(chosen, rejected, label_smoothing=0.2)[0]
    right, wrong = dpo(chosen, rejected)[0], dpo(rejected, chosen)[0]
    torch.testing.assert_close(mixed, 0.8 * right + 0.2 * wrong)


def test_averaged_dpo_compares_log_ratios_per_token() -> None:
    """Per token 1/2 and -2/8: h = 2 · .75. Twice as long with twice the log-ratio is the same."""
    loss, chosen, rejected, metrics = evaluate(
        "dpo", D([1.0]), D([-2.0]), D([2.0]), D([8.0]), beta=2.0, average=True
    )
    assert loss.item() == pytest.approx(-math.log(sigmoid(1.5)))
    assert chosen.item() == pytest.approx(2.0 / 2 * (sigmoid(1.5) - 1))
    assert rejected.item() == pytest.approx(-2.0 / 8 * (sigmoid(1.5) - 1))
    assert metrics == pytest.approx(
        {"pair/accuracy": 1.0, "pair/margin": 1.5, "pair/chosen": 1.0, "pair/rejected": -0.5}
    )
    longer = evaluate("dpo", D([2.0]), D([-4.0]), D([4.0]), D([16.0]), beta=2.0, average=True)
    torch.testing.assert_close(longer[0], loss)


def test_reference_free_dpo_is_dpo_of_the_log_probs() -> None:
    chosen, rejected = D([-1.0, -3.0]), D([-2.0, -2.5])
    free = evaluate("dpo_reference_free", chosen, rejected, beta=0.3, label_smoothing=0.1)
    torch.testing.assert_close(free[:3], dpo(chosen, rejected, beta=0.3, label_smoothing=0.1)[:3])
    read = columns_read(lookup("pair_loss", "dpo_reference_free"))
    assert read == ("chosen_log_prob", "rejected_log_prob")


def test_simpo_by_hand() -> None:
    """Per token -.5 and -1, twice: a lead of 2 · .5, short of γ = 1.2 by .2; the metrics are without γ."""
    columns = D([-2.0]), D([-3.0]), D([4.0]), D([3.0])
    loss, chosen, rejected, metrics = evaluate("simpo", *columns, beta=2.0, gamma=1.2)
    assert loss.item() == pytest.approx(-math.log(sigmoid(-0.2)))
    assert chosen.item() == pytest.approx(2.0 / 4 * (sigmoid(-0.2) - 1))
    assert rejected.item() == pytest.approx(-2.0 / 3 * (sigmoid(-0.2) - 1))
    assert metrics == pytest.approx(
        {"pair/accuracy": 1.0, "pair/margin": 1.0, "pair/chosen": -1.0, "pair/rejected": -2.0}
    )
    averaged = evaluate("dpo", *columns, beta=2.0, average=True)[0]  # γ = 0: averaged DPO, reference free
    torch.testing.assert_close(evaluate("simpo", *columns, beta=2.0, gamma=0.0)[0], averaged)


def test_ipo_is_a_square_around_half_the_inverse_of_beta() -> None:
    loss, chosen, rejected, metrics = evaluate("ipo", D([0.0, 2.5]), D([0.0, 0.5]), beta=0.25)
    assert loss.tolist() == pytest.approx([4.0, 0.0])
    assert chosen.tolist() == pytest.approx([-4.0, 0.0])
    torch.testing.assert_close(rejected, -chosen)
    assert metrics["pair/margin"] == pytest.approx(0.25)


def test_sppo_of_a_certain_pair_is_the_loss_of_its_two_responses() -> None:
    chosen, rejected = D([0.2]), D([0.5])
    loss, *_ = evaluate("sppo_pair", chosen, rejected, eta=4.0)
    assert loss.item() == pytest.approx((0.2 - 2) ** 2 + (0.5 + 2) ** 2)
    both = lookup("policy_loss", "sppo")(
        D([0.2, 0.5]), D([0.0, 0.0]), D([0.5, -0.5]), D([1.0, 1.0]), torch.tensor([0, 1, 2]), eta=4.0
    )[0]
    assert loss.item() == pytest.approx(both.sum().item())


def test_bradley_terry_and_its_margin() -> None:
    margin = D([0.0, 1.0])
    loss, chosen, rejected, metrics = evaluate("bradley_terry", D([2.0, 0.5]), D([0.5, 0.0]), margin)
    assert loss.tolist() == pytest.approx([-math.log(sigmoid(1.5)), -math.log(sigmoid(-0.5))])
    assert chosen.tolist() == pytest.approx([sigmoid(1.5) - 1, sigmoid(-0.5) - 1])
    torch.testing.assert_close(rejected, -chosen)
    assert metrics == pytest.approx(
        {"pair/accuracy": 1.0, "pair/margin": 1.0, "pair/chosen": 1.25, "pair/rejected": 0.25}
    )


def test_dpo_is_bradley_terry_of_beta_times_the_log_ratios() -> None:
    chosen, rejected = D([1.0, -2.0]), D([-0.5, 0.3])
    ours = dpo(chosen, rejected, beta=0.3)[0]
    scores = evaluate("bradley_terry", 0.3 * chosen, 0.3 * rejected, D([0.0, 0.0]))[0]
    torch.testing.assert_close(ours, scores)


def test_cost_model_is_positive_for_harm() -> None:
    """Chosen is the more harmful: costs 2 (harmful) over -1 (safe); then -.5 (safe) over .5 (safe, wrong)."""
    loss, chosen, _, metrics = evaluate(
        "cost_bradley_terry", D([2.0, -0.5]), D([-1.0, 0.5]), D([-1.0, 1.0]), D([1.0, 1.0])
    )
    expected = [
        -math.log(sigmoid(3)) - math.log(sigmoid(2)) - math.log(sigmoid(1)),
        -math.log(sigmoid(-1)) - math.log(sigmoid(0.5)) - math.log(sigmoid(-0.5)),
    ]
    assert loss.tolist() == pytest.approx(expected)
    slopes = [sigmoid(3) - 1 + (sigmoid(2) - 1), sigmoid(-1) - 1 - (sigmoid(0.5) - 1)]
    assert chosen.tolist() == pytest.approx(slopes)
    assert metrics["pair/sign_accuracy"] == 0.75
    assert metrics["pair/accuracy"] == 0.5


def arguments(name: str, chosen: Tensor, rejected: Tensor) -> list[Tensor]:
    """One column per parameter; safe is +1, margin .5."""
    others = {"margin": 0.5 * torch.ones_like(chosen)}
    return [
        chosen if column in ("chosen_log_ratio", "chosen_log_prob", "chosen_score") else
        rejected if column in ("rejected_log_ratio", "rejected_log_prob", "rejected_score") else
        others.get(column, torch.ones_like(chosen))
        for column in columns_read(lookup("pair_loss", name))
    ]  # fmt: skip


@pytest.mark.parametrize("name", names("pair_loss"))
def test_extremes_stay_finite(name: str) -> None:
    for gap in (1e4, -1e4, 1e8, -1e8):
        chosen = torch.tensor([gap, gap, 0.0], requires_grad=True)
        rejected = torch.tensor([0.0, -gap, gap], requires_grad=True)
        loss, metrics = lookup("pair_loss", name)(*arguments(name, chosen, rejected))
        assert loss.isfinite().all()
        assert all(
            gradient.isfinite().all() for gradient in torch.autograd.grad(loss.sum(), [chosen, rejected])
        )
        assert all(value.isfinite() for pair in metrics.values() for value in pair)
    far = torch.tensor([-1e4], requires_grad=True)  # the worst pair still pulls with full strength
    loss, _ = lookup("pair_loss", name)(*arguments(name, far, torch.tensor([1e4])))
    assert torch.autograd.grad(loss.sum(), far)[0].item() < -0.05


@pytest.mark.parametrize("name", names("pair_loss"))
def test_gradients_in_float64(name: str) -> None:
    chosen, rejected = D([0.3, -1.0, 2.0]).requires_grad_(), D([0.1, 0.5, -0.7]).requires_grad_()
    function = lookup("pair_loss", name)
    assert torch.autograd.gradcheck(lambda c, r: function(*arguments(name, c, r))[0], (chosen, rejected))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dpo", {"beta": 0.0}),
        ("dpo", {"label_smoothing": 0.5}),
        ("dpo_reference_free", {"beta": 0.0}),
        ("simpo", {"beta": 0.0}),
        ("simpo", {"gamma": -0.5}),
        ("simpo", {"label_smoothing": 0.5}),
        ("ipo", {"beta": -1.0}),
        ("spin", {"beta": 0.0}),
        ("sppo_pair", {"eta": 0.0}),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.preference_loss"):
        lookup("pair_loss", name)(*arguments(name, D([0.0]), D([0.0])), **options)


def test_registered_functions_are_these() -> None:
    expected = {"dpo", "dpo_reference_free", "simpo", "ipo", "spin", "sppo_pair"}
    expected |= {"bradley_terry", "cost_bradley_terry"}
    assert set(names("pair_loss")) == expected
