"""Reward functions in verl's form run as they are: with what verl would give them, for what they return
there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rondo.config.functions import resolve_function
from rondo.config.schema import RewardConfig, RewardFunctionConfig
from rondo.core.errors import ConfigError, DataError, RewardError
from rondo.core.types import Trajectory, Turn
from rondo.rewards import Scorer, load_functions
from tests.rewards.conftest import make_trajectory

# As verl's recipes have them: a number, a mapping, a coroutine, one that writes into what it is given.
FUNCTIONS = '''
import asyncio, os

def length(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) / 10

def right(data_source, solution_str, ground_truth, extra_info, bonus=0.0, **kwargs):
    good = solution_str.endswith(ground_truth)
    score = (1.0 if good else -1.0) + bonus
    return {"score": score, "acc": good, "pred": solution_str, "length": len(solution_str)}

def without_acc(data_source, solution_str, ground_truth, extra_info):
    return {"score": 0.25, "penalty": -0.5}

async def judged(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.01)
    return {"score": float(extra_info["index"])}

def few(solution_str, ground_truth, seed=7):
    return float(seed)

def told(data_source, solution_str, ground_truth, extra_info, **kwargs):
    extra_info["seen"] = True
    ground_truth["target"].append("new")
    told.last = (data_source, solution_str, ground_truth, extra_info, kwargs)
    return 0

def dies(data_source, solution_str, ground_truth, extra_info):
    if "die" in solution_str:
        os._exit(3)
    return 1.0

def no_score(data_source, solution_str, ground_truth, extra_info):
    return {"acc": 1.0}

def listed(data_source, solution_str, ground_truth, extra_info):
    return [1.0]

def routed(data_source, solution_str, ground_truth, extra_info, reward_router_address):
    return 1.0

def batched(data_sources, solution_strs, ground_truths, extra_infos):
    return [1.0 for _ in solution_strs]

def by_place(solution_str, /, ground_truth):
    return 1.0
'''  # fmt: skip
ROW = {
    "data_source": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 3, "split": "train"},
}


@pytest.fixture
def scored(path: Path) -> Iterator[Callable[..., Trajectory]]:
    made: list[Scorer] = []

    def score(name: str, text: str, row: dict[str, Any] = ROW, **config: Any) -> Trajectory:
        options = config.pop("options", {})
        entry = RewardFunctionConfig(f"{path}:{name}", options=options)
        made.append(Scorer(RewardConfig(functions=(entry,), **config)))
        return asyncio.run(made[-1].score(make_trajectory(text, **row)))

    yield score
    for one in made:
        one.close()


@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_numbers_and_mappings(scored: Callable[..., Trajectory], isolation: str) -> None:
    """A number is its own accuracy; of a mapping, `score` is the reward, `acc` the accuracy, other numbers
    are scores and texts are none.
    """

    def scores(name: str, text: str, **options: Any) -> dict[str, float]:
        found = scored(name, text, isolation=isolation, options=options)
        assert found.reward == found.scores[name]
        return dict(found.scores)

    assert scores("length", "twelve chars") == {"length": 1.2, "length/acc": 1.2}
    good = {"right": 1.0, "right/acc": 1.0, "right/length": 3.0}
    assert scores("right", "= 4") == good
    assert scores("right", "= 5") == {"right": -1.0, "right/acc": 0.0, "right/length": 3.0}
    assert scores("right", "= 4", bonus=0.5) == {**good, "right": 1.5}
    assert scores("without_acc", "x") == {
        "without_acc": 0.25,
        "without_acc/acc": 0.25,
        "without_acc/penalty": -0.5,
    }
    assert scores("judged", "x") == {"judged": 3.0, "judged/acc": 3.0}
    assert scores("few", "x") == {"few": 7.0, "few/acc": 7.0}
    assert scores("few", "x", seed=8) == {"few": 8.0, "few/acc": 8.0}


def test_it_is_given_what_verl_gives(path: Path, scored: Callable[..., Trajectory]) -> None:
    """Copies of its own, which it may write into; a row's JSON is read; kwargs are the options alone."""
    truth = {"target": ["Paris"]}
    row = {**ROW, "reward_model": {"ground_truth": truth}, "extra_info": '{"index": 1}'}
    scored("told", "Paris", row, options={"beta": 2})
    told: Any = resolve_function(f"{path}:told")
    seen = {"index": 1, "num_turns": 2, "rollout_reward_scores": {}, "seen": True}
    assert told.last == ("math", "Paris", {"target": ["Paris", "new"]}, seen, {"beta": 2})
    assert truth == {"target": ["Paris"]}


def test_an_episode_is_its_whole_response(path: Path) -> None:
    """All turns, without who wrote them; verl counts the prompt as a turn."""
    shown = make_trajectory("4", **ROW)
    turns = (Turn("policy", 0, 1), Turn("tool", 1, 2), Turn("policy", 2, 3))
    row = replace(shown.rows[0], turns=turns)
    shown = replace(shown, rows=(row,), transcripts=("[policy] add\n[tool] [4]\n[policy] = 4",))
    returned = "{'score': 0, 'turns': extra_info['num_turns'], 'n': len(solution_str)}"
    path.write_text(f"def told(solution_str, extra_info): return {returned}")
    scorer = Scorer(RewardConfig(functions=(RewardFunctionConfig(f"{path}:told"),)))
    found = asyncio.run(scorer.score(shown)).scores
    assert (found["told/turns"], found["told/n"]) == (4, len("add\n[4]\n= 4"))
    scorer.close()


def test_evaluation_reports_by_data_source(path: Path) -> None:
    entries = [
        RewardFunctionConfig(f"{path}:length", sources=("a",)),
        RewardFunctionConfig("exact_match", sources=("b",)),
    ]
    scorer = Scorer(RewardConfig(functions=tuple(entries)))
    assert scorer.source(make_trajectory("x", source="a", **ROW)) == "math"
    assert scorer.source(make_trajectory("x", source="b", **ROW)) == "b"
    scorer.close()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("no_score", "verl takes the reward from 'score'"), ("listed", "the returned score|score '")],
)
def test_what_is_no_score_stops_the_run(scored: Callable[..., Trajectory], name: str, wrong: str) -> None:
    with pytest.raises(RewardError, match=wrong):
        scored(name, "x")


def test_its_process_may_die(scored: Callable[..., Trajectory]) -> None:
    found = scored("dies", "die", isolation="process", on_error="drop")
    assert found.outcome == "reward_error"
    assert scored("dies", "live", isolation="process").reward == 1.0


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("routed", "wants reward_router_address, which there"),
        ("batched", "wants data_sources, which there is"),
        ("by_place", "by name, and solution_str has none"),
    ],
)
def test_what_verl_does_not_give_is_refused(path: Path, name: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        load_functions([RewardFunctionConfig(f"{path}:{name}")])


def test_an_option_is_none_of_verls_arguments(path: Path) -> None:
    with pytest.raises(ConfigError, match="option ground_truth has the name"):
        load_functions([RewardFunctionConfig(f"{path}:right", options={"ground_truth": "4"})])
    with pytest.raises(ConfigError, match="bonnus"):
        load_functions([RewardFunctionConfig(f"{path}:few", options={"bonnus": 1})])


def test_a_row_of_another_format_is_refused(path: Path) -> None:
    (function,) = load_functions([RewardFunctionConfig(f"{path}:length")])
    function.check_row(make_trajectory("x", **ROW).prompt)
    function.check_row(make_trajectory("x", **{**ROW, "reward_model": {"ground_truth": None}}).prompt)
    with pytest.raises(DataError, match="has a text in 'data_source'"):
        function.check_row(make_trajectory("x", answer="4").prompt)
    with pytest.raises(DataError, match="ground_truth: …} in 'reward_model'"):
        function.check_row(make_trajectory("x", data_source="math", answer="4").prompt)
