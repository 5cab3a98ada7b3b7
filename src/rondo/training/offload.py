"""Bytes of tensors that are in host memory for a while: one after another in pinned buffers, which are made
once and used again, copied beside what the device computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rondo.planning.memory import BLOCK_BYTES
from rondo.platform import platform_of

_ALIGNED = 256  # bytes, as torch's own allocators do: a tensor of any dtype may begin there


def blocks_of(sizes: Sequence[int]) -> list[list[int]]:
    """Returns the places, in order, of tensors of `sizes` bytes that share a buffer: as many as have
    BLOCK_BYTES together, or one.
    """
    blocks: list[list[int]] = []
    total = 0
    for place, size in enumerate(map(_aligned, sizes)):
        if not blocks or total + size > BLOCK_BYTES:
            blocks.append([])
            total = 0
        blocks[-1].append(place)
        total += size
    return blocks


def cut(buffer: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Returns parts of a buffer, uint8, one after another."""
    parts, start = [], 0
    for size in sizes:
        parts.append(buffer[start : start + size])
        start += _aligned(size)
    return parts


def is_there(tensor: torch.Tensor) -> bool:
    """Says whether a tensor has its memory, or has given that up."""
    return bool(tensor.untyped_storage().nbytes())


def in_blocks(buffer: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns a buffer, uint8, in parts of at most BLOCK_BYTES."""
    return buffer.split(BLOCK_BYTES)


def room_for(sizes: Sequence[int]) -> int:
    """Returns the bytes of a buffer that holds tensors of `sizes` bytes (`cut`)."""
    return sum(map(_aligned, sizes))


def like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Returns a part of a buffer as a tensor of the shape and dtype of another one, row by row."""
    return part.view(tensor.dtype).view(tensor.shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


class HostMemory:
    """Buffers in host memory, pinned where the device's copies want that."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pins = platform_of(device).pins
        self._buffers: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Returns what all of it takes."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def buffers(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Returns a buffer for each block of `sizes` bytes, uint8: those of the last time where they are
        large enough, else new ones, of zeros. What was in them is no longer.
        """
        for place, size in enumerate(sizes):
            if place == len(self._buffers):
                self._buffers.append(self._made(size))
            elif self._buffers[place].nbytes < size:
                self._buffers[place] = self._made(size)
        return [buffer[:size] for buffer, size in zip(self._buffers, sizes, strict=False)]

    def views(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns a place for each tensor, of its shape and dtype."""
        sizes = [one.nbytes for one in tensors]
        blocks = blocks_of(sizes)
        of_blocks = [[sizes[place] for place in block] for block in blocks]
        buffers = self.buffers([room_for(own) for own in of_blocks])
        parts = [part for buffer, own in zip(buffers, of_blocks, strict=True) for part in cut(buffer, own)]
        return [like(one, part) for one, part in zip(tensors, parts, strict=True)]

    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns copies of tensors of the device; of a CPU's in new memory."""
        platform = platform_of(self._device)
        if platform.host:
            return [tensor.clone() for tensor in tensors]
        copies, stream = self.views(tensors), platform.stream(self._device)
        stream.copy(zip(copies, tensors, strict=True))
        stream.finish()
        return copies

    def _made(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=self._pins)
