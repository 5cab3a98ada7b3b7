"""A sink that keeps what it receives, for tests of transports."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rondo.core.errors import WeightSyncError
from rondo.weights.checksum import checksum


class Keeping:
    """Implements WeightSink. refuse: a name that it does not take. change: flips one bit of that tensor."""

    def __init__(self, *, refuse: str | None = None, change: str | None = None) -> None:
        self.version = -1
        self.tensors: dict[str, torch.Tensor] = {}
        self._refuse, self._change = refuse, change

    def begin(self, version: int) -> None:
        self.version, self.tensors = -1, {}

    def receive(self, name: str, tensor: torch.Tensor) -> None:
        if name == self._refuse:
            raise WeightSyncError(f"{name!r} has shape {tuple(tensor.shape)}, the model wants (7,)")
        kept = tensor.clone()
        if name == self._change:
            kept.view(-1)[:1].view(torch.uint8)[0] ^= 1
        self.tensors[name] = kept

    def close(self) -> None:
        """As WeightFanout's, which has buckets to give up."""

    def commit(self, version: int, checksums: Mapping[str, int] | None = None) -> None:
        assert checksums is not None
        assert list(checksums) == list(self.tensors)
        for name, expected in checksums.items():
            if checksum(self.tensors[name]) != expected:
                raise WeightSyncError(f"commit({version}): {name!r} is not what was sent")
        self.version = version
