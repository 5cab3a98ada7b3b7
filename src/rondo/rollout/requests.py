"""What several parts ask about a request."""

from __future__ import annotations

import numpy as np

from rondo.errors import DeadlyRequestError, ReplicaLostError, RolloutError
from rondo.types import Completion, FinishReason, GenerateRequest

LAST_LINES = 10  # of a dead engine's output, in the error of the request that it died of


def so_far(request: GenerateRequest, reason: FinishReason) -> Completion:
    """The completion of a request on which nobody has worked: its prefix, or nothing."""
    return Completion.empty(request, reason).after(request.prefix)


def complete_as_it_is(request: GenerateRequest) -> Completion | None:
    """A prefix may be a whole response: it ends with a stop token, or has max_tokens. None: it is not."""
    prefix = request.prefix
    if prefix is None or len(prefix.token_ids) == 0:
        return None
    if int(prefix.token_ids[-1]) in request.sampling.stop_token_ids:
        return so_far(request, "stop")
    if len(prefix.token_ids) >= request.sampling.max_tokens:
        return so_far(request, "length")
    return None


def deadly_error(request: GenerateRequest, num_deaths: int, error: ReplicaLostError) -> DeadlyRequestError:
    """Of a request that replicas die of; error: how the last one did."""
    made = 0 if request.prefix is None else len(request.prefix.token_ids)
    last = "\n".join(error.last_lines.splitlines()[-LAST_LINES:])
    return DeadlyRequestError(
        f"request {request.request_id!r} ({len(request.token_ids)} prompt tokens, {made} made) is given up: "
        f"{num_deaths} replicas died while they were running it, the last one while it was running nothing "
        f"else: {error}; " + (f"it wrote last:\n{last}" if last else "it wrote nothing")
    )


def check_request(
    request: GenerateRequest, *, max_context: int, vocab_size: int, coldest: float = 0.0
) -> None:
    """Raises RolloutError for what the engine would refuse, cut off or answer wrongly.

    coldest: the engine takes smaller temperatures above 0 for others.
    """
    who = f"request {request.request_id!r}"
    sampling, prompt = request.sampling, np.asarray(request.token_ids)
    if sampling.max_tokens < 1:
        raise RolloutError(f"{who}: max_tokens is {sampling.max_tokens}; it must be at least 1")
    if not (
        sampling.temperature >= 0
        and 0 < sampling.top_p <= 1
        and sampling.top_k >= 0
        and 0 <= sampling.min_p <= 1
    ):
        raise RolloutError(
            f"{who}: {sampling} is out of range (temperature ≥ 0, 0 < top_p ≤ 1, top_k ≥ 0, 0 ≤ min_p ≤ 1)"
        )
    if 0 < sampling.temperature < coldest:
        raise RolloutError(
            f"{who}: this engine cannot sample at temperature {sampling.temperature}, only at 0 (greedy) or "
            f"from {coldest} on"
        )
    if len(prompt) == 0:
        raise RolloutError(f"{who} has an empty prompt; give at least one token")
    if len(prompt) + sampling.max_tokens > max_context:
        raise RolloutError(
            f"{who}: {len(prompt)} prompt tokens and max_tokens {sampling.max_tokens} exceed max_context "
            f"{max_context}; shorten the prompt, lower rollout.max_tokens, or raise max_context"
        )
    prefix = np.empty(0, np.int32) if request.prefix is None else np.asarray(request.prefix.token_ids)
    for tokens in (prompt, prefix):
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab_size):
            raise RolloutError(
                f"{who} has token ids outside the model's vocabulary of {vocab_size}; wrong tokenizer?"
            )
