"""A platform of a user's own, as docs/hardware.md has it: two devices that are the CPU."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from rondo.platform.cpu import Cpu

LOG = "OWN_LOG"


class Own(Cpu):
    """It computes in bfloat16, a little at a time, and writes down what it is asked to use, and what it sees
    then.
    """

    title = "core"
    half = "bfloat16"
    visible = "OWN_VISIBLE_DEVICES"
    ray_resource = "own_core"
    engines = frozenset()
    numbers = replace(Cpu.numbers, scores=1 << 10, gathered_bytes=1 << 12, checksum_words=1 << 8)

    def count(self) -> int:
        """See Platform.count."""
        said = os.environ.get(self.visible)
        return 2 if said is None else len(said.split(",")) if said else 0

    def device(self, index: int = 0) -> str:
        """See Platform.device; both are the CPU."""
        return self.kind

    def use(self, device: torch.device | str) -> None:
        """See Platform.use."""
        if folder := os.environ.get(LOG):
            (Path(folder) / str(os.getpid())).write_text(os.environ.get(self.visible, "all"))


class Half:
    """No platform."""


class Fails(Cpu):
    """One that cannot be made."""

    def __init__(self) -> None:
        raise RuntimeError("no driver")


class Broken(Cpu):
    """Its driver is gone."""

    def count(self) -> int:
        """See Platform.count."""
        raise RuntimeError("driver gone")


class Words(Cpu):
    """It counts in words."""

    def count(self) -> int:
        """See Platform.count."""
        return "two"  # type: ignore[return-value]


class Unsaid(Cpu):
    """A device that torch does not have."""

    kind = "abacus"
