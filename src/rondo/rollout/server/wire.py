"""What travels between an engine's process and its host, besides calls and replies (`system.actor`).

host → engine   Call: generate and the rest (`child.EngineServer`)
engine → host   Reply (of ready, a Ready; of generate, a Done) | Tokens (of many generate calls)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rondo.core.types import Completion, FinishReason
from rondo.rollout.protocol import Capabilities


@dataclass(frozen=True)
class Ready:
    """The engine is built."""

    pid: int
    """The id of its process."""
    description: str
    """Its line for the log (`RolloutEngine.describe`)."""
    capabilities: Capabilities
    """What it can do here."""
    version: int
    """The policy version that it serves."""


@dataclass(frozen=True)
class Tokens:
    """New tokens of R generate calls, T in all, one call after the other."""

    keys: tuple[int, ...]
    """The keys of the calls, R of them."""
    lengths: np.ndarray
    """How many new tokens each call has, int64 [R]."""
    token_ids: np.ndarray
    """int32 [T]."""
    log_probs: np.ndarray
    """float32 [T]."""
    policy_versions: np.ndarray
    """int32 [T]."""

    @staticmethod
    def of(parts: Mapping[int, Sequence[Completion]]) -> Tokens:
        """Joins the new tokens of several calls. parts: what each call got, in order."""
        flat = [part for mine in parts.values() for part in mine]
        return Tokens(
            tuple(parts),
            np.array([sum(len(part.token_ids) for part in mine) for mine in parts.values()], np.int64),
            np.concatenate([part.token_ids for part in flat]),
            np.concatenate([part.log_probs for part in flat]),
            np.concatenate([part.policy_versions for part in flat]),
        )

    def parts(self) -> Iterator[tuple[int, Completion]]:
        """Yields (key of the call, its new tokens); other fields of these completions mean nothing."""
        nothing = np.empty(0, np.int32)
        every = Completion("", nothing, self.token_ids, self.log_probs, self.policy_versions, "length")
        start = 0
        for key, length in zip(self.keys, self.lengths.tolist(), strict=True):
            yield key, every.part(start, start + length)
            start += length


@dataclass(frozen=True)
class Done:
    """The value of a generate call, whose tokens have been sent."""

    prompt_ids: np.ndarray
    """The prompt as the engine read it."""
    finish_reason: FinishReason
    """Why generation ended."""
    num_tokens: int
    """Tokens of the response, to check that all came."""
    routes: np.ndarray | None = None
    """Where a mixture's tokens went, of prompt and response."""
