"""The decode loop's own side: scheduler, slots and path, one token step at a time. No asyncio and no locks
here; what is news for callers is returned, for `requests.deliver`.

Everything is called from one thread at a time: the engine's decode thread while it serves, the caller's
otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from rondo.errors import RolloutError
from rondo.rollout.native.choose import DecodePath
from rondo.rollout.native.scheduler import Scheduler, Sequence, SlotTable
from rondo.rollout.protocol import WASTED_TOKENS
from rondo.rollout.requests import News, so_far
from rondo.types import Completion, FinishReason, StepStats

_PREFILLS = ("shared_prefill_tokens", "prefill_tokens")


class Decoder:
    """Decodes what `scheduler` has. streams: some sequence wants its tokens as they come. Clock of deadlines:
    time.monotonic.
    """

    def __init__(self, path: DecodePath, num_slots: int, capacity: int) -> None:
        self.path = path
        self.scheduler = Scheduler(num_slots, dense=path.dense)
        self._num_slots, self._capacity = num_slots, capacity
        self._table = SlotTable(num_slots, capacity)
        self._rows = np.empty(0, np.int64)
        self._deadlines = False  # some sequence has one
        self.streams = False
        # Seconds of all threads that decode; this one alone where it is not told of others.
        self.cpu_clock: Callable[[], float] = time.thread_time
        self.asleep = False
        self._stats = StepStats()
        path.allocate()

    @torch.inference_mode()
    def step(self, version: int) -> list[News]:
        """One token for every running sequence, after seating those that wait. Returns who finished, or is
        past its deadline. version: of the weights.
        """
        if self.scheduler.changed:
            started = self.cpu_clock()
            self._apply_plan()
            self._stats.add_sum("perf/prefill_cpu_seconds", self.cpu_clock() - started)
        rows, news = self._rows, []
        if len(rows):
            started = self.cpu_clock()
            ids, log_probs = self.path.decode(rows, self._table)
            if not np.isfinite(log_probs).all():
                sequence = self.scheduler.slots[rows[np.flatnonzero(~np.isfinite(log_probs))[0]]]
                assert sequence is not None
                raise RolloutError(f"the logits of request {sequence.request.request_id!r} are not finite; "
                                   "the weights hold NaN or inf, or the dtype overflows")  # fmt: skip
            stopped, full = self._table.append(rows, ids, log_probs, version)
            for at in np.flatnonzero(stopped | full):
                news.append(self._take_out(int(rows[at]), "stop" if stopped[at] else "length"))
            self._stats.add_sum("perf/decode_cpu_seconds", self.cpu_clock() - started)
            self._stats.add_sum("perf/decode_steps", 1)
            self._stats.add_sum("perf/decoded_tokens", len(rows))
            self._stats.add_mean("perf/batch_occupancy", len(rows))
        return [*news, *self.expire()] if self._deadlines else news

    def _apply_plan(self) -> None:
        scheduler, table = self.scheduler, self._table
        plan = scheduler.plan()
        for slot, sequence in plan.joins:
            table.seat(slot, sequence)
        for copy in plan.early_copies:
            self._copy(copy.source, copy.target, copy.length)
        for move in plan.moves:
            length = int(table.positions[move.source])
            if length:
                self.path.copy(move.source, move.target, length)
            table.move(move.source, move.target)
        prompts = [(prefill.slot, self._cached_tokens(prefill.slot)) for prefill in plan.prefills]
        prompts = [(slot, tokens) for slot, tokens in prompts if len(tokens)]
        if prompts:
            self.path.prefill(prompts)
            self._stats.add_sum("perf/prefill_tokens", sum(len(tokens) for _, tokens in prompts))
        for copy in plan.late_copies:
            self._copy(copy.source, copy.target, copy.length)
        running = [(slot, sequence) for slot, sequence in enumerate(scheduler.slots) if sequence is not None]
        self._rows = np.array([slot for slot, _ in running], np.int64)
        if self.path.reads_prefixes:
            # Out of slot order a row must not read what another one writes in the same step.
            unwritten = 0 if self.path.in_slot_order else 1
            table.prefix_lengths[:] = 0
            for slot, source, length in scheduler.prefixes():
                table.prefix_slots[slot] = source
                table.prefix_lengths[slot] = length - unwritten
        calls = [sequence.call for sequence in (*(one for _, one in running), *scheduler.waiting)]
        self.streams = any(call.on_tokens is not None for call in calls)
        self._deadlines = any(call.deadline is not None for call in calls)

    def _copy(self, source: int, target: int, length: int) -> None:
        if length:
            self.path.copy(source, target, length)
            self._stats.add_sum("perf/shared_prefill_tokens", length)

    def _cached_tokens(self, slot: int) -> np.ndarray:
        """All tokens whose keys and values the cache must hold: those before the one that is fed next."""
        sequence = self.scheduler.slots[slot]
        assert sequence is not None
        new = self._table.ids[slot, sequence.num_prefix : self._table.indices[slot]]
        return np.concatenate([sequence.tokens, new.astype(np.int64)])[:-1]

    def _take_out(self, slot: int, reason: FinishReason) -> News:
        """The end of the slot's sequence, with the tokens of which its caller was to be told still."""
        sequence = self.scheduler.release(slot)
        call = sequence.call
        whole = Completion(
            call.request.request_id, call.prompt_ids, *self._table.response(slot), finish_reason=reason
        )
        told = sequence.num_prefix + call.reported
        rest = None if call.on_tokens is None or told == len(whole.token_ids) else whole.part(told)
        return call, rest, whole

    def progress(self) -> list[News]:
        """The new tokens of all running sequences that stream, since the last call."""
        news: list[News] = []
        for slot, sequence in enumerate(self.scheduler.slots):
            if sequence is None or sequence.call.on_tokens is None:
                continue
            call = sequence.call
            new = self._table.response(slot, sequence.num_prefix + call.reported)
            if len(new[0]):
                call.reported += len(new[0])
                part = Completion(call.request.request_id, call.prompt_ids, *new, finish_reason="length")
                news.append((call, part, None))
        return news

    # ---- out before the end ----

    def cancel(self, request_id: str) -> list[News]:
        """Take a sequence out, with what it has so far; nothing if it is not here (any more)."""
        return self._leave(lambda s: s.request.request_id == request_id, "cancelled")

    def give_up(self, request_id: str) -> None:
        """As `cancel`, for a sequence that nobody waits for any more; its tokens are counted as wasted."""
        for _, _, completion in self.cancel(request_id):
            self._stats.add_sum(WASTED_TOKENS, float(len(completion.token_ids)))

    def expire(self) -> list[News]:
        """Take out all sequences past their deadline."""
        now = time.monotonic()
        return self._leave(lambda s: s.call.deadline is not None and s.call.deadline <= now, "deadline")

    def _leave(self, who: Callable[[Sequence], bool], reason: FinishReason) -> list[News]:
        scheduler = self.scheduler
        out = [
            self._take_out(slot, reason)
            for slot, sequence in enumerate(scheduler.slots)
            if sequence is not None and who(sequence)
        ]
        for sequence in [s for s in scheduler.waiting if who(s)]:
            scheduler.waiting.remove(sequence)
            out.append((sequence.call, None, so_far(sequence.request, reason)))
        return out

    # ---- weights and cache ----

    def weights_changed(self) -> None:
        """The next step runs on new weights: what is cached is not valid; running sequences prefill again."""
        self.path.weights_changed()
        self.scheduler.invalidate()

    def sleep(self) -> None:
        """Free the cache; running sequences keep their tokens and are prefilled after `wake`."""
        self.path.free()
        self.scheduler.invalidate()
        self.asleep = True

    def wake(self) -> None:
        self.path.allocate()
        self.asleep = False

    def reset(self) -> None:
        """After an error, and with nothing to decode: a clean table and cache."""
        self._table = SlotTable(self._num_slots, self._capacity)
        self.path.free()
        if not self.asleep:
            self.path.allocate()

    def stats(self) -> StepStats:
        """Counters since the last call."""
        stats, self._stats = self._stats, StepStats()
        stats.add_max("rollout/cache_bytes", self.path.cache_nbytes)
        shared, computed = (stats.sums.get(f"perf/{kind}", 0.0) for kind in _PREFILLS)
        if shared + computed:
            stats.add_mean("rollout/cache_hit_rate", shared, shared + computed)
        return stats
