"""The plain policy gradient."""

from __future__ import annotations

from torch import Tensor

from rondo.algorithms.policy_losses.ratio import Metrics
from rondo.algorithms.registry import policy_loss


@policy_loss("gpg", zero_at_zero_advantage=True)  # the name under which that paper's readers look for it
@policy_loss("reinforce", zero_at_zero_advantage=True)
def reinforce(log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, Metrics]:
    """-A·ℓ, [N]: no ratio, no clip; for updates on the policy's own samples (Williams 1992; the loss of GPG
    2504.02546).
    """
    return -advantages * log_probs, {}
