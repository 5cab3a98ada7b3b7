"""A generate call on its way: what an engine has made for it, and the caller who waits on an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rondo.rollout.protocol import OnTokens
from rondo.types import Completion, FinishReason, GenerateRequest


@dataclass(eq=False)
class Pending:
    """One call; to be made on the caller's event loop.

    key: the engine's own name of it. deadline: on the clock of time.monotonic. prompt_ids: the engine's own,
    once it has said them. The tokens are those made here, without the request's prefix, and belong to one
    thread; `reported` of them have been handed to on_tokens.
    """

    request: GenerateRequest
    on_tokens: OnTokens | None = None
    key: str = ""
    loop: asyncio.AbstractEventLoop = field(init=False, default_factory=asyncio.get_running_loop)
    future: asyncio.Future[Completion] = field(init=False)
    deadline: float | None = field(init=False, default=None)
    prompt_ids: np.ndarray = field(init=False)
    token_ids: list[int] = field(init=False, default_factory=list)
    log_probs: list[float] = field(init=False, default_factory=list)
    versions: list[int] = field(init=False, default_factory=list)
    reported: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.future = self.loop.create_future()
        self.prompt_ids = np.array(self.request.token_ids, np.int32)
        if self.request.deadline_seconds is not None:
            self.deadline = time.monotonic() + self.request.deadline_seconds

    # ---- where the tokens are made ----

    def append(self, token_ids: Sequence[int], log_probs: Sequence[float], versions: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        self.log_probs.extend(log_probs)
        self.versions.extend(versions)

    def news(self) -> Completion | None:
        """Tokens since the last call, for `report`; None where there are none or nobody wants them."""
        if self.on_tokens is None or self.reported == len(self.token_ids):
            return None
        start, self.reported = self.reported, len(self.token_ids)
        return self._made("length", start)

    def completion(self, reason: FinishReason) -> Completion:
        """The whole response, prefix first."""
        return self._made(reason).after(self.request.prefix)

    def _made(self, reason: FinishReason, start: int = 0) -> Completion:
        return Completion(
            self.request.request_id,
            self.prompt_ids,
            np.array(self.token_ids[start:], np.int32),
            np.array(self.log_probs[start:], np.float32),
            np.array(self.versions[start:], np.int32),
            reason,
        )

    # ---- on the caller's event loop ----

    def report(self, part: Completion) -> None:
        """What on_tokens raises is the error of the generate call."""
        if self.on_tokens is None or self.future.done():
            return
        try:
            self.on_tokens(part)
        except Exception as error:  # the caller's own function: its error is the caller's
            self.future.set_exception(error)

    def settle(self, result: Completion | BaseException) -> None:
        """The end; of a call that has ended already, or whose task was cancelled, nothing."""
        if self.future.done():
            return
        if isinstance(result, BaseException):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


# New tokens of a call, or None; and its end as its `settle` takes it, or None while it goes on.
News = tuple[Pending, Completion | None, Any]


def deliver(news: Iterable[News]) -> None:
    """From any thread: report and settle on the callers' event loops, in order, one callback per loop. A loop
    that is closed is no error: nobody waits.
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
