"""Group sequence policy optimisation: one ratio per response."""

from __future__ import annotations

import torch
from torch import Tensor

from rondo.algorithms.policy_losses.ratio import Metrics, clip_range, ratio_metrics, share
from rondo.algorithms.registry import policy_loss
from rondo.algorithms.statistics import row_index, row_means

LOG_LIMIT = 10.0


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
    delta = (mean + (log_probs - log_probs.detach())).clamp(max=LOG_LIMIT)  # the bracket is exactly 0
    ratio = delta.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    is_clipped = clipped > unclipped
    metrics = ratio_metrics(delta, response_mask) | {
        "actor/clip_fraction": share(is_clipped, response_mask),
        "actor/clip_fraction_low": share(is_clipped & (advantages < 0), response_mask),
        "actor/clip_fraction_high": share(is_clipped & (advantages > 0), response_mask),
    }
    return torch.maximum(unclipped, clipped), metrics
