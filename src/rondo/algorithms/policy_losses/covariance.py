"""Clip-Cov and KL-Cov: hold back the few tokens that drive the entropy down (2505.22617).

A token's covariance is (A - mean A)(ℓ - mean ℓ), means over the trained tokens, ℓ of the current policy.
Selection is over the whole mini-batch, before it is cut into micro-batches: per micro-batch, with at least
one token each, a share of 2e-4 would become 1/n (D14). So the mini-batch's log-probs are computed before each
optimizer step, except where they are known: before the first, where ℓ = ℓ_old.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rondo.algorithms.arguments import ranked, require
from rondo.algorithms.policy_losses.clipped import ppo_clip
from rondo.algorithms.policy_losses.ratio import clip_range, log_ratio, ratio_metrics
from rondo.algorithms.registry import policy_loss
from rondo.algorithms.statistics import Metrics, share
from rondo.core.errors import ConfigError


@ranked("rows")
def covariances(advantages: Tensor, log_probs: Tensor, response_mask: Tensor) -> Tensor:
    """(A - mean A)(ℓ - mean ℓ) of the N trained tokens of columns [B, T], row by row: float64 [N]."""
    counted = response_mask > 0
    advantage, log_prob = (column[counted].to(torch.float64) for column in (advantages, log_probs))
    return (advantage - advantage.mean()) * (log_prob - log_prob.mean())


def _number(fraction: float, num_tokens: int) -> int:
    """Returns max(1, ⌊fraction · N⌋), how many tokens are selected of N."""
    require("algorithm.policy_loss: the selection", above=0, at_most=1, fraction=fraction)
    return max(1, math.floor(fraction * num_tokens + 1e-9))  # in floating point, 0.29 · 100 is just below 29


def _column(chosen: Tensor, response_mask: Tensor) -> dict[str, Tensor]:
    """Makes the column that is 1 at the trained tokens numbered `chosen`, 0 elsewhere: float32 [B, T]."""
    counted = response_mask > 0
    flat = torch.zeros(int(counted.sum()), device=counted.device)
    flat[chosen] = 1
    selected = torch.zeros(counted.shape, device=counted.device)
    selected[counted] = flat
    return {"covariance_selected": selected}


@ranked("rows")
def select_largest(
    advantages: Tensor, log_probs: Tensor, response_mask: Tensor, *, fraction: float = 2e-3
) -> dict[str, Tensor]:
    """KL-Cov's tokens: the max(1, ⌊fraction · N⌋) of largest covariance among the N trained ones, all [B, T].

    Ties go to the earlier token. Paper: fraction 2e-3 for 7B, 2e-4 for 32B.
    """
    covariance = covariances(advantages, log_probs, response_mask)
    number = _number(fraction, len(covariance))
    return _column(torch.argsort(covariance, descending=True, stable=True)[:number], response_mask)


@ranked("rows")
def select_between(
    advantages: Tensor,
    log_probs: Tensor,
    old_log_probs: Tensor,
    response_mask: Tensor,
    seed: int,
    *,
    fraction: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    clip: float = 1.0,
    clip_low: float | None = None,
    clip_high: float | None = None,
) -> dict[str, Tensor]:
    """Clip-Cov's tokens: max(1, ⌊fraction · N⌋) of the N trained ones, all [B, T], drawn at random among
    those with low < covariance < high that PPO does not clip already; all of these where they are fewer.

    The clip range is the loss's own. The draw depends on `seed` alone.
    """
    if not low < high:
        raise ConfigError(f"algorithm.policy_loss: clip_cov needs low < high, got {low} and {high}")
    covariance = covariances(advantages, log_probs, response_mask)
    number = _number(fraction, len(covariance))
    down, up = clip_range(clip, clip_low, clip_high)
    counted = response_mask > 0
    ratio, advantage = (log_probs - old_log_probs)[counted].exp(), advantages[counted]
    is_clipped = torch.where(advantage > 0, ratio > 1 + up, (advantage < 0) & (ratio < 1 - down))
    candidates = torch.nonzero((covariance > low) & (covariance < high) & ~is_clipped).squeeze(1)
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    return _column(candidates[order.to(candidates.device)[:number]], response_mask)


@policy_loss("kl_cov", prepare=select_largest)
def kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    covariance_selected: Tensor,
    *,
    beta: float = 1.0,
) -> tuple[Tensor, Metrics]:
    """-Aρ + β·|δ| on the selected tokens, -Aρ elsewhere, [N] (KL-Cov, 2505.22617; β = 1).

    No ratio is clipped; the log-ratio is clamped to ±20. At δ = 0 the penalty has no gradient: it acts from
    the second optimizer step on a batch on. Metric actor/covariance_selected: the share that was selected.
    """
    require("algorithm.policy_loss: kl_cov", at_least=0, beta=beta)
    delta = log_ratio(log_probs, old_log_probs)
    metrics = ratio_metrics(delta, response_mask)
    metrics["actor/covariance_selected"] = share(covariance_selected, response_mask)
    return -advantages * delta.exp() + beta * covariance_selected * delta.abs(), metrics


@policy_loss("clip_cov", zero_at_zero_advantage=True, prepare=select_between)
def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    covariance_selected: Tensor,
    *,
    clip: float = 1.0,
    clip_low: float | None = None,
    clip_high: float | None = None,
) -> tuple[Tensor, Metrics]:
    """The loss of `ppo_clip` without dual clip, 0 on the selected tokens, [N] (Clip-Cov, 2505.22617; clip =
    1).

    Metric actor/covariance_selected: the share that was selected. The clip fractions count all tokens.
    """
    columns = (log_probs, old_log_probs, advantages, response_mask)
    loss, metrics = ppo_clip(*columns, clip=clip, clip_low=clip_low, clip_high=clip_high, dual_clip=None)
    metrics["actor/covariance_selected"] = share(covariance_selected, response_mask)
    return loss * (1 - covariance_selected), metrics
