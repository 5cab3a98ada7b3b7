"""How sequences are cut into the blocks of the cache, whose these are, and what can be found in them. No
tensors, no clock.
"""

from __future__ import annotations

import hashlib

import numpy as np

# Positions of a sequence that lie side by side in the cache. Attention's width grows in steps of it, so that
# bits do not depend on batch mates; kernels.c calls it PAGE.
BLOCK = 64


def blocks_of(positions: int) -> int:
    """Returns the number of blocks that hold so many positions of one sequence."""
    return -(-positions // BLOCK)


def content_keys(root: bytes, tokens: np.ndarray) -> list[bytes]:
    """Returns one key per block of `tokens`, the last block perhaps in part: a digest of `root` and of all
    tokens up to the block's end, for these are what its keys and values depend on.
    """
    keys, key = [], root
    for start in range(0, len(tokens), BLOCK):
        key = hashlib.blake2b(key + tokens[start : start + BLOCK].tobytes(), digest_size=16).digest()
        keys.append(key)
    return keys


class BlockPool:
    """Counts the owners of blocks 0 … num_blocks - 1. One without an owner is free; what it holds can be
    found until another owner takes it. Free blocks that hold nothing are taken first, then those that were
    given back earliest.
    """

    def __init__(self, num_blocks: int) -> None:
        self._owners = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack: the last used is warm
        # Free, but what they hold can be found; in the order in which they became so.
        self._idle: dict[int, None] = {}
        self._keys: list[list[bytes]] = [[] for _ in range(num_blocks)]
        self._where: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._idle)

    def take(self) -> int:
        """Returns a block for one owner, which is to write it; there must be a free one."""
        if self._blank:
            block = self._blank.pop()
        else:
            block = next(iter(self._idle))
            del self._idle[block]
            for key in self._keys[block]:
                del self._where[key]
            self._keys[block].clear()
        self._owners[block] = 1
        return block

    def share(self, block: int) -> None:
        """Adds an owner of a block that was found."""
        if self._owners[block] == 0:
            del self._idle[block]
        self._owners[block] += 1

    def give_back(self, block: int) -> None:
        """Takes one owner away."""
        self._owners[block] -= 1
        assert self._owners[block] >= 0
        if self._owners[block] == 0:
            if self._keys[block]:
                self._idle[block] = None
            else:
                self._blank.append(block)

    def find(self, key: bytes) -> int | None:
        return self._where.get(key)

    def publish(self, block: int, key: bytes) -> None:
        """Lets `block` be found under `key`, unless another one is already."""
        if key not in self._where:
            self._where[key] = block
            self._keys[block].append(key)

    def forget(self) -> None:
        """Forgets what all blocks hold, since it is of no use any more; owners stay."""
        self._where.clear()
        self._blank.extend(self._idle)
        self._idle.clear()
        for keys in self._keys:
            keys.clear()
