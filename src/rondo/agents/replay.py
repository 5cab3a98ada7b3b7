"""How a trajectory ended, as a run's journal keeps it; and a trajectory made again as it was.

What a trajectory is depends on time in two ways only: how many of its tokens each policy version made, and
whether a clock ended it (a deadline, a scorer's timeout). With both given, its tokens are generated in
pieces, one per version, each with the tokens so far as its prefix: noise is a function of (seed, token
index), and after a swap of weights the engine computes all keys and values anew, with or without a prefix.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rondo.agents.runner import AgentLoop, Generate, TrajectoryScorer, single_turn
from rondo.types import Completion, GenerateRequest, Prompt, Trajectory

GREEDY = "greedy"
# What time decides, or the death of a process: a scorer's timeout, a request's deadline.
IMPOSED = ("reward_timeout", "rollout_error")

Entry = Mapping[str, Any]


def spans_of(versions: np.ndarray) -> list[list[int]]:
    """[[version, number of tokens], …] of the tokens of a response, in order."""
    starts = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1))
    counts = np.diff([*starts, len(versions)])
    return [[int(versions[at]), int(count)] for at, count in zip(starts, counts, strict=True)]


def entry_of(trajectory: Trajectory) -> dict[str, Any]:
    """spans (`spans_of`), finish reason, outcome, reward (None: none), and a digest of the bits of prompt,
    response and log-probs.
    """
    digest = hashlib.blake2b(digest_size=8)
    for values, kind in (
        (trajectory.prompt.token_ids, np.int32),
        (trajectory.response_ids, np.int32),
        (trajectory.rollout_log_probs, np.float32),
    ):
        digest.update(np.ascontiguousarray(values, kind).tobytes())
    return {
        "spans": spans_of(np.asarray(trajectory.policy_versions)),
        "finish": trajectory.finish_reason,
        "outcome": trajectory.outcome,
        "reward": None if math.isnan(trajectory.reward) else float(np.float32(trajectory.reward)),
        "digest": digest.hexdigest(),
    }


def ended_column(trajectories: Sequence[Trajectory], greedy: Sequence[Trajectory] = ()) -> list[str]:
    """The column ENDED: an entry per row; the first also has that of the greedy answer, if there is one."""
    entries = [entry_of(trajectory) for trajectory in trajectories]
    for answer in greedy:
        entries[0][GREEDY] = entry_of(answer)
    return [json.dumps(entry) for entry in entries]


def ended_of(column: Sequence[str]) -> dict[str, Any]:
    """The column as the part of a journal's line: trajectories, and greedy where there is one."""
    entries = [json.loads(text) for text in column]
    greedy = entries[0].pop(GREEDY, None)
    return {"trajectories": entries} | ({} if greedy is None else {GREEDY: greedy})


def entries_of(ended: Mapping[str, Any]) -> list[Entry]:
    """Of the samples, and of the greedy answer after them."""
    return [*ended["trajectories"], *([ended[GREEDY]] if GREEDY in ended else [])]


def versions_of(entries: Sequence[Entry]) -> list[int]:
    """Those that made a token of one of them, rising."""
    return sorted({version for entry in entries for version, _ in entry["spans"]})


def length_at(entry: Entry, version: int) -> int:
    """Tokens made under `version` and those before it."""
    return sum(count for made_by, count in entry["spans"] if made_by <= version)


def pieces(lengths: Sequence[int], so_far: Sequence[Completion | None]) -> AgentLoop:
    """An agent that generates the response of sample i up to lengths[i] tokens, going on after so_far[i];
    without a deadline.
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
    """An agent whose responses are there already. Those that failed in the journal end as they did there."""

    async def run(prompt: Prompt, generate: Generate, *, sample_index: int, **options: Any) -> Trajectory:
        completion, entry = completions[sample_index], entries[sample_index]
        if entry["outcome"] == "rollout_error":
            completion = dataclasses.replace(completion, finish_reason=entry["finish"])

        async def generate_whole(request: GenerateRequest) -> Completion:
            return completion

        return await single_turn(prompt, generate_whole, sample_index=sample_index, **options)

    return run


class ReplayedScores:
    """A scorer that is not asked where time decided: those trajectories have the outcome of the journal.
    entries: by sample index.
    """

    def __init__(self, scores: TrajectoryScorer, entries: Sequence[Entry]) -> None:
        self._scores, self._entries, self.names = scores, entries, scores.names

    async def score(self, trajectory: Trajectory) -> Trajectory:
        outcome = self._entries[trajectory.sample_index]["outcome"]
        if outcome not in IMPOSED:
            return await self._scores.score(trajectory)
        why = "in the run that is replayed"
        return dataclasses.replace(trajectory, outcome=outcome, reward=math.nan, scores={}, failure=why)

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        return await self._scores.score_group(trajectories)
