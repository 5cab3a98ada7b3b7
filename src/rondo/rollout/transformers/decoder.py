"""One token of one sequence at a time: the sequences that run take turns."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rondo.chat import StopMatcher
from rondo.core.errors import RolloutError
from rondo.core.types import FinishReason, GenerateRequest, StepStats
from rondo.models.routers import RouteRecorder
from rondo.rollout.decoder import Decoder
from rondo.rollout.native.sampling import sample, uniforms
from rondo.rollout.protocol import OnTokens
from rondo.rollout.requests import News, Pending
from rondo.rollout.transformers.forward import CachedForward, nbytes


@dataclass(eq=False)
class Sequence(Pending):
    """A generate call here."""

    together: int = field(init=False)
    """So many of its first tokens go through the model at one time, those after them one by one."""
    cache: Any = field(init=False, default=None)
    """The model's, of all its tokens but the newest; None: there is none yet, or no longer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.together = self.num_tokens


@dataclass(frozen=True)
class Prefilled:
    """What the model made of a prompt; the samples of a group begin with copies of it."""

    tokens: np.ndarray
    logits: torch.Tensor
    cache: Any
    routes: np.ndarray | None


class TurnDecoder(Decoder[Sequence]):
    """Decodes with `forward`; at most `max_running` sequences have a cache, and the latest prompt. recorder:
    of a mixture's routes, which completions have then.
    """

    def __init__(
        self, forward: CachedForward, max_running: int, recorder: RouteRecorder | None = None
    ) -> None:
        super().__init__()
        self._forward = forward
        self._recorder = recorder
        self._max_running = max_running
        self._waiting: deque[Sequence] = deque()
        # In the order of their turns.
        self._running: deque[Sequence] = deque()
        self._latest: Prefilled | None = None

    def sequence(
        self, request: GenerateRequest, on_tokens: OnTokens | None, matcher: StopMatcher | None
    ) -> Sequence:
        return Sequence(request, on_tokens, matcher=matcher)

    def add(self, sequence: Sequence) -> None:
        """Puts it behind those that wait; an urgent one only behind others of its kind."""
        if sequence.request.urgent:
            ahead = sum(one.request.urgent for one in self._waiting)  # they are all in front
            self._waiting.insert(ahead, sequence)
        else:
            self._waiting.append(sequence)

    def sequences(self) -> list[Sequence]:
        return [*self._running, *self._waiting]

    def step(self, version: int) -> list[News]:
        news = self.expire()
        while self._waiting and len(self._running) < self._max_running:
            self._running.append(self._waiting.popleft())
        self.streams = any(one.on_tokens is not None for one in self._running)
        if not self._running:
            return news
        sequence = self._running[0]
        self._running.rotate(-1)
        self._stats.add_mean("perf/batch_occupancy", len(self._running))
        logits = self._next_logits(sequence)
        started = self.cpu_clock()
        token, log_prob = _drawn(sequence, logits)
        if not math.isfinite(log_prob):
            raise RolloutError(
                f"the logits of request {sequence.request.request_id!r} are not finite; the weights hold NaN "
                "or inf, or the dtype overflows"
            )
        stopped = sequence.append_to_stop([token], [log_prob], [version])
        self._stats.add_sum("perf/decode_cpu_seconds", self.cpu_clock() - started)
        self._stats.add_sum("perf/decode_steps", 1)
        self._stats.add_sum("perf/decoded_tokens", 1)
        sampling = sequence.request.sampling
        if stopped or token in sampling.stop_token_ids:
            news += self._leave(lambda one: one is sequence, "stop")
        elif sequence.num_response >= sampling.max_tokens:
            news += self._leave(lambda one: one is sequence, "length")
        return news

    def progress(self) -> list[News]:
        parts = ((one, one.news()) for one in self._running)
        return [(one, part, None) for one, part in parts if part is not None]

    def _leave(self, who: Callable[[Sequence], bool], reason: FinishReason) -> list[News]:
        gone = [one for one in self.sequences() if who(one)]
        for one in gone:
            (self._running if one in self._running else self._waiting).remove(one)
            one.cache = None
        return [(one, one.news(), one.completion(reason)) for one in gone]

    # ---- the model ----

    def _next_logits(self, sequence: Sequence) -> torch.Tensor:
        """Returns logits [1, V] behind the sequence's newest token, which its cache has then."""
        tokens, done = sequence.tokens, sequence.num_tokens - 1
        if sequence.cache is None:
            prefilled = self._prefilled(tokens[: sequence.together])
            logits, sequence.cache = prefilled.logits, copy.deepcopy(prefilled.cache)
            if prefilled.routes is not None:
                sequence.see_routes(prefilled.routes)
            done = sequence.together
        started = self.cpu_clock()
        for at in range(done, len(tokens)):  # several where what was decoded has to be computed again
            logits, sequence.cache = self._forward(tokens[at : at + 1], at, sequence.cache)
            if self._recorder is not None:
                sequence.see_routes(self._recorder.latest().numpy(force=True), at)
        self._stats.add_sum("perf/decode_cpu_seconds", self.cpu_clock() - started)
        return logits

    def _prefilled(self, tokens: np.ndarray) -> Prefilled:
        """Returns what the model makes of the tokens; its cache is everybody's."""
        started, latest = self.cpu_clock(), self._latest
        if latest is not None and np.array_equal(latest.tokens, tokens):
            self._stats.add_sum("perf/shared_prefill_tokens", len(tokens))
        else:
            self._latest = None  # there is room for one
            logits, cache = self._forward(tokens)
            routes = None if self._recorder is None else self._recorder.latest().numpy(force=True)
            latest = self._latest = Prefilled(tokens, logits, cache, routes)
            self._stats.add_sum("perf/prefill_tokens", len(tokens))
        self._stats.add_sum("perf/prefill_cpu_seconds", self.cpu_clock() - started)
        return latest

    # ---- weights and cache ----

    def weights_changed(self) -> None:
        """Drops what is cached. Running sequences go through the new model as if they came with all tokens
        that they have.
        """
        self._forget()
        for one in self._running:
            one.together = one.num_tokens

    def sleep(self) -> None:
        """Frees the caches; they are computed again as they were, and have the same bits."""
        self._forget()
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False

    def reset(self) -> None:
        self._forget()
        self._running.clear()
        self._waiting.clear()

    def _forget(self) -> None:
        self._latest = None
        for one in self._running:
            one.cache = None

    def stats(self) -> StepStats:
        stats = super().stats()
        held = [one.cache for one in (*self._running, self._latest) if one is not None]
        stats.add_max("rollout/cache_bytes", nbytes(held))
        return stats


def _drawn(sequence: Sequence, logits: torch.Tensor) -> tuple[int, float]:
    """Returns the next token, by the noise of its seed and index, and its log-prob."""
    request, sampling = sequence.request, sequence.request.sampling
    # A seed of 2^63 or more becomes the int64 of the same bits.
    seed = (request.seed + 2**63) % 2**64 - 2**63
    noise = uniforms(np.array([seed]), np.array([sequence.num_response]))
    settings = [
        torch.from_numpy(noise),
        torch.tensor([sampling.temperature], dtype=torch.float32),
        torch.tensor([sampling.top_k]),
        torch.tensor([sampling.top_p], dtype=torch.float32),
        torch.tensor([sampling.min_p], dtype=torch.float32),
    ]
    token, log_prob = sample(logits, *(one.to(logits.device) for one in settings))
    return int(token), float(log_prob)
