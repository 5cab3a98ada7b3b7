"""Rows from calls: what an agent's episode is trained on.

    calls    [a b] → c d     [a b c d · e] → f     [a x] → y     [a b c d e f · g] → h
    rows     prompt a b, response c d e f g h      prompt a x, response y
             mask                 1 1 0 1 0 1                           1

The next call joins the row that its prompt goes on from, token for token; a prompt that goes on from none
(the agent wrote its context anew: a summary, another role, a template that drops reasoning, a second choice)
starts a row of its own. So whatever agent and template: every token that was sampled is trained on once,
after exactly the tokens that the engine had before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from rondo.core.images import ImageRef
from rondo.core.types import Completion, FinishReason, PolicyCall, Row, Turn, longer_routes


def rows_of(calls: Iterable[PolicyCall]) -> list[Row]:
    """Returns the rows of an episode's calls, which come in the order in which they ended; the row with the
    last call comes last. Calls for which nothing was sampled are in none.

    Of several rows that a prompt goes on from, the longest one is meant.
    """
    rows: list[_Growing] = []
    for call in calls:
        if not len(call.completion.token_ids):
            continue
        going_on = [row for row in rows if row.begins(call.completion)]
        row = max(going_on, key=lambda row: len(row.ids), default=None)
        if row is None:
            row = _Growing.of(call)
        else:
            rows.remove(row)
            row.insert(call)
        row.add(call)
        rows.append(row)
    return [row.done() for row in rows]


@dataclass(eq=False)
class _Growing:
    """A row under way."""

    ids: np.ndarray
    """The context so far, prompt and response."""
    prompt_length: int
    mask: list[np.ndarray] = field(default_factory=list)
    log_probs: list[np.ndarray] = field(default_factory=list)
    versions: list[np.ndarray] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    routes: np.ndarray | None = None
    images: tuple[ImageRef, ...] = ()
    finish_reason: FinishReason = "cancelled"

    @classmethod
    def of(cls, call: PolicyCall) -> _Growing:
        prompt_ids = np.asarray(call.completion.prompt_ids, np.int32)
        return cls(prompt_ids, len(prompt_ids), images=call.completion.images)

    def begins(self, made: Completion) -> bool:
        """Says whether the prompt of a call begins with the whole row so far: its tokens, and what they show
        (images of one size have the same tokens).
        """
        length, shown = len(self.ids), [image.sha256 for image in self.images]
        return (
            length <= len(made.prompt_ids)
            and np.array_equal(self.ids, made.prompt_ids[:length])
            and shown == [image.sha256 for image in made.images[: len(shown)]]
        )

    def insert(self, call: PolicyCall) -> None:
        """Adds the tokens that came in between from others than the policy; their version is -1."""
        new = call.completion.prompt_ids[len(self.ids) :]
        n = len(new)
        if n:
            self._extend(new, np.zeros(n), np.zeros(n), np.full(n, -1))
            stop = len(self.ids) - self.prompt_length
            self.turns.append(Turn(call.inserted, stop - n, stop))

    def add(self, call: PolicyCall) -> None:
        made = call.completion
        n = len(made.token_ids)
        self._extend(made.token_ids, np.ones(n), made.log_probs, made.policy_versions)
        stop = len(self.ids) - self.prompt_length
        given = (call.reward, call.anchor, call.flags, call.note, call.states)
        self.turns.append(Turn("policy", stop - n, stop, *given))
        self.finish_reason = made.finish_reason
        self.images = made.images
        if made.routes is not None:  # of the whole context
            self.routes = longer_routes(self.routes, made.routes)

    def _extend(self, ids: np.ndarray, *arrays: np.ndarray) -> None:
        self.ids = np.concatenate([self.ids, ids], dtype=np.int32, casting="unsafe")
        for column, array in zip((self.mask, self.log_probs, self.versions), arrays, strict=True):
            column.append(array)

    def done(self) -> Row:
        return Row(
            prompt_ids=self.ids[: self.prompt_length],
            response_ids=self.ids[self.prompt_length :],
            response_mask=np.concatenate(self.mask).astype(np.uint8),
            rollout_log_probs=np.concatenate(self.log_probs).astype(np.float32),
            policy_versions=np.concatenate(self.versions).astype(np.int32),
            turns=tuple(self.turns),
            finish_reason=self.finish_reason,
            routes=self.routes,
            images=self.images,
        )
