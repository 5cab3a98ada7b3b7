"""A request on its way through vLLM, and where its answer goes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rondo.rollout.protocol import OnTokens
from rondo.types import Completion, FinishReason, GenerateRequest

_NO_TOKENS = np.empty(0, np.int32)


@dataclass
class Pending:
    """One `generate` call. key: the engine's own id of it. deadline: on the clock of time.monotonic.

    The arrays are what was made here: without the request's prefix. reported: how many the caller has had.
    """

    key: str
    request: GenerateRequest
    future: asyncio.Future[Completion]
    loop: asyncio.AbstractEventLoop
    deadline: float | None
    on_tokens: OnTokens | None
    prompt_ids: np.ndarray
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reported: int = 0

    def append(self, token_ids: Sequence[int], log_probs: Sequence[float], version: int) -> None:
        self.token_ids.extend(token_ids)
        self.log_probs.extend(log_probs)
        self.versions.extend([version] * len(token_ids))

    def completion(self, reason: FinishReason) -> Completion:
        """The whole response, prefix first."""
        new, prefix = self._since(0, self.prompt_ids, reason), self.request.prefix
        if prefix is None:
            return new
        return dataclasses.replace(
            new,
            token_ids=np.concatenate([np.asarray(prefix.token_ids, np.int32), new.token_ids]),
            log_probs=np.concatenate([np.asarray(prefix.log_probs, np.float32), new.log_probs]),
            policy_versions=np.concatenate(
                [np.asarray(prefix.policy_versions, np.int32), new.policy_versions]
            ),
        )

    def news(self) -> Completion | None:
        """Tokens since the last call, for `on_tokens`; None where there are none or nobody wants them."""
        if self.on_tokens is None or self.reported == len(self.token_ids):
            return None
        new = self._since(self.reported, _NO_TOKENS, "length")
        self.reported = len(self.token_ids)
        return new

    def _since(self, start: int, prompt_ids: np.ndarray, reason: FinishReason) -> Completion:
        return Completion(
            self.request.request_id,
            prompt_ids,
            np.array(self.token_ids[start:], np.int32),
            np.array(self.log_probs[start:], np.float32),
            np.array(self.versions[start:], np.int32),
            finish_reason=reason,
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
        if self.future.done():
            return
        if isinstance(result, BaseException):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)
