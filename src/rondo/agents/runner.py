"""The episode runner: all trajectories of one prompt group, scored as they finish, as rows of one Batch."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import numpy as np

from rondo.agents.single_turn import Generate, single_turn
from rondo.errors import DeadlyRequestError
from rondo.types import Prompt, SamplingParams, Trajectory


class TrajectoryScorer(Protocol):
    """What the runner needs of `rewards.Scorer`."""

    names: tuple[str, ...]

    async def score(self, trajectory: Trajectory) -> Trajectory: ...

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]: ...


Decode = Callable[[np.ndarray], str]
AgentLoop = Callable[..., Awaitable[Trajectory]]


class EpisodeRunner:
    """Runs agent loops next to an engine. generate: the engine's. decode: response ids to text for the
    scorers.
    """

    def __init__(
        self,
        generate: Generate,
        scorer: TrajectoryScorer,
        decode: Decode,
        *,
        run_seed: int,
        agent: AgentLoop = single_turn,
    ) -> None:
        self._generate, self._scorer, self._decode = generate, scorer, decode
        self._run_seed, self._agent = run_seed, agent

    async def run_group(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        n: int,
        *,
        purpose: str = "train",
        deadline_seconds: float | None = None,
    ) -> list[Trajectory]:
        """n scored trajectories of one prompt, in sample order. The first error cancels the others and is
        raised.
        """
        return await self._run(prompt, [sampling] * n, n, purpose, deadline_seconds)

    async def run_group_with_baseline(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        n: int,
        *,
        purpose: str = "train",
        deadline_seconds: float | None = None,
    ) -> tuple[list[Trajectory], Trajectory]:
        """As `run_group`, and the scored greedy answer to the same prompt (ReMax, 2310.10505).

        It has the next sample index, so that the others' noise is what it is without it. Group scorers do
        not see it.
        """
        greedy = dataclasses.replace(sampling, temperature=0.0)
        trajectories = await self._run(prompt, [*[sampling] * n, greedy], n, purpose, deadline_seconds)
        return trajectories[:n], trajectories[n]

    async def _run(
        self,
        prompt: Prompt,
        samplings: Sequence[SamplingParams],
        grouped: int,
        purpose: str,
        deadline_seconds: float | None,
    ) -> list[Trajectory]:
        """A trajectory for each of `samplings`; the first `grouped` of them are the group."""
        tasks = [
            asyncio.create_task(self._trajectory(prompt, sampling, i, purpose, deadline_seconds))
            for i, sampling in enumerate(samplings)
        ]
        try:
            trajectories = await asyncio.gather(*tasks)
            return await self._scorer.score_group(trajectories[:grouped]) + trajectories[grouped:]
        finally:
            await _cancel(tasks)

    async def _trajectory(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        sample_index: int,
        purpose: str,
        deadline_seconds: float | None,
    ) -> Trajectory:
        try:
            trajectory = await self._agent(
                prompt,
                self._generate,
                sampling=sampling,
                sample_index=sample_index,
                run_seed=self._run_seed,
                purpose=purpose,
                deadline_seconds=deadline_seconds,
            )
        except DeadlyRequestError as error:  # of all that an engine may raise, this is about one request only
            trajectory = _failed(prompt, sample_index, purpose, str(error))
        if not trajectory.text:
            trajectory = dataclasses.replace(trajectory, text=self._decode(trajectory.response_ids))
        return await self._scorer.score(trajectory)


def _failed(prompt: Prompt, sample_index: int, purpose: str, failure: str) -> Trajectory:
    """Without a token: what there is of it is in no row."""
    nothing = np.empty(0, np.int32)
    return Trajectory(
        prompt=prompt,
        trajectory_id=f"{purpose}/{prompt.prompt_id}/{sample_index}",
        sample_index=sample_index,
        response_ids=nothing,
        response_mask=np.empty(0, np.uint8),
        rollout_log_probs=np.empty(0, np.float32),
        policy_versions=nothing,
        turns=(),
        finish_reason="cancelled",
        outcome="rollout_error",
        failure=failure,
    )


async def _cancel(tasks: Sequence[asyncio.Task[Trajectory]]) -> None:
    pending = [task for task in tasks if not task.done()]
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.gather(*pending, return_exceptions=True)
