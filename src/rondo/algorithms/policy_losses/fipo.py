"""FIPO: a token counts by what the policy did since with the tokens behind it (2603.19835)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rondo.algorithms.arguments import ranked, require
from rondo.algorithms.policy_losses.clipped import ppo_clip
from rondo.algorithms.policy_losses.ratio import log_ratio
from rondo.algorithms.registry import policy_loss
from rondo.algorithms.statistics import Metrics, row_index


@ranked("flat", values="token")
def discounted_from_end(values: Tensor, cu_seqlens: Tensor, gamma: float) -> Tensor:
    """Σ_{j >= t} γ^{j-t} x_j within each response, of values [N]; distances count every position. float64.

    In log2(N) passes over all tokens: after one with step s each has the sum over 2s positions.
    """
    rows = row_index(cu_seqlens, len(values))
    total, step = values.to(torch.float64), 1
    while step < len(values):
        behind = torch.zeros_like(total)
        same = rows[step:] == rows[:-step]
        behind[:-step] = torch.where(same, total[step:], 0.0)
        total, step = total + gamma**step * behind, 2 * step
    return total


@policy_loss("fipo", zero_at_zero_advantage=True)
def fipo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    half_life: float = 32.0,
    reach: float = 0.2,
    high_only: bool = True,
    safe: float = 4.0,
    clip: float = 0.2,
    clip_low: float | None = None,
    clip_high: float | None = 0.28,
    dual_clip: float = 10.0,
) -> tuple[Tensor, Metrics]:
    """The loss of `ppo_clip` with f_t A_t for A_t, [N]; f_t = clip(exp F_t, lo, 1 + reach), F_t = Σ_{j >= t}
    γ^{j-t} m_j δ_j 1[δ_j <= ln dual_clip] of the current policy, without a gradient (FIPO, 2603.19835).

    half_life: of the discount, in tokens: γ = 2^(-1/half_life). lo is 1 (high_only) or 1 - reach. Where A < 0
    and ρ > safe, f stays within [.8, 1]. A response with more than one token that the dual clip cuts has no
    loss. Defaults are those of ms-swift's form (other ports: half-life 12 or 64, lo = 1 - reach); the paper's
    own were not seen. One difference: there the tokens of such a response leave the denominator,
    too, here they count in it, which was planned before. At the first update f is 1, and the loss is
    `ppo_clip`. Metrics: those of ppo_clip, actor/fipo_weight (mean f), actor/fipo_left_out (share of such
    responses).
    """
    require("algorithm.policy_loss: fipo", above=0, half_life=half_life, safe=safe)
    require("algorithm.policy_loss: fipo", at_least=0, below=1, reach=reach)
    require("algorithm.policy_loss: fipo", above=1, dual_clip=dual_clip)
    fixed = log_ratio(log_probs, old_log_probs).detach()
    ratio = fixed.exp()
    counts = torch.where(fixed <= math.log(dual_clip), fixed * response_mask, 0.0)
    future = discounted_from_end(counts, cu_seqlens, 2 ** (-1 / half_life))
    weight = future.exp().clamp(1.0 if high_only else 1 - reach, 1 + reach).to(fixed.dtype)
    weight = torch.where((advantages < 0) & (ratio > safe), weight.clamp(0.8, 1.0), weight)
    columns = (log_probs, old_log_probs, weight * advantages, response_mask)
    loss, metrics = ppo_clip(*columns, clip=clip, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    is_cut = (advantages < 0) & (ratio > dual_clip) & (response_mask > 0)
    rows, num_rows = row_index(cu_seqlens, len(loss)), len(cu_seqlens) - 1
    cuts = response_mask.new_zeros(num_rows).index_add(0, rows, is_cut.to(response_mask.dtype))
    answered = response_mask.new_zeros(num_rows).index_add(0, rows, response_mask) > 0
    metrics["actor/fipo_weight"] = ((weight * response_mask).sum(), response_mask.sum())
    metrics["actor/fipo_left_out"] = ((cuts > 1).to(loss.dtype).sum(), answered.to(loss.dtype).sum())
    return torch.where((cuts > 1)[rows], 0.0, loss), metrics
