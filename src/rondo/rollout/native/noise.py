"""Counter-based noise: one uniform number per (request seed, token index), and nothing else."""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """float64 [N] in [0, 1): splitmix64 of int64 seeds [N] at token indices [N], as in kernels.c."""
    with np.errstate(over="ignore"):
        z = seeds.astype(np.uint64) + (indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * _MIX_1
        z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
