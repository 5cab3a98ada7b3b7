"""Distillation on the teacher's likeliest tokens: KL divergences over K tokens per position, no advantages.

Both read wide columns [N, K]: the teacher's log-probs of its K likeliest tokens and the current policy's of
the same tokens. The positions are the student's own samples (GKD 2306.13649).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rondo.algorithms.arguments import require
from rondo.algorithms.registry import policy_loss
from rondo.algorithms.statistics import Metrics
from rondo.core.errors import ConfigError


@policy_loss("forward_kl_topk")
def forward_kl_topk(
    topk_log_probs: Tensor,
    teacher_topk_log_probs: Tensor,
    response_mask: Tensor,
    *,
    renormalize: bool = False,
    floor: float = -10.0,
    limit: float = 10.0,
) -> tuple[Tensor, Metrics]:
    """Σ_j p_T,j (log p_T,j - log p_S,j) over the teacher's top K, [N] from [N, K].

    With K the whole vocabulary this is KL(p_T ‖ p_S), gradient p_S - p_T with respect to the logits. With
    fewer the tail's mass is missing: the sum is no divergence and may be negative (it is not cut at 0, which
    would cut the gradient); its minimum over p_S is the teacher's top K in proportion and nothing elsewhere.
    renormalize: both sum to 1 over the K tokens, a KL that says nothing about the mass elsewhere.

    In the value, log-probs are raised to `floor` and a token's loss is at most `limit`; the gradient with
    respect to log p_S,j is -p_T,j (before renormalisation) whatever the bounds (straight-through): the tokens
    that the student all but excludes are those that it has to learn, and -p_T,j needs no bound. Metric
    actor/teacher_mass: the teacher's probability of its top K.
    """
    require("algorithm.policy_loss: forward_kl_topk", above=0, limit=limit)
    metrics = {"actor/teacher_mass": _mass(teacher_topk_log_probs, response_mask)}
    teacher, student = _comparable(teacher_topk_log_probs, topk_log_probs, renormalize)
    probability = teacher.clamp(max=0).exp()
    value = (probability * (_bounded(teacher, floor) - _bounded(student.detach(), floor))).sum(-1)
    finite = student.clamp(min=torch.finfo(student.dtype).min)  # -inf - -inf is no 0
    return value.clamp(max=limit) - (probability * (finite - finite.detach())).sum(-1), metrics


@policy_loss("reverse_kl_topk")
def reverse_kl_topk(
    topk_log_probs: Tensor, teacher_topk_log_probs: Tensor, response_mask: Tensor, *, floor: float = -10.0
) -> tuple[Tensor, Metrics]:
    """Σ_j p_S,j (log p_S,j - log p_T,j) with both renormalised over the teacher's top K, [N] from [N, K].

    Not renormalised, the student could lower the sum by moving its mass to tokens that are not in it. What
    the student does outside the top K is not seen. Log-probs are raised to `floor` in the difference. Metric
    as in `forward_kl_topk`.
    """
    metrics = {"actor/teacher_mass": _mass(teacher_topk_log_probs, response_mask)}
    teacher, student = _comparable(teacher_topk_log_probs, topk_log_probs, True)
    return (student.exp() * (_bounded(student, floor) - _bounded(teacher, floor))).sum(-1), metrics


def _comparable(teacher: Tensor, student: Tensor, renormalize: bool) -> tuple[Tensor, Tensor]:
    if renormalize:
        return torch.log_softmax(teacher, -1), torch.log_softmax(student, -1)
    return teacher, student


def _bounded(log_probs: Tensor, floor: float) -> Tensor:
    if not floor < 0:
        raise ConfigError(f"algorithm.policy_loss: floor must be negative (a log-prob), got {floor}")
    return log_probs.clamp(floor, 0.0)


def _mass(log_probs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return (log_probs.clamp(max=0).exp().sum(-1) * mask).sum(), mask.sum()
