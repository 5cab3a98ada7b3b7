"""On-policy distillation as an advantage: the student samples, the teacher judges each token."""

from __future__ import annotations

import torch
from torch import Tensor

from rondo.algorithms.registry import advantage, require


@advantage("teacher_gap")
def teacher_gap(
    teacher_log_probs: Tensor, old_log_probs: Tensor, response_mask: Tensor, *, clamp: float = 20.0
) -> Tensor:
    """A_t = ℓ_teacher - ℓ_old of the sampled token, [B, T]: minus the one-sample reverse KL (on-policy
    distillation, Thinking Machines 2025; 2306.13649 §3 with λ = 1).

    Per token: no discount (a token is not credited with later ones), no baseline, no whitening. clamp: bounds
    |A_t|, so that one token that the teacher all but excludes cannot rule the batch. 0 where the mask is 0.
    """
    require(clamp > 0, f"algorithm.advantage: teacher_gap needs clamp > 0, got {clamp}")
    gap = (teacher_log_probs - old_log_probs).clamp(-clamp, clamp)
    return torch.where(response_mask > 0, gap, 0.0).to(old_log_probs.dtype)
