"""KL-Cov and Clip-Cov: who is selected over the mini-batch, and what becomes of the selected."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rondo.algorithms import check_algorithm, lookup
from rondo.algorithms.policy_losses.covariance import covariances, select_between, select_largest
from rondo.algorithms.registry import bind_preparation
from rondo.config.schema import AlgorithmConfig, FunctionConfig
from rondo.core.errors import ConfigError

NAN = math.nan
# Trained: A = 3, -1, 1, -3 (mean 0), ℓ = -1, -2, -4, -5 (mean -3): covariances 6, -1, -1, 6.
ADVANTAGES = torch.tensor([[3.0, NAN, -1.0], [1.0, -3.0, 0.0]])
OLD = torch.tensor([[-1.0, NAN, -2.0], [-4.0, -5.0, 99.0]])
MASK = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])


def selected(made: dict[str, Tensor]) -> list[list[float]]:
    assert list(made) == ["covariance_selected"]
    return made["covariance_selected"].tolist()


def test_covariance_is_over_the_trained_tokens_of_the_mini_batch() -> None:
    assert covariances(ADVANTAGES, OLD, MASK).tolist() == [6.0, -1.0, -1.0, 6.0]


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [
        (1e-3, [[1, 0, 0], [0, 0, 0]]),  # at least one token of the mini-batch; the earlier of two
        (0.5, [[1, 0, 0], [0, 1, 0]]),
        (0.75, [[1, 0, 1], [0, 1, 0]]),
        (1.0, [[1, 0, 1], [1, 1, 0]]),
    ],
)
def test_kl_cov_selects_the_largest(fraction: float, expected: list[list[float]]) -> None:
    assert selected(select_largest(ADVANTAGES, OLD, MASK, fraction=fraction)) == expected


def test_the_number_is_a_share_of_the_mini_batch_rounded_down() -> None:
    generator = torch.Generator().manual_seed(0)
    advantages, old = torch.randn(2, 20, 100, generator=generator)
    mask = torch.ones(20, 100)
    for fraction, number in ((2e-3, 4), (2e-4, 1), (0.29, 580), (0.00149, 2)):
        chosen = select_largest(advantages, old, mask, fraction=fraction)["covariance_selected"] > 0
        assert int(chosen.sum()) == number
        covariance = covariances(advantages, old, mask).reshape(20, 100)
        assert covariance[chosen].min() > covariance[~chosen].max()


def test_clip_cov_draws_between_the_bounds_with_its_seed() -> None:
    generator = torch.Generator().manual_seed(1)
    advantages, old = torch.randn(2, 10, 100, generator=generator)
    mask = torch.ones(10, 100)
    covariance = covariances(advantages, old, mask).reshape(10, 100)

    def draw(seed: int, fraction: float) -> Tensor:
        return select_between(advantages, old, old, mask, seed, fraction=fraction)["covariance_selected"] > 0

    chosen = draw(7, 0.02)
    assert int(chosen.sum()) == 20
    assert bool(((covariance > 1) & (covariance < 5))[chosen].all())
    assert torch.equal(chosen, draw(7, 0.02))
    assert not torch.equal(chosen, draw(8, 0.02))
    everything = draw(7, 1.0)  # fewer candidates than asked for: all of them
    assert torch.equal(everything, (covariance > 1) & (covariance < 5))


def test_clip_cov_without_a_candidate_selects_nothing() -> None:
    def between(low: float, high: float) -> list[list[float]]:
        return selected(select_between(ADVANTAGES, OLD, OLD, MASK, 0, low=low, high=high))

    for low, high in ((10.0, 20.0), (1.0, 6.0), (6.0, 9.0)):  # the bounds are strict
        assert not any(map(any, between(low, high)))
    one = between(5.0, 7.0)
    assert one in ([[1, 0, 0], [0, 0, 0]], [[0, 0, 0], [0, 1, 0]])


def test_clip_cov_leaves_out_what_ppo_clips() -> None:
    """Both tokens of covariance 6: A = 3, clipped where ρ > 1.2; A = -3, clipped where ρ < 0.8."""
    for moved, expected in (
        ((0.0, 0.0), [[1, 0, 0], [0, 1, 0]]),
        ((0.2, 0.0), [[0, 0, 0], [0, 1, 0]]),
        ((-0.3, 0.2), [[1, 0, 0], [0, 1, 0]]),
        ((0.1, -0.3), [[1, 0, 0], [0, 0, 0]]),
    ):
        old = OLD.clone()
        old[0, 0] -= moved[0]
        old[1, 1] -= moved[1]
        options = {"fraction": 1.0, "low": 5.0, "high": 7.0, "clip": 0.2}
        assert selected(select_between(ADVANTAGES, OLD, old, MASK, 0, **options)) == expected


def test_clip_cov_counts_a_token_without_advantage_as_unclipped() -> None:
    """Its term of PPO's loss is 0 with and without clipping."""
    advantages, now = torch.tensor([[[0.0, 3.0, 3.0]], [[-4.0, -1.0, -1.0]]])  # covariances 4, 1, 1
    mask = torch.ones(1, 3)
    for moved in (0.0, 0.5, -0.5):
        old = now - torch.tensor([[moved, 0.0, 0.0]])
        made = select_between(advantages, now, old, mask, 0, fraction=1.0, low=3.0, high=5.0, clip=0.2)
        assert selected(made) == [[1, 0, 0]]


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_a_mini_batch_without_a_trained_token(shape: tuple[int, int]) -> None:
    nothing, mask = torch.full(shape, NAN), torch.zeros(shape)
    largest = select_largest(nothing, nothing, mask)
    for made in (largest, select_between(nothing, nothing, nothing, mask, 0)):
        assert torch.equal(made["covariance_selected"], torch.zeros(shape))


def evaluate(name: str, delta: list[float], advantage: float, chosen: list[float], **options: Any) -> Any:
    old = torch.full((len(delta),), -1.0, dtype=torch.float64)
    leaf = (old + torch.tensor(delta, dtype=torch.float64)).requires_grad_()
    function: Callable[..., Any] = lookup("policy_loss", name)
    columns = (old, torch.full_like(old, advantage), torch.ones_like(old), torch.tensor(chosen).double())
    loss, metrics = function(leaf, *columns, **options)
    return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0], metrics


def test_kl_cov_penalises_the_selected() -> None:
    delta = [0.2, -0.3, 0.2, -0.3, 0.0]
    loss, gradient, metrics = evaluate("kl_cov", delta, 2.0, [1, 1, 0, 0, 1], beta=0.5)
    ratio = torch.tensor(delta).double().exp()
    torch.testing.assert_close(loss, -2 * ratio + torch.tensor([0.1, 0.15, 0, 0, 0]).double())
    torch.testing.assert_close(gradient, -2 * ratio + torch.tensor([0.5, -0.5, 0, 0, 0]).double())
    assert metrics["actor/covariance_selected"] == (3, 5)


def test_kl_cov_with_beta_0_is_the_unclipped_policy_gradient() -> None:
    delta = [0.7, -0.9, 0.0]
    for advantage in (1.0, -1.0):
        free = evaluate("kl_cov", delta, advantage, [1, 1, 1], beta=0.0)
        torch.testing.assert_close(free[0], -advantage * torch.tensor(delta).double().exp())
        torch.testing.assert_close(free[1], free[0])


def test_clip_cov_drops_the_selected_and_clips_the_others() -> None:
    """clip 1: ratios above 2 are clipped where A > 0; nothing below 0 exists, so none where A < 0."""
    delta = [math.log(1.5), math.log(3.0), math.log(1.5)]
    loss, gradient, metrics = evaluate("clip_cov", delta, 1.0, [1, 0, 0])
    torch.testing.assert_close(loss, torch.tensor([0, -2.0, -1.5]).double())
    torch.testing.assert_close(gradient, torch.tensor([0, 0, -1.5]).double())
    assert metrics["actor/covariance_selected"] == (1, 3)
    _, gradient, _ = evaluate("clip_cov", delta, -1.0, [1, 0, 0])
    torch.testing.assert_close(gradient, torch.tensor([0, 3.0, 1.5]).double())
    _, gradient, _ = evaluate("clip_cov", delta, 1.0, [0, 0, 0], clip_high=0.2)
    assert not gradient.any()


@pytest.mark.parametrize("name", ["kl_cov", "clip_cov"])
def test_at_ratio_1_the_unselected_follow_the_policy_gradient(name: str) -> None:
    _, gradient, _ = evaluate(name, [0.0, 0.0], 1.7, [0, 0])
    assert gradient.tolist() == pytest.approx([-1.7, -1.7])


def test_options_of_loss_and_selection_are_one_set_and_checked_at_start() -> None:
    config = FunctionConfig("clip_cov", {"fraction": 0.5, "low": 5.0, "high": 7.0, "clip": 0.2})
    check_algorithm(AlgorithmConfig(policy_loss=config))
    prepare = bind_preparation(config)
    assert prepare is not None
    assert prepare.func is select_between
    assert sum(map(sum, selected(prepare(ADVANTAGES, OLD, OLD, MASK, 3)))) == 2
    for name, options, message in (
        ("kl_cov", {"fraction": 0.0}, "fraction"),
        ("clip_cov", {"fraction": 1.5}, "fraction"),
        ("clip_cov", {"low": 5.0, "high": 1.0}, "low < high"),
        ("kl_cov", {"beta": -1.0}, "beta"),
        ("kl_cov", {"low": 1.0}, "low"),  # clip_cov's
    ):
        with pytest.raises(ConfigError, match=message):
            check_algorithm(AlgorithmConfig(policy_loss=FunctionConfig(name, options)))
