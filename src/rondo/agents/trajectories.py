"""A session's recorded calls as one trajectory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rondo.serving import ModelCall, Session
from rondo.types import FinishReason, Prompt, Trajectory, Turn


def trajectory_of(
    session: Session, prompt: Prompt, trajectory_id: str, sample_index: int, failure: str = ""
) -> Trajectory:
    """Returns the unscored trajectory of a session. The first call's prompt is the prompt; what the model
    made is the response (mask 1), with the tokens that the agent inserted between two answers (mask 0,
    log-prob 0, version -1).

    failure: why the agent failed; then, and where the calls are no single context, the outcome is
    "rollout_error". One row carries one context: an agent that rewrites its conversation, calls twice with
    the same one or asks for several choices makes several. A failed trajectory keeps the context of the last
    call.
    """
    calls = session.calls
    extended = {call.parent for call in calls}
    ends = [i for i in range(len(calls)) if i not in extended]
    failure = failure or _not_one_context(session, ends)
    chain = _chain(calls, ends[-1]) if ends else []
    response = _Response()
    for before, call in zip([None, *chain], chain, strict=False):
        if before is not None:
            response.insert(call.inserted, call.completion.prompt_ids[len(before.token_ids) :])
        response.add(call)
    if session.exhausted:
        response.finish_reason = "length"
    if chain:
        prompt = replace(prompt, token_ids=chain[0].completion.prompt_ids)
    if not failure and not response.num_made:
        failure = f"no token was generated ({response.finish_reason})"
    return Trajectory(
        prompt=prompt,
        trajectory_id=trajectory_id,
        sample_index=sample_index,
        response_ids=_joined(response.ids, np.int32),
        response_mask=_joined(response.mask, np.uint8),
        rollout_log_probs=_joined(response.log_probs, np.float32),
        policy_versions=_joined(response.versions, np.int32),
        turns=tuple(response.turns),
        finish_reason=response.finish_reason,
        outcome="rollout_error" if failure else "scored",
        failure=failure,
    )


def _not_one_context(session: Session, ends: list[int]) -> str:
    if not session.calls:
        return "the agent never called the model (base_url, api_key and model are what it was given)"
    if session.broken_streams:
        return f"the agent stopped reading {session.broken_streams} streamed answers before their end"
    if len(ends) == 1:
        return ""
    roots = sum(call.parent is None for call in session.calls)
    return (
        f"the agent's {len(session.calls)} calls make {len(ends)} contexts ({roots} with a beginning of "
        "their own), and a trajectory is one: each call must send back the messages of the call before, its "
        "answer as it was returned, and new messages behind it, with the same tools and n=1"
    )


def _chain(calls: list[ModelCall], end: int) -> list[ModelCall]:
    """Returns the calls of a context, from its first to `end`."""
    chain = [calls[end]]
    while chain[-1].parent is not None:
        chain.append(calls[chain[-1].parent])
    return chain[::-1]


class _Response:
    """Grows call by call."""

    def __init__(self) -> None:
        self.ids: list[np.ndarray] = []
        self.mask: list[np.ndarray] = []
        self.log_probs: list[np.ndarray] = []
        self.versions: list[np.ndarray] = []
        self.turns: list[Turn] = []
        self.finish_reason: FinishReason = "cancelled"
        self.num_made = self._length = 0

    def insert(self, kind: str, ids: np.ndarray) -> None:
        n = len(ids)
        self._extend(ids, np.zeros(n), np.zeros(n), np.full(n, -1))  # -1: no version of the policy made them
        self._turn(kind, n)

    def add(self, call: ModelCall) -> None:
        made = call.completion
        n = len(made.token_ids)
        self._extend(made.token_ids, np.ones(n), made.log_probs, made.policy_versions)
        self._turn("policy", n)
        self.num_made += n
        self.finish_reason = made.finish_reason

    def _extend(self, *arrays: np.ndarray) -> None:
        columns = (self.ids, self.mask, self.log_probs, self.versions)
        for column, array in zip(columns, arrays, strict=True):
            column.append(array)

    def _turn(self, kind: str, length: int) -> None:
        self.turns.append(Turn(kind, self._length, self._length + length))  # type: ignore[arg-type]
        self._length += length


def _joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([a.astype(dtype) for a in arrays]) if arrays else np.empty(0, dtype)
