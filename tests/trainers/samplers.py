"""Samplers for tests: one whose choices follow all that it has heard, and stateless ones."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np


class Curious:
    """Chooses by a digest of every reward that it was told, in order: one that is lost, or comes at another
    time, changes all rows and group sizes after it.
    """

    def __init__(self, *, most: int = 6) -> None:
        self.most = most
        self.digest = ""
        self.told: list[tuple[str, int, int, int]] = []
        """Source, row, number of rewards and version of each."""

    def choose(self, k: int, sizes: Mapping[str, int], seed: int) -> list[tuple[str, int, int]]:
        draw = random.Random(f"{self.digest} {seed}")
        name = next(iter(sizes))
        return [(name, draw.randrange(sizes[name]), draw.randint(2, self.most)) for _ in range(k)]

    def heard(self, source: str, row: int, rewards: np.ndarray, version: int) -> None:
        text = f"{self.digest} {source} {row} {rewards.tolist()} {version}"
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self.told.append((source, row, len(rewards), version))

    def metrics(self) -> dict[str, float]:
        return {"digest": float(int(self.digest[:8] or "0", 16))}

    def state(self) -> dict[str, Any]:
        return {"digest": self.digest, "told": self.told}

    def load(self, state: Mapping[str, Any]) -> None:
        self.digest, self.told = state["digest"], [tuple(entry) for entry in state["told"]]


def backwards(k: int, sizes: Mapping[str, int], step: int, *, n: int = 3) -> list[tuple[str, int, int]]:
    """The last rows first, the same in each step: n is rollout.n, and no option."""
    name = next(iter(sizes))
    return [(name, sizes[name] - 1 - i, n + step % 2) for i in range(k)]


def one(k: int) -> list[tuple[str, int, int]]:
    return [("train", i, 1) for i in range(k)]


def outside(k: int) -> list[tuple[str, int, int]]:
    return [("train", 64, 4)] * k
