"""The episode runner (all trajectories of one prompt group, scored as they finish), and the smallest agent
loop: one prompt, one generate call, one turn.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from rondo.agents.record import rows_of
from rondo.core.errors import EpisodeLostError, FailedRequestError, RolloutError
from rondo.core.types import (
    Completion,
    GenerateRequest,
    PolicyCall,
    Prompt,
    Row,
    SamplingParams,
    Trajectory,
    request_seed,
)
from rondo.system.border import all_of

Generate = Callable[[GenerateRequest], Awaitable[Completion]]
Decode = Callable[[np.ndarray], str]
AgentLoop = Callable[..., Awaitable[Trajectory]]
_log = logging.getLogger(__name__)


class TrajectoryScorer(Protocol):
    """What the runner needs of `rewards.Scorer`."""

    names: tuple[str, ...]

    async def score(self, trajectory: Trajectory) -> Trajectory: ...

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]: ...


async def single_turn(
    prompt: Prompt,
    generate: Generate,
    *,
    sampling: SamplingParams,
    sample_index: int,
    run_seed: int,
    purpose: str = "train",
    deadline_seconds: float | None = None,
    prefix: Completion | None = None,
) -> Trajectory:
    """Generates one completion of `prompt`: an unscored trajectory. prefix: how the response begins.

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
        prefix=prefix,
        images=prompt.images,
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
    failure = ""
    if completion.finish_reason == "deadline":
        failure = f"{length} tokens after rollout.deadline_seconds = {deadline_seconds}"
    elif length == 0:
        failure = f"no token was generated ({completion.finish_reason})"
    rows = rows_of([PolicyCall(completion)]) or [
        Row.empty(prompt.token_ids, completion.finish_reason, prompt.images)
    ]
    return Trajectory(
        prompt=prompt,
        trajectory_id=trajectory_id,
        sample_index=sample_index,
        rows=tuple(rows),
        outcome="rollout_error" if failure else "scored",
        failure=failure,
    )


def giving(given: Sequence[Completion], first: int) -> AgentLoop:
    """Returns a loop that generates nothing: its trajectories are these answers, that of sample `first` the
    first.
    """

    async def give(prompt: Prompt, generate: Generate, *, sample_index: int, **_: object) -> Trajectory:
        rows = rows_of([PolicyCall(given[sample_index - first])])
        return Trajectory(prompt, f"given/{prompt.prompt_id}/{sample_index}", sample_index, tuple(rows))

    return give


def going_on(prefixes: Sequence[Completion | None], first: int) -> AgentLoop:
    """Returns a loop whose responses begin with these, that of sample `first` with the first."""

    async def go_on(prompt: Prompt, generate: Generate, *, sample_index: int, **options: Any) -> Trajectory:
        prefix = prefixes[sample_index - first]
        return await single_turn(prompt, generate, sample_index=sample_index, prefix=prefix, **options)

    return go_on


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
        self._generate = generate
        self._scorer = scorer
        self._decode = decode
        self._run_seed = run_seed
        self._agent = agent

    async def run_group(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        n: int,
        *,
        purpose: str = "train",
        deadline_seconds: float | None = None,
        greedy_baseline: bool = False,
        first: int = 0,
    ) -> list[Trajectory]:
        """Returns n scored trajectories of one prompt, in sample order; with greedy_baseline, the scored
        greedy answer to the same prompt after them (ReMax, 2310.10505). The first error cancels the others
        and is raised. first: the sample index of the first.

        The greedy answer has the next sample index, so that the others' noise is what it is without it. Group
        scorers do not see it.
        """
        samplings = [sampling] * n
        if greedy_baseline:
            samplings.append(dataclasses.replace(sampling, temperature=0.0))
        trajectories = await all_of(
            *(
                self._trajectory(prompt, each, i, purpose, deadline_seconds)
                for i, each in enumerate(samplings, first)
            )
        )
        return await self._scorer.score_group(trajectories[:n]) + trajectories[n:]

    async def run_groups(
        self, prompts: Iterable[Prompt], sampling: SamplingParams, n: int, purpose: str
    ) -> list[Trajectory]:
        """Returns the trajectories of several groups, prompt by prompt. All run at once, and the first error
        cancels the others.
        """
        groups = await all_of(*(self.run_group(prompt, sampling, n, purpose=purpose) for prompt in prompts))
        return [trajectory for group in groups for trajectory in group]

    async def _trajectory(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        sample_index: int,
        purpose: str,
        deadline_seconds: float | None,
    ) -> Trajectory:
        trajectory = None
        while trajectory is None:
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
            except EpisodeLostError as error:  # with the same seeds, and so to the same end
                _log.info("%s/%s/%d: begun again: %s", purpose, prompt.prompt_id, sample_index, error)
            except FailedRequestError as error:  # of what an engine may raise, this is about one request only
                trajectory = _failed(prompt, sample_index, purpose, str(error))
        if not trajectory.text:
            trajectory = trajectory.replaced(text=self._decode(trajectory.response_ids))
        return await self._scorer.score(trajectory)


def _failed(prompt: Prompt, sample_index: int, purpose: str, failure: str) -> Trajectory:
    """Returns a trajectory without a token: what there is of it is in no row."""
    return Trajectory(
        prompt=prompt,
        trajectory_id=f"{purpose}/{prompt.prompt_id}/{sample_index}",
        sample_index=sample_index,
        rows=(Row.empty(prompt.token_ids, images=prompt.images),),
        outcome="rollout_error",
        failure=failure,
    )
