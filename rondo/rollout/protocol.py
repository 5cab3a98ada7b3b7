"""What the rest of the house sees of an engine that generates tokens."""

from __future__ import annotations

from typing import Protocol

import torch

from rondo.types import Completion, GenerateRequest, StepStats


class RolloutEngine(Protocol):
    """One replica. Tokens in, tokens out; every token carries the policy version that made it.

    Weights: `begin(version)`, `receive(name, tensor)` for every checkpoint name, `commit(version)`; the
    engine must be paused or idle meanwhile. `pause` stops at a token boundary and requests keep their place;
    `sleep` gives the key/value cache back and `wake` makes it again.
    """

    async def generate(self, request: GenerateRequest) -> Completion:
        """The completion of one request. Cancelling the task frees its place. Raises RolloutError."""
        ...

    async def cancel(self, request_id: str) -> None:
        """The pending `generate` call returns what it has ("cancelled"). Unknown ids are ignored."""
        ...

    async def pause(self) -> None: ...

    def resume(self) -> None: ...

    def begin(self, version: int) -> None: ...

    def receive(self, name: str, tensor: torch.Tensor) -> None: ...

    def commit(self, version: int) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def stats(self) -> StepStats:
        """Counters since the last call."""
        ...

    def close(self) -> None: ...
