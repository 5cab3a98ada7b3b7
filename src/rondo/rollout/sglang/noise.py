"""The native engine's noise (rollout/native/noise.py) where SGLang's sampler needs it: on the device, and
from what the sampler knows of a token, its position in prompt and response.
"""

from __future__ import annotations

import torch

_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def seed_at(seed: int, prompt_length: int) -> int:
    """int64 that with a token's position says what `seed` says with its index in the response."""
    word = (seed - (prompt_length - 1) * _GOLDEN) % (1 << 64)
    return word - (1 << 64) if word >> 63 else word


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """float64 [B] in [0, 1): what `native.noise.uniforms` gives for int64 seeds [B] (made by `seed_at`) and
    the positions [B] of the tokens before.
    """
    z = seeds + (positions.to(torch.int64) + 1) * _signed(_GOLDEN)
    z = (z ^ _shifted(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shifted(z, 27)) * _signed(_MIX_2)
    return _shifted(z ^ _shifted(z, 31), 11).to(torch.float64) * 2.0**-53


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _shifted(word: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, zeros from the left: torch's own shift copies the sign."""
    return (word >> by) & ((1 << (64 - by)) - 1)
