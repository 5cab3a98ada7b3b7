"""Policy losses without a clip: the policy gradient, its importance-weighted form, and three regressions.

REINFORCE (GPG) needs no ratio; `reinforce_is` weighs samples of another policy; DRO, SPPO and GVPO hold the
policy near another one by a square.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rondo.algorithms.arguments import ranked, require
from rondo.algorithms.policy_losses.ratio import LOG_RATIO_LIMIT, log_ratio, ratio_metrics
from rondo.algorithms.registry import policy_loss
from rondo.algorithms.statistics import Answers, Metrics, row_index, row_means, share
from rondo.core.errors import ConfigError

LEVELS = ("token", "sequence", "geometric")


@policy_loss("reinforce", zero_at_zero_advantage=True)
def reinforce(log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, Metrics]:
    """-A·ℓ, [N]: no ratio, no clip; for updates on the policy's own samples (Williams 1992; the loss of GPG
    2504.02546).
    """
    return -advantages * log_probs, {}


@policy_loss("reinforce_is", zero_at_zero_advantage=True)
def reinforce_is(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    level: str = "token",
    lower: float | None = None,
    upper: float = 2.0,
    outside: str = "truncate",
) -> tuple[Tensor, Metrics]:
    """-sg[w]·A·ℓ, [N]: importance sampling with w = π/π_old of the policy as it is now, within bounds.

    Meant for bypass mode (algorithm.rollout_correction.mode), where π_old is the policy that sampled: w
    corrects staleness and the update at once. The options are those of rollout_correction.importance. level:
    w of the token, of the sequence (the product over its trained tokens, on each of them), or their geometric
    mean. outside: what is not in [lower, upper] is truncated to it, or masked: w = 0, which is rejection
    (the token still counts in the aggregation). Log-ratios of tokens and of sequences are clamped to ±20.
    Metrics are of w before the bounds; actor/clip_fraction: the share of tokens outside of them.
    """
    if level not in LEVELS:
        raise ConfigError(f"algorithm.policy_loss: level must be one of {', '.join(LEVELS)}, got {level!r}")
    if outside not in ("truncate", "mask"):
        raise ConfigError(f"algorithm.policy_loss: outside must be truncate or mask, got {outside!r}")
    lowest = 0.0 if lower is None else lower
    require("algorithm.policy_loss: reinforce_is", above=0, at_least=lowest, upper=upper)
    require("algorithm.policy_loss: reinforce_is", at_least=0, lower=lower)
    delta = log_ratio(log_probs, old_log_probs).detach()
    if level != "token":
        rows, num_rows = row_index(cu_seqlens, len(delta)), len(cu_seqlens) - 1
        if level == "sequence":
            of_row = delta.new_zeros(num_rows).index_add(0, rows, delta * response_mask)
        else:
            of_row = row_means(delta, response_mask, rows, num_rows)
        delta = of_row.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[rows]
    ratio = delta.exp()
    beyond = (ratio < lowest) | (ratio > upper)
    weight = ratio.masked_fill(beyond, 0.0) if outside == "mask" else ratio.clamp(lowest, upper)
    metrics = ratio_metrics(delta, response_mask) | {"actor/clip_fraction": share(beyond, response_mask)}
    return -weight * advantages * log_probs, metrics


@policy_loss("dro")
def dro(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    beta: float = 0.1,
) -> tuple[Tensor, Metrics]:
    """-(A·ℓ - (β/2)·δ²), [N]; gradient -(A - β δ), also where A is 0.

    This is the form that verl calls `dro`, per token and on the policy's own samples. The paper (2405.19107)
    is offline and regresses whole responses: ½(r - V(x) - β log(π/π_ref))² with a learned V; neither it nor
    verl has a default β for this form. δ is not clamped in the loss: far from π_old the pull must not vanish.
    The metrics are of the δ clamped to ±20, as everywhere.
    """
    require("algorithm.policy_loss: dro", at_least=0, beta=beta)
    delta = log_probs - old_log_probs
    metrics = ratio_metrics(log_ratio(log_probs, old_log_probs), response_mask)
    return -(advantages * log_probs - beta / 2 * delta.square()), metrics


@policy_loss("sppo")
def sppo(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    eta: float = 1e3,
) -> tuple[Tensor, Metrics]:
    """(Σ_t m (ℓ - ℓ_ref) - η a)² on every token of the response, [N] (SPPO, 2405.00675; η = 1e3).

    a = P(y ≻ π_t | x) - ½ of the response (advantage: win_rate; the mean over its tokens is taken), per
    prompt, not over the batch (D17). ref_log_probs are those of π_t, the policy at the start of the iteration
    (reference.refresh_every). Aggregation seq-mean-token-mean gives the paper's mean over responses. A
    response with a = 0 is pulled back to π_t. Metric actor/sequence_log_ratio: the mean over responses of
    what is regressed.
    """
    require("algorithm.policy_loss: sppo", above=0, eta=eta)
    rows, num_rows = row_index(cu_seqlens, len(log_probs)), len(cu_seqlens) - 1
    per_token = (log_probs - ref_log_probs) * response_mask
    sequence_log_ratio = per_token.new_zeros(num_rows).index_add(0, rows, per_token)
    residual = sequence_log_ratio - eta * row_means(advantages, response_mask, rows, num_rows)
    counted = response_mask.new_zeros(num_rows).index_add(0, rows, response_mask) > 0
    number = counted.to(sequence_log_ratio.dtype).sum()
    metrics: Metrics = {"actor/sequence_log_ratio": (sequence_log_ratio.detach().sum(), number)}
    return residual.square()[rows], metrics


@ranked("rows", group_id="token")
def group_log_ratios(
    log_probs: Tensor, old_log_probs: Tensor, group_id: Tensor, response_mask: Tensor
) -> dict[str, Tensor]:
    """GVPO's statistics of a prompt group, [B, T]: the mean over its responses of Σ_t m δ, and how many there
    are. All columns are [B, T]; a response without trained tokens counts in no group.
    """
    answers = Answers.of(group_id, response_mask)
    groups = answers.groups
    means = groups.sums(answers.sums(log_probs - old_log_probs)) / groups.size
    both = means[groups.index], groups.size[groups.index]
    mean, size = answers.on_tokens(*both, dtype=log_probs.dtype)
    return {"group_log_ratio": mean, "group_size": size}


@policy_loss("gvpo", prepare=group_log_ratios)
def gvpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    group_log_ratio: Tensor,
    group_size: Tensor,
    cu_seqlens: Tensor,
    *,
    beta: float = 0.1,
) -> tuple[Tensor, Metrics]:
    """½ [β (D - D̄) - (R - R̄)]² · n/(n-1) on every token of the response, [N] (GVPO, 2504.19599), D = Σ_t m δ,
    means over the prompt's n responses.

    R - R̄ are the advantages (advantage: dr_grpo; the mean over a response's tokens is taken). Aggregation
    seq-mean-token-mean gives Σ_i ½[…]²/(n-1), averaged over prompts. D̄ is of the current policy, computed
    before each optimizer step (`group_log_ratios`), so that a group may be cut into micro-batches; it is a
    constant in the gradient, which is exact all the same: the residuals of a group sum to 0. At the optimum
    β log π/π_old is R up to a number per prompt. Metric actor/sequence_log_ratio: the mean of D.
    """
    require("algorithm.policy_loss: gvpo", above=0, beta=beta)
    rows, num_rows = row_index(cu_seqlens, len(log_probs)), len(cu_seqlens) - 1
    per_token = (log_probs - old_log_probs) * response_mask
    log_ratio = per_token.new_zeros(num_rows).index_add(0, rows, per_token)
    mean, size, advantage = (
        row_means(column, response_mask, rows, num_rows)
        for column in (group_log_ratio, group_size, advantages)
    )
    residual = beta * (log_ratio - mean) - advantage
    loss = residual.square() / 2 * size / (size - 1).clamp(min=1)
    answered = (size > 0).to(log_ratio.dtype)
    metrics: Metrics = {"actor/sequence_log_ratio": ((log_ratio.detach() * answered).sum(), answered.sum())}
    return torch.where(size > 1, loss, 0.0)[rows], metrics
