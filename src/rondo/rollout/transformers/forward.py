"""The next token's logits by a model's own forward, with whatever cache the model makes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from rondo.core.errors import ConfigError

# What models call the cache that they return, and take again: attention's keys and values, a state-space
# model's states, RWKV's.
CACHES = ("past_key_values", "cache_params", "state")


class CachedForward:
    """Takes one sequence per call. The model is tried when this is made; raises ConfigError for one that
    makes no cache of its own for each sequence.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        taken = inspect.signature(module.forward).parameters
        wanted = {"use_cache": True, "logits_to_keep": 1}
        self._options = {name: value for name, value in wanted.items() if name in taken}
        self._takes_positions = "position_ids" in taken
        self._cache = next((name for name in CACHES if name in taken), "")
        token = np.zeros(1, np.int64)
        cache = self(token)[1] if self._cache else None
        if cache is None:
            raise ConfigError(
                f"{type(module).__name__} returns no cache to go on from ({', '.join(CACHES)}), so that "
                "sequences cannot take turns: no engine of rondo's own can decode it; choose another model"
            )
        first = nbytes(cache)
        self._growth = nbytes(self(token, 1, cache)[1]) - first
        self._fixed = first - self._growth

    def cache_bytes(self, positions: int) -> int:
        """Returns the bytes of one sequence's cache at this length: states of a fixed size, and what each
        position adds. (Windows make it smaller.)
        """
        return self._fixed + positions * self._growth

    @torch.inference_mode()
    def __call__(self, tokens: np.ndarray, start: int = 0, cache: Any = None) -> tuple[torch.Tensor, Any]:
        """Returns logits [1, V] behind tokens int64 [T], and the cache with them in it. cache: of the `start`
        tokens before them, which the call may change; None: there are none.
        """
        inputs = {"input_ids": torch.from_numpy(tokens).to(self._device)[None], self._cache: cache}
        if self._takes_positions:  # some models count from 0 whatever the cache holds
            inputs["position_ids"] = torch.arange(start, start + len(tokens), device=self._device)[None]
        output = self._module(**inputs, **self._options)
        return output.logits[:, -1], output.get(self._cache)


def nbytes(cache: Any) -> int:
    """Counts the bytes of all tensors that a model's cache holds."""
    return sum(tensor.nbytes for tensor in _tensors(cache, set()))


def _tensors(held: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(held) in seen:
        return
    seen.add(id(held))
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, Mapping | list | tuple):
        for part in held.values() if isinstance(held, Mapping) else held:
            yield from _tensors(part, seen)
    elif hasattr(held, "__dict__"):
        yield from _tensors(vars(held), seen)
