"""What a policy says of the state that it sees and of the one that it expects, scored against the
environment's own (VAGEN, 2510.16907).

    <observation>what is there</observation> … <prediction>what will be there</prediction> <action>up</action>
                  │ state before the turn's actions              │ state behind them
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from rondo.config.functions import check_options, resolve_function
from rondo.core.errors import ConfigError, RewardError

_WHERE = "rollout.agent.reasoning"
PARTS = ("observation", "prediction")


def cells(said: str, state: Mapping[str, Any]) -> float:
    """Returns the share of the signs of the room in `state["text"]` that were said, each in its line and
    place. Spaces and lines around it do not matter.
    """
    if not isinstance(state.get("text"), str):
        raise ConfigError(
            f"{_WHERE}: by: cells compares with `text` of the environment's state(), which has none; name a "
            "function of yours, path.py:function"
        )
    right = str(state["text"]).split("\n")
    lines = ["".join(line.split()) for line in said.strip().split("\n")]
    hits = sum(
        a == b for line, other in zip(right, lines, strict=False) for a, b in zip(line, other, strict=False)
    )
    return hits / sum(map(len, right))


RULES: Mapping[str, Callable[..., Any]] = {"cells": cells}


class StateReasoning:
    """Scores each turn's `<observation>` against the state before its actions, and its `<prediction>` against
    the one behind them. observation, prediction: what a score of 1 is worth. format: what it is worth to say
    both. by: a rule of RULES, or `path.py:function`: `(said, state) -> float` from 0 to 1, plain or a
    coroutine, which may ask a judge. Raises ConfigError.
    """

    def __init__(
        self,
        *,
        observation: float = 0.0,
        prediction: float = 0.0,
        format: float = 0.0,
        by: str | Callable[..., Any] = "cells",
    ) -> None:
        self._weights = {"observation": observation, "prediction": prediction}
        self._format = format
        if min(observation, prediction, format) < 0 or not math.isfinite(observation + prediction + format):
            raise ConfigError(f"{_WHERE}: observation, prediction and format must be at least 0")
        if not observation + prediction + format:
            raise ConfigError(f"{_WHERE}: set observation, prediction or format above 0, or leave it out")
        self._by = resolve_function(by, RULES)

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> StateReasoning | None:
        """Returns that of an agent's option; None: there is none. Raises ConfigError."""
        if options is None:
            return None
        check_options(cls, options, _WHERE, given=0)
        return cls(**options)

    async def score(
        self, answer: str, before: Mapping[str, Any], after: Mapping[str, Any]
    ) -> tuple[float, Mapping[str, float]]:
        """Returns what is added to the reward of a turn, and the score of each part, 0 where it was not said.
        Raises RewardError for a function that returns no score, and whatever it raises.
        """
        said = {part: part_of(answer, part) for part in PARTS}
        scores = dict.fromkeys(PARTS, 0.0)
        for part, state in zip(PARTS, (before, after), strict=True):
            text = said[part]
            if text and self._weights[part]:
                scores[part] = await self._score(text, state)
        reward = sum(self._weights[part] * scores[part] for part in PARTS)
        return reward + self._format * all(said.values()), scores

    async def _score(self, said: str, state: Mapping[str, Any]) -> float:
        score = self._by(said, state)
        if inspect.isawaitable(score):
            score = await score
        if not isinstance(score, int | float) or not 0 <= score <= 1:
            raise RewardError(f"{_WHERE}: by returned {score!r:.80}, no score from 0 to 1")
        return float(score)


def part_of(answer: str, part: str) -> str:
    """Returns what stands in the last `<part>…</part>` of an answer; empty: there is none."""
    before, end, _ = answer.rpartition(f"</{part}>")
    _, begin, inside = before.rpartition(f"<{part}>")
    return inside.strip() if begin and end else ""
