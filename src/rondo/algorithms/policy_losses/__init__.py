"""Policy losses: pure functions of flat per-token columns [N].

A loss returns (token loss [N], metrics); which tokens count, and how much, is the caller's business
(`objective.py` multiplies by mask and weight). Entries where `response_mask` is 0 arrive as 0, never as NaN.
A loss that needs whole responses names `cu_seqlens` (int32 [B+1]). A metric is (numerator, denominator), or a
0-dim tensor: a maximum. Distillation losses (`distillation.py`) read wide columns [N, K] and no advantages.
Importing the package registers the built-in ones; a new file is named here.
"""

# ruff: noqa: F401
from rondo.algorithms.policy_losses import (
    clipped,
    covariance,
    distillation,
    fipo,
    mixed,
    pacs,
    top_entropy,
    unclipped,
)
