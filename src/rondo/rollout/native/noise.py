"""Counter-based noise: one uniform number per request seed and token index, a function of nothing else."""

from __future__ import annotations

import numpy as np
import torch

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64


def uniforms(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Returns float64 [N] in [0, 1): splitmix64 of int64 seeds [N] at token indices [N], as in kernels.c."""
    with np.errstate(over="ignore"):
        z = seeds.astype(np.uint64) + (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    # The upper 53 bits: as many as a float64 holds exactly.
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniforms_on_device(seeds: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Returns the numbers of `uniforms`, float64 [N], for int64 tensors [N], on the device of these."""
    z = seeds + (indices.to(torch.int64) + 1) * _signed(_GOLDEN)
    z = (z ^ _shifted(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shifted(z, 27)) * _signed(_MIX_2)
    return _shifted(z ^ _shifted(z, 31), 11).to(torch.float64) * 2.0**-53


def seed_ahead(seed: int, count: int) -> int:
    """Returns the seed, int64, that gives at index i what `seed` gives at i + count."""
    return _signed((seed + count * _GOLDEN) % (1 << 64))


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _shifted(word: torch.Tensor, by: int) -> torch.Tensor:
    """Shifts to the right, with zeros from the left: torch's own shift copies the sign."""
    return (word >> by) & ((1 << (64 - by)) - 1)
