"""The engine `transformers`: one token of one sequence at a time; the sequences that run take turns. The next
token's logits are those of the model's own forward, with whatever cache the model makes.
`rollout/in_process.py` is its asyncio side.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import __version__ as version

from rondo.chat import StopMatcher
from rondo.core.errors import ConfigError, RolloutError
from rondo.core.types import FinishReason, GenerateRequest, StepStats
from rondo.models.context import to_device
from rondo.models.routers import RouteRecorder
from rondo.rollout.decoder import Decoder
from rondo.rollout.images import ReadImages, Tower, digest_of
from rondo.rollout.in_process import InProcessEngine, as_torch, check_sizes
from rondo.rollout.native.blocks import blocks_of
from rondo.rollout.native.cache import count_blocks
from rondo.rollout.native.sampling import sample, uniforms
from rondo.rollout.protocol import Capabilities, EngineSpec, OnTokens
from rondo.rollout.requests import News, Pending
from rondo.rollout.weights import WeightStore, build_module

# The attention that computes all that models ask of it (sinks, soft-caps, windows); others leave some out.
ATTENTION = "eager"


@dataclass(eq=False)
class TransformersSequence(Pending):
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
    """Ids of the prompt."""
    logits: torch.Tensor
    """The logits behind the prompt."""
    cache: Any
    """The model's own cache, with the prompt in it."""
    shown: bytes
    """`digest_of` its images."""
    routes: np.ndarray | None
    """Where a mixture's tokens went; None: this is not kept."""


class TurnDecoder(Decoder[TransformersSequence]):
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
        self._waiting: deque[TransformersSequence] = deque()
        # In the order of their turns.
        self._running: deque[TransformersSequence] = deque()
        self._latest: Prefilled | None = None

    def sequence(
        self, request: GenerateRequest, on_tokens: OnTokens | None, matcher: StopMatcher | None
    ) -> TransformersSequence:
        return TransformersSequence(request, on_tokens, matcher=matcher)

    def add(self, sequence: TransformersSequence) -> None:
        """Puts it behind those that wait; an urgent one only behind others of its kind."""
        if sequence.request.urgent:
            ahead = sum(one.request.urgent for one in self._waiting)  # they are all in front
            self._waiting.insert(ahead, sequence)
        else:
            self._waiting.append(sequence)

    def sequences(self) -> list[TransformersSequence]:
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
        token, log_prob = _drawn(sequence, logits, self._forward.never)
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

    def _leave(self, who: Callable[[TransformersSequence], bool], reason: FinishReason) -> list[News]:
        gone = [one for one in self.sequences() if who(one)]
        for one in gone:
            (self._running if one in self._running else self._waiting).remove(one)
            one.cache = None
        return [(one, one.news(), one.completion(reason)) for one in gone]

    # ---- the model ----

    def _next_logits(self, sequence: TransformersSequence) -> torch.Tensor:
        """Returns logits [1, V] behind the sequence's newest token, which its cache has then."""
        tokens, done = sequence.tokens, sequence.num_tokens - 1
        if sequence.cache is None:
            prefilled = self._prefilled(tokens[: sequence.together], sequence.shown)
            logits, sequence.cache = prefilled.logits, copy.deepcopy(prefilled.cache)
            if prefilled.routes is not None:
                sequence.see_routes(prefilled.routes)
            done = sequence.together
        started = self.cpu_clock()
        for at in range(done, len(tokens)):  # several where what was decoded has to be computed again
            logits, sequence.cache = self._forward(tokens[at : at + 1], at, sequence.cache, sequence.shown)
            if self._recorder is not None:
                sequence.see_routes(self._recorder.latest().numpy(force=True), at)
        self._stats.add_sum("perf/decode_cpu_seconds", self.cpu_clock() - started)
        return logits

    def _prefilled(self, tokens: np.ndarray, shown: ReadImages | None) -> Prefilled:
        """Returns what the model makes of a prompt; its cache is shared, and has to be copied."""
        started, latest, digest = self.cpu_clock(), self._latest, digest_of(shown)
        if latest is not None and latest.shown == digest and np.array_equal(latest.tokens, tokens):
            self._stats.add_sum("perf/shared_prefill_tokens", len(tokens))
        else:
            self._latest = None  # there is room for one
            logits, cache = self._forward(tokens, shown=shown)
            routes = None if self._recorder is None else self._recorder.latest().numpy(force=True)
            latest = self._latest = Prefilled(tokens, logits, cache, digest, routes)
            self._stats.add_sum("perf/prefill_tokens", len(tokens))
        self._stats.add_sum("perf/prefill_cpu_seconds", self.cpu_clock() - started)
        return latest

    # ---- weights and cache ----

    def weights_changed(self) -> None:
        """Drops what is cached. Running sequences go through the new model as if they came with all tokens
        that they have.
        """
        self._forget()
        self._forward.forget()
        for one in self._running:
            one.together = one.num_tokens

    def sleep(self) -> None:
        """Frees the caches; they are computed again as they were, and have the same bits."""
        self._forget()
        self._forward.forget()
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


def _drawn(
    sequence: TransformersSequence, logits: torch.Tensor, never: torch.Tensor | None
) -> tuple[int, float]:
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
    token, log_prob = sample(logits, *settings, never=never)
    return int(token), float(log_prob)


# ---- the next token's logits ----


# What models call the cache that they return, and take again: attention's keys and values, a state-space
# model's states, RWKV's.
CACHES = ("past_key_values", "cache_params", "state")


class CachedForward:
    """Takes one sequence per call. The model is tried when this is made; raises ConfigError for one that
    makes no cache of its own for each sequence.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device, tower: Tower | None = None) -> None:
        self._module = module
        self._device = device
        self._tower = tower
        self.never = None if tower is None else tower.never
        """Tokens that are never sampled."""
        taken = inspect.signature(module.forward).parameters
        wanted = {"use_cache": True, "logits_to_keep": 1}
        self._options = {name: value for name, value in wanted.items() if name in taken}
        self._takes_positions = "position_ids" in taken
        self._cache = next((name for name in CACHES if name in taken), "")
        token = np.zeros(1, np.int64)
        cache = self(token)[1] if self._cache else None
        if cache is None:
            raise ConfigError(
                f"{type(module).__name__} returns no cache to go on from ({', '.join(CACHES)}), so that "
                "sequences cannot take turns: no engine of rondo's own can decode it; choose another model"
            )
        first = nbytes(cache)
        self._growth = nbytes(self(token, 1, cache)[1]) - first
        self._fixed = first - self._growth

    def cache_bytes(self, positions: int) -> int:
        """Returns the bytes of one sequence's cache at this length: states of a fixed size, and what each
        position adds. (Windows make it smaller.)
        """
        return self._fixed + positions * self._growth

    @torch.inference_mode()
    def __call__(
        self, tokens: np.ndarray, start: int = 0, cache: Any = None, shown: ReadImages | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Returns logits [1, V] behind tokens int64 [T], and the cache with them in it. cache: of the `start`
        tokens before them, which the call may change; None: there are none. shown: the images of the prompt.
        """
        inputs = {"input_ids": torch.from_numpy(tokens).to(self._device)[None], self._cache: cache}
        if self._takes_positions:  # some models count from 0 whatever the cache holds
            inputs["position_ids"] = torch.arange(start, start + len(tokens), device=self._device)[None]
        if shown is not None:
            assert self._tower is not None
            stop = start + len(tokens)
            if self._tower.turns:
                turns = to_device(shown.turns(start, stop), self._device)[:, None]
                # As transformers' own generate gives it: the place comes first.
                inputs["position_ids"] = torch.cat([inputs["position_ids"][None], turns])
            if self._tower.sees_itself and start == 0:  # a prompt, with all of its images
                inputs["token_type_ids"] = (inputs["input_ids"] == self._tower.token).int()
            inputs |= self._tower.features(shown, start, stop)
        output = self._module(**inputs, **self._options)
        return output.logits[:, -1], output.get(self._cache)

    def forget(self) -> None:
        """Drops what the weights made of images."""
        if self._tower is not None:
            self._tower.forget()


def nbytes(cache: Any) -> int:
    """Counts the bytes of all tensors that a model's cache holds."""
    return sum(tensor.nbytes for tensor in _tensors(cache, set()))


def _tensors(held: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(held) in seen:
        return
    seen.add(id(held))
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, Mapping | list | tuple):
        for part in held.values() if isinstance(held, Mapping) else held:
            yield from _tensors(part, seen)
    elif hasattr(held, "__dict__"):
        yield from _tensors(vars(held), seen)


# ---- the engine ----


class TransformersEngine(InProcessEngine[TransformersSequence]):
    """Serves any causal LM that transformers can generate with, as its `generate` does: slow, exact, and the
    same bits whatever else is under way. Raises ConfigError or WeightSyncError when it is made of what cannot
    work.
    """

    def __init__(
        self,
        spec: EngineSpec,
        # The transformers config of `spec.source`.
        model_config: Any,
        # See `build_engine`.
        parameters: Mapping[str, torch.Tensor] | None = None,
        *,
        # Bytes of all caches. None: what all sequences could need, at most a share of the free memory.
        cache_bytes: int | None = None,
    ) -> None:
        check_sizes(spec)
        dtype, device = as_torch(spec.dtype, spec.device)
        module = build_module(
            model_config, ATTENTION, dtype, device, trust_remote_code=spec.source.trust_remote_code
        )
        weights = WeightStore(module, parameters, dtype, device, spec.adapters)
        recorder = RouteRecorder(module) if spec.routes else None
        forward = CachedForward(module, device, Tower.of(module, device))
        longest = blocks_of(spec.max_context)
        num_blocks = count_blocks(
            -(-forward.cache_bytes(spec.max_context) // longest),
            spare=longest,  # the latest prompt's
            max_concurrent=spec.max_concurrent,
            max_context=spec.max_context,
            limit=cache_bytes,
            device=device,
        )
        self._max_running = num_blocks // longest
        super().__init__(
            spec,
            weights,
            TurnDecoder(forward, self._max_running, recorder),
            vocab_size=int(module.get_input_embeddings().weight.shape[0]),
            device=device,
            model_config=model_config,
        )

    def describe(self) -> str:
        """Returns one line that says how many sequences take turns."""
        return f"transformers rollout engine: one sequence per pass, {self._max_running} taking turns"

    def capabilities(self) -> Capabilities:
        return Capabilities("transformers", version, sleep=True, reads_back=True)
