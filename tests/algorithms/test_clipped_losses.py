"""The losses that clip or bound the ratio: values and gradients at chosen ratios, by hand, and identities."""

from __future__ import annotations

import math

import pytest
import torch

from tests.algorithms.policy_losses import D, bound, call, evaluate, random_columns, value_and_gradient

T = torch.tensor
RATIOS = [0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 2.0, 3.5]
# Of DPPO: moves by +.2, -.2, +.04 (ratio 5), +.1, -.1.
OLD = D([0.5, 0.5, 0.01, 0.5, 0.5]).log()
NEW = D([0.7, 0.3, 0.05, 0.6, 0.4]).log()


def test_ppo_table_for_positive_advantages() -> None:
    loss, gradient, metrics = value_and_gradient(bound("ppo_clip"), RATIOS, [2.0] * 8)
    torch.testing.assert_close(
        loss, -2 * T([0.5, 0.79, 0.81, 1.0, 1.19, 1.2, 1.2, 1.2]).double(), rtol=1e-6, atol=0
    )
    expected = -2 * T([0.5, 0.79, 0.81, 1.0, 1.19, 0, 0, 0]).double()
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=0)
    assert [metrics["actor/clip_fraction"][0], metrics["actor/clip_fraction_high"][0]] == [3, 3]
    assert metrics["actor/clip_fraction_low"][0] == 0


def test_ppo_table_for_negative_advantages_with_dual_clip() -> None:
    loss, gradient, metrics = value_and_gradient(bound("ppo_clip", dual_clip=3.0), RATIOS, [-1.0] * 8)
    torch.testing.assert_close(
        loss, T([0.8, 0.8, 0.81, 1.0, 1.19, 1.21, 2.0, 3.0]).double(), rtol=1e-6, atol=0
    )
    torch.testing.assert_close(gradient, T([0, 0, 0.81, 1.0, 1.19, 1.21, 2.0, 0]).double(), rtol=1e-6, atol=0)
    assert metrics["actor/clip_fraction_low"][0] == 2
    assert metrics["actor/clip_fraction_dual"][0] == 1
    without, gradient, _ = value_and_gradient(bound("ppo_clip", dual_clip=None), RATIOS, [-1.0] * 8)
    assert without[-1].item() == pytest.approx(3.5)
    assert gradient[-1].item() == pytest.approx(3.5)


def test_ppo_one_value_sets_both_clips_unless_overridden() -> None:
    """D10: `clip` alone is dead in a widely used implementation."""
    for options, range_ in (
        ({"clip": 0.1}, (0.9, 1.1)),
        ({"clip": 0.1, "clip_high": 0.28}, (0.9, 1.28)),
        ({"clip_low": 0.3}, (0.7, 1.2)),
    ):
        high, _, _ = value_and_gradient(bound("ppo_clip", **options), [9.0], [1.0])
        low, _, _ = value_and_gradient(bound("ppo_clip", **options), [0.01], [-1.0])
        assert (low.item(), -high.item()) == pytest.approx(range_)


def test_ppo_metrics_ignore_masked_tokens() -> None:
    mask = T([1.0, 1.0, 0.0], dtype=torch.float64)
    _, _, metrics = value_and_gradient(bound("ppo_clip"), [2.0, 1.0, 9.0], [1.0] * 3, response_mask=mask)
    assert metrics["actor/clip_fraction"] == (1, 2)
    assert metrics["actor/ratio"][0].item() == pytest.approx(3.0)
    assert metrics["actor/ratio_max"].item() == pytest.approx(2.0)
    assert metrics["actor/ppo_kl"][0].item() == pytest.approx(-math.log(2))


def test_cispo_keeps_every_gradient_and_bounds_its_weight() -> None:
    loss, gradient, metrics = value_and_gradient(bound("cispo", clip_high=0.2), RATIOS, [-2.0] * 8)
    weight = T(RATIOS, dtype=torch.float64).clamp(max=1.2)
    torch.testing.assert_close(gradient, 2 * weight)
    torch.testing.assert_close(loss, 2 * weight * (T(RATIOS, dtype=torch.float64).log() - 1))
    assert metrics["actor/clip_fraction_high"][0] == metrics["actor/clip_fraction"][0] == 3
    _, gradient, metrics = value_and_gradient(bound("cispo", clip_low=0.2), [0.5, 0.9, 1.0], [1.0] * 3)
    assert gradient.tolist() == pytest.approx([-0.8, -0.9, -1.0])
    assert metrics["actor/clip_fraction_low"] == metrics["actor/clip_fraction"] == (1, 3)


def test_sapo_gradient_is_the_soft_gate() -> None:
    ratio = T([0.3, 1.0, 2.5], dtype=torch.float64)
    for advantage, tau in ((1.7, 1.0), (-1.7, 1.05)):
        loss, gradient, _ = value_and_gradient(bound("sapo"), ratio.tolist(), [advantage] * 3)
        gate = torch.sigmoid(tau * (ratio - 1))
        exact = {"rtol": 1e-12, "atol": 0.0}  # τ is not rounded to float32 on its way
        torch.testing.assert_close(loss, -advantage * 4 / tau * gate, **exact)
        torch.testing.assert_close(gradient, -advantage * 4 * gate * (1 - gate) * ratio, **exact)


def test_dppo_tv_drops_what_moved_too_far_along_its_advantage() -> None:
    up = evaluate("dppo_tv", NEW, old_log_probs=OLD)
    torch.testing.assert_close(up[1], D([0, -0.6, -5.0, -1.2, -0.8]))
    torch.testing.assert_close(up[0], D([0, -0.6, -5.0, -1.2, -0.8]) * NEW)
    assert up[2]["actor/clip_fraction"] == up[2]["actor/clip_fraction_high"] == (1, 5)
    down = evaluate("dppo_tv", NEW, old_log_probs=OLD, advantages=-2 * torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(down[1], 2 * D([1.4, 0, 5.0, 1.2, 0.8]))
    assert down[2]["actor/clip_fraction"] == down[2]["actor/clip_fraction_low"] == (1, 5)


def test_dppo_tv_thresholds_per_side() -> None:
    for options, dropped in (
        ({"threshold": 0.05}, ([0, 3], [1, 4])),
        ({"threshold_low": 0.05}, ([0], [1, 4])),
        ({"threshold_high": 0.03}, ([0, 2, 3], [1])),
    ):
        for advantage, expected in zip((1.0, -1.0), dropped, strict=True):
            _, gradient, _ = evaluate(
                "dppo_tv", NEW, options, old_log_probs=OLD, advantages=torch.full_like(OLD, advantage)
            )
            assert torch.nonzero(gradient == 0).squeeze(1).tolist() == expected


def test_dppo_kl_is_the_divergence_of_this_token_or_another() -> None:
    divergence = [
        o * math.log(o / n) + (1 - o) * math.log((1 - o) / (1 - n))
        for o, n in zip(OLD.exp().tolist(), NEW.exp().tolist(), strict=True)
    ]  # .087 .087 .024 .020 .020
    for advantage, moves_along in ((1.0, {0, 2, 3}), (-1.0, {1, 4})):
        for threshold in (0.01, 0.022, 0.05, 0.1):
            _, gradient, _ = evaluate(
                "dppo_kl",
                NEW,
                {"threshold": threshold},
                old_log_probs=OLD,
                advantages=torch.full_like(OLD, advantage),
            )
            expected = {i for i in moves_along if divergence[i] > threshold}
            assert set(torch.nonzero(gradient == 0).squeeze(1).tolist()) == expected


def test_dppo_kl_thresholds_per_side() -> None:
    """Divergences .087, .087, .024, .020, .020; 0, 2, 3 move up and 1, 4 down."""
    for options, dropped in (
        ({"threshold_low": 0.01, "threshold_high": 0.05}, ([0], [1, 4])),
        ({"threshold_low": 0.05, "threshold_high": 0.01}, ([0, 2, 3], [1])),
        ({"threshold_high": 1.0}, ([], [1])),
        ({"threshold_low": 1.0}, ([0], [])),
    ):
        for advantage, expected in zip((1.0, -1.0), dropped, strict=True):
            _, gradient, _ = evaluate(
                "dppo_kl", NEW, options, old_log_probs=OLD, advantages=torch.full_like(OLD, advantage)
            )
            assert torch.nonzero(gradient == 0).squeeze(1).tolist() == expected


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_without_a_threshold_is_truncated_importance_sampling(name: str) -> None:
    advantages = D([1.0, -0.5, 2.0, -1.0, 0.3])
    columns = {"old_log_probs": OLD, "advantages": advantages}
    free = evaluate(name, NEW, {"threshold": math.inf, "cap": 3.0}, **columns)
    truncated = evaluate("reinforce_is", NEW, {"upper": 3.0}, **columns)
    torch.testing.assert_close(free[:2], truncated[:2])
    torch.testing.assert_close(free[1], -advantages * (NEW - OLD).exp().clamp(max=3.0))


def test_gspo_on_sequences_of_one_token_is_ppo() -> None:
    cu_seqlens = torch.arange(len(RATIOS) + 1, dtype=torch.int32)
    for sign in (1.0, -1.0):
        advantages = [sign * 1.3] * 8
        ppo = value_and_gradient(bound("ppo_clip", dual_clip=None), RATIOS, advantages)
        sequence = value_and_gradient(
            bound("gspo", clip_low=0.2, clip_high=0.2), RATIOS, advantages, cu_seqlens=cu_seqlens
        )
        torch.testing.assert_close(sequence[0], ppo[0])
        torch.testing.assert_close(sequence[1], ppo[1])


def test_gspo_uses_the_geometric_mean_over_trained_tokens() -> None:
    """Row 1: ratios 2, 8 and a masked 1000: s = 4. Row 2: 0.25 alone. Each token has the gradient -A s."""
    mask = T([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    cu_seqlens = T([0, 3, 4], dtype=torch.int32)
    loss, gradient, _ = value_and_gradient(
        bound("gspo", clip_low=10, clip_high=10),
        [2.0, 1000.0, 8.0, 0.25],
        [1.0] * 4,
        cu_seqlens=cu_seqlens,
        response_mask=mask,
    )
    torch.testing.assert_close(loss[mask.bool()], T([-4.0, -4.0, -0.25], dtype=torch.float64))
    torch.testing.assert_close(gradient[mask.bool()], T([-4.0, -4.0, -0.25], dtype=torch.float64))


@pytest.mark.parametrize(
    ("name", "low", "high"), [("gspo", 0.7, 1.5), ("gmpo", math.exp(-0.3), math.exp(0.5))]
)
def test_a_clip_range_has_its_sides_and_its_counts(name: str, low: float, high: float) -> None:
    function, cu_seqlens = bound(name, clip_low=0.3, clip_high=0.5), torch.arange(3, dtype=torch.int32)
    for advantage, ratio, edge, side in ((1.0, 9.0, high, "high"), (-1.0, 0.01, low, "low")):
        # the second response's ratio is on the other side, where its advantage's clip does not act
        loss, _, metrics = value_and_gradient(
            function, [ratio, 1 / ratio], [advantage] * 2, cu_seqlens=cu_seqlens
        )
        assert loss[0].item() == pytest.approx(-advantage * edge)
        assert metrics["actor/clip_fraction"] == metrics[f"actor/clip_fraction_{side}"] == (1, 2)


def test_gspo_keeps_its_ratio_at_large_log_probs_in_float32() -> None:
    """At ℓ = -1e4 the spacing of float32 is 2^-10: adding ℓ to the mean and taking it off again loses it."""
    leaf = torch.full((4,), -1e4).requires_grad_()
    old = leaf.detach() - T([2.0**-10, 0.0, 0.0, 0.0])
    loss, _ = call(bound("gspo"), leaf, old_log_probs=old)
    torch.testing.assert_close(
        loss.double(), torch.full((4,), -math.exp(2.0**-12)).double(), rtol=1e-7, atol=0
    )
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), leaf)[0], loss.detach())


def test_gspo_clips_a_response_as_a_whole() -> None:
    """One token far out, the mean within the range: no token is clipped; beyond it, all are."""
    inside = value_and_gradient(bound("gspo", clip_low=0.2, clip_high=0.2), [1.4, 0.8], [1.0, 1.0])
    assert (inside[1] != 0).all()
    outside = value_and_gradient(bound("gspo", clip_low=0.2, clip_high=0.2), [1.6, 1.0], [1.0, 1.0])
    assert (outside[1] == 0).all()


def test_gspo_gradient_equals_that_of_the_sequence_form() -> None:
    """With one advantage per response, the gradient is that of max(-A s, …) with s differentiated."""
    columns = random_columns()
    rows = T([0] * 4 + [2] * 3 + [3] * 3)
    columns["advantages"] = T([1.0, 0.0, -1.0, 2.0], dtype=torch.float64)[rows]
    log_probs = columns.pop("log_probs").requires_grad_()
    mask = columns["response_mask"]
    options = {"clip_low": 0.5, "clip_high": 0.5}
    token, _ = call(bound("gspo", **options), log_probs, **columns)
    (got,) = torch.autograd.grad((token * mask).sum(), log_probs)
    lengths = torch.zeros(4, dtype=torch.float64).index_add(0, rows, mask)
    mean = torch.zeros(4, dtype=torch.float64).index_add(
        0, rows, (log_probs - columns["old_log_probs"]) * mask
    )
    ratio = (mean / lengths.clamp(min=1)).exp()
    advantage = T([1.0, 0.0, -1.0, 2.0], dtype=torch.float64)
    sequence = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.5, 1.5)) * lengths
    (wanted,) = torch.autograd.grad(sequence.sum(), log_probs)
    torch.testing.assert_close(got, wanted)


def test_gmpo_table() -> None:
    """A > 0: ratios 1.2, 3 (log-clipped at .4: no gradient) and a masked 9; ρ̂ = exp((ln 1.2 + .4)/2)."""
    mask = T([1.0, 1.0, 0.0], dtype=torch.float64)
    loss, gradient, metrics = value_and_gradient(
        bound("gmpo"), [1.2, 3.0, 9.0], [0.5] * 3, response_mask=mask
    )
    mean_ratio = math.exp((math.log(1.2) + 0.4) / 2)
    assert loss.tolist() == pytest.approx([-0.5 * mean_ratio] * 3)
    assert metrics["actor/clip_fraction"] == (1, 2)
    # All three entries are summed here; in training the mask leaves L = 2 of them, each weighted 1/(B L).
    assert gradient.tolist() == pytest.approx([-0.5 * mean_ratio * 3 / 2, 0.0, 0.0])


def test_gmpo_on_one_token_within_the_range_is_ppo_without_clip() -> None:
    cu_seqlens = torch.arange(4, dtype=torch.int32)
    ratios, advantages = [0.8, 1.0, 1.3], [1.0, -2.0, 0.5]
    one = value_and_gradient(bound("gmpo"), ratios, advantages, cu_seqlens=cu_seqlens)
    plain = value_and_gradient(bound("ppo_clip", clip=10.0, dual_clip=None), ratios, advantages)
    torch.testing.assert_close(one[0], plain[0])
    torch.testing.assert_close(one[1], plain[1])
