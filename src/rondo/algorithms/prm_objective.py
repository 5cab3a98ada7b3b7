"""The loss of the implicit process reward model (PRIME), in the shape of those in `objective.py`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rondo.algorithms.objective import Columns, clean, detached
from rondo.algorithms.policy_losses.ratio import Metrics
from rondo.algorithms.statistics import row_index


class PrmLoss:
    """Cross-entropy of p = σ(β Σ_t m (ℓ - ℓ_ref)) with the outcome: -[o log p + (1-o) log(1-p)], 2502.01456.

    o is 1 where accuracy > 0. The row's value stands on every token of the row, so that with
    `prm_loss_weight` planned as seq-mean-token-mean the loss is the mean over rows. β ℓ-ratios become the
    process rewards r_t = β (ℓ - ℓ_ref). Picklable. Metrics: prm/loss (weighted as the loss), prm/accuracy
    (share of rows with p > ½ exactly where o = 1), prm/reward (mean r_t over trained tokens).
    """

    outputs: tuple[str, ...] = ("log_probs",)
    columns: tuple[str, ...] = ("response_mask", "ref_log_probs", "accuracy", "prm_loss_weight")

    def __init__(self, beta: float) -> None:
        self._beta = beta

    def __call__(self, outputs: Columns, columns: Columns, cu_seqlens: Tensor) -> tuple[Tensor, Metrics]:
        """outputs and columns: [N]; accuracy arrives expanded; cu_seqlens: int32 [B+1] of the responses."""
        log_probs = outputs["log_probs"]
        counted = columns["response_mask"] > 0
        read = {name: columns[name] for name in self.columns if name != "response_mask"}
        inputs = clean({**read, "log_probs": log_probs}, counted, log_probs.dtype)
        weight, mask = inputs["prm_loss_weight"], counted.to(log_probs.dtype)
        reward = self._beta * (inputs["log_probs"] - inputs["ref_log_probs"])
        rows, num_rows = row_index(cu_seqlens, len(reward)), len(cu_seqlens) - 1
        logit = reward.new_zeros(num_rows).index_add(0, rows, reward)[rows]
        right = inputs["accuracy"] > 0
        token_loss = -functional.logsigmoid(torch.where(right, logit, -logit))
        loss = (weight * token_loss).sum()
        lengths = mask.new_zeros(num_rows).index_add(0, rows, mask)
        share_of_row = mask / lengths[rows].clamp(min=1)
        agrees = ((logit > 0) == right).to(mask.dtype)
        metrics: Metrics = {
            "prm/loss": (loss, weight.sum()),
            "prm/accuracy": ((agrees * share_of_row).sum(), share_of_row.sum()),
            "prm/reward": (reward.sum(), mask.sum()),
        }
        return loss, detached(metrics)
