"""A trajectory made again as it was.

What a trajectory is depends on time in two ways only: how many of its tokens each policy version made, and
whether a clock ended it (a deadline, a scorer's timeout). With both given (`ended`), its tokens are generated
in pieces, one per version, each with the tokens so far as its prefix: noise is a function of (seed, token
index), and after a swap of weights the engine computes all keys and values anew, with or without a prefix.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from rondo.agents.ended import Entry
from rondo.agents.runner import AgentLoop, Generate, TrajectoryScorer, single_turn
from rondo.batch import Batch
from rondo.columns import declared
from rondo.types import Completion, GenerateRequest, Prompt, Trajectory

# What time decides, or the death of a process: a scorer's timeout, a request's deadline.
IMPOSED = ("reward_timeout", "rollout_error")

# The columns of responses under way; those of PIECE_INDEX stay with the controller.
PIECE_INDEX = declared("response_length", "finish_reason")
PIECE_TOKENS = declared("prompt_ids", "response_ids", "rollout_log_probs", "policy_versions")
PIECE = (*PIECE_INDEX, *PIECE_TOKENS)


def pieces(lengths: Sequence[int], so_far: Sequence[Completion | None]) -> AgentLoop:
    """Returns an agent that generates the response of sample i up to lengths[i] tokens, going on after
    so_far[i]; without a deadline.
    """

    async def run(prompt: Prompt, generate: Generate, *, sample_index: int, **options: Any) -> Trajectory:
        length, before = lengths[sample_index], so_far[sample_index]

        async def generate_piece(request: GenerateRequest) -> Completion:
            done = 0 if before is None else len(before.token_ids)
            if done >= length:
                return Completion.empty(request, "length") if before is None else before
            sampling = dataclasses.replace(request.sampling, max_tokens=length)
            prefix = before if done else None
            return await generate(
                dataclasses.replace(request, sampling=sampling, prefix=prefix, deadline_seconds=None)
            )

        return await single_turn(prompt, generate_piece, sample_index=sample_index, **options)

    return run


def whole(completions: Sequence[Completion], entries: Sequence[Entry]) -> AgentLoop:
    """Returns an agent whose responses are there already. Those that failed in the journal end as they did
    there.
    """

    async def run(prompt: Prompt, generate: Generate, *, sample_index: int, **options: Any) -> Trajectory:
        completion, entry = completions[sample_index], entries[sample_index]
        if entry["outcome"] == "rollout_error":
            completion = dataclasses.replace(completion, finish_reason=entry["finish"])

        async def generate_whole(request: GenerateRequest) -> Completion:
            return completion

        return await single_turn(prompt, generate_whole, sample_index=sample_index, **options)

    return run


def completions_of(rows: Batch) -> list[Completion]:
    """Returns the completions that rows of PIECE were made of."""
    prompts, responses, log_probs, versions = (rows.rows(name) for name in PIECE_TOKENS)
    reasons = rows.scalars("finish_reason")
    return [
        Completion(f"row {i}", prompts[i], responses[i], log_probs[i], versions[i], reasons[i])
        for i in range(len(rows))
    ]


class ReplayedScores:
    """A scorer that is not asked where time decided: those trajectories have the outcome of the journal.
    entries: by sample index.
    """

    def __init__(self, scores: TrajectoryScorer, entries: Sequence[Entry]) -> None:
        self._scores = scores
        self._entries = entries
        self.names = scores.names

    async def score(self, trajectory: Trajectory) -> Trajectory:
        outcome = self._entries[trajectory.sample_index]["outcome"]
        if outcome not in IMPOSED:
            return await self._scores.score(trajectory)
        why = "in the run that is replayed"
        return dataclasses.replace(trajectory, outcome=outcome, reward=math.nan, scores={}, failure=why)

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        return await self._scores.score_group(trajectories)
