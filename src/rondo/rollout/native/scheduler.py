"""The slots: who sits in which (pure decisions over small records), and the numbers of each as arrays. No
tensors, no clock.

Requests wait in arrival order, the urgent ones in front, and join whenever a slot is free. A slot's cache
holds the key/values of all tokens of its sequence but the last, which the next decode step feeds. Requests
with one affinity key and the same prompt share the prefill: the first one's is computed, the others' are
copied from any slot that still holds it (`content`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rondo.types import GenerateRequest

ContentKey = tuple[str, bytes]


@dataclass(eq=False)
class Sequence:
    """One request as the slots see it.

    tokens: int64 prompt and prefix; generated tokens live in the slot table. num_prefix: how many of `tokens`
    are an earlier part of the response. call: who waits for it, which is nothing to the scheduler.
    """

    request: GenerateRequest
    tokens: np.ndarray
    num_prefix: int = 0
    call: Any = None


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
    """dense: keep the occupied slots at 0 .. n - 1 (paths that decode a contiguous range of slots).

    changed: somebody joined or left, or caches are stale, since the last plan.
    """

    def __init__(self, num_slots: int, *, dense: bool) -> None:
        self.slots: list[Sequence | None] = [None] * num_slots
        self.waiting: deque[Sequence] = deque()
        self.changed = False
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
        self.changed = True
        if sequence.request.urgent:
            ahead = sum(1 for one in self.waiting if one.request.urgent)  # they are all in front
            self.waiting.insert(ahead, sequence)
        else:
            self.waiting.append(sequence)

    def release(self, slot: int) -> Sequence:
        """Returns the slot's sequence, which leaves; the cache's content stays of use until the slot is
        taken.
        """
        sequence = self.slots[slot]
        assert sequence is not None
        self.slots[slot] = None
        self._stale.discard(slot)
        self.changed = True
        return sequence

    def invalidate(self) -> None:
        """Weights changed, or the cache was lost: share nothing, prefill every sequence again."""
        self._content = [None] * len(self.slots)
        self._where.clear()
        self.changed = True
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
        self.changed = False
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
        # What its slot's cache can be shared as. Sequences with a prefix neither give nor take.
        key = None if sequence.num_prefix else (sequence.request.affinity, sequence.tokens.tobytes())
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


class SlotTable:
    """All arrays are indexed by slot. tokens: the one to feed next, at `positions`. indices: response tokens
    so far.

    prefix_slots, prefix_lengths: another slot whose first so many cache positions are the same (0: none).
    ids, log_probs, versions: [S, capacity], the response as it grows. stops: [S, K] stop tokens, -1 where
    unused.
    """

    def __init__(self, num_slots: int, capacity: int) -> None:
        self.tokens = np.zeros(num_slots, np.int64)
        self.positions = np.zeros(num_slots, np.int64)
        self.seeds = np.zeros(num_slots, np.int64)
        self.indices = np.zeros(num_slots, np.int64)
        self.max_tokens = np.zeros(num_slots, np.int64)
        self.prefix_slots = np.arange(num_slots)
        self.prefix_lengths = np.zeros(num_slots, np.int64)
        self.temperature = np.ones(num_slots, np.float32)
        self.top_p = np.ones(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int64)
        self.ids = np.zeros((num_slots, capacity), np.int32)
        self.log_probs = np.zeros((num_slots, capacity), np.float32)
        self.versions = np.zeros((num_slots, capacity), np.int32)
        self.stops = np.full((num_slots, 1), -1, np.int64)

    def seat(self, slot: int, sequence: Sequence) -> None:
        """Start a sequence; with the response so far, where it goes on with one."""
        request, sampling = sequence.request, sequence.request.sampling
        self.tokens[slot], self.positions[slot] = sequence.tokens[-1], len(sequence.tokens) - 1
        self.seeds[slot] = (request.seed + 2**63) % 2**64 - 2**63
        self.max_tokens[slot] = sampling.max_tokens
        self.temperature[slot], self.top_p[slot] = sampling.temperature, sampling.top_p
        self.top_k[slot], self.min_p[slot] = sampling.top_k, sampling.min_p
        stops, missing = sampling.stop_token_ids, len(sampling.stop_token_ids) - self.stops.shape[1]
        if missing > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, missing)), constant_values=-1)
        self.stops[slot] = -1
        self.stops[slot, : len(stops)] = stops
        self.indices[slot] = 0
        if request.prefix is not None:
            done = self.indices[slot] = len(request.prefix.token_ids)
            self.ids[slot, :done] = request.prefix.token_ids
            self.log_probs[slot, :done] = request.prefix.log_probs
            self.versions[slot, :done] = request.prefix.policy_versions

    def move(self, source: int, target: int) -> None:
        """All numbers of `source` to `target`."""
        for array in vars(self).values():
            array[target] = array[source]

    def append(
        self, rows: np.ndarray, tokens: np.ndarray, log_probs: np.ndarray, version: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """One more token in each slot of `rows`. Returns bool [R] twice: ended by a stop token, by length."""
        at = self.indices[rows]
        self.ids[rows, at] = tokens
        self.log_probs[rows, at] = log_probs
        self.versions[rows, at] = version
        self.indices[rows] = at + 1
        self.positions[rows] += 1
        self.tokens[rows] = tokens
        return (self.stops[rows] == tokens[:, None]).any(1), at + 1 >= self.max_tokens[rows]

    def response(self, slot: int, start: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Copies of ids, log_probs and versions so far, from response token `start` on."""
        new = slice(start, int(self.indices[slot]))
        return self.ids[slot, new].copy(), self.log_probs[slot, new].copy(), self.versions[slot, new].copy()
