"""The preallocated key/value cache of the PyTorch paths, and how many bytes any path's cache takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rondo.models.family import head_widths

WIDTH_STEP = (
    64  # the cache is looked at in steps of this many positions, so that bits do not depend on batch mates
)


@dataclass(frozen=True)
class LayerShape:
    """One attention layer's cache: key/value heads, and what one position of one head holds."""

    kv_heads: int
    key_dim: int
    value_dim: int


def capacity_of(max_context: int) -> int:
    """Positions per slot: max_context and one that padding rows may write to, in whole steps."""
    return round_up(max_context + 1, WIDTH_STEP)


def round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def layer_shapes(model_config: Any) -> list[LayerShape]:
    """What the config says; the generic path asks the model itself."""
    config = model_config.get_text_config()
    heads = config.num_attention_heads
    latent = getattr(config, "qk_nope_head_dim", None)  # keys of every head are cached, after expansion
    kv_heads = heads if latent else getattr(config, "num_key_value_heads", None) or heads
    return [LayerShape(kv_heads, *head_widths(config))] * int(config.num_hidden_layers)


def cache_bytes(model_config: Any, max_concurrent: int, max_context: int, dtype: torch.dtype | str) -> int:
    """Bytes of the key/value cache that a NativeEngine with these settings allocates at its start.

    The PyTorch paths round max_concurrent up to a multiple of 8, and to at least 16 (128 with several CPU
    threads).
    """
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    per_position = sum(s.kv_heads * (s.key_dim + s.value_dim) for s in layer_shapes(model_config))
    return int(per_position * capacity_of(max_context) * max_concurrent * dtype.itemsize)


class SlotCache:
    """keys[l], values[l]: [slots, kv_heads, capacity, dim], zero at first (what is masked must be finite)."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_slots: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def zeros(shape: LayerShape, dim: int) -> torch.Tensor:
            return torch.zeros(num_slots, shape.kv_heads, capacity, dim, dtype=dtype, device=device)

        self.capacity = capacity
        self.keys = [zeros(shape, shape.key_dim) for shape in shapes]
        self.values = [zeros(shape, shape.value_dim) for shape in shapes]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` positions of one slot to another, in every layer."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]
