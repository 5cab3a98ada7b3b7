"""A trajectory made again as it was.

What a trajectory is depends on time in two ways only: how many of its tokens each policy version made, and
whether a clock ended it (a deadline, a timeout of a scorer or a tool). With both given (`ended`), its tokens
are generated in pieces, one per version, each with the tokens so far as its prefix: noise is a function of
(seed, token index), and after a swap of weights the engine computes all keys and values anew, with or without
a prefix.

An agent runs from its beginning for each piece, and is answered with what is there already, up to the calls
that have no token of that version. So it must do the same when it is told the same, and its tools, too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rondo.agents.ended import Entry, calls_of, length_at, prompt_digest
from rondo.agents.record import rows_of
from rondo.agents.runner import AgentLoop, Generate, TrajectoryScorer
from rondo.core.batch import Batch
from rondo.core.columns import PROMPT_ROUTED, ROUTED, declared
from rondo.core.errors import RefusedRequestError
from rondo.core.types import Completion, GenerateRequest, PolicyCall, Prompt, Row, Trajectory

# What time may decide, or the death of a process: a deadline, a timeout of a scorer, tool or environment.
IMPOSED = ("reward_timeout", "rollout_error", "tool_error", "environment_error")

# The columns of responses under way; those of PIECE_INDEX stay with the controller.
PIECE_INDEX = declared("response_length", "finish_reason")
PIECE_TOKENS = declared("prompt_ids", "response_ids", "rollout_log_probs", "policy_versions")
PIECE = (*PIECE_INDEX, *PIECE_TOKENS)

_IDS = np.empty(0, np.int32)
_NOTHING = Completion("", _IDS, _IDS, np.empty(0, np.float32), _IDS, "cancelled")


def pieces(
    agent: AgentLoop, entries: Sequence[Entry], version: int, so_far: Sequence[Sequence[Completion]]
) -> AgentLoop:
    """Returns an agent that does as `agent` did in the journal until every call has its tokens of `version`
    and those before it, without a deadline. so_far: what there is of each call. A row is a call.
    """

    async def run(prompt: Prompt, generate: Generate, *, sample_index: int, **options: Any) -> Trajectory:
        calls = _Calls(entries[sample_index], so_far[sample_index])
        lengths = [length_at(spans, version) for spans in calls.spans]
        made, enough = calls.made, asyncio.Event()

        def done(at: int) -> bool:
            return len(made[at].token_ids) >= lengths[at]

        def all_done() -> bool:
            return all(map(done, range(len(made))))

        async def generate_piece(request: GenerateRequest, on_tokens: Any = None) -> Completion:
            at = calls.place(request)
            if not done(at):
                sampling = dataclasses.replace(request.sampling, max_tokens=lengths[at])
                prefix = made[at] if len(made[at].token_ids) else None
                made[at] = await generate(
                    dataclasses.replace(request, sampling=sampling, prefix=prefix, deadline_seconds=None)
                )
                if not done(at) or all_done():  # it ended too early, or that is all
                    enough.set()
            if lengths[at] < length_at(calls.spans[at], math.inf):
                await asyncio.Event().wait()  # the rest is of later weights
            return made[at]

        if not all_done():
            episode = asyncio.ensure_future(
                agent(prompt, generate_piece, sample_index=sample_index, **options)
            )
            waiting = asyncio.ensure_future(enough.wait())
            try:
                await asyncio.wait({episode, waiting}, return_when=asyncio.FIRST_COMPLETED)
                if episode.done():
                    episode.result()
            finally:
                waiting.cancel()
                episode.cancel()
                await asyncio.gather(episode, return_exceptions=True)
        return Trajectory(
            prompt=prompt,
            trajectory_id=f"train/{prompt.prompt_id}/{sample_index}",
            sample_index=sample_index,
            rows=tuple(
                row
                for one in made
                for row in rows_of([PolicyCall(one)]) or [Row.empty(one.prompt_ids, images=one.images)]
            ),
        )

    return run


def whole(agent: AgentLoop, entries: Sequence[Entry], so_far: Sequence[Sequence[Completion]]) -> AgentLoop:
    """Returns an agent that does as `agent` with answers that are there already. A response without an agent
    that failed in the journal ends as it did there.
    """

    async def run(prompt: Prompt, generate: Generate, *, sample_index: int, **options: Any) -> Trajectory:
        entry = entries[sample_index]
        calls = _Calls(entry, so_far[sample_index])
        if "calls" not in entry and entry["outcome"] == "rollout_error":
            calls.made[0] = dataclasses.replace(calls.made[0], finish_reason=entry["finish"])

        async def generate_whole(request: GenerateRequest, on_tokens: Any = None) -> Completion:
            made = calls.made[calls.place(request)]
            # Of a call that a clock ended before its first token nothing is there, not even what was asked.
            return (
                made
                if len(made.token_ids)
                else dataclasses.replace(made, prompt_ids=request.token_ids, images=request.images)
            )

        return await agent(prompt, generate_whole, sample_index=sample_index, **options)

    return run


class _Calls:
    """The calls of a trajectory that is made again: their spans, and what is there of each."""

    def __init__(self, entry: Entry, made: Sequence[Completion]) -> None:
        names, self.spans = zip(*calls_of(entry), strict=True)
        self.made = list(made) or [_NOTHING] * len(names)
        self._left = list(enumerate(names))

    def place(self, request: GenerateRequest) -> int:
        """Says which call this is: the next with this prompt. Raises RefusedRequestError where it was not
        made there, as when a clock had ended the episode before.
        """
        name = prompt_digest(request.token_ids, request.images)
        for at, known in self._left:
            if known in (name, None):
                self._left.remove((at, known))
                return at
        raise RefusedRequestError(f"{request.request_id}: was not asked in the run that is replayed")


def completions_of(rows: Batch, entries: Sequence[Entry]) -> list[list[Completion]]:
    """Returns the completions that rows of PIECE were made of, call by call of each entry."""
    prompts, responses, log_probs, versions = (rows.rows(name) for name in PIECE_TOKENS)
    reasons = rows.scalars("finish_reason")
    routes: Sequence[np.ndarray | None] = [None] * len(rows)
    if ROUTED in rows.columns:
        both = zip(rows.rows(PROMPT_ROUTED), rows.rows(ROUTED), strict=True)
        routes = [np.concatenate(parts) for parts in both]
    images = rows.images()
    made = (
        Completion(
            f"row {i}",
            prompts[i],
            responses[i],
            log_probs[i],
            versions[i],
            reasons[i],
            routes[i],
            images[i],
        )
        for i in range(len(rows))
    )
    return [list(itertools.islice(made, len(calls_of(entry)))) for entry in entries]


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
        why = self._entries[trajectory.sample_index].get("failure") or "in the run that is replayed"
        return dataclasses.replace(trajectory, outcome=outcome, reward=math.nan, scores={}, failure=why)

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        return await self._scores.score_group(trajectories)
