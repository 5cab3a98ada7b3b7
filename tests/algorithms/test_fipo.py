"""FIPO: the reference's example, PPO at the first update, and what the dual clip leaves out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rondo.algorithms.policy_losses.fipo import discounted_from_end
from tests.algorithms.policy_losses import D, evaluate, random_columns

TWO = torch.tensor([0, 3, 7], dtype=torch.int32)


@pytest.mark.parametrize("gamma", [0.5, 2 ** (-1 / 32), 1.0])
def test_sums_from_the_end_are_those_of_a_loop(gamma: float) -> None:
    generator = torch.Generator().manual_seed(0)
    cu = torch.tensor([0, 9, 9, 10, 23], dtype=torch.int32)
    values = torch.randn(23, generator=generator, dtype=torch.float64)
    expected = torch.zeros(23, dtype=torch.float64)
    for start, stop in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        total = 0.0
        for t in reversed(range(start, stop)):
            total = values[t].item() + gamma * total
            expected[t] = total
    torch.testing.assert_close(discounted_from_end(values, cu, gamma), expected)
    assert discounted_from_end(values[:0], torch.tensor([0], dtype=torch.int32), gamma).tolist() == []


@pytest.mark.parametrize(
    ("half_life", "weights"),
    [(1.0, [1.077884, 0.951229, 1.2]), (32.0, [1.2, 1.098089, 1.2])],
)
def test_the_references_example(half_life: float, weights: list[float]) -> None:
    """δ = .1, -.2, .3, A = 1: no ratio is clipped high but the last, which is 1.28."""
    delta = D([0.1, -0.2, 0.3])
    options = {"half_life": half_life, "high_only": False}
    _, _, metrics = evaluate("fipo", delta, options, old_log_probs=torch.zeros_like(delta))
    total, number = metrics["actor/fipo_weight"]
    assert (total / number).item() == pytest.approx(sum(weights) / 3, abs=1e-6)
    loss, _, _ = evaluate("fipo", delta, options, old_log_probs=torch.zeros_like(delta))
    ratio = delta.exp().clamp(max=1.28)
    torch.testing.assert_close(loss, -D(weights) * ratio, rtol=0, atol=1e-6)


def test_at_the_first_update_it_is_ppo() -> None:
    columns = random_columns()
    columns["log_probs"] = columns["old_log_probs"]
    clip = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}
    given = {name: column for name, column in columns.items() if name != "log_probs"}
    ours = evaluate("fipo", columns["log_probs"], {}, **given)
    theirs = evaluate("ppo_clip", columns["log_probs"], clip, **given)
    torch.testing.assert_close(ours[:2], theirs[:2])


def test_high_only_never_weighs_less() -> None:
    delta = D([-0.3, -0.3, -0.3])
    free = evaluate("fipo", delta, {"high_only": False}, old_log_probs=torch.zeros_like(delta))
    high = evaluate("fipo", delta, {}, old_log_probs=torch.zeros_like(delta))
    assert [(x / n).item() for x, n in (free[2]["actor/fipo_weight"], high[2]["actor/fipo_weight"])] == [
        pytest.approx(0.8),
        pytest.approx(1.0),
    ]


def test_what_got_likelier_against_its_advantage_is_held() -> None:
    """A < 0 and ρ = 5 > 4: f is at most 1, where the same future would give 1.2."""
    delta = D([1.6094379124341003, 0.2, 0.2])
    for safe, weight in ((4.0, 1.0), (6.0, 1.2)):
        loss, _, _ = evaluate(
            "fipo", delta, {"safe": safe}, old_log_probs=torch.zeros_like(delta), advantages=D([-1.0] * 3)
        )
        assert loss[0].item() == pytest.approx(5.0 * weight)


@pytest.mark.parametrize(("cuts", "left"), [(1, True), (2, False)])
def test_a_response_with_two_tokens_beyond_the_dual_clip_has_no_loss(cuts: int, left: bool) -> None:
    """ρ = e^3 > 10, A < 0; the second response keeps its own."""
    delta = D([3.0] * cuts + [0.0] * (3 - cuts) + [0.1] * 4)
    given: dict[str, Any] = {
        "old_log_probs": torch.zeros(7, dtype=torch.float64),
        "advantages": D([-1.0] * 7),
        "cu_seqlens": TWO,
    }
    loss, gradient, metrics = evaluate("fipo", delta, {}, **given)
    assert bool((loss[:3] != 0).any()) is left
    assert bool((gradient[:3] != 0).any()) is (left and cuts < 3)
    assert bool((loss[3:] != 0).all())
    numerator, denominator = metrics["actor/fipo_left_out"]
    assert (numerator.item(), denominator.item()) == (0.0 if left else 1.0, 2.0)
