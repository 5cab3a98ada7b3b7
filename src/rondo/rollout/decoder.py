"""What an engine in this process has its decode thread do: one token step at a time. No asyncio and no locks
here; what is news for callers is returned, for `requests.deliver`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from rondo.chat import StopMatcher
from rondo.core.types import FinishReason, GenerateRequest, StepStats
from rondo.rollout.protocol import WASTED_TOKENS, OnTokens
from rondo.rollout.requests import News, Pending

PendingT = TypeVar("PendingT", bound=Pending)

PREFILLS = ("shared_prefill_tokens", "prefill_tokens")


class Decoder(ABC, Generic[PendingT]):
    """Decodes the sequences that were added. Deadlines are on the clock of time.monotonic.

    Everything is called from one thread at a time: the engine's decode thread while it serves, the caller's
    otherwise.
    """

    def __init__(self) -> None:
        self.streams = False  # some sequence wants its tokens as they come
        self.asleep = False
        # Seconds of all threads that decode; this one alone where it is not told of others.
        self.cpu_clock: Callable[[], float] = time.thread_time
        self._stats = StepStats()

    @abstractmethod
    def sequence(
        self, request: GenerateRequest, on_tokens: OnTokens | None, matcher: StopMatcher | None
    ) -> PendingT:
        """Makes the record of a call; from the caller's event loop, for `add`."""

    @abstractmethod
    def add(self, sequence: PendingT) -> None:
        """Queues a sequence."""

    @abstractmethod
    def sequences(self) -> list[PendingT]:
        """Returns all sequences, running and waiting."""

    @abstractmethod
    def step(self, version: int) -> list[News]:
        """Makes tokens: at most one for every sequence. Returns the sequences that ended. version: of the
        weights.
        """

    @abstractmethod
    def progress(self) -> list[News]:
        """Returns the new tokens, since the last call, of all running sequences that stream."""

    # ---- out before the end ----

    def cancel(self, request_id: str) -> list[News]:
        """Takes a sequence out, with what it has so far; nothing if it is not here (any more)."""
        return self._leave(lambda one: one.request.request_id == request_id, "cancelled")

    def give_up(self, request_id: str) -> None:
        """Takes a sequence out whose caller has gone; its tokens are counted as wasted."""
        for _, _, completion in self.cancel(request_id):
            self._stats.add_sum(WASTED_TOKENS, float(len(completion.token_ids)))

    def expire(self) -> list[News]:
        """Takes out all sequences past their deadline."""
        now = time.monotonic()
        return self._leave(lambda one: one.deadline is not None and one.deadline <= now, "deadline")

    @abstractmethod
    def _leave(self, who: Callable[[PendingT], bool], reason: FinishReason) -> list[News]:
        """Takes sequences out, with what they have so far."""

    # ---- weights and cache ----

    @abstractmethod
    def weights_changed(self) -> None:
        """Drops what is cached: the next step runs on new weights. Running sequences are prefilled again."""

    @abstractmethod
    def sleep(self) -> None:
        """Frees the cache, and what was derived from the weights; running sequences keep their tokens and are
        prefilled after `wake`.
        """

    @abstractmethod
    def wake(self) -> None:
        """Makes the cache again."""

    @abstractmethod
    def reset(self) -> None:
        """Forgets all sequences, after an error, and what is cached."""

    def stats(self) -> StepStats:
        """Returns the counters since the last call."""
        stats = self._stats
        self._stats = StepStats()
        shared, computed = (stats.sums.get(f"perf/{kind}", 0.0) for kind in PREFILLS)
        if shared + computed:
            stats.add_mean("rollout/cache_hit_rate", shared, shared + computed)
        return stats
