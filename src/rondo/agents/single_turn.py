"""The smallest agent loop: one prompt, one generate call, one turn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np

from rondo.errors import RolloutError
from rondo.types import Completion, GenerateRequest, Prompt, SamplingParams, Trajectory, Turn, request_seed

Generate = Callable[[GenerateRequest], Awaitable[Completion]]


async def single_turn(
    prompt: Prompt,
    generate: Generate,
    *,
    sampling: SamplingParams,
    sample_index: int,
    run_seed: int,
    purpose: str = "train",
    deadline_seconds: float | None = None,
) -> Trajectory:
    """One completion of `prompt` as an unscored trajectory.

    Its noise depends on (run_seed, purpose, prompt, sample_index) only. Raises RolloutError when the engine
    worked on other prompt tokens than it was given.
    """
    trajectory_id = f"{purpose}/{prompt.prompt_id}/{sample_index}"
    request = GenerateRequest(
        request_id=trajectory_id,
        token_ids=prompt.token_ids,
        sampling=sampling,
        seed=request_seed(run_seed, purpose, prompt.seq, sample_index),
        affinity=f"{purpose}/{prompt.seq}",
        deadline_seconds=deadline_seconds,
    )
    completion = await generate(request)
    if not np.array_equal(completion.prompt_ids, prompt.token_ids):
        raise RolloutError(
            f"{trajectory_id}: the engine generated from {len(completion.prompt_ids)} prompt tokens that "
            f"are not the "
            f"{len(prompt.token_ids)} it was sent; tokenizer and engine disagree"
        )
    length = len(completion.token_ids)
    # An answer that a clock cut off is no sample of the policy, and one without a token nothing to score.
    late = completion.finish_reason == "deadline"
    return Trajectory(
        prompt=prompt,
        trajectory_id=trajectory_id,
        sample_index=sample_index,
        response_ids=completion.token_ids,
        response_mask=np.ones(length, np.uint8),
        rollout_log_probs=completion.log_probs,
        policy_versions=completion.policy_versions,
        turns=(Turn("policy", 0, length),),
        finish_reason=completion.finish_reason,
        outcome="rollout_error" if late or length == 0 else "scored",
        failure=_failure(completion, deadline_seconds) if late or length == 0 else "",
    )


def _failure(completion: Completion, deadline_seconds: float | None) -> str:
    if completion.finish_reason == "deadline":
        made = len(completion.token_ids)
        return f"{made} tokens after rollout.deadline_seconds = {deadline_seconds}"
    return f"no token was generated ({completion.finish_reason})"
