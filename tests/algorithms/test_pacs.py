"""PACS: the reference's example by hand, the loss differentiated as a whole, and cuts that change nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rondo.algorithms.policy_losses.pacs import classified
from tests.algorithms.policy_losses import D, bound, call

RIGHT = [1.0, 0.0, 0.0, 1.0]


def prepared(delta: Tensor, right: list[float], groups: list[int], mask: Tensor, **options: Any) -> Any:
    """What is made of answers [B, T] whose log-ratios are `delta`."""
    shape = delta.shape
    return classified(
        delta,
        torch.zeros(shape, dtype=torch.float64),
        torch.tensor(groups)[:, None].expand(shape),
        D(right)[:, None].expand(shape),
        mask,
        **options,
    )


def whole(delta: Tensor, right: Tensor, groups: list[list[int]], beta: float, balance: bool) -> Tensor:
    """The loss of answers [B], written as the paper has it."""
    total = delta.new_zeros(())
    for group in groups:
        for i in group:
            others = [beta * delta[j] for j in group if j != i]
            psi = beta * delta[i] - sum(others) / len(others)
            alike = sum(bool(right[j] == right[i]) for j in group)
            weight = len(group) / (2 * alike) if balance and alike < len(group) else 1.0
            total = total + weight * functional.softplus(-psi if right[i] else psi)
    return total / len(delta)


def test_the_references_example() -> None:
    delta = D([[0.2], [-0.1], [0.4], [-0.3]])
    made = prepared(delta, RIGHT, [7] * 4, torch.ones_like(delta))
    torch.testing.assert_close(
        made["pacs_gradient"][:, 0] / 4, D([-0.150055, 0.150055, 0.204865, -0.204865]), rtol=0, atol=1e-6
    )
    assert made["pacs_loss"].mean().item() == pytest.approx(0.775799, abs=1e-6)
    one_right = prepared(delta, [1.0, 0.0, 0.0, 0.0], [7] * 4, torch.ones_like(delta))
    assert one_right["pacs_loss"].mean().item() == pytest.approx(0.638801, abs=1e-6)


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("beta", [1.0, 2.5])
def test_its_gradient_is_that_of_the_whole_loss(beta: float, balance: bool) -> None:
    """Three groups, one of them all right; masked tokens count nowhere; the value is the loss, too."""
    generator = torch.Generator().manual_seed(1)
    delta = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    mask = (torch.rand(9, 5, generator=generator) < 0.7).to(torch.float64)
    mask[:, 0] = 1
    groups, right = [3, 3, 3, 5, 5, 5, 9, 9, 9], [1.0, 0, 0, 1, 1, 1, 0, 0, 1]
    made = prepared(delta, right, groups, mask, beta=beta, balance=balance)
    flat = delta.flatten().clone().requires_grad_()
    token_loss, metrics = call(
        bound("pacs"),
        flat,
        old_log_probs=torch.zeros(45, dtype=torch.float64),
        response_mask=mask.flatten(),
        cu_seqlens=torch.arange(0, 46, 5, dtype=torch.int32),
        **{name: (column * mask).flatten() for name, column in made.items()},
    )
    ours = (token_loss * mask.flatten()).sum() / 9  # seq-mean-token-sum
    leaf = delta.clone().requires_grad_()
    sides = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    expected = whole((leaf * mask).sum(1), D(right), sides, beta, balance)
    torch.testing.assert_close(ours, expected)
    gradients = [torch.autograd.grad(x, y)[0] for x, y in ((ours, flat), (expected, leaf))]
    torch.testing.assert_close(gradients[0].view(9, 5) * mask, gradients[1])
    numerator, denominator = metrics["actor/pacs_loss"]
    torch.testing.assert_close(numerator / denominator, expected)


def test_before_the_first_update_it_is_ln_2() -> None:
    delta = torch.zeros(4, 3, dtype=torch.float64)
    made = prepared(delta, RIGHT, [0] * 4, torch.ones_like(delta))
    assert made["pacs_loss"].mean().item() == pytest.approx(math.log(2))


def test_one_answer_has_nobody_to_be_compared_with() -> None:
    """No gradient; and an answer without trained tokens is none."""
    delta, mask = D([[1.0], [2.0], [3.0]]), D([[1.0], [1.0], [0.0]])
    made = prepared(delta, [1.0, 0.0, 1.0], [0, 1, 1], mask)
    assert made["pacs_gradient"].tolist() == [[0.0], [0.0], [0.0]]
    assert made["pacs_loss"][2].tolist() == [0.0]
