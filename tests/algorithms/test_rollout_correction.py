"""Rollout correction: hand-computed weights, bounds on the right ratio, rejection, diagnostics, no NaN."""

from __future__ import annotations

import math

import pytest
import torch

from rondo.algorithms.rollout_correction import (
    Correction,
    accepted,
    correct,
    divergences,
    mean_weight,
    weight_sums,
    with_sample_size,
)
from rondo.config.schema import (
    DivergenceRejectionConfig,
    ImportanceConfig,
    RatioRejectionConfig,
    RejectionConfig,
    RolloutCorrectionConfig,
)

T = torch.tensor
LOG2 = math.log(2.0)
# Three rows: ratios 2, 1/4, 8 (a hole in between); 1/2, 1/2; no trained token at all.
RATIOS = T([[2.0, 0.25, 999.0, 8.0], [0.5, 0.5, 999.0, 999.0], [999.0] * 4])
MASK = T([[1, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.uint8)


def run(
    importance: ImportanceConfig | None = None,
    *reject: RejectionConfig,
    ratios: torch.Tensor = RATIOS,
    mask: torch.Tensor = MASK,
) -> Correction:
    rollout = torch.full_like(ratios, -3.0)
    config = RolloutCorrectionConfig(importance=importance, reject=reject)
    return corrected(rollout + ratios.log(), rollout, mask, config)


def corrected(
    old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, config: RolloutCorrectionConfig
) -> Correction:
    """Of rows of one length below each other, as they lie there; the diagnostics complete."""
    height, width = mask.shape
    flat = [column.reshape(-1) for column in (old, rollout, mask)]
    cu_seqlens = torch.arange(height + 1, dtype=torch.int32) * width
    mean = 1.0
    if config.importance is not None and config.importance.normalize:
        mean = mean_weight(weight_sums(*flat, cu_seqlens, config))
    made = correct(*flat, cu_seqlens, config, mean=mean)
    rows = (column.view(height, width) for column in (made.weights, made.mask))
    return Correction(*rows, with_sample_size(made.stats))


@pytest.mark.parametrize(
    ("config", "first", "second"),
    [
        (ImportanceConfig(upper=4.0), [2, 0.25, 0, 4], [0.5, 0.5]),
        (ImportanceConfig(lower=0.5, upper=4.0), [2, 0.5, 0, 4], [0.5, 0.5]),
        (ImportanceConfig(lower=0.3, upper=5.0, outside="mask"), [2, 0, 0, 0], [0.5, 0.5]),
        (ImportanceConfig("sequence", upper=9.0), [4, 4, 0, 4], [0.25, 0.25]),  # 2 · ¼ · 8 = 4
        (ImportanceConfig("sequence", upper=3.0), [3, 3, 0, 3], [0.25, 0.25]),
        (ImportanceConfig("sequence", upper=3.0, outside="mask"), [0, 0, 0, 0], [0.25, 0.25]),
        (ImportanceConfig("geometric", upper=9.0), [4 ** (1 / 3)] * 2 + [0, 4 ** (1 / 3)], [0.5, 0.5]),
        (None, [1, 1, 0, 1], [1, 1]),
    ],
)
def test_importance_weights(config: ImportanceConfig | None, first: list[float], second: list[float]) -> None:
    result = run(config)
    expected = T([first, [*second, 0, 0], [0, 0, 0, 0]], dtype=torch.float32)
    torch.testing.assert_close(result.weights, expected)
    assert torch.equal(result.mask, MASK)
    assert result.mask.dtype == torch.uint8


def test_a_batch_normalised_by_tokens_or_by_rows() -> None:
    """Mean of the tokens 2, ¼, 4, ½, ½: 1.45; mean of the rows 4, ¼: 2.125, though their lengths differ."""
    token = run(ImportanceConfig(upper=4.0, normalize=True)).weights
    torch.testing.assert_close(token[0], T([2, 0.25, 0, 4]) / 1.45)
    assert token[MASK > 0].mean().item() == pytest.approx(1.0)
    row = run(ImportanceConfig("sequence", upper=9.0, normalize=True)).weights
    torch.testing.assert_close(row[:2, 0], T([4, 0.25]) / 2.125)


def test_equal_policies_need_no_correction() -> None:
    same = torch.ones_like(RATIOS)
    rules = [
        kind(statistic, upper, level)
        for kind, statistic, upper in (
            (RatioRejectionConfig, "k1", 1.0),
            (DivergenceRejectionConfig, "k2", 1e-9),
            (DivergenceRejectionConfig, "k3", 1e-9),
        )
        for level in ("token", "sum", "mean")
    ]
    for level in ("token", "sequence", "geometric"):
        result = run(ImportanceConfig(level, lower=0.999, upper=1.001, normalize=True), *rules, ratios=same)
        assert torch.equal(result.weights, MASK.float())
        assert torch.equal(result.mask, MASK)
    values = result.stats.values()
    assert values["rollout_correction/effective_sample_size"] == 1.0
    zero = ("kl", "k3", "log_ppl_difference", "chi2_token", "chi2_sequence", "clipped_share")
    assert all(values[f"rollout_correction/{name}"] == 0.0 for name in zero)


@pytest.mark.parametrize(
    ("rule", "first", "second"),
    [
        # k1's bounds are those of π_old/π_roll itself, not of its inverse (D2)
        (RatioRejectionConfig("k1", 3.0, lower=1e-9), [1, 1, 0, 0], [1, 1]),
        (RatioRejectionConfig("k1", 100.0, lower=0.4), [1, 0, 0, 1], [1, 1]),
        (RatioRejectionConfig("k1", 3.0), [1, 0, 0, 0], [1, 1]),  # ⅓ <= ratio <= 3
        (RatioRejectionConfig("k1", 5.0, "sum", lower=0.3), [1, 1, 0, 1], [0, 0]),  # 4 and ¼
        (RatioRejectionConfig("k1", 3.0, "sum", lower=0.1), [0, 0, 0, 0], [1, 1]),
        (RatioRejectionConfig("k1", 1.5, "mean", lower=0.1), [0, 0, 0, 0], [1, 1]),  # 4^⅓ = 1.587, ½
        (RatioRejectionConfig("k1", 1.6, "mean", lower=0.6), [1, 1, 0, 1], [0, 0]),
        # k2 = (log ratio)²/2: .240, .961, 2.162 and .240, .240
        (DivergenceRejectionConfig("k2", 1.0), [1, 1, 0, 0], [1, 1]),
        (DivergenceRejectionConfig("k2", 1.0, "mean"), [0, 0, 0, 0], [1, 1]),  # 1.121
        (DivergenceRejectionConfig("k2", 0.4, "sum"), [0, 0, 0, 0], [0, 0]),  # 3.363, .480
        (DivergenceRejectionConfig("k2", 2.2, "max"), [1, 1, 0, 1], [1, 1]),
        # k3 = ratio - 1 - log ratio: .307, .636, 4.921 and .193, .193
        (DivergenceRejectionConfig("k3", 0.31), [1, 0, 0, 0], [1, 1]),
        (DivergenceRejectionConfig("k3", 0.63, "max"), [0, 0, 0, 0], [1, 1]),
        (DivergenceRejectionConfig("k3", 5.9, "sum"), [1, 1, 0, 1], [1, 1]),  # 5.864, .386
    ],
)
def test_rejection(rule: RejectionConfig, first: list[int], second: list[int]) -> None:
    result = run(None, rule)
    expected = T([first, [*second, 0, 0], [0, 0, 0, 0]], dtype=torch.uint8)
    assert torch.equal(result.mask, expected)
    assert torch.equal(result.weights, expected.float())


RULES = [
    *(RatioRejectionConfig("k1", 1.3, level) for level in ("token", "sum", "mean")),
    *(
        DivergenceRejectionConfig(statistic, 0.05, level)
        for statistic in ("k2", "k3")
        for level in ("token", "sum", "mean", "max")
    ),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.statistic}-{rule.level}")
def test_responses_behind_each_other_are_judged_each_for_itself(rule: RejectionConfig) -> None:
    """Fifty responses of up to nine tokens with holes, some without a trained token."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(1, 10, (50,), generator=generator)
    rows = torch.repeat_interleave(torch.arange(50), lengths)
    scale = 0.5 * torch.rand(50, generator=generator).double()[rows]
    counted = torch.rand(len(rows), generator=generator) < 0.7
    gap = torch.where(counted, scale * torch.randn(len(rows), generator=generator), 0.0)
    found = accepted(gap, counted, torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(), rule)
    for row in range(50):
        own, trained = gap[rows == row], counted[rows == row]
        values = divergences(own, rule.statistic)
        of_row = {"sum": values.sum(), "mean": values[trained].mean(), "max": values.max()}
        value = of_row.get(rule.level, values)
        inside = value <= (math.log(rule.upper) if rule.statistic == "k1" else rule.upper)
        if rule.statistic == "k1":
            inside &= value >= -math.log(rule.upper)
        assert torch.equal(found[rows == row], inside | ~trained)
    assert 0.05 < found[counted].float().mean() < 0.95  # it says something


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_what_is_made_of_rows_does_not_depend_on_who_has_which(level: str) -> None:
    """Forty rows at once, and cut in three: the same bits of weights and mask, a row that counts k times as
    if it stood there k times, the same diagnostics."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(0, 9, (40,), generator=generator)
    rows = torch.repeat_interleave(torch.arange(40), lengths)
    old, rollout = torch.randn(2, len(rows), generator=generator)
    mask = (torch.rand(len(rows), generator=generator) < 0.8).to(torch.uint8)
    times = torch.randint(0, 4, (40,), generator=generator).double()
    config = RolloutCorrectionConfig(
        importance=ImportanceConfig(level, upper=3.0, normalize=True),
        reject=(DivergenceRejectionConfig("k3", 2.0, "max"),),
    )

    def made_of(
        chosen: list[int], often: torch.Tensor | None, mean: float | None
    ) -> tuple[Correction, float]:
        at = torch.cat([torch.nonzero(rows == row).flatten() for row in chosen])
        cu_seqlens = torch.cat([torch.zeros(1), lengths[chosen].cumsum(0)]).int()
        given = old[at], rollout[at], mask[at], cu_seqlens, config
        own = None if often is None else often[chosen]
        found = mean_weight(weight_sums(*given, times=own)) if mean is None else mean
        return correct(*given, times=own, mean=found), found

    every = list(range(40))
    whole, mean = made_of(every, times, None)
    parts = [made_of(part, times, mean)[0] for part in (every[:7], every[7:29], every[29:])]
    assert torch.equal(torch.cat([part.weights for part in parts]), whole.weights)
    assert torch.equal(torch.cat([part.mask for part in parts]), whole.mask)
    repeated = [row for row in every for _ in range(int(times[row]))]
    as_often, same = made_of(repeated, None, None)
    assert same == pytest.approx(mean, rel=1e-13)
    merged = with_sample_size(whole.stats).values()
    of_parts = with_sample_size(parts[0].stats.merge(*(part.stats for part in parts[1:]))).values()
    assert of_parts == pytest.approx(merged, rel=1e-12)
    assert with_sample_size(as_often.stats).values() == pytest.approx(merged, rel=1e-12)


def test_all_rules_must_accept_and_what_is_rejected_is_counted() -> None:
    rules = RatioRejectionConfig("k1", 3.0, lower=1e-9), RatioRejectionConfig("k1", 100.0, "sum", lower=0.3)
    result = run(ImportanceConfig(lower=0.5, upper=4.0), *rules)
    assert result.mask.tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert result.weights[0].tolist() == [2.0, 0.5, 0.0, 0.0]
    values = result.stats.values()
    assert values["rollout_correction/rejected_token_share"] == 3 / 5
    assert values["rollout_correction/rejected_row_share"] == 1 / 2  # the empty row is not one
    assert values["rollout_correction/clipped_share"] == 1 / 2
    assert values["rollout_correction/weight_mean"] == pytest.approx(1.25)


def test_normalisation_is_over_what_is_still_trained_on() -> None:
    weights = run(ImportanceConfig(upper=9.0, normalize=True), RatioRejectionConfig("k1", 3.0)).weights
    torch.testing.assert_close(weights[0], T([2.0, 0, 0, 0]))  # mean of 2, ½, ½ is 1


def test_diagnostics_by_hand() -> None:
    """The logs of the first four ratios are 1, -2, 3, -1 times log 2, that of the last one -3 times."""
    ratios = RATIOS.clone()
    ratios[1, 1] = 0.125
    values = run(ImportanceConfig(upper=100.0), ratios=ratios).stats.values()
    squares = 4 + 1 / 16 + 64 + 1 / 4 + 1 / 64
    expected = {
        "kl": 2 * LOG2 / 5,  # -(1 - 2 + 3 - 1 - 3) log 2 / 5
        "k3": (2 + 0.25 + 8 + 0.5 + 0.125) / 5 - 1 + 2 * LOG2 / 5,
        "log_ppl_difference": (-2 / 3 * LOG2 + 2 * LOG2) / 2,  # row means ⅔ log 2 and -2 log 2
        "ppl_ratio": (2 ** (-2 / 3) + 4) / 2,
        "chi2_token": squares / 5 - 1,
        "chi2_sequence": (16 + 1 / 256) / 2 - 1,
        "effective_sample_size": 10.875**2 / (5 * squares),
        "weight_mean": 10.875 / 5,
        "weight_max": 8.0,
        "weight_min": 0.125,
    }
    for name, value in expected.items():
        assert values[f"rollout_correction/{name}"] == pytest.approx(value, abs=1e-6), name


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("outside", ["truncate", "mask"])
def test_no_nan_whatever_the_gap_and_the_padding(level: str, outside: str) -> None:
    old = T([[-1e4, -0.1, float("nan")], [-0.1, -0.1, float("inf")], [float("nan")] * 3])
    rollout = T([[-0.1, -0.1, float("nan")], [-1e4, -1e4, float("nan")], [float("nan")] * 3])
    mask = T([[1, 1, 0], [1, 1, 0], [0, 0, 0]])
    importance = ImportanceConfig(level, upper=1e12, outside=outside, normalize=True)
    for reject in [
        (),
        (DivergenceRejectionConfig("k3", 1.0, "max"),),
        (RatioRejectionConfig("k1", 2.0, "sum"),),
    ]:
        for width, rows in ((3, 3), (3, 0), (0, 3)):
            config = RolloutCorrectionConfig(importance=importance, reject=reject)
            parts = (x[:rows, :width] for x in (old, rollout, mask))
            result = corrected(*parts, config)
            assert bool(result.weights.isfinite().all())
            assert not result.weights[result.mask == 0].any()
            assert all(math.isfinite(value) for value in result.stats.values().values())
    assert not corrected(old.requires_grad_(), rollout, mask, config).weights.requires_grad


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_sampler_that_does_not_say_is_not_judged(level: str) -> None:
    """Its rows have the weight 1, and all else is what it is without them."""
    old, rollout = T([[-1.0, -2.0], [-0.5, -3.0]]), T([[-1.5, -1.0], [-0.7, -2.0]])
    nan, mask = torch.full((2, 2), float("nan")), T([[1, 1], [1, 1]])
    for reject in ((), (RatioRejectionConfig("k1", 1.4, "token"),)):
        importance = ImportanceConfig(level, upper=1.5, normalize=True)
        config = RolloutCorrectionConfig(importance=importance, reject=reject)
        alone = corrected(old, rollout, mask, config)
        both = corrected(torch.cat([old, old]), torch.cat([rollout, nan]), torch.cat([mask, mask]), config)
        torch.testing.assert_close(both.weights[:2], alone.weights)
        torch.testing.assert_close(both.mask[:2], alone.mask)
        assert (both.weights[2:] == 1).all()
        assert (both.mask[2:] == 1).all()
        assert both.stats.values() == pytest.approx(alone.stats.values())
