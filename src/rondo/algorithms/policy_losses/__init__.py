"""Policy losses: pure functions of flat per-token columns [N]. Importing registers the built-in ones.

A loss returns (token loss [N], metrics); which tokens count, and how much, is the caller's business
(`objective.py` multiplies by mask and weight). Entries where `response_mask` is 0 arrive as 0, never as NaN.
A loss that needs whole responses names `cu_seqlens` (int32 [B+1]). A metric is (numerator, denominator), or a
0-dim tensor: a maximum. Distillation losses (`distillation.py`) read wide columns [N, K] and no advantages.
"""

from rondo.algorithms.policy_losses import (
    cispo,
    covariance,
    distillation,
    dppo,
    dro,
    gmpo,
    gspo,
    ppo,
    reinforce,
    sapo,
    sppo,
)

__all__ = [
    "cispo",
    "covariance",
    "distillation",
    "dppo",
    "dro",
    "gmpo",
    "gspo",
    "ppo",
    "reinforce",
    "sapo",
    "sppo",
]
