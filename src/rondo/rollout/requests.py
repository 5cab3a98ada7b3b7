"""A generate call in an engine: whether it can be served, what has been made for it, the stop strings that
end it, and the caller who waits for it on an event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from rondo.chat import StopMatcher
from rondo.core.errors import RefusedRequestError, RolloutError
from rondo.core.types import Completion, FinishReason, GenerateRequest, longer_routes
from rondo.models.loading import load_tokenizer
from rondo.models.source import TokenizerSource
from rondo.rollout.adapters import Served
from rondo.rollout.images import ReadImages, RequestImages
from rondo.rollout.protocol import OnTokens


def so_far(request: GenerateRequest, reason: FinishReason) -> Completion:
    """Returns the completion of a request on which no engine has worked: its prefix, or nothing."""
    return Completion.empty(request, reason).after(request.prefix)


def complete_as_it_is(request: GenerateRequest, matcher: StopMatcher | None = None) -> Completion | None:
    """Returns the completion of a request whose prefix is a whole response: it ends with a stop token, has a
    stop string, or max_tokens. None: it is not, or has stop strings and there is no matcher of them that
    could tell how it ended. The matcher gets the prefix.
    """
    prefix = request.prefix
    if prefix is None or len(prefix.token_ids) == 0:
        return None
    has_stop = matcher is not None and matcher.feed(prefix.token_ids)
    if has_stop or int(prefix.token_ids[-1]) in request.sampling.stop_token_ids:
        return so_far(request, "stop")
    known = matcher is not None or not request.sampling.stop
    if known and len(prefix.token_ids) >= request.sampling.max_tokens:
        return so_far(request, "length")
    return None


def check_ready(
    request: GenerateRequest, *, closed: bool, asleep: bool, version: int, in_flight: Container[str]
) -> None:
    """Raises RolloutError where an engine can serve no request now, or not this one a second time.

    version: of its weights; -1: it has none. in_flight: ids of the requests that it works on.
    """
    who = f"request {request.request_id!r}"
    if closed:
        raise RolloutError(f"{who}: the rollout engine is closed")
    if asleep:
        raise RolloutError(f"{who}: the rollout engine is asleep; call wake() first")
    if version < 0:
        raise RolloutError(
            f"{who}: the rollout engine has no weights yet; send them with begin, receive, commit"
        )
    if request.request_id in in_flight:
        raise RolloutError(f"{who} is in flight already; request ids must be unique")


def check_request(
    request: GenerateRequest, *, max_context: int, vocab_size: int, coldest: float = 0.0, blind: str = ""
) -> None:
    """Raises RefusedRequestError for what the engine would refuse, cut off or answer wrongly.

    coldest: the engine takes smaller temperatures above 0 for others. blind: why it is given no images; "":
    it is.
    """
    who = f"request {request.request_id!r}"
    if request.images and blind:
        raise RefusedRequestError(f"{who} has {len(request.images)} images: {blind} (docs/images.md)")
    sampling, prompt = request.sampling, np.asarray(request.token_ids)
    if sampling.max_tokens < 1:
        raise RefusedRequestError(f"{who}: max_tokens is {sampling.max_tokens}; it must be at least 1")
    if not (
        sampling.temperature >= 0
        and 0 < sampling.top_p <= 1
        and sampling.top_k >= 0
        and 0 <= sampling.min_p <= 1
    ):
        raise RefusedRequestError(
            f"{who}: {sampling} is out of range (temperature ≥ 0, 0 < top_p ≤ 1, top_k ≥ 0, 0 ≤ min_p ≤ 1)"
        )
    if 0 < sampling.temperature < coldest:
        raise RefusedRequestError(
            f"{who}: this engine cannot sample at temperature {sampling.temperature}, only at 0 (greedy) or "
            f"from {coldest} on"
        )
    if len(prompt) == 0:
        raise RefusedRequestError(f"{who} has an empty prompt; give at least one token")
    if len(prompt) + sampling.max_tokens > max_context:
        raise RefusedRequestError(
            f"{who}: {len(prompt)} prompt tokens and max_tokens {sampling.max_tokens} exceed max_context "
            f"{max_context}; shorten the prompt, lower rollout.max_tokens, or raise max_context"
        )
    prefix = np.empty(0, np.int32) if request.prefix is None else np.asarray(request.prefix.token_ids)
    for tokens in (prompt, prefix):
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab_size):
            raise RefusedRequestError(
                f"{who} has token ids outside the model's vocabulary of {vocab_size}; wrong tokenizer?"
            )


@dataclass(eq=False)
class Pending:
    """One call; to be made on the caller's event loop."""

    request: GenerateRequest
    """What is to be generated."""
    on_tokens: OnTokens | None = None
    """Called with new tokens while they are made."""
    key: str = ""
    """The engine's own name of it."""
    matcher: StopMatcher | None = None
    """Finds its stop strings in all its tokens, each of which it gets once; None: it has none."""
    adapters: Served | None = None
    """What the engine makes it with, where it serves several versions of adapters."""
    loop: asyncio.AbstractEventLoop = field(init=False, default_factory=asyncio.get_running_loop)
    """The caller's event loop."""
    future: asyncio.Future[Completion] = field(init=False)
    """Resolved with the answer, on the caller's loop."""
    deadline: float | None = field(init=False, default=None)
    """When it must have ended, on the clock of time.monotonic."""
    prompt_ids: np.ndarray = field(init=False)
    """The prompt as the engine reads it, once the engine has said so."""
    token_ids: list[int] = field(init=False, default_factory=list)
    """The tokens made here, without the request's prefix; they belong to one thread."""
    log_probs: list[float] = field(init=False, default_factory=list)
    """The log-prob of each of `token_ids`."""
    versions: list[int] = field(init=False, default_factory=list)
    """The policy version of each of `token_ids`."""
    shown: ReadImages | None = field(init=False, default=None)
    """The images of its prompt, once they are read; None: it has none."""
    routes: np.ndarray | None = field(init=False, default=None)
    """Where a mixture's tokens went, of prompt and response, as far as that is kept: [n, W]."""
    reported: int = field(init=False, default=0)
    """How many of `token_ids` have been handed to on_tokens."""

    def __post_init__(self) -> None:
        self.future = self.loop.create_future()
        self.prompt_ids = np.array(self.request.token_ids, np.int32)
        if self.request.prefix is not None:
            self.routes = self.request.prefix.routes
        if self.request.deadline_seconds is not None:
            self.deadline = time.monotonic() + self.request.deadline_seconds

    # ---- where the tokens are made ----

    @property
    def num_response(self) -> int:
        """Returns how many response tokens it has, the request's prefix included."""
        prefix = self.request.prefix
        return len(self.token_ids) + (0 if prefix is None else len(prefix.token_ids))

    @property
    def num_tokens(self) -> int:
        """Counts the tokens of the prompt and of the response so far."""
        return len(self.prompt_ids) + self.num_response

    @property
    def tokens(self) -> np.ndarray:
        """Returns prompt and response so far, int64 [num_tokens]."""
        prefix = () if self.request.prefix is None else self.request.prefix.token_ids
        parts = (self.prompt_ids, prefix, self.token_ids)
        return np.concatenate([np.asarray(part, np.int64) for part in parts])

    async def read_images(self, images: RequestImages | None) -> bool:
        """Reads those of its prompt, if it has some. Returns whether it has ended meanwhile. Raises as
        `RequestImages.read`.
        """
        if self.request.images:
            assert images is not None
            self.shown = await images.read(self.request)
        return self.future.done()

    @property
    def waits_for_images(self) -> bool:
        """Says whether its images are still being read: what makes tokens has not got it."""
        return bool(self.request.images) and self.shown is None

    def append(self, token_ids: Sequence[int], log_probs: Sequence[float], versions: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        self.log_probs.extend(log_probs)
        self.versions.extend(versions)

    def append_to_stop(
        self, token_ids: Sequence[int], log_probs: Sequence[float], versions: Sequence[int]
    ) -> bool:
        """Adds tokens up to the one that brings a stop string. Returns whether there is one; tokens behind it
        are dropped.
        """
        length = None if self.matcher is None else self.matcher.length_to_stop(token_ids)
        self.append(token_ids[:length], log_probs[:length], versions[:length])
        return length is not None

    def see_routes(self, routes: np.ndarray, start: int = 0) -> None:
        """Keeps the routes [n, W] of its tokens from `start` on, behind those that it has."""
        self.routes = longer_routes(self.routes, routes, start)

    def news(self) -> Completion | None:
        """Returns the tokens since the last call, for `report`; None where there are none or nobody wants
        them.
        """
        if self.on_tokens is None or self.reported == len(self.token_ids):
            return None
        start = self.reported
        self.reported = len(self.token_ids)
        return self._made("length", start)

    def completion(self, reason: FinishReason) -> Completion:
        """Returns the whole response, prefix first."""
        made = replace(self._made(reason), routes=self.routes)
        return made if self.request.prefix is None else made.after(self.request.prefix)

    def _made(self, reason: FinishReason, start: int = 0) -> Completion:
        return Completion(
            self.request.request_id,
            self.prompt_ids,
            np.array(self.token_ids[start:], np.int32),
            np.array(self.log_probs[start:], np.float32),
            np.array(self.versions[start:], np.int32),
            reason,
            images=self.request.images,
        )

    # ---- on the caller's event loop ----

    def report(self, part: Completion) -> None:
        """Hands over new tokens. What on_tokens raises is the error of the generate call."""
        if self.on_tokens is None or self.future.done():
            return
        try:
            self.on_tokens(part)
        except Exception as error:  # the caller's own function: its error is the caller's
            self.future.set_exception(error)

    def settle(self, result: Completion | BaseException) -> None:
        """Ends the call, unless it has ended already, or its task was cancelled."""
        if self.future.done():
            return
        if isinstance(result, BaseException):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


# New tokens of a call, or None; and its end as its `settle` takes it, or None while it goes on.
News = tuple[Pending, Completion | None, Any]


def deliver(news: Iterable[News]) -> None:
    """Reports and settles, from any thread, on the callers' event loops, in order, with one callback per
    loop. A loop that is closed is no error: nobody waits.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[News]] = {}
    for one in news:
        by_loop.setdefault(one[0].loop, []).append(one)
    for loop, mine in by_loop.items():
        try:
            loop.call_soon_threadsafe(_hand_over, mine)
        except RuntimeError:
            continue


def _hand_over(news: list[News]) -> None:
    for pending, part, result in news:
        if part is not None:
            pending.report(part)
        if result is not None:
            pending.settle(result)


class StopText:
    """Finds stop strings for one engine. source: of its tokenizer; None: no request can have stop strings."""

    def __init__(self, source: TokenizerSource | None) -> None:
        self._source = source

    @cached_property
    def _tokenizer(self) -> Any:
        """Returns a tokenizer of the engine's own, loaded when a request first needs it: other threads use
        the host's.
        """
        assert self._source is not None
        return load_tokenizer(self._source)

    def matcher(self, request: GenerateRequest) -> StopMatcher | None:
        """Returns what finds the request's stop strings behind its prefix; None: it has no stop strings.
        Raises RefusedRequestError.
        """
        stops = request.sampling.stop
        if not stops:
            return None
        who = f"request {request.request_id!r}"
        if self._source is None:
            raise RefusedRequestError(
                f"{who} has stop strings, and this engine no tokenizer to find them with; make it with "
                "`tokenizer`, or use stop_token_ids"
            )
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise RefusedRequestError(f"{who} has stop strings {stops!r}; each must be text, and not empty")
        return StopMatcher(self._tokenizer, stops)
