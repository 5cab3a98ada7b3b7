"""Self-play preference optimisation: a response's log-ratio is regressed onto how often it wins."""

from __future__ import annotations

from torch import Tensor

from rondo.algorithms.policy_losses.ratio import Metrics
from rondo.algorithms.registry import policy_loss, require
from rondo.algorithms.statistics import row_index, row_means


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
    require(eta > 0, f"algorithm.policy_loss: sppo's eta must be positive, got {eta}")
    rows, num_rows = row_index(cu_seqlens, len(log_probs)), len(cu_seqlens) - 1
    per_token = (log_probs - ref_log_probs) * response_mask
    log_ratio = per_token.new_zeros(num_rows).index_add(0, rows, per_token)
    residual = log_ratio - eta * row_means(advantages, response_mask, rows, num_rows)
    counted = response_mask.new_zeros(num_rows).index_add(0, rows, response_mask) > 0
    number = counted.to(log_ratio.dtype).sum()
    return residual.square()[rows], {"actor/sequence_log_ratio": (log_ratio.detach().sum(), number)}
