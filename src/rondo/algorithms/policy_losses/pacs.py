"""PACS: the answers of a prompt as a classification of right and wrong (2509.02522).

With D = Σ_t m δ of an answer, r = β D, ψ_i = r_i - mean_{j≠i} r_j and y = 1 for a right answer, the loss
is (1/B) Σ w [y softplus(-ψ) + (1-y) softplus(ψ)], differentiated through the group's other answers, too.
Its gradient to D_j is β n/(n-1)/B [d_j - mean_g d], d = w (σ(ψ) - y): one number per answer, made of the
whole mini-batch before each optimizer step, so that a group may be cut into micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rondo.algorithms.arguments import ranked, require
from rondo.algorithms.policy_losses.ratio import log_ratio, ratio_metrics
from rondo.algorithms.registry import policy_loss
from rondo.algorithms.statistics import Answers, Metrics, row_index, row_means


@ranked("rows", group_id="token", accuracy="token")
def classified(
    log_probs: Tensor,
    old_log_probs: Tensor,
    group_id: Tensor,
    accuracy: Tensor,
    response_mask: Tensor,
    *,
    beta: float = 1.0,
    balance: bool = True,
) -> dict[str, Tensor]:
    """Makes of each answer what `pacs` needs, on each of its tokens, all [B, T]: pacs_gradient, B ∂L/∂D, and
    pacs_loss, its summand of the loss. An answer without trained tokens is in no group.

    balance: weighs the classes of a group alike, w = n / (2 · answers of the class), where both occur.
    """
    require("algorithm.policy_loss: pacs", above=0, beta=beta)
    answers = Answers.of(group_id, response_mask)
    groups, size = answers.groups, answers.groups.size[answers.groups.index]
    right = (torch.where(answers.counted, accuracy, 0.0).amax(1)[answers.there] > 0).to(torch.float64)
    others = size / (size - 1).clamp(min=1)
    psi = beta * others * groups.centred(answers.sums(log_probs - old_log_probs))
    weight = torch.ones_like(psi)
    if balance:
        of_class = torch.where(
            right > 0, groups.sums(right)[groups.index], groups.sums(1 - right)[groups.index]
        )
        weight = torch.where(of_class < size, size / (2 * of_class), 1.0)
    towards = weight * (psi.sigmoid() - right)
    gradient = torch.where(size < 2, 0.0, beta * others * groups.centred(towards))
    loss = weight * torch.where(right > 0, functional.softplus(-psi), functional.softplus(psi))
    columns = answers.on_tokens(gradient, loss, dtype=log_probs.dtype)
    return dict(zip(("pacs_gradient", "pacs_loss"), columns, strict=True))


@policy_loss("pacs", prepare=classified)
def pacs(
    log_probs: Tensor,
    old_log_probs: Tensor,
    response_mask: Tensor,
    pacs_gradient: Tensor,
    pacs_loss: Tensor,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Metrics]:
    """B ∂L/∂D · (ℓ - sg[ℓ]) + L_i / trained tokens, [N] (PACS, 2509.02522): summed over an answer and
    averaged over answers (aggregation seq-mean-token-sum) it is the loss, and its gradient the loss's.

    It reads no advantages. β = 1 and balanced classes are the paper's scripts'; π_old is the policy at the
    start of the step, as in its code (the paper says: a reference). Its code sums over tokens without a loss,
    too, which is wrong with tools, and is not followed. Metric actor/pacs_loss: the loss (ln 2 before the
    first update, where classes are balanced), averaged over answers.
    """
    rows, num_rows = row_index(cu_seqlens, len(log_probs)), len(cu_seqlens) - 1
    tokens = response_mask.new_zeros(num_rows).index_add(0, rows, response_mask)
    of_row = row_means(pacs_loss, response_mask, rows, num_rows)
    metrics = ratio_metrics(log_ratio(log_probs, old_log_probs), response_mask)
    answered = (tokens > 0).to(of_row.dtype)
    metrics["actor/pacs_loss"] = ((of_row * answered).sum(), answered.sum())
    share = (of_row / tokens.clamp(min=1))[rows]
    return pacs_gradient * (log_probs - log_probs.detach()) + share, metrics
