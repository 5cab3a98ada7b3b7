"""Policy losses that clip or bound the probability ratio: PPO's surrogate and its relatives.

Per token: PPO (also clip-higher and dual clip), CISPO, SAPO and DPPO. Per response: GSPO and GMPO. Clip-Cov,
which is PPO's with a selection of tokens, is in `covariance.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rondo.algorithms.arguments import require
from rondo.algorithms.policy_losses.ratio import (
    LOG_RATIO_LIMIT,
    clip_metrics,
    clip_range,
    log_ratio,
    ratio_metrics,
)
from rondo.algorithms.registry import policy_loss
from rondo.algorithms.statistics import Metrics, row_index, row_means, share

# Of log s in GSPO: one response's mean log-ratio, far below the ±20 of a single token's.
GSPO_LOG_LIMIT = 10.0
# Of "another token than this one" in DPPO-KL, so that its logarithm stays finite where a token was certain.
LEAST_PROBABILITY = 1e-20


@policy_loss("ppo_clip", zero_at_zero_advantage=True)
def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip: float = 0.2,
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = 3.0,
) -> tuple[Tensor, Metrics]:
    """max(-Aρ, -A·clip(ρ, 1-ε_l, 1+ε_h)), all [N] (PPO 1707.06347 eq. 7; clip-higher: DAPO 2503.14476, .2 and
    .28).

    ρ = π/π_old with the log-ratio clamped to ±20. dual_clip: for A < 0 the loss is at most -A·dual_clip
    (1912.09729, c = 3; null: off). Clip fractions count tokens whose clipped branch is strictly larger:
    `clip_fraction` all of them, `_low` those with A < 0 (ρ < 1-ε_l), `_high` those with A > 0 (ρ > 1+ε_h),
    `_dual` those that the dual clip cut.
    """
    low, high = clip_range(clip, clip_low, clip_high)
    require("algorithm.policy_loss: ppo_clip", above=1, dual_clip=dual_clip)
    delta = log_ratio(log_probs, old_log_probs)
    loss, metrics = _surrogate(delta, advantages, response_mask, low, high)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        is_cut = (advantages < 0) & (bound < loss)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
        metrics["actor/clip_fraction_dual"] = share(is_cut, response_mask)
    return loss, metrics


def _surrogate(
    delta: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float
) -> tuple[Tensor, Metrics]:
    """Returns the larger of the plain and the clipped loss of log-ratios [N], and which one it was."""
    ratio = delta.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    metrics = clip_metrics(delta, clipped > unclipped, advantages, mask)
    return torch.maximum(unclipped, clipped), metrics


@policy_loss("cispo", zero_at_zero_advantage=True)
def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float | None = None,
    clip_high: float = 0.2,
) -> tuple[Tensor, Metrics]:
    """-sg[clip(ρ, 1-ε_l, 1+ε_h)]·A·ℓ, [N] (CISPO, MiniMax-M1 2506.13585); gradient -clip(ρ)·A, never zero.

    clip_low: null for no lower bound, as in the paper. The log-ratio is clamped to ±20.
    """
    require("algorithm.policy_loss: cispo", at_least=0, clip_low=clip_low, clip_high=clip_high)
    delta = log_ratio(log_probs, old_log_probs).detach()
    ratio = delta.exp()
    lowest = 0.0 if clip_low is None else 1 - clip_low
    weight = ratio.clamp(lowest, 1 + clip_high)
    metrics = ratio_metrics(delta, response_mask) | {
        "actor/clip_fraction": share(weight != ratio, response_mask),
        "actor/clip_fraction_low": share(ratio < lowest, response_mask),
        "actor/clip_fraction_high": share(ratio > 1 + clip_high, response_mask),
    }
    return -weight * advantages * log_probs, metrics


@policy_loss("sapo", zero_at_zero_advantage=True)
def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[Tensor, Metrics]:
    """-A·(4/τ)·σ(τ(ρ-1)), [N], τ by the sign of A (SAPO, 2511.20347); gradient -A·4σ(1-σ)·ρ, at ρ = 1 that of
    PPO.

    The paper averages per response: aggregation seq-mean-token-mean (not forced, D13). The log-ratio is
    clamped to ±20.
    """
    require("algorithm.policy_loss: sapo", above=0, tau_positive=tau_positive, tau_negative=tau_negative)
    delta = log_ratio(log_probs, old_log_probs)
    tau = torch.where(advantages > 0, delta.new_full((), tau_positive), delta.new_full((), tau_negative))
    gate = torch.sigmoid(tau * (delta.exp() - 1))
    return -advantages * (4 / tau) * gate, ratio_metrics(delta, response_mask)


@policy_loss("dppo_tv", zero_at_zero_advantage=True)
def dppo_tv(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    threshold: float = 0.15,
    threshold_low: float | None = None,
    threshold_high: float | None = None,
    cap: float = 1e4,
) -> tuple[Tensor, Metrics]:
    """-A·sg[min(ρ, cap)·keep]·ℓ, [N] (DPPO-Binary-TV, 2602.04879); gradient -A·min(ρ, cap)·keep.

    keep: π - π_old <= threshold_high where A > 0, >= -threshold_low elsewhere; a move against the advantage
    is never dropped. `threshold` sets both sides unless one is given. The paper compares with the policy that
    sampled, which π_old is in bypass mode. cap only guards against overflow (D11: own default; the PPO
    dual-clip constant 3 would change the algorithm); the log-ratio is clamped to ±20. Metrics: clip_fraction
    counts the dropped tokens with A ≠ 0, `_low` those with A < 0, `_high` those with A > 0.
    """
    low, high = clip_range(threshold, threshold_low, threshold_high)
    move = _probability(log_probs) - _probability(old_log_probs)
    keep = torch.where(advantages > 0, move <= high, move >= -low)
    return _dppo(log_probs, old_log_probs, advantages, response_mask, keep, cap)


@policy_loss("dppo_kl", zero_at_zero_advantage=True)
def dppo_kl(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    threshold: float = 0.05,
    threshold_low: float | None = None,
    threshold_high: float | None = None,
    cap: float = 1e4,
) -> tuple[Tensor, Metrics]:
    """Is `dppo_tv` with the KL divergence of the two-way choice "this token or another", [N]
    (DPPO-Binary-KL).

    KL = p_o (ℓ_o - ℓ) + (1-p_o) log((1-p_o)/(1-p)). keep: KL <= threshold (_high where A > 0, else _low), or
    the token moved against its advantage.
    """
    low, high = clip_range(threshold, threshold_low, threshold_high)
    old, new = _probability(old_log_probs), log_probs.detach().clamp(max=0)
    rest_old, rest_new = (
        (-torch.expm1(logs.detach().clamp(max=0))).clamp(min=LEAST_PROBABILITY)
        for logs in (old_log_probs, log_probs)
    )
    divergence = old * (old_log_probs.detach().clamp(max=0) - new) + rest_old * (rest_old / rest_new).log()
    follows = torch.where(advantages > 0, log_probs > old_log_probs, log_probs < old_log_probs)
    keep = ~(follows & torch.where(advantages > 0, divergence > high, divergence > low))
    return _dppo(log_probs, old_log_probs, advantages, response_mask, keep, cap)


def _probability(log_probs: Tensor) -> Tensor:
    return log_probs.detach().clamp(max=0).exp()


def _dppo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, keep: Tensor, cap: float
) -> tuple[Tensor, Metrics]:
    require("algorithm.policy_loss: dppo", above=0, cap=cap)
    delta = log_ratio(log_probs, old_log_probs).detach()
    weight = delta.exp().clamp(max=cap) * keep
    metrics = clip_metrics(delta, ~keep & (advantages != 0), advantages, mask)
    return -advantages * weight * log_probs, metrics


@policy_loss("gspo", zero_at_zero_advantage=True)
def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Tensor, Metrics]:
    """max(-A s, -A·clip(s, 1-ε_l, 1+ε_h)), [N], with the length-normalised ratio of the response (GSPO,
    2507.18071).

    log s_i = Σ_t m δ / L_i, at most 10; per token exp(sg[log s_i] + ℓ - sg[ℓ]), whose gradient is s_i
    (GSPO-token, eq. 14). The paper averages per response: aggregation seq-mean-token-mean (chosen in the
    config, not forced, D13).
    """
    low, high = clip_range(0.0, clip_low, clip_high)
    rows = row_index(cu_seqlens, len(log_probs))
    mean = row_means((log_probs - old_log_probs).detach(), response_mask, rows, len(cu_seqlens) - 1)[rows]
    delta = (mean + (log_probs - log_probs.detach())).clamp(max=GSPO_LOG_LIMIT)  # the bracket is exactly 0
    return _surrogate(delta, advantages, response_mask, low, high)


@policy_loss("gmpo", zero_at_zero_advantage=True)
def gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    clip: float = 0.4,
    clip_low: float | None = None,
    clip_high: float | None = None,
) -> tuple[Tensor, Metrics]:
    """-Ā_i exp(Σ_t m u_t / L_i) on every token of response i, [N] (GMPO, 2507.20673).

    u = sgn(A)·min(sgn(A)·δ, sgn(A)·clip(δ, -ε_l, ε_h)); the clip range is that of the *log*-ratio (paper:
    0.4, ratios e^±0.4). Ā_i is the response's mean advantage. Aggregation seq-mean-token-mean gives the
    paper's mean over responses, over the whole mini-batch (D8). The exponent is clamped to ±20. Weights of
    rollout correction multiply the tokens' losses, which are equal in a response: there they are averaged
    arithmetically, not geometrically as the ratios.
    """
    low, high = clip_range(clip, clip_low, clip_high)
    rows, num_rows = row_index(cu_seqlens, len(log_probs)), len(cu_seqlens) - 1
    delta = log_probs - old_log_probs
    sign = advantages.sign()
    bounded = delta.clamp(-low, high)
    chosen = sign * torch.minimum(sign * delta, sign * bounded)
    exponent = row_means(chosen, response_mask, rows, num_rows).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    advantage = row_means(advantages, response_mask, rows, num_rows)
    is_clipped = sign * bounded < sign * delta
    limited = delta.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    metrics = clip_metrics(limited, is_clipped, advantages, response_mask)
    return (-advantage * exponent.exp())[rows], metrics
