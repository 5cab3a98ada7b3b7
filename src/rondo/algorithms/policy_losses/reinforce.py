"""The plain policy gradient, and the same for samples of another policy."""

from __future__ import annotations

from torch import Tensor

from rondo.algorithms.policy_losses.ratio import LOG_RATIO_LIMIT, Metrics, log_ratio, ratio_metrics, share
from rondo.algorithms.registry import policy_loss, require
from rondo.algorithms.statistics import row_index, row_means

LEVELS = ("token", "sequence", "geometric")


@policy_loss("gpg", zero_at_zero_advantage=True)  # the name under which that paper's readers look for it
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
    require(
        level in LEVELS, f"algorithm.policy_loss: level must be one of {', '.join(LEVELS)}, got {level!r}"
    )
    require(
        outside in ("truncate", "mask"),
        f"algorithm.policy_loss: outside must be truncate or mask, got {outside!r}",
    )
    lowest = 0.0 if lower is None else lower
    require(
        0 <= lowest <= upper and upper > 0,
        f"algorithm.policy_loss: needs 0 <= lower <= upper and upper > 0, got {lower} and {upper}",
    )
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
