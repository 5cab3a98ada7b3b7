"""Who sits in which slot: pure decisions over small records, no tensors, no clock.

Requests wait in arrival order, the urgent ones in front, and join whenever a slot is free. A slot's cache
holds the key/values of all tokens of its sequence but the last, which the next decode step feeds. Requests
with one affinity key and the same prompt share the prefill: the first one's is computed, the others' are
copied from any slot that still holds it (`content`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rondo.types import GenerateRequest

ContentKey = tuple[str, bytes]


@dataclass(eq=False)
class Sequence:
    """One request as the decoder sees it. tokens: int64 prompt and prefix; generated tokens live in the slot
    table.

    num_prefix: how many of `tokens` are an earlier part of the response. deadline: on the caller's clock, or
    None. reply: whatever the caller needs to answer with. streams: the caller wants tokens as they come;
    num_streamed: response tokens, prefix included, that it has had.
    """

    request: GenerateRequest
    tokens: np.ndarray
    num_prefix: int = 0
    deadline: float | None = None
    reply: object = None
    streams: bool = False
    num_streamed: int = 0

    def __post_init__(self) -> None:
        self.num_streamed = self.num_prefix

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def content(self) -> ContentKey | None:
        """What its slot's cache can be shared as. Sequences with a prefix neither give nor take."""
        return None if self.num_prefix else (self.request.affinity, self.tokens.tobytes())


@dataclass(frozen=True)
class Copy:
    """The first `length` positions of slot `source` to slot `target`."""

    source: int
    target: int
    length: int


@dataclass(frozen=True)
class Move:
    """Everything of slot `source` to slot `target` (which is free)."""

    source: int
    target: int


@dataclass(frozen=True)
class Prefill:
    """Compute key/values of all but the last token of the sequence in `slot`."""

    slot: int


@dataclass
class Plan:
    """What to do before the next decode step, in this order: seat, copy early, move, prefill, copy late."""

    joins: list[tuple[int, Sequence]] = field(default_factory=list)
    early_copies: list[Copy] = field(default_factory=list)  # from slots that were filled before this plan
    moves: list[Move] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    late_copies: list[Copy] = field(default_factory=list)  # from slots that this plan fills


class Scheduler:
    """dense: keep the occupied slots at 0 .. n - 1 (paths that decode a contiguous range of slots)."""

    def __init__(self, num_slots: int, *, dense: bool) -> None:
        self.slots: list[Sequence | None] = [None] * num_slots
        self.waiting: deque[Sequence] = deque()
        self._dense = dense
        self._content: list[ContentKey | None] = [None] * num_slots
        self._where: dict[ContentKey, set[int]] = {}
        self._stale: set[int] = set()

    @property
    def num_active(self) -> int:
        return sum(sequence is not None for sequence in self.slots)

    def has_work(self) -> bool:
        return bool(self.waiting) or any(sequence is not None for sequence in self.slots)

    def add(self, sequence: Sequence) -> None:
        """Behind those that wait; an urgent one only behind others of its kind."""
        if sequence.request.urgent:
            ahead = sum(1 for one in self.waiting if one.request.urgent)  # they are all in front
            self.waiting.insert(ahead, sequence)
        else:
            self.waiting.append(sequence)

    def release(self, slot: int) -> None:
        """The sequence has left; the cache's content stays of use until the slot is taken."""
        self.slots[slot] = None
        self._stale.discard(slot)

    def invalidate(self) -> None:
        """Weights changed, or the cache was lost: share nothing, prefill every sequence again."""
        for slot in range(len(self.slots)):
            self._set_content(slot, None)
        self._stale = {slot for slot, sequence in enumerate(self.slots) if sequence is not None}

    def clear(self) -> list[Sequence]:
        """Forget everything; returns the sequences that were waiting or running."""
        dropped = [sequence for sequence in self.slots if sequence is not None] + list(self.waiting)
        self.slots = [None] * len(self.slots)
        self.waiting.clear()
        self.invalidate()
        return dropped

    def plan(self) -> Plan:
        """Seat who waits in the lowest free slots, close holes if dense, say how the caches get filled."""
        plan = Plan()
        plan.prefills = [Prefill(slot) for slot in sorted(self._stale)]
        self._stale.clear()
        filled: set[int] = set()
        if self.waiting:
            for slot in [i for i, sequence in enumerate(self.slots) if sequence is None]:
                if not self.waiting:
                    break
                self._seat(plan, slot, self.waiting.popleft(), filled)
        if self._dense:
            self._close_holes(plan)
        return plan

    def prefixes(self) -> list[tuple[int, int, int]]:
        """(slot, source, length): slots of one prompt, and the lowest of them; length is the prompt's.

        The prompt's last position is written in the first decode step, by every sequence for itself.
        """
        found = []
        for slot, sequence in enumerate(self.slots):
            key = self._content[slot]
            if sequence is not None and key is not None:
                source = min(other for other in self._where[key] if self.slots[other] is not None)
                found.append((slot, source, len(sequence.tokens)))
        return found

    def _seat(self, plan: Plan, slot: int, sequence: Sequence, filled: set[int]) -> None:
        self.slots[slot] = sequence
        plan.joins.append((slot, sequence))
        key = sequence.content
        sources = self._where.get(key, ()) if key is not None else ()
        if slot in sources:
            return
        if sources:
            source = min(sources)
            late = source in filled
            (plan.late_copies if late else plan.early_copies).append(
                Copy(source, slot, len(sequence.tokens) - 1)
            )
            if late:
                filled.add(slot)
        else:
            plan.prefills.append(Prefill(slot))
            filled.add(slot)
        self._set_content(slot, key)

    def _close_holes(self, plan: Plan) -> None:
        low, high = 0, len(self.slots) - 1
        prefilled = {prefill.slot: i for i, prefill in enumerate(plan.prefills)}
        while True:
            while low < high and self.slots[low] is not None:
                low += 1
            while low < high and self.slots[high] is None:
                high -= 1
            if low >= high:
                return
            self.slots[low], self.slots[high] = self.slots[high], None
            plan.moves.append(Move(high, low))
            self._set_content(low, self._content[high])
            self._set_content(high, None)
            if high in prefilled:
                plan.prefills[prefilled[high]] = Prefill(low)

    def _set_content(self, slot: int, key: ContentKey | None) -> None:
        old = self._content[slot]
        if old is not None:
            self._where[old].discard(slot)
            if not self._where[old]:
                del self._where[old]
        self._content[slot] = key
        if key is not None:
            self._where.setdefault(key, set()).add(slot)
