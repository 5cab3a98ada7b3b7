"""Correction for samples of another policy than the trainer's: importance weights, rejection, diagnostics.

Three policies: π_roll sampled (stale, or an engine with other numerics), π_old is what the trainer makes of
the same tokens at the start of the step, π is being trained. With λ_t = ℓ_old - ℓ_roll on trained tokens
(clamped to ±20, 0 elsewhere) the loss gets a weight and a mask per token; the ratio π/π_old stays the policy
loss's own business (decoupled PPO: 2110.00641, AReaL 2505.24298). In bypass mode π_old is π_roll, and nothing
is known of the trainer's numbers before the update: there the loss itself judges λ_t = ℓ - ℓ_roll
(`accepted`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rondo.algorithms.arguments import ranked
from rondo.algorithms.policy_losses.ratio import LOG_RATIO_LIMIT
from rondo.algorithms.statistics import row_index, row_means
from rondo.config.schema import ImportanceConfig, RejectionConfig, RolloutCorrectionConfig
from rondo.core.types import StepStats

# Σ w², on the way to the effective sample size.
_SQUARES = "rollout_correction/squares"


@dataclass(frozen=True)
class Correction:
    """What `correct` makes of rows."""

    weights: Tensor
    """float32 [N], 0 where `mask` is 0, no gradient."""
    mask: Tensor
    """[N], the response mask without what was rejected, in its own type."""
    stats: StepStats
    """The diagnostics, to be merged with those of other rows; then `with_sample_size`."""


@dataclass(frozen=True)
class _Judged:
    """What is known of each token: λ, in float64 and 0 where not `counted`; bool: whether it counts, whether
    no rule rejects it, whether its ratio is out of bounds; the bounded ratio. How often each row counts.
    """

    gap: Tensor
    counted: Tensor
    keep: Tensor
    outside: Tensor
    weights: Tensor
    rows: Tensor
    times: Tensor

    def per_row(self, values: Tensor) -> Tensor:
        """Sums values [N] per row: float64 [B]."""
        return values.new_zeros(len(self.times), dtype=torch.float64).index_add(
            0, self.rows, values.to(torch.float64)
        )


@ranked("flat", times="row")
def correct(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    config: RolloutCorrectionConfig,
    *,
    times: Tensor | None = None,
    mean: float = 1.0,
) -> Correction:
    """Computes weights and mask for the responses of some rows, one behind the other, all [N]; where the mask
    is 0 the log-probs may be anything. Rows do not influence each other, except through `mean`.

    importance: see `importance_ratio`; truncated to the bounds (TIS) or 0 outside them (IcePop, Ring-1T
    2510.18855). None: all weights are 1. mean: what all weights are divided by; with `normalize` that of the
    whole batch (`mean_weight`). reject: see `accepted`; all must accept. times: [B], how often each row
    counts in what is measured; 0: its tokens are neither judged nor weighed.
    rollout_log_probs: NaN where the sampler did not say; such a token is not judged, is in no diagnostic and
    no mean, and has the weight 1.

    Diagnostics, over the original mask, as rollout_correction/…: kl and k3 (k1 and k3 estimates of
    KL(π_roll ‖ π_old)), ppl_ratio and log_ppl_difference (means over rows; perplexity under π_old relative to
    that under π_roll), chi2_token and chi2_sequence (E[w²] - 1 of the unbounded token and row ratios),
    rejected_token_share and rejected_row_share; over the new mask: weight_mean, _max, _min and
    effective_sample_size (1/E[(w/E w)²], a share of the tokens) of the weights in the loss, clipped_share
    (tokens whose ratio is out of the bounds of importance).
    """
    judged = _judge(old_log_probs, rollout_log_probs, response_mask, cu_seqlens, config, times)
    judged = replace(judged, weights=judged.weights / mean)
    mask = torch.where(judged.counted & ~judged.keep, 0, response_mask)
    weights = torch.where(rollout_log_probs.isnan() & (response_mask > 0), 1.0, judged.weights)
    return Correction(weights.to(torch.float32), mask, _diagnostics(judged))


@ranked("flat", times="row")
def weight_sums(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    config: RolloutCorrectionConfig,
    *,
    times: Tensor | None = None,
) -> Tensor:
    """Returns for each row what `mean_weight` is made of, float64 [B, 2]: the sum of its weights, and what it
    counts: its tokens (level token), or itself once, however long it is (and then the mean of its weights).
    """
    assert config.importance is not None
    judged = _judge(old_log_probs, rollout_log_probs, response_mask, cu_seqlens, config, times)
    sums, counts = judged.per_row(judged.weights), judged.per_row(judged.keep)
    if config.importance.level != "token":
        sums, counts = sums / counts.clamp(min=1), counts.clamp(max=1)
    return torch.stack([sums, counts], 1) * judged.times[:, None]


def mean_weight(sums: Tensor) -> float:
    """Returns the mean weight of what is still trained on, from `weight_sums` of all rows of a batch, in any
    fixed order; 1 where no weight is above 0.
    """
    total, count = sums.sum(0).tolist()
    mean: float = total / max(count, 1.0)
    return mean if mean > 0 else 1.0


def with_sample_size(stats: StepStats) -> StepStats:
    """Returns the diagnostics of all parts of a batch, merged, with the effective sample size."""
    squares = stats.sums.pop(_SQUARES, None)
    if squares is not None:
        # 1/E[(w/E w)²] = (Σ w)² / (N Σ w²); 0 where every weight is
        total, number = stats.means["rollout_correction/weight_mean"]
        effective = total**2 / (number * squares) if squares > 0 else 0.0
        stats.add_mean("rollout_correction/effective_sample_size", effective)
    return stats


def _judge(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    config: RolloutCorrectionConfig,
    times: Tensor | None,
) -> _Judged:
    rows, num_rows = row_index(cu_seqlens, len(response_mask)), len(cu_seqlens) - 1
    often = torch.ones(num_rows, dtype=torch.float64) if times is None else times.to(torch.float64)
    counted = (response_mask > 0) & (often > 0)[rows] & ~rollout_log_probs.isnan()
    gap = old_log_probs.detach().to(torch.float64) - rollout_log_probs.detach().to(torch.float64)
    gap = torch.where(counted, gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), 0.0)
    keep = counted.clone()
    for rule in config.reject:
        keep &= accepted(gap, counted, cu_seqlens, rule)
    weights, outside = keep.to(torch.float64), torch.zeros_like(keep)
    if config.importance is not None:
        ratio = importance_ratio(gap, counted, cu_seqlens, config.importance.level)
        weights, outside = _bounded(ratio, keep, config.importance)
    return _Judged(gap, counted, keep, outside, weights, rows, often)


@ranked("flat", gap="token", counted="token")
def importance_ratio(gap: Tensor, counted: Tensor, cu_seqlens: Tensor, level: str) -> Tensor:
    """Returns π_old/π_roll of each token's unit, [N], from λ [N] (0 where not `counted`).

    token: exp λ_t. sequence: exp Σ_t λ_t on every token of the row, the exponent clamped to ±20. geometric:
    exp of the row's mean λ.
    """
    if level == "token":
        return gap.exp()
    rows, num_rows = row_index(cu_seqlens, len(gap)), len(cu_seqlens) - 1
    if level == "geometric":
        exponent = row_means(gap, counted.to(gap.dtype), rows, num_rows)
    else:
        exponent = gap.new_zeros(num_rows).index_add(0, rows, gap)
    return exponent.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()[rows]


def _bounded(ratio: Tensor, keep: Tensor, config: ImportanceConfig) -> tuple[Tensor, Tensor]:
    """Returns (weights [N], 0 where not `keep`; bool [N]: whether the ratio was out of the bounds)."""
    lower = 0.0 if config.lower is None else config.lower
    assert 0.0 <= lower <= config.upper
    outside = (ratio < lower) | (ratio > config.upper)
    inside = (
        torch.where(outside, 0.0, ratio) if config.outside == "mask" else ratio.clamp(lower, config.upper)
    )
    return torch.where(keep, inside, 0.0), outside


@ranked("flat", gap="token", counted="token")
def accepted(gap: Tensor, counted: Tensor, cu_seqlens: Tensor, rule: RejectionConfig) -> Tensor:
    """Says which tokens one rule accepts, of responses one behind the other: bool [N]; a rule that judges
    rows accepts all tokens of a row or none.

    Statistics of a token, estimates of KL(π_roll ‖ π_old): k1 = -λ, k2 = λ²/2, k3 = e^λ - 1 - λ. Level token
    judges each for itself; sum, mean and max judge the row by that of its trained tokens. k2 and k3 are
    accepted up to `upper`; k1 is bounded by ratios: lower <= π_old/π_roll <= upper (that of the whole
    response for sum, its geometric mean for mean), lower 1/upper by default. What does not count is accepted.
    Which combinations mean something is checked when a configuration is loaded.
    """
    values = divergences(torch.where(counted, gap, 0.0), rule.statistic)
    if rule.level == "token":
        return _in_bounds(values, rule) | ~counted
    rows, num_rows = row_index(cu_seqlens, len(gap)), len(cu_seqlens) - 1
    if rule.level == "max":
        of_row = values.new_zeros(num_rows).scatter_reduce(0, rows, values, "amax")
    elif rule.level == "mean":
        of_row = row_means(values, counted.to(values.dtype), rows, num_rows)
    else:
        of_row = values.new_zeros(num_rows).index_add(0, rows, values)
    return _in_bounds(of_row, rule)[rows] | ~counted


def divergences(gap: Tensor, statistic: str) -> Tensor:
    """Returns what a rule bounds, of each token: k2 or k3; for k1, whose bounds are those of the ratio,
    λ = -k1 itself (D2).
    """
    if statistic == "k1":
        return gap
    return gap.square() / 2 if statistic == "k2" else gap.expm1() - gap


def _in_bounds(value: Tensor, rule: RejectionConfig) -> Tensor:
    assert rule.upper > 0
    if rule.statistic != "k1":
        return value <= rule.upper
    lower = 1.0 / rule.upper if rule.lower is None else rule.lower
    assert 0 < lower <= rule.upper
    return (value >= math.log(lower)) & (value <= math.log(rule.upper))


def _diagnostics(judged: _Judged) -> StepStats:
    """Measures how far π_roll and π_old are apart, and how much was cut off, rejected and reweighted."""
    stats = StepStats()
    gap, keep, times = judged.gap, judged.keep, judged.times
    often = times[judged.rows]

    def mean(name: str, numerators: Tensor, denominator: float) -> None:
        stats.add_mean(f"rollout_correction/{name}", float((often * numerators).sum()), denominator)

    def mean_of_rows(name: str, numerators: Tensor) -> None:
        stats.add_mean(f"rollout_correction/{name}", float((times * numerators).sum()), rows)

    of_rows = judged.per_row(judged.counted)
    has_tokens = of_rows > 0
    tokens, rows = float((times * of_rows).sum()), float((times * has_tokens).sum())
    total = judged.per_row(gap)
    means = total / of_rows.clamp(min=1)
    bounded = total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    mean("kl", -gap, tokens)
    mean("k3", gap.expm1() - gap, tokens)
    mean_of_rows("ppl_ratio", torch.where(has_tokens, (-means).exp(), 0.0))
    mean_of_rows("log_ppl_difference", -means)
    mean("chi2_token", (2 * gap).expm1(), tokens)
    mean_of_rows("chi2_sequence", (2 * bounded).expm1())
    kept = float((often * keep).sum())
    mean("rejected_token_share", judged.counted & ~keep, tokens)
    mean_of_rows("rejected_row_share", has_tokens & ~(judged.per_row(keep) > 0))
    mean("clipped_share", judged.outside & keep, kept)
    mean("weight_mean", judged.weights, kept)
    if kept:
        weights = judged.weights[keep]
        stats.add_max("rollout_correction/weight_max", float(weights.max()))
        stats.add_min("rollout_correction/weight_min", float(weights.min()))
        stats.add_sum(_SQUARES, float((often * judged.weights.square()).sum()))
    return stats
