"""What an episode's searches have found, compared with the passages that the row says are wanted.

A tool's results count that have `ids` in their data (`ToolResult`), as the tool `search` gives them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rondo.core.errors import ConfigError, DataError
from rondo.core.types import Prompt, Trajectory
from rondo.rewards.answers import required_field
from rondo.rewards.marks import reward_function


def recall_of(found: Sequence[str], gold: Sequence[str]) -> float:
    """Returns the share of the wanted that is found."""
    return len(set(gold) & set(found)) / len(set(gold))


def ndcg_of(found: Sequence[str], gold: Sequence[str]) -> float:
    """Returns the discounted gain of a ranking without repeats, a wanted passage at place i being worth
    1 / log2(i + 1), over that of the best one, which has all wanted ones first (Järvelin and Kekäläinen,
    2002, equation for binary relevance).
    """
    wanted = set(gold)
    gain = sum(1 / math.log2(place + 1) for place, one in enumerate(found, 1) if one in wanted)
    return gain / sum(1 / math.log2(place + 1) for place in range(1, len(wanted) + 1))


def _check(*, k: int | None = None, gold_key: str = "gold") -> None:
    if k is not None and k < 1:
        raise ConfigError(f"k must be at least 1, or null for all that was found, got {k}")


def _gold(prompt: Prompt, *, gold_key: str = "gold", **_: Any) -> list[str]:
    gold = required_field(prompt, gold_key, "gold_key")
    ids = [str(one) for one in (gold if isinstance(gold, list | tuple) else [gold])]
    if not ids:
        raise DataError(
            f"prompt {prompt.prompt_id}: column {gold_key!r} is empty; it has the ids of the passages that "
            "the answer takes"
        )
    return ids


@reward_function(run_in="loop", check=_check, columns=["{gold_key}"], row=_gold)
def recall(prompt: Prompt, trajectory: Trajectory, *, k: int | None = None, gold_key: str = "gold") -> float:
    """The share, from 0 to 1, of the row's wanted passages that are among the first k of some search."""
    return recall_of(_found(trajectory, k), _gold(prompt, gold_key=gold_key))


@reward_function(run_in="loop", check=_check, columns=["{gold_key}"], row=_gold)
def ndcg(prompt: Prompt, trajectory: Trajectory, *, k: int | None = None, gold_key: str = "gold") -> float:
    """nDCG, from 0 to 1, of the passages in the order in which the policy read them first: those of the first
    search, then what later ones add, the first k of each.
    """
    return ndcg_of(_found(trajectory, k), _gold(prompt, gold_key=gold_key))


def _found(trajectory: Trajectory, k: int | None) -> list[str]:
    searches = [result.data["ids"] for result in trajectory.tool_results if "ids" in result.data]
    found = list(dict.fromkeys(str(one) for ids in searches for one in ids[:k]))
    if "" in found:
        raise DataError(
            f"trajectory {trajectory.trajectory_id}: the retriever gives passages without an id, so that "
            "nobody can say whether a wanted one was found; have it send document.id"
        )
    return found
