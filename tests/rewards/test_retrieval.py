"""Rewards for what an episode's searches found, against numbers computed by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from rondo.config.schema import RewardFunctionConfig
from rondo.core.errors import ConfigError, DataError
from rondo.core.types import ToolResult, Trajectory
from rondo.rewards.functions import load_functions
from rondo.rewards.retrieval import ndcg, ndcg_of, recall, recall_of
from tests.messages import full_text
from tests.rewards.conftest import make_trajectory


def searched(*searches: list[str], **fields: Any) -> Trajectory:
    """An episode that searched, calculated in between, and has found these."""
    results = [ToolResult("…", {"ids": ids}, "search") for ids in searches]
    results.insert(1, ToolResult("3", {}, "calculator"))
    return dataclasses.replace(make_trajectory("#### x", **fields), tool_results=tuple(results))


@pytest.mark.parametrize(
    ("found", "gold", "share", "gain"),
    [
        ("ab", "ab", 1.0, 1.0),
        ("ba", "ab", 1.0, 1.0),
        ("xa", "a", 1.0, 1 / math.log2(3)),
        ("axb", "ab", 1.0, (1 + 1 / 2) / (1 + 1 / math.log2(3))),
        ("xxb", "ab", 0.5, (1 / 2) / (1 + 1 / math.log2(3))),
        ("", "ab", 0.0, 0.0),
        ("xy", "ab", 0.0, 0.0),
        ("a", "aa", 1.0, 1.0),
        ("a", "abcd", 0.25, 1 / (1 + 1 / math.log2(3) + 1 / 2 + 1 / math.log2(5))),
    ],
)
def test_recall_and_ndcg(found: str, gold: str, share: float, gain: float) -> None:
    assert recall_of(found, gold) == share
    assert ndcg_of(found, gold) == pytest.approx(gain, abs=1e-12)


def test_searches_of_an_episode_are_one_ranking() -> None:
    """c a | a d b: what comes again counts at its first place; k cuts each search."""
    episode = searched(["c", "a"], ["a", "d", "b"], gold=["a", "b"])
    assert recall(episode.prompt, episode) == 1.0
    ideal = 1 + 1 / math.log2(3)
    assert ndcg(episode.prompt, episode) == pytest.approx((1 / math.log2(3) + 1 / math.log2(5)) / ideal)
    assert recall(episode.prompt, episode, k=1) == 0.5  # c | a
    assert ndcg(episode.prompt, episode, k=1) == pytest.approx((1 / math.log2(3)) / ideal)
    assert recall(episode.prompt, episode, k=2) == 0.5  # c a | a d
    other = searched(["7"], wanted=7)
    assert recall(other.prompt, other, gold_key="wanted") == 1.0
    none = make_trajectory("#### x", gold=["a"])
    assert (recall(none.prompt, none), ndcg(none.prompt, none)) == (0.0, 0.0)


@pytest.mark.parametrize("reward", [recall, ndcg])
def test_rows_that_do_not_say_what_is_wanted(reward: Any) -> None:
    for fields, told in (({}, "needs column 'gold'"), ({"gold": []}, "column 'gold' is empty")):
        episode = searched(["a"], **fields)
        with pytest.raises(DataError, match=f"prompt s/0/0: .*{told}"):
            reward(episode.prompt, episode)
    episode = searched(["a", ""], gold=["a"])
    with pytest.raises(DataError, match=full_text("trajectory 0-0: the retriever gives")):
        reward(episode.prompt, episode)


def test_a_k_that_cannot_be() -> None:
    (function,) = load_functions([RewardFunctionConfig("recall", options={"k": 0})])
    assert function.marks.check is not None
    with pytest.raises(ConfigError, match="k must be at least 1"):
        function.marks.check(**function.options)
