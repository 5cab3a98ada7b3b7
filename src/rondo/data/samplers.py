"""The built-in samplers (`data.sampler`): which prompts come next, and how many answers each gets.

They walk the order that the run would have without them, and each passes something over or shares something
out. What a sampler is called with, and when: `chosen.py`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

import numpy as np

from rondo.core.errors import ConfigError

Order = Callable[[int], tuple[str, int]]
"""Source and row of the prompt at a place (from 0, without end) of the order without a sampler."""
Asked = tuple[str, int, int]
"""Source, row and number of answers."""


class Walk:
    """Goes along the order, and remembers how far it is."""

    def __init__(self) -> None:
        self._place = 0

    def _rows(self, order: Order) -> Iterator[tuple[str, int]]:
        while True:
            self._place += 1
            yield order(self._place - 1)


class SuccessRate(Walk):
    """Passes over rows that were (nearly) always right or wrong when they were asked last: nothing is learnt
    from answers that are all the same.

    low, high: a row is asked where its share of right answers (accuracy > 0) is between these; at `low` and
    at `high` it rests. revisit: how often a row that rests is passed over before it is asked again, since the
    policy changes. Where all rows rest, those that have rested longest are asked.
    """

    def __init__(self, *, low: float = 0.0, high: float = 1.0, revisit: int = 4) -> None:
        if not 0 <= low < high <= 1:
            raise ConfigError(f"success_rate needs 0 <= low < high <= 1, got low={low}, high={high}")
        if revisit < 1:
            raise ConfigError(f"success_rate needs revisit >= 1, got {revisit}: at 0 no row would rest")
        super().__init__()
        self._low, self._high, self._revisit = low, high, revisit
        self._skipped = 0
        # Row → how often it is still passed over. In the order in which they came to rest.
        self._resting: dict[tuple[str, int], int] = {}

    def choose(self, k: int, sizes: Mapping[str, int], n: int, order: Order) -> list[Asked]:
        return [(*self._next(order, sum(sizes.values())), n) for _ in range(k)]

    def _next(self, order: Order, rows: int) -> tuple[str, int]:
        """Returns the next row that does not rest. rows: after so many that do, the longest rest ends."""
        for row in islice(self._rows(order), rows):
            if not self._resting.get(row):
                self._resting.pop(row, None)
                return row
            self._resting[row] -= 1
            self._skipped += 1
        row = next(iter(self._resting))
        self._resting[row] = self._resting.pop(row)  # behind the others, until it is heard of
        return row

    def heard(self, source: str, row: int, accuracy: np.ndarray) -> None:
        self._resting.pop((source, row), None)
        if len(accuracy) and not self._low < float(np.mean(accuracy > 0)) < self._high:
            self._resting[source, row] = self._revisit

    def metrics(self) -> dict[str, float]:
        """skipped: times that a row was passed over since the start; resting: rows that would be, now."""
        return {"skipped": self._skipped, "resting": sum(map(bool, self._resting.values()))}

    def state(self) -> dict[str, Any]:
        resting = [[*row, left] for row, left in self._resting.items()]
        return {"place": self._place, "skipped": self._skipped, "resting": resting}

    def load(self, state: Mapping[str, Any]) -> None:
        self._place, self._skipped = state["place"], state["skipped"]
        self._resting = {(source, row): left for source, row, left in state["resting"]}


class Stages(Walk):
    """Takes prompts of some sources only, and of others from a certain step on.

    stages: `{step: 1, sources: [easy]}`, `{step: 200, sources: [easy, hard]}`, …: from that step (the first
    is 1) to the next stage. Inside a stage sources come in the shares that their weights give them.
    """

    def __init__(self, *, stages: Sequence[Mapping[str, Any]]) -> None:
        for number, stage in enumerate(stages):
            if set(stage) != {"step", "sources"}:
                raise ConfigError(f"stages.{number} needs step and sources, and no other key: {dict(stage)}")
            names, step = stage["sources"], stage["step"]
            if type(step) is not int or not isinstance(names, list | tuple) or not names:
                raise ConfigError(f"stages.{number}: step is a number, sources are names: {dict(stage)}")
        steps = [stage["step"] for stage in stages]
        if not steps or steps[0] != 1 or any(a >= b for a, b in pairwise(steps)):
            raise ConfigError(f"stages begin at step 1, and each later than the one before, got {steps}")
        super().__init__()
        self._stages = [(stage["step"], frozenset(stage["sources"])) for stage in stages]
        self._stage = 1

    def check(self, sources: Sequence[str]) -> None:
        """Raises ConfigError for a source that is not there, or that no stage has."""
        named = frozenset().union(*(names for _, names in self._stages))
        for wrong, why in (
            (named - set(sources), "is no source of data.train"),
            (set(sources) - named, "is in none of them, and would never be asked"),
        ):
            if wrong:
                raise ConfigError(f"stages: {min(wrong)!r} {why}; there are: {', '.join(sources)}")

    def choose(self, k: int, n: int, order: Order, step: int) -> list[Asked]:
        self._stage = sum(begin <= step for begin, _ in self._stages)
        names = self._stages[self._stage - 1][1]
        of_stage = (row for row in self._rows(order) if row[0] in names)
        return [(*next(of_stage), n) for _ in range(k)]

    def metrics(self) -> dict[str, float]:
        """stage: which one prompts were chosen from last; the first is 1."""
        return {"stage": self._stage}

    def state(self) -> dict[str, Any]:
        return {"place": self._place, "stage": self._stage}

    def load(self, state: Mapping[str, Any]) -> None:
        self._place, self._stage = state["place"], state["stage"]


class Knapsack(Walk):
    """Shares the answers of a step out among its prompts by what is learnt from them (Knapsack RL,
    2509.25849): see `allocate`. The success rate of a row is that of its last answers.

    low, high: answers of a prompt at least and at most.
    """

    def __init__(self, *, high: int, low: int = 2) -> None:
        if not 1 <= low <= high:
            raise ConfigError(f"knapsack needs 1 <= low <= high, got low={low}, high={high}")
        super().__init__()
        self._low, self._high = low, high
        self._rates: dict[tuple[str, int], float] = {}

    def check(self, n: int, least: int) -> None:
        """Raises ConfigError where prompts without an estimate, which get n, would be out of bounds, and
        where `low` is less than the algorithm takes.
        """
        if self._low < least:
            raise ConfigError(
                f"knapsack needs low >= {least}, got {self._low}: the algorithm compares a prompt's answers"
            )
        if not self._low <= n <= self._high:
            raise ConfigError(
                f"knapsack needs low <= rollout.n <= high, got low={self._low}, rollout.n={n}, "
                f"high={self._high}"
            )

    def choose(self, k: int, n: int, order: Order) -> list[Asked]:
        rows = list(islice(self._rows(order), k))
        rates = [self._rates.get(row) for row in rows]
        counts = allocate(rates, n=n, low=self._low, high=self._high)
        return [(*row, count) for row, count in zip(rows, counts, strict=True)]

    def heard(self, source: str, row: int, accuracy: np.ndarray) -> None:
        if len(accuracy):
            self._rates[source, row] = float(np.mean(accuracy > 0))

    def metrics(self) -> dict[str, float]:
        """known: rows with an estimate; useful: those of them that are neither always right nor wrong."""
        return {"known": len(self._rates), "useful": sum(0 < rate < 1 for rate in self._rates.values())}

    def state(self) -> dict[str, Any]:
        return {"place": self._place, "rates": [[*row, rate] for row, rate in self._rates.items()]}

    def load(self, state: Mapping[str, Any]) -> None:
        self._place = state["place"]
        self._rates = {(source, row): rate for source, row, rate in state["rates"]}


def value(count: int, rate: float) -> float:
    """Returns (1 - p^N - (1-p)^N) · p (1-p)²: the chance that N answers differ, times what is learnt then."""
    return (1 - rate**count - (1 - rate) ** count) * rate * (1 - rate) ** 2


def allocate(rates: Sequence[float | None], *, n: int, low: int, high: int) -> list[int]:
    """Returns how many answers each prompt gets: n · len(rates) in all, where `high` lets them.

    rates: share of right answers of each prompt; None: not known. Prompts without a rate get n, those at 0
    and at 1 `low`, and the others what makes Σ `value` largest with low <= N <= high. If these need less than
    there is (each ln(.1) / ln(max(p, 1-p)) answers, for a chance of .9 that some differ), the prompts at 0
    share the excess evenly first. Without such others the prompts at 0 share it all, and without these every
    prompt gets n. What nobody may have because of `high` is not spent.
    """
    unsolved = [i for i, rate in enumerate(rates) if rate == 0]
    useful = [i for i, rate in enumerate(rates) if rate is not None and 0 < rate < 1]
    if not unsolved and not useful:
        return [n] * len(rates)
    counts = [n if rate is None else low for rate in rates]
    left = n * len(rates) - sum(counts)  # useful prompts have their `low` already
    need = sum(_need(rates[i], low, high) - low for i in useful)
    if unsolved and left > need:
        share, more = divmod(left - need, len(unsolved))
        for number, i in enumerate(unsolved):
            counts[i] = min(high, low + share + (number < more))
            left -= counts[i] - low
    # `value` is concave in N, so the best use of each further answer is the best use of all.
    gains = [(-_gain(low, rates[i]), i) for i in useful if low < high]
    heapq.heapify(gains)
    while left > 0 and gains:
        _, i = gains[0]
        counts[i], left = counts[i] + 1, left - 1
        if counts[i] < high:
            heapq.heapreplace(gains, (-_gain(counts[i], rates[i]), i))
        else:
            heapq.heappop(gains)
    return counts


def _gain(count: int, rate: float | None) -> float:
    """Returns what one more answer than `count` is worth."""
    assert rate is not None
    return value(count + 1, rate) - value(count, rate)


def _need(rate: float | None, low: int, high: int) -> int:
    assert rate is not None
    return max(low, min(high, math.floor(math.log(0.1) / math.log(max(rate, 1 - rate)))))


BUILT_IN: Mapping[str, Callable[..., Any]] = {
    "success_rate": SuccessRate,
    "knapsack": Knapsack,
    "stages": Stages,
}
