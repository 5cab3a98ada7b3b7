"""Losses of batches in which some rows are another sampler's (`algorithm.mix`, column `given`):
demonstrations (LUFFY, RL-PLUS) and answers of earlier steps (ExGRPO).

Each has one form for sampled tokens and another for given ones. Ratio metrics are of sampled tokens alone.
π = exp ℓ is the current policy's, differentiated; ρ = π/π_old.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rondo.algorithms.arguments import require
from rondo.algorithms.policy_losses.clipped import ppo_clip
from rondo.algorithms.policy_losses.ratio import log_ratio, ratio_metrics
from rondo.algorithms.registry import policy_loss
from rondo.algorithms.statistics import Metrics, share


@policy_loss("luffy", zero_at_zero_advantage=True)
def luffy(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    given: Tensor,
    *,
    gamma: float = 0.1,
    clip: float | None = None,
) -> tuple[Tensor, Metrics]:
    """-A ρ of sampled tokens, -A f(π) of given ones, f(p) = p/(p + γ), all [N] (LUFFY, 2504.14945).

    The gradient of a given token, -A γπ/(π+γ)², is largest at π = γ: unlikely tokens are learnt, too. clip:
    of ρ, as in `ppo_clip`; null: none, as in the authors' script. γ .1 in paper and code. The code's other
    form, π over the expert's probability, is not here. Metrics: ratios of sampled tokens, and of given ones
    their share of tokens (actor/given_share) and the mean of π (actor/given_probability).
    """
    require("algorithm.policy_loss: luffy", above=0, gamma=gamma)
    shaped = _shaped(log_probs.clamp(max=0).exp(), gamma)
    return _joined(log_probs, old_log_probs, advantages, response_mask, given, -advantages * shaped, clip)


@policy_loss("rl_plus", zero_at_zero_advantage=True)
def rl_plus(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    given: Tensor,
    *,
    kappa: float = 0.5,
    uniform: float = 1.0,
    clip: float | None = None,
) -> tuple[Tensor, Metrics]:
    """-A ρ of sampled tokens, -A C r of given ones, all [N], with r = 2π/(π_old + ω), ω = (π_old + u)/2 and
    C = sg[(1 - π)^κ] (RL-PLUS, 2508.00222).

    r stands for the ratio to a sampler that nobody knows, C lifts what the policy finds unlikely; r is not
    clipped. The public code's numbers: u = 1 (uniform), κ = ½. The paper has half of π_old and half uniform,
    which read literally is u = 1/vocabulary; its κ is not known. clip and metrics: as in `luffy`.
    """
    require("algorithm.policy_loss: rl_plus", at_least=0, kappa=kappa)
    require("algorithm.policy_loss: rl_plus", above=0, uniform=uniform)
    probability, old = log_probs.clamp(max=0).exp(), old_log_probs.clamp(max=0).exp()
    ratio = 2 * probability / (old + (old + uniform) / 2)
    lift = (1 - probability.detach()) ** kappa
    return _joined(
        log_probs, old_log_probs, advantages, response_mask, given, -advantages * lift * ratio, clip
    )


@policy_loss("exgrpo", zero_at_zero_advantage=True)
def exgrpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    given: Tensor,
    given_log_probs: Tensor,
    replaying: Tensor,
    *,
    gamma: float = 0.1,
    clip: float = 0.2,
) -> tuple[Tensor, Metrics]:
    """-A ρ of sampled tokens, -A f(w) of given ones, all [N], with w = exp(ℓ - ℓ_given) to the policy that
    sampled them in an earlier step, and f(w) = w/(w + γ) (ExGRPO, 2510.02245).

    replaying: a number of algorithm.coefficients; where it is not above 0, nothing is replayed yet, and ρ is
    clipped as in `ppo_clip` (clip), as the authors' code does. Metrics: as in `luffy`.
    """
    require("algorithm.policy_loss: exgrpo", above=0, gamma=gamma)
    columns = (log_probs, old_log_probs, advantages, response_mask, given)
    on_given = -advantages * _shaped(log_ratio(log_probs, given_log_probs).exp(), gamma)
    clipped, _ = _joined(*columns, on_given, clip)
    loss, metrics = _joined(*columns, on_given, None)
    return torch.where(replaying > 0, loss, clipped), metrics


def _shaped(value: Tensor, gamma: float) -> Tensor:
    return value / (value + gamma)


def _joined(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    given: Tensor,
    on_given: Tensor,
    clip: float | None,
) -> tuple[Tensor, Metrics]:
    """Returns the loss of sampled tokens, and `on_given` where a token was given; all [N]."""
    is_given = given > 0
    of_sampled = mask * ~is_given
    if clip is None:
        delta = log_ratio(log_probs, old_log_probs)
        loss, metrics = -advantages * delta.exp(), ratio_metrics(delta, of_sampled)
    else:
        columns = log_probs, old_log_probs, advantages, of_sampled
        loss, metrics = ppo_clip(*columns, clip=clip, dual_clip=None)
    of_given = mask * is_given
    probability = log_probs.detach().clamp(max=0).exp() * of_given
    metrics["actor/given_share"] = share(is_given, mask)
    metrics["actor/given_probability"] = (probability.sum(), of_given.sum())
    return torch.where(is_given, on_given, loss), metrics
