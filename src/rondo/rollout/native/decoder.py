"""The decode loop's own side: scheduler, slots and path, one token step at a time. No asyncio and no locks
here.

Everything is called from one thread at a time: the engine's decode thread while it serves, the caller's
otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from rondo.errors import RolloutError
from rondo.rollout.native.choose import DecodePath
from rondo.rollout.native.scheduler import Scheduler, Sequence
from rondo.rollout.native.slots import SlotTable
from rondo.rollout.protocol import WASTED_TOKENS
from rondo.rollout.requests import so_far
from rondo.types import Completion, FinishReason, GenerateRequest, StepStats

_PREFILLS = ("shared_prefill_tokens", "prefill_tokens")


@dataclass(frozen=True)
class Finished:
    """A sequence that has left, and what it made. rest: the tokens that were not streamed yet, or None."""

    sequence: Sequence
    completion: Completion

    @property
    def rest(self) -> Completion | None:
        start, whole = self.sequence.num_streamed, self.completion
        if not self.sequence.streams or start == len(whole.token_ids):
            return None
        return whole.part(start)


class Decoder:
    """version: () -> policy version that the weights are. Clock of deadlines: time.monotonic."""

    def __init__(self, path: DecodePath, num_slots: int, capacity: int, version: Callable[[], int]) -> None:
        self.path, self._version = path, version
        self.scheduler = Scheduler(num_slots, dense=path.dense)
        self._num_slots, self._capacity = num_slots, capacity
        self._table = SlotTable(num_slots, capacity)
        self._rows = np.empty(0, np.int64)
        self._changed = False  # somebody joined or left, or caches are stale: plan before the next step
        self._deadlines = False
        self.streams = False  # some sequence wants its tokens as they come
        self.asleep = False
        self._stats = StepStats()
        path.allocate()

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def add(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)
        self._changed = True
        self._deadlines |= sequence.deadline is not None
        self.streams |= sequence.streams

    def progress(self) -> list[tuple[Sequence, Completion]]:
        """The new tokens of all running sequences that stream, since the last call."""
        out = []
        for slot, sequence in enumerate(self.scheduler.slots):
            if sequence is None or not sequence.streams:
                continue
            new = self._table.response(slot, sequence.num_streamed)
            if len(new[0]):
                sequence.num_streamed += len(new[0])
                out.append((sequence, _completion(sequence.request, new, "length")))
        if not out and not self.scheduler.has_work():
            self.streams = False
        return out

    def cancel(self, request_id: str) -> Finished | None:
        """Take a sequence out, with what it has so far; None if it is not here (any more)."""
        return next(iter(self._leave(lambda s: s.request_id == request_id, "cancelled")), None)

    def give_up(self, request_id: str) -> None:
        """As `cancel`, for a sequence that nobody waits for any more; its tokens are counted as wasted."""
        finished = self.cancel(request_id)
        if finished is not None:
            self._stats.add_sum(WASTED_TOKENS, float(len(finished.completion.token_ids)))

    def expire(self) -> list[Finished]:
        """Take out all sequences past their deadline."""
        if not self._deadlines:
            return []
        now = time.monotonic()
        return self._leave(lambda s: s.deadline is not None and s.deadline <= now, "deadline")

    def weights_changed(self) -> None:
        """The next step runs on new weights: what is cached is not valid; running sequences prefill again."""
        self.path.weights_changed()
        self.scheduler.invalidate()
        self._changed = True

    def sleep(self) -> None:
        """Free the cache; running sequences keep their tokens and are prefilled after `wake`."""
        self.path.free()
        self.scheduler.invalidate()
        self._changed = self.asleep = True

    def wake(self) -> None:
        self.path.allocate()
        self.asleep = False

    def drop_all(self) -> list[Sequence]:
        """Forget all sequences; returns them."""
        self._changed = True
        return self.scheduler.clear()

    def reset(self) -> None:
        """After an error: a clean table and cache."""
        self._table = SlotTable(self._num_slots, self._capacity)
        self.path.free()
        if not self.asleep:
            self.path.allocate()

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """One token for every running sequence, after seating those that wait. Returns who finished."""
        if self._changed:
            started = time.thread_time()
            self._apply_plan()
            self._stats.add_sum("perf/prefill_cpu_seconds", time.thread_time() - started)
        rows = self._rows
        if not len(rows):
            return []
        started = time.thread_time()
        ids, log_probs = self.path.decode(rows, self._table)
        if not np.isfinite(log_probs).all():
            slot = int(rows[np.flatnonzero(~np.isfinite(log_probs))[0]])
            raise RolloutError(f"the logits of request {self._sequence(slot).request_id!r} are not finite; "
                               "the weights hold NaN or inf, or the dtype overflows")  # fmt: skip
        done = self._table.append(rows, ids, log_probs, self._version())
        finished = [self._finish(int(slot)) for slot in rows[done]] if done.any() else []
        self._stats.add_sum("perf/decode_cpu_seconds", time.thread_time() - started)
        self._stats.add_sum("perf/decode_steps", 1)
        self._stats.add_sum("perf/decoded_tokens", len(rows))
        self._stats.add_mean("perf/batch_occupancy", len(rows))
        return finished

    def stats(self) -> StepStats:
        """Counters since the last call."""
        stats, self._stats = self._stats, StepStats()
        stats.add_max("rollout/cache_bytes", self.path.cache_nbytes)
        shared, computed = (stats.sums.get(f"perf/{kind}", 0.0) for kind in _PREFILLS)
        if shared + computed:
            stats.add_mean("rollout/cache_hit_rate", shared, shared + computed)
        return stats

    def _apply_plan(self) -> None:
        plan = self.scheduler.plan()
        for slot, sequence in plan.joins:
            self._seat(slot, sequence)
        for copy in plan.early_copies:
            self._copy(copy.source, copy.target, copy.length)
        for move in plan.moves:
            length = int(self._table.positions[move.source])
            if length:
                self.path.copy(move.source, move.target, length)
            self._table.move(move.source, move.target)
        prompts = [(prefill.slot, self._cached_tokens(prefill.slot)) for prefill in plan.prefills]
        prompts = [(slot, tokens) for slot, tokens in prompts if len(tokens)]
        if prompts:
            self.path.prefill(prompts)
            self._stats.add_sum("perf/prefill_tokens", sum(len(tokens) for _, tokens in prompts))
        for copy in plan.late_copies:
            self._copy(copy.source, copy.target, copy.length)
        slots = self.scheduler.slots
        self._rows = np.array([i for i, sequence in enumerate(slots) if sequence is not None], np.int64)
        if self.path.reads_prefixes:
            self._table.prefix_lengths[:] = 0
            for slot, source, length in self.scheduler.prefixes():
                self._table.prefix_slots[slot] = source
                self._table.prefix_lengths[slot] = length if self.path.in_slot_order else length - 1
        self._changed = False

    def _copy(self, source: int, target: int, length: int) -> None:
        if length:
            self.path.copy(source, target, length)
            self._stats.add_sum("perf/shared_prefill_tokens", length)

    def _seat(self, slot: int, sequence: Sequence) -> None:
        request = sequence.request
        seed = (request.seed + 2**63) % 2**64 - 2**63
        self._table.seat(slot, sequence.tokens, request.sampling, seed, request.prefix)

    def _cached_tokens(self, slot: int) -> np.ndarray:
        """All tokens whose keys and values the cache must hold: those before the one that is fed next."""
        sequence = self._sequence(slot)
        new = self._table.ids[slot, sequence.num_prefix : self._table.indices[slot]]
        return np.concatenate([sequence.tokens, new.astype(np.int64)])[:-1]

    def _sequence(self, slot: int) -> Sequence:
        sequence = self.scheduler.slots[slot]
        assert sequence is not None
        return sequence

    def _finish(self, slot: int) -> Finished:
        sequence = self._sequence(slot)
        stopped = (
            self._table.ids[slot, self._table.indices[slot] - 1] in sequence.request.sampling.stop_token_ids
        )
        return self._take_out(slot, "stop" if stopped else "length")

    def _take_out(self, slot: int, reason: FinishReason) -> Finished:
        sequence = self._sequence(slot)
        finished = Finished(sequence, _completion(sequence.request, self._table.response(slot), reason))
        self.scheduler.release(slot)
        self._changed = True
        return finished

    def _leave(self, who: Callable[[Sequence], bool], reason: FinishReason) -> list[Finished]:
        scheduler = self.scheduler
        out = [
            self._take_out(slot, reason)
            for slot, sequence in enumerate(scheduler.slots)
            if sequence is not None and who(sequence)
        ]
        for sequence in [s for s in scheduler.waiting if who(s)]:
            scheduler.waiting.remove(sequence)
            out.append(Finished(sequence, so_far(sequence.request, reason)))
        return out


def _completion(
    request: GenerateRequest, response: tuple[np.ndarray, np.ndarray, np.ndarray], reason: FinishReason
) -> Completion:
    prompt_ids = np.array(request.token_ids, np.int32)
    return Completion(request.request_id, prompt_ids, *response, finish_reason=reason)
