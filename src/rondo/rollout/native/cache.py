"""How many blocks the key/value cache has, and the tensors of the PyTorch paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rondo.core.errors import ConfigError
from rondo.models.family import head_widths, layer_configs
from rondo.models.routers import RouteRecorder
from rondo.planning.engine_memory import CACHE_SHARE, kv_bytes
from rondo.platform import cache_share
from rondo.rollout.native.blocks import BLOCK, blocks_of
from rondo.system.usage import memory_bytes

TABLE_BYTES = 12  # of a token in `SlotTable`: id, log-prob, version


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer keeps in its cache."""

    kv_heads: int
    """Heads of keys and values."""
    key_dim: int
    """Numbers per position of one head's keys."""
    value_dim: int
    """Numbers per position of one head's values."""


def round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def layer_shapes(model_config: Any) -> list[LayerShape]:
    """Returns what the config says of every layer; the generic path asks the model itself."""
    shapes = []
    for config in layer_configs(model_config.get_text_config()):
        heads = config.num_attention_heads
        latent = getattr(config, "qk_nope_head_dim", None)  # keys of every head are cached, after expansion
        kv_heads = heads if latent else getattr(config, "num_key_value_heads", None) or heads
        shapes.append(LayerShape(kv_heads, *head_widths(config)))
    return shapes


def block_bytes(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Returns the bytes of one block in all layers together."""
    return BLOCK * sum(kv_bytes(s.kv_heads, s.key_dim, s.value_dim, dtype.itemsize) for s in shapes)


def cache_bytes(model_config: Any, max_concurrent: int, max_context: int, dtype: torch.dtype | str) -> int:
    """Returns the bytes of a cache in which `max_concurrent` sequences of full length lie at one time: what a
    NativeEngine allocates at its start where neither memory nor `cache_bytes` sets a lower bound.

    The PyTorch paths add one block, into which padding is written.
    """
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return max_concurrent * blocks_of(max_context) * block_bytes(layer_shapes(model_config), dtype)


def count_blocks(
    nbytes: int,
    *,
    spare: int,
    max_concurrent: int,
    max_context: int,
    limit: int | None,
    device: torch.device,
) -> int:
    """Returns how many blocks of `nbytes` bytes sequences may use.

    spare: blocks that the path needs for itself. limit: rollout.engine.cache_bytes; None: what all slots
    could need, and at most `cache_share` of the memory that is free now. Raises ConfigError where one request
    of full length would not fit.
    """
    longest = blocks_of(max_context)
    least = (longest + spare) * nbytes
    if limit is not None:
        if limit < least:
            raise ConfigError(
                f"rollout.engine.cache_bytes={limit} is less than the keys and values of one request of full "
                f"length ({max_context} tokens): set it to at least {least}, or lower rollout.max_tokens or "
                "data.max_prompt_tokens"
            )
        return limit // nbytes - spare
    share, free = cache_share(device)
    affordable = share // nbytes - spare
    if affordable < longest:
        raise ConfigError(
            f"the keys and values of one request of full length ({max_context} tokens) take {least} bytes, "
            f"which is more than {CACHE_SHARE:.0%} of the {free} bytes that are free on {device}: free some, "
            f"set rollout.engine.cache_bytes to at least {least}, or lower rollout.max_tokens or "
            "data.max_prompt_tokens"
        )
    return min(max_concurrent * longest, affordable)


def check_tables(slots: int, max_context: int) -> None:
    """Raises ConfigError for more tokens of all slots than this machine has memory to write down."""
    nbytes, memory = slots * max_context * TABLE_BYTES, memory_bytes()[0]
    if memory and nbytes > memory:
        raise ConfigError(
            f"rollout.max_concurrent={slots} sequences of {max_context} tokens take {nbytes} bytes to write "
            f"down (ids, log-probs, versions), and there are {memory}: lower it, or rollout.max_tokens or "
            "data.max_prompt_tokens",
            key="rollout.max_concurrent",
        )


class BlockCache:
    """Holds the keys and values of the PyTorch paths."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        recorder: RouteRecorder | None = None,
    ) -> None:
        def zeros(shape: LayerShape, dim: int) -> torch.Tensor:
            # Not empty: what is masked is multiplied by 0, and must be finite.
            return torch.zeros(num_blocks * BLOCK, shape.kv_heads, dim, dtype=dtype, device=device)

        # Per layer [blocks × BLOCK, kv_heads, dim], so that a block is one piece of memory.
        self.keys = [zeros(shape, shape.key_dim) for shape in shapes]
        self.values = [zeros(shape, shape.value_dim) for shape in shapes]
        # [blocks × BLOCK, W]: where a mixture's tokens went, which is shared and copied with the rest.
        self.routes = None
        if recorder is not None:
            nothing = recorder.shape.padded(None, num_blocks * BLOCK)
            self.routes = torch.from_numpy(nothing).to(device)

    @property
    def _tensors(self) -> list[torch.Tensor]:
        return [*self.keys, *self.values, *([] if self.routes is None else [self.routes])]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._tensors)

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies blocks, int64 [n] each, in every layer: all at one time, which on a device is a few kernels
        and not some for every row. No source may be a target.
        """
        for tensor in self._tensors:
            blocks = tensor.view(len(tensor) // BLOCK, -1).view(torch.int64)  # whatever the dtype
            blocks.index_copy_(0, targets, blocks.index_select(0, sources))
