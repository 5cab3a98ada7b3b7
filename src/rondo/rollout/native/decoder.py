"""The decode loop of the native engine: scheduler and path, one token of every sequence at a time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import numpy as np
import torch

from rondo.chat import StopMatcher
from rondo.core.errors import RolloutError
from rondo.core.types import FinishReason, GenerateRequest, StepStats
from rondo.rollout.decoder import PREFILLS, Decoder
from rondo.rollout.native.choose import DecodePath
from rondo.rollout.native.scheduler import Scheduler, Sequence
from rondo.rollout.protocol import OnTokens
from rondo.rollout.requests import News


class PagedDecoder(Decoder[Sequence]):
    """Decodes what `scheduler` has."""

    def __init__(self, path: DecodePath, num_slots: int, num_blocks: int, max_context: int) -> None:
        super().__init__()
        self.path = path
        self._sizes = (num_slots, num_blocks, max_context)
        self.scheduler = self._new_scheduler()
        self._rows = np.empty(0, np.int64)
        self._deadlines = False  # some sequence has one
        self._matchers: list[tuple[int, StopMatcher]] = []  # by the place of the sequence in `_rows`
        path.allocate(num_blocks)

    def sequence(
        self, request: GenerateRequest, on_tokens: OnTokens | None, matcher: StopMatcher | None
    ) -> Sequence:
        return Sequence(request, on_tokens, matcher=matcher)

    def add(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)

    def sequences(self) -> list[Sequence]:
        return self.scheduler.sequences()

    @torch.inference_mode()
    def step(self, version: int) -> list[News]:
        """Makes one token for every running sequence, after seating those that wait. Returns the sequences
        that finished, or are past their deadline. version: of the weights.
        """
        table, news = self.scheduler.table, []
        self.scheduler.grow(self._rows)  # before any is seated: blocks go to those that run first
        if self.scheduler.changed:
            started = self.cpu_clock()
            self._apply_plan()
            self._stats.add_sum("perf/prefill_cpu_seconds", self.cpu_clock() - started)
        rows = self._rows
        if len(rows):
            started = self.cpu_clock()
            ids, log_probs = self.path.decode(rows, table)
            if not np.isfinite(log_probs).all():
                sequence = self.scheduler.slots[rows[np.flatnonzero(~np.isfinite(log_probs))[0]]]
                assert sequence is not None
                raise RolloutError(f"the logits of request {sequence.request.request_id!r} are not finite; "
                                   "the weights hold NaN or inf, or the dtype overflows")  # fmt: skip
            stopped, full = table.append(rows, ids, log_probs, version)
            for place, matcher in self._matchers:
                stopped[place] |= matcher.feed(ids[place : place + 1])
            for at in np.flatnonzero(stopped | full):
                news.append(self._take_out(int(rows[at]), "stop" if stopped[at] else "length"))
            self._stats.add_sum("perf/decode_cpu_seconds", self.cpu_clock() - started)
            self._stats.add_sum("perf/decode_steps", 1)
            self._stats.add_sum("perf/decoded_tokens", len(rows))
            self._stats.add_mean("perf/batch_occupancy", len(rows))
        return [*news, *self.expire()] if self._deadlines else news

    def _apply_plan(self) -> None:
        scheduler = self.scheduler
        plan = scheduler.plan()
        # Waves in order, then copies: each reads blocks that those before it fill.
        for _, wave in groupby(sorted(plan.prefills, key=lambda one: one.wave), key=lambda one: one.wave):
            self.path.prefill(list(wave), scheduler.table)
        if plan.copies:
            self.path.copy(plan.copies)
        computed = sum(len(one.tokens) - one.start for one in plan.prefills)
        for name, count in zip(PREFILLS, (plan.num_shared, computed), strict=True):
            if count:
                self._stats.add_sum(f"perf/{name}", count)
        running = scheduler.running
        self._rows = np.array([slot for slot, _ in running], np.int64)
        matchers = enumerate(sequence.matcher for _, sequence in running)
        self._matchers = [(at, matcher) for at, matcher in matchers if matcher is not None]
        here = scheduler.sequences()
        self.streams = any(one.on_tokens is not None for one in here)
        self._deadlines = any(one.deadline is not None for one in here)

    def _take_out(self, slot: int, reason: FinishReason) -> News:
        """Ends the slot's sequence. Returns its completion, and the tokens that are news to its caller."""
        self._see_routes(slot)
        sequence = self.scheduler.release(slot)
        return sequence, sequence.news(), sequence.completion(reason)

    def _see_routes(self, slot: int) -> None:
        """Has the slot's sequence keep where its tokens went, under the weights so far."""
        sequence = self.scheduler.slots[slot]
        assert sequence is not None
        routes = self.path.routes(sequence.blocks, int(self.scheduler.table.positions[slot]))
        if routes is not None:
            sequence.see_routes(routes)

    def progress(self) -> list[News]:
        news: list[News] = []
        for slot, sequence in self.scheduler.running:
            if sequence.on_tokens is not None:
                sequence.take(self.scheduler.table.response(slot, sequence.num_response))
                part = sequence.news()
                if part is not None:
                    news.append((sequence, part, None))
        return news

    def _leave(self, who: Callable[[Sequence], bool], reason: FinishReason) -> list[News]:
        scheduler = self.scheduler
        out = [self._take_out(slot, reason) for slot, sequence in scheduler.running if who(sequence)]
        for sequence in [one for one in scheduler.in_line if who(one)]:
            scheduler.leave_line(sequence)
            out.append((sequence, sequence.news(), sequence.completion(reason)))
        return out

    # ---- weights and cache ----

    def weights_changed(self) -> None:
        for slot, _ in self.scheduler.running:
            self._see_routes(slot)
        self.path.weights_changed()
        self.scheduler.invalidate(new_weights=True)

    def sleep(self) -> None:
        self.path.free()
        self.path.let_go()
        self.scheduler.invalidate(new_weights=False)
        self.asleep = True

    def wake(self) -> None:
        self.path.allocate(self._sizes[1])
        self.asleep = False

    def reset(self) -> None:
        """Forgets all sequences, after an error, and makes a clean table and cache."""
        self.scheduler = self._new_scheduler()
        self._rows = np.empty(0, np.int64)
        self.path.free()
        if not self.asleep:
            self.wake()

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(*self._sizes, chunk=self.path.chunk)

    def stats(self) -> StepStats:
        stats = super().stats()
        stats.add_max("rollout/cache_bytes", self.path.cache_nbytes)
        if self.scheduler.num_preempted:
            stats.add_sum("rollout/preemptions", self.scheduler.num_preempted)
            self.scheduler.num_preempted = 0
        return stats
