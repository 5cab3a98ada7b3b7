"""Branches of episodes: an agent runs from its beginning and is given the recorded answers back, up to the
call in which a branch leaves its parent; from there on the policy answers.

    parent   prompt ─▶ answer 1 · observation ─▶ answer 2 · observation ─▶ answer 3 · …
    branch   prompt ─▶ (answer 1) · observation ─▶ (beginning of 2), sampled · observation ─▶ sampled · …

So the environment gets to where it was by the same actions. Whether it did, the next prompt says: one that
was not asked in the parent, token for token, ends the call with an error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rondo.agents.ended import prompt_digest
from rondo.agents.runner import AgentLoop, Generate
from rondo.agents.worlds import Retold
from rondo.chat import StopMatcher
from rondo.core.errors import RolloutError
from rondo.core.images import images_in
from rondo.core.types import (
    SCORED,
    Completion,
    FinishReason,
    GenerateRequest,
    Prompt,
    Row,
    Trajectory,
    Turn,
)


@dataclass(frozen=True, eq=False)
class Fork:
    """Where a branch leaves the episode of its parent."""

    rows: Sequence[Row]
    """Of the parent's episode, all of them."""
    ids: Sequence[int]
    """Their row_id."""
    row: int
    """In which of them the branch leaves it."""
    at: int
    """How many tokens of that one's response are kept; the policy sampled the next one."""
    record: str = ""
    """See `Trajectory.record`: an environment that has one is restored, and does not act again."""


@dataclass(frozen=True, eq=False)
class _Known:
    """A call of the policy in the parent's episode."""

    row: int
    turn: Turn
    made: Completion

    def context(self, stop: int) -> np.ndarray:
        """Returns the tokens up to the place `stop` in its row's response."""
        return np.concatenate([self.made.prompt_ids, self.made.token_ids[: stop - self.turn.start]])


class Forks:
    """An agent loop whose episodes are branches: that of sample `first` leaves its parent at the first of
    `forks`. agent: plays them. place: the environment, for errors. tokenizer: looks for stop strings.
    image_token: stands for images; -1: there are none.
    """

    def __init__(
        self,
        agent: AgentLoop,
        forks: Sequence[Fork],
        first: int,
        place: str,
        tokenizer: Any,
        image_token: int = -1,
    ) -> None:
        self._agent = agent
        self._forks = forks
        self._first = first
        self._place = place
        self._tokenizer = tokenizer
        self._image_token = image_token
        self._given: dict[int, dict[_Known, int]] = {}  # by sample: the calls, and up to which place

    async def __call__(
        self, prompt: Prompt, generate: Generate, *, sample_index: int, **options: Any
    ) -> Trajectory:
        """Plays a branch. Raises RolloutError where the parent's episode is not played again as it was."""
        fork = self._forks[sample_index - self._first]
        left = _calls(fork, self._image_token)
        number, leaves = next(
            (number, call)
            for number, call in enumerate(left)
            if call.row == fork.row and call.turn.start <= fork.at < call.turn.stop
        )
        given = self._given[sample_index] = dict[_Known, int]()
        told = Retold(json.loads(fork.record)) if fork.record else None

        def differs(why: str) -> RolloutError:
            return RolloutError(
                f"{prompt.prompt_id}: a branch brings {self._place} to turn {number} of an episode by the "
                f"actions before it, and {why} (turns count from 0). Branches need an environment that does "
                "the same under the same actions, and an agent that asks the same when it is told the same"
            )

        async def answer(request: GenerateRequest, *on_tokens: Any) -> Completion:
            if leaves in given:
                return await generate(request, *on_tokens)
            asked = prompt_digest(request.token_ids, request.images)
            same = (call for call in left if asked == prompt_digest(call.made.prompt_ids, call.made.images))
            known = next(same, None)
            if known is None:
                raise differs(f"turn {len(given)} was asked with another prompt than in that episode")
            left.remove(known)
            made = known.made
            if known is not leaves:
                given[known] = known.turn.stop
                return replace(made, request_id=request.request_id, finish_reason=self._reason(request, made))
            given[known] = fork.at
            if told is not None:
                told.is_over = True
            kept = fork.at - known.turn.start
            routes = None if made.routes is None else made.routes[: len(made.prompt_ids) + kept - 1]
            prefix = replace(made.part(0, kept), routes=routes) if kept else None
            return await generate(replace(request, prefix=prefix), *on_tokens)

        trajectory = await self._agent(prompt, answer, sample_index=sample_index, told=told, **options)
        if trajectory.outcome == SCORED and leaves not in given:
            raise differs("it ended before it was there")
        return trajectory

    def _reason(self, request: GenerateRequest, made: Completion) -> FinishReason:
        """Returns why a recorded answer ended: rows say it of their last call only."""
        sampling = request.sampling
        if int(made.token_ids[-1]) in sampling.stop_token_ids:
            return "stop"
        ended = sampling.stop and StopMatcher(self._tokenizer, sampling.stop).feed(made.token_ids)
        return "stop" if ended else "length"

    def origins(self, trajectories: Sequence[Trajectory], ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns parent_id and fork of each row. ids: the rows' own.

        A row that begins as one of the parent's goes on from that one, behind what was given of it; one that
        began after the fork goes on from the episode's row before it.
        """
        parents, forks = list[int](), list[int]()
        for trajectory in trajectories:
            fork = self._forks[trajectory.sample_index - self._first]
            given = self._given.get(trajectory.sample_index, {})
            stops = {call.row: (call, stop) for call, stop in given.items()}
            before = fork.ids[fork.row]
            for row in trajectory.rows:
                begun = [place for place, one in stops.items() if _begins(row, fork.rows[place], *one)]
                # Of several the longest: what is left of a parent's prompt alone is begun by a row behind it.
                place = max(begun, key=lambda place: stops[place][1], default=None)
                parents.append(before if place is None else fork.ids[place])
                forks.append(0 if place is None else stops.pop(place)[1])
                before = ids[len(forks) - 1]
        return parents, forks


def _calls(fork: Fork, image_token: int) -> list[_Known]:
    """Returns the calls that the parent's rows were made of, row by row."""
    calls = []
    for place, row in enumerate(fork.rows):
        context, length = np.concatenate([row.prompt_ids, row.response_ids]), len(row.prompt_ids)
        for turn in row.turns:
            if turn.kind == "policy":
                cut = slice(turn.start, turn.stop)
                before = context[: length + turn.start]
                made = Completion(
                    "",
                    before,
                    row.response_ids[cut],
                    row.rollout_log_probs[cut],
                    row.policy_versions[cut],
                    "stop",
                    None if row.routes is None else row.routes[: length + turn.stop - 1],
                    images_in(before, row.images, image_token) if row.images else (),
                )
                calls.append(_Known(place, turn, made))
    return calls


def _begins(row: Row, parent: Row, call: _Known, stop: int) -> bool:
    """Says whether a row begins with what was given of one of its parent's: up to the place `stop` in that
    one's response, which is in `call`.
    """
    length = len(parent.prompt_ids)
    both = np.concatenate([row.prompt_ids, row.response_ids[:stop]])
    return len(row.prompt_ids) == length and np.array_equal(both, call.context(stop))
