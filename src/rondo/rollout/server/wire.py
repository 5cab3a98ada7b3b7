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
    """The engine is built. pid: of its process."""

    pid: int
    description: str
    capabilities: Capabilities
    version: int


@dataclass(frozen=True)
class Tokens:
    """New tokens of several generate calls, one after the other. keys: of the calls; lengths int64 [R];
    token_ids int32 [T], log_probs float32 [T], policy_versions int32 [T].
    """

    keys: tuple[int, ...]
    lengths: np.ndarray
    token_ids: np.ndarray
    log_probs: np.ndarray
    policy_versions: np.ndarray

    @staticmethod
    def of(parts: Mapping[int, Sequence[Completion]]) -> Tokens:
        """parts: what each call has got, in order."""
        flat = [part for mine in parts.values() for part in mine]
        return Tokens(
            tuple(parts),
            np.array([sum(len(part.token_ids) for part in mine) for mine in parts.values()], np.int64),
            np.concatenate([part.token_ids for part in flat]),
            np.concatenate([part.log_probs for part in flat]),
            np.concatenate([part.policy_versions for part in flat]),
        )

    def parts(self) -> Iterator[tuple[int, Completion]]:
        """(key of the call, its new tokens; nothing else of the completions is said)."""
        nothing = np.empty(0, np.int32)
        every = Completion("", nothing, self.token_ids, self.log_probs, self.policy_versions, "length")
        start = 0
        for key, length in zip(self.keys, self.lengths.tolist(), strict=True):
            yield key, every.part(start, start + length)
            start += length


@dataclass(frozen=True)
class Done:
    """The value of a generate call, whose tokens have been sent. num_tokens: of the response, for a check."""

    prompt_ids: np.ndarray
    finish_reason: FinishReason
    num_tokens: int
    routes: np.ndarray | None = None
