"""The loss of a token counts where the policy was least sure: the 80/20 rule (2506.01939)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rondo.algorithms.arguments import ranked, require
from rondo.algorithms.policy_losses.clipped import ppo_clip
from rondo.algorithms.registry import policy_loss
from rondo.algorithms.statistics import Metrics
from rondo.core.errors import ConfigError

_DIVISORS = ("kept", "all")


@ranked("rows")
def least_sure(
    entropy: Tensor, response_mask: Tensor, *, share: float = 0.2, divide: str = "kept"
) -> dict[str, Tensor]:
    """What a token's loss is multiplied with, [B, T]: of the N trained tokens of a mini-batch the max(1,
    ⌈share · N⌉) of largest entropy count, others do not; ties go to the earlier token.

    divide: by the tokens that are kept, so that these have the weight N / kept (the authors' code), or by all
    (TRL's `top_entropy_quantile`), 1. entropy: of the policy before the update.
    """
    require("algorithm.policy_loss: top_entropy", above=0, at_most=1, share=share)
    if divide not in _DIVISORS:
        raise ConfigError(f"algorithm.policy_loss: top_entropy divides by kept or by all, got {divide!r}")
    counted = response_mask > 0
    values = entropy[counted]
    number = min(len(values), max(1, math.floor(share * len(values) + 0.9999)))
    flat = torch.zeros_like(values)
    flat[torch.argsort(values, descending=True, stable=True)[:number]] = (
        len(values) / number if divide == "kept" else 1.0
    )
    out = torch.zeros_like(entropy)
    out[counted] = flat
    return {"entropy_weight": out}


@policy_loss("top_entropy", zero_at_zero_advantage=True, prepare=least_sure)
def top_entropy(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    entropy_weight: Tensor,
    *,
    clip: float = 0.2,
    clip_low: float | None = None,
    clip_high: float | None = 0.28,
    dual_clip: float | None = 10.0,
) -> tuple[Tensor, Metrics]:
    """The loss of `ppo_clip` on the fifth of the tokens with the largest entropy, 0 on others, [N] (80/20,
    2506.01939; its recipe is DAPO's, with clip .2 and .28 and a dual clip of 10).

    Differences: the tokens are chosen over the whole mini-batch (the authors: in each micro-batch of a rank),
    by the entropy before the update (the authors: of the policy in each pass). With aggregation token-mean
    it is the mean over the tokens that are kept (`divide`). Metric actor/entropy_kept: their share.
    """
    columns = (log_probs, old_log_probs, advantages, response_mask)
    loss, metrics = ppo_clip(*columns, clip=clip, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    kept = (entropy_weight > 0) & (response_mask > 0)
    metrics["actor/entropy_kept"] = (kept.to(loss.dtype).sum(), response_mask.sum())
    return loss * entropy_weight, metrics
