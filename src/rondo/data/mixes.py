"""The built-in mixes (`algorithm.mix`): rows of another sampler that join the groups of a step. What a mix is
called with, and when: `chosen.py` and `trainers/program/mixing.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rondo.core.errors import ConfigError, DataError
from rondo.core.types import Prompt
from rondo.data.samplers import Asked, Order, Walk

MIX = "algorithm.mix"


class Demonstrations:
    """Has the demonstrations in the data join their prompts' groups (LUFFY, RL-PLUS).

    column: of a row, a text: the answer as the assistant gives it. required: false lets rows be without one
    (null), whose groups stay as they are.
    """

    def __init__(self, *, column: str, required: bool = True) -> None:
        self._column, self._required = column, required

    def check_columns(self, columns: Mapping[str, Sequence[str]]) -> None:
        """Raises DataError for a source whose first row lacks the column."""
        for source, there in columns.items():
            if self._column not in there:
                raise DataError(
                    f"{MIX}: demonstrations are in the column {self._column!r}, which {source} does not "
                    f"have; it has {', '.join(there)}"
                )

    def rows(self, prompt: Prompt) -> list[str]:
        text = prompt.fields.get(self._column)
        if isinstance(text, str) and text:
            return [text]
        if text is None and not self._required:
            return []
        raise DataError(
            f"{MIX}: prompt {prompt.prompt_id!r} has {text!r:.40} in the column {self._column!r}, and no "
            "text; required: false lets rows be without (null)"
        )

    def state(self) -> None:
        return None

    def load(self, state: None) -> None:
        return None


class Replay(Walk):
    """Asks prompts again that were answered partly right, with a right answer of an earlier step in the place
    of one sample (ExGRPO, 2510.02245).

    share: of a step's prompts that come from the pool, at most. A prompt joins it with its right answers when
    some but not all of its answers are right, and leaves it for good when all are. Its bucket is the number
    of its right answers at its last visit; prompts are drawn by buckets, of weight exp(-(bucket - n/2)²/2)
    each, none twice in a step. Of a prompt's right answers (each once) the one of least mean entropy under
    the current policy joins; their log-probs are the sampler's. most: newest answers that are kept of a
    prompt; null: all.

    The pool is filled in steps in which the coefficient `replaying` is above 0.
    """

    def __init__(self, *, share: float = 0.5, most: int | None = None) -> None:
        if not 0 < share <= 1:
            raise ConfigError(f"replay needs 0 < share <= 1, got {share}")
        if most is not None and most < 1:
            raise ConfigError(f"replay needs most >= 1 (null: all), got {most}")
        super().__init__()
        self._share, self._most = share, most
        self._pool: dict[tuple[str, int], list[tuple[np.ndarray, np.ndarray]]] = {}
        self._bucket: dict[tuple[str, int], int] = {}
        self._retired: dict[tuple[str, int], None] = {}  # in the order in which they were
        # What a step's groups have said, until the step ends: a prompt that is asked meanwhile depends on
        # nothing that time decides. Row → right answers of each visit, and whether one was replayed.
        self._visits: dict[tuple[str, int], list[tuple[list[tuple[np.ndarray, np.ndarray]], bool]]] = {}

    def check(self, n: int, least: int) -> None:
        """Raises ConfigError where one sample fewer is too few."""
        if n - 1 < max(least, 1):
            raise ConfigError(
                f"replay samples rollout.n - 1 answers beside one of the pool, and rollout.n={n} leaves "
                f"{n - 1}; it needs {max(least, 1)} or more"
            )

    def choose(self, k: int, n: int, seed: int, order: Order) -> list[Asked]:
        rng = np.random.default_rng(seed)
        again = self._draw(min(len(self._pool), math.floor(self._share * k)), n, rng)
        fresh = self._rows(order)
        return [(*row, n - 1) for row in again] + [(*next(fresh), n) for _ in range(k - len(again))]

    def _draw(self, number: int, n: int, rng: np.random.Generator) -> list[tuple[str, int]]:
        """Draws so many prompts of the pool: how many of each bucket, then which of them. What a bucket does
        not have is drawn again from the others.
        """
        left: dict[int, list[tuple[str, int]]] = {}
        for row, bucket in self._bucket.items():
            left.setdefault(bucket, []).append(row)
        drawn: list[tuple[str, int]] = []
        while len(drawn) < number:
            levels = sorted(level for level, rows in left.items() if rows)
            weights = np.array([math.exp(-((level - n / 2) ** 2) / 2) for level in levels])
            counts = rng.multinomial(number - len(drawn), weights / weights.sum())
            for level, count in zip(levels, counts.tolist(), strict=True):
                rows = [left[level][place] for place in rng.permutation(len(left[level])).tolist()]
                drawn += rows[:count]
                left[level] = rows[count:]
        return drawn

    def rows(
        self,
        prompt: Prompt,
        responses: Sequence[np.ndarray],
        log_probs: Sequence[np.ndarray],
        accuracy: np.ndarray,
        asked: int,
        n: int,
        replaying: float,
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        row = _row_of(prompt)
        joining = self._pool.get(row, []) if asked < n else []
        if replaying > 0:
            sampled = zip(responses, log_probs, accuracy > 0, strict=True)
            right = [(ids.copy(), said.copy()) for ids, said, is_right in sampled if is_right]
            self._visits.setdefault(row, []).append((right, bool(joining)))
        return joining

    def pick(self, entropy: Sequence[np.ndarray]) -> int:
        return int(np.argmin([one.mean() for one in entropy]))

    def heard(self, source: str, row: int, accuracy: np.ndarray) -> None:
        prompt = (source, row)
        visits = self._visits.get(prompt)
        if not visits:  # it was dropped, or nothing is kept yet
            return
        right, is_replayed = visits.pop(0)
        if not visits:
            del self._visits[prompt]
        successes = int((accuracy > 0).sum()) + is_replayed
        if successes == len(accuracy) + is_replayed:
            self._retired[prompt] = None
            self._pool.pop(prompt, None)
            self._bucket.pop(prompt, None)
        elif successes and prompt not in self._retired:
            # By their tokens: of those that are the same the newest log-probs.
            kept = {ids.tobytes(): (ids, said) for ids, said in [*self._pool.get(prompt, ()), *right]}
            self._pool[prompt] = list(kept.values())[-(self._most or len(kept)) :]
            self._bucket[prompt] = successes

    def metrics(self) -> dict[str, float]:
        """pool: prompts in it; kept: their answers; retired: prompts that were always right."""
        kept = sum(map(len, self._pool.values()))
        return {"pool": len(self._pool), "kept": kept, "retired": len(self._retired)}

    def state(self) -> dict[str, Any]:
        """The answers in a few arrays: JSON would take ten times as much."""
        answers = [answer for kept in self._pool.values() for answer in kept]
        empty = np.zeros(0)
        return {
            "place": self._place,
            "pool": [[*row, self._bucket[row], len(kept)] for row, kept in self._pool.items()],
            "retired": [list(row) for row in self._retired],
            "lengths": np.array([len(ids) for ids, _ in answers], np.int64),
            "ids": np.concatenate([*(ids for ids, _ in answers), empty]).astype(np.int32),
            "log_probs": np.concatenate([*(said for _, said in answers), empty]).astype(np.float32),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._place = state["place"]
        cuts = np.cumsum(state["lengths"])[:-1]
        parts = (np.split(state[name], cuts) for name in ("ids", "log_probs"))
        answers = iter(zip(*parts, strict=True))
        self._pool, self._bucket, self._visits = {}, {}, {}
        for source, row, bucket, kept in state["pool"]:
            self._pool[source, row] = [next(answers) for _ in range(kept)]
            self._bucket[source, row] = bucket
        self._retired = dict.fromkeys((source, row) for source, row in state["retired"])


def _row_of(prompt: Prompt) -> tuple[str, int]:
    """Returns source and row of a prompt that a sampler has chosen."""
    return prompt.source, int(prompt.prompt_id.rpartition("/")[2])


MIXES: Mapping[str, Callable[..., Any]] = {"demonstrations": Demonstrations, "replay": Replay}
