"""KL estimators: values, gradients, expectations; the penalty in the reward; the adaptive coefficient."""

from __future__ import annotations

import math

import pytest
import torch

from rondo.algorithms import ActorLoss, kl_reward, lookup, names, update_kl_coef
from rondo.algorithms.kl import k1, k1_plus, k2, k3, k3_plus, k3_unbiased
from rondo.config.schema import AlgorithmConfig, KlConfig
from rondo.core.errors import ConfigError, TrainError

T = torch.tensor
D = T([-2.0, -0.1, 0.0, 0.3, 4.0], dtype=torch.float64)
Q = torch.exp(-D)

# name: (value, gradient with respect to ℓ)
TABLE = {
    "k1": (D, torch.ones_like(D)),
    "abs": (D.abs(), D.sign()),
    "k2": (D**2 / 2, D),
    "k3": (Q - 1 + D, 1 - Q),
    "k1+": (D, D),
    "k3+": (Q - 1 + D, D),
}


def value_and_gradient(
    name: str, log_probs: torch.Tensor, ref: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = log_probs.clone().requires_grad_()
    value = lookup("kl", name)(leaf, ref)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient


@pytest.mark.parametrize("name", list(TABLE))
def test_value_and_gradient_table(name: str) -> None:
    ref = T([-1.0, -2.0, -0.5, -3.0, -7.0], dtype=torch.float64)
    value, gradient = value_and_gradient(name, ref + D, ref)
    torch.testing.assert_close(value, TABLE[name][0])
    torch.testing.assert_close(gradient, TABLE[name][1])


def test_every_estimator_but_the_off_policy_one_is_in_the_table() -> None:
    assert set(names("kl")) == set(TABLE) | {"k3-unbiased"}


@pytest.mark.parametrize("name", sorted(TABLE))
@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_huge_gaps_stay_finite(name: str, gap: float) -> None:
    value, gradient = value_and_gradient(name, T([-1.0 + gap]), T([-1.0]))
    assert value.isfinite().all()
    assert gradient.isfinite().all()
    if name.startswith("k3"):
        assert value.item() == 10.0


def test_k3_is_never_negative_in_float32() -> None:
    ref = -torch.rand(10_000) * 5
    assert (k3(ref + 1e-4 * torch.randn(10_000), ref) >= 0).all()


def exact_kl_gradient(logits: torch.Tensor, ref: torch.Tensor, forward: bool) -> torch.Tensor:
    leaf = logits.clone().requires_grad_()
    log_p, log_r = leaf.log_softmax(-1), ref.log_softmax(-1)
    kl = (log_r.exp() * (log_r - log_p)).sum() if forward else (log_p.exp() * (log_p - log_r)).sum()
    return torch.autograd.grad(kl, leaf)[0]


def expected_gradient(name: str, logits: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """Σ_y π(y) ∇ k(y): what back-propagating the estimator does on average."""
    leaf = logits.clone().requires_grad_()
    log_p = leaf.log_softmax(-1)
    estimate = lookup("kl", name)(log_p, ref.log_softmax(-1))
    return torch.autograd.grad((log_p.detach().exp() * estimate).sum(), leaf)[0]


def test_expected_gradients_are_those_of_the_documented_divergences() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=generator, dtype=torch.float64)
    ref = torch.randn(6, generator=generator, dtype=torch.float64)
    reverse, forward = exact_kl_gradient(logits, ref, False), exact_kl_gradient(logits, ref, True)
    assert (reverse - forward).norm() > 0.1
    for name in ("k2", "k1+", "k3+"):
        torch.testing.assert_close(expected_gradient(name, logits, ref), reverse)
    torch.testing.assert_close(expected_gradient("k3", logits, ref), forward)
    torch.testing.assert_close(expected_gradient("k1", logits, ref), torch.zeros_like(reverse))


def test_k3_unbiased_is_exact_off_policy() -> None:
    """Samples from another policy, weighted by nothing: the ratio inside does it."""
    generator = torch.Generator().manual_seed(1)
    logits, ref, old = (torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(3))
    leaf = logits.clone().requires_grad_()
    old_log_probs = old.log_softmax(-1)
    estimate = k3_unbiased(leaf.log_softmax(-1), ref.log_softmax(-1), old_log_probs)
    (gradient,) = torch.autograd.grad((old_log_probs.exp() * estimate).sum(), leaf)
    torch.testing.assert_close(gradient, exact_kl_gradient(logits, ref, False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_unbiased_has_its_gradient_far_away_too(dtype: torch.dtype) -> None:
    """ρ·d with d in full and ρ = e^{±20} beyond ±20; the value stays finite."""
    gaps = T([-1e4, -30.0, -25.0, 25.0, 30.0, 1e4], dtype=dtype)
    old_gaps = T([0.5, 0.0, -0.5, 40.0, -40.0, 0.0], dtype=dtype)
    log_probs = torch.full_like(gaps, -1.0).requires_grad_()
    value = k3_unbiased(log_probs, log_probs.detach() - gaps, log_probs.detach() - old_gaps)
    (gradient,) = torch.autograd.grad(value.sum(), log_probs)
    ratio = old_gaps.clamp(-20, 20).exp()
    torch.testing.assert_close(gradient, ratio * gaps)
    bounded = gaps.clamp(-20, 20)
    torch.testing.assert_close(value.detach(), ratio * (torch.exp(-bounded) - 1 + bounded))


def test_straight_through_values_carry_the_gradient_of_k2() -> None:
    log_probs = torch.randn(5, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(5, dtype=torch.float64)
    wanted = torch.autograd.grad(k2(log_probs, ref).sum(), log_probs)[0]
    for plus, plain in ((k1_plus, k1), (k3_plus, k3)):
        assert torch.equal(torch.autograd.grad(plus(log_probs, ref).sum(), log_probs)[0], wanted)
        torch.testing.assert_close(plus(log_probs, ref), plain(log_probs, ref))


def test_reward_sits_on_the_last_trained_token_less_the_penalty() -> None:
    mask = T([[1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    old = T([[-1.0, 5.0, -2.0, float("nan")], [-1.0] * 4, [float("nan")] * 4])
    ref = T([[-1.5, 9.0, -1.0, float("nan")], [-1.0] * 4, [0.0] * 4])
    plain, _ = kl_reward(T([1.0, 2.0, 3.0]), mask)
    assert plain.tolist() == [[0, 0, 1, 0], [0, 0, 0, 2], [0, 0, 0, 0]]
    shaped, stats = kl_reward(T([1.0, 2.0, 3.0]), mask, old, ref, estimator="k1", coef=0.1)
    torch.testing.assert_close(shaped, T([[-0.05, 0, 1.1, 0], [0, 0, 0, 2.0], [0, 0, 0, 0]]))
    # Rows: mean of {.5, -1} = -.25, 0, and 0 for the row without tokens.
    assert stats.means["actor/kl_reward"] == pytest.approx((-0.25, 3))


def test_an_unknown_estimator_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'k3'"):
        kl_reward(torch.ones(1), torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1), estimator="kk3")


def test_adaptive_coefficient() -> None:
    """Target 0.1, horizon 1000, 100 responses: e = .1 → ·1.01; clipped at ±.2; on target: unchanged."""
    for measured, factor in ((0.11, 1.01), (5.0, 1.02), (0.0, 0.98), (-3.0, 0.98), (0.1, 1.0)):
        assert update_kl_coef(0.5, measured, 0.1, 1000, 100) == pytest.approx(0.5 * factor)
    assert update_kl_coef(0.5, 0.0, 0.1, 100, 1000) == pytest.approx(0.4)  # 10 horizons: ·0.8, not ·-1
    assert update_kl_coef(0.5, 9.0, 0.1, 100, 1000) == pytest.approx(0.6)
    coef = 0.2
    for _ in range(2000):  # KL falls with the coefficient: it settles where KL meets the target
        coef = update_kl_coef(coef, 0.02 / coef, 0.1, 1000, 50)
    assert math.isclose(coef, 0.2, rel_tol=1e-3)


def one_number(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    return (log_probs - ref_log_probs).mean()


def undefined(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    return (log_probs - ref_log_probs) / 0.0


def no_tensor(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> list[float]:
    return (log_probs - ref_log_probs).tolist()


@pytest.mark.parametrize(
    ("estimator", "said"),
    [
        ("one_number", r"one_number .* \[2, 3\]; .* shape \[\]"),
        ("no_tensor", r"no_tensor .* \[2, 3\]; it returned list"),
        ("undefined", "algorithm.kl: .*undefined .* not finite"),
    ],
)
def test_what_an_estimator_of_ones_own_returns_is_checked_in_the_reward(estimator: str, said: str) -> None:
    log_probs = T([[-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0]])
    with pytest.raises(TrainError, match=said):
        kl_reward(
            T([1.0, 0.0]),
            torch.ones(2, 3),
            log_probs,
            log_probs - 1,
            estimator=f"{__name__}:{estimator}",
            coef=0.1,
        )


def test_an_estimator_that_returns_one_number_is_refused_in_the_loss() -> None:
    """It went to each token as its own, and was another for each cut of the mini-batch."""
    loss = ActorLoss(AlgorithmConfig(kl=KlConfig(name=f"{__name__}:one_number", where="loss", coef=0.1)))
    columns = dict.fromkeys(
        ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs"), -torch.ones(3)
    )
    columns |= dict.fromkeys(("response_mask", "loss_weight", "advantages"), torch.ones(3))
    with pytest.raises(TrainError, match=r"one_number .* \[3\]; .* shape \[\]"):
        loss(columns, columns, T([0, 3]))
