"""verl's rules by data_source, on cases worked out by hand from verl's code; and which row has which rule."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rondo.config.schema import RewardConfig, RewardFunctionConfig
from rondo.core.errors import ConfigError, DataError
from rondo.core.types import Trajectory
from rondo.rewards import Scorer, load_functions
from rondo_sandbox import check_sandbox
from rondo_verl.scoring import gsm8k, hendrycks_math, math_dapo, search_match, thought_first
from tests.installed import needs
from tests.rewards.conftest import make_trajectory


def row(source: str, truth: Any, **fields: Any) -> dict[str, Any]:
    return {"data_source": source, "reward_model": {"style": "rule", "ground_truth": truth}, **fields}


@pytest.fixture
def scorer() -> Iterator[Scorer]:
    made = Scorer(RewardConfig(functions=(RewardFunctionConfig("verl"),), accuracy="verl/acc"))
    yield made
    made.close()


def scores(scorer: Scorer, text: str, source: str, truth: Any) -> tuple[float, float]:
    """Reward and accuracy of an answer."""
    found: Trajectory = asyncio.run(scorer.score(make_trajectory(text, **row(source, truth))))
    assert found.reward == found.scores["verl"]
    return found.reward, found.scores["verl/acc"]


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("6 * 7 = 42\n#### 42", "42", 1.0),
        ("#### 1,042", "1042", 1.0),  # commas are taken out of the answer
        ("#### 1042", "1,042", 0.0),  # and not out of the ground truth
        ("#### -7", "-7", 1.0),
        ("#### 41\n#### 42", "42", 1.0),  # the last one counts
        ("#### 42\n#### 41", "42", 0.0),
        ("#### 42 apples, as I said", "42", 1.0),  # text after the answer
        ("#### 42.", "42", 0.0),  # a full stop is taken for a part of it
        ("#### 42.0", "42", 0.0),  # letter by letter
        ("#### $42", "42", 0.0),
        ("####42", "42", 0.0),  # without the blank
        ("the answer is 42", "42", 0.0),  # no marker
        ("#### forty-two", "42", 0.0),
        ("#### 42" + " " * 293, "42", 1.0),  # within the last 300 characters
        ("#### 42" + " " * 294, "42", 0.0),
        ("", "42", 0.0),
    ],
)
def test_gsm8k(response: str, truth: str, score: float) -> None:
    assert gsm8k(response, truth) == score


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        (r"so \boxed{42}", "42", 1.0),
        (r"\boxed{41}, no: \boxed{42}. Done", "42", 1.0),  # several boxes: the last
        (r"\boxed{42}, no: \boxed{41}", "42", 0.0),
        (r"\boxed{42} and \boxed{4", "42", 0.0),  # an unclosed last box hides the one before
        ("42", "42", 0.0),  # no box
        (r"\fbox{42}", "42", 0.0),  # verl finds it, and breaks off when it reads it
        (r"$\boxed 42$ is it", "42", 1.0),  # without braces, up to the dollar
        (r"\boxed 42$ \boxed{41}", "42", 1.0),  # and before any with braces
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt2}", 1.0),  # braces within
        (r"\boxed{\dfrac12}", r"\frac{1}{2}", 1.0),
        (r"\boxed{\tfrac1{72}}", r"\frac{1}{72}", 1.0),
        (r"\boxed{1/2}", r"\frac{1}{2}", 1.0),
        (r"\boxed{01/2}", r"\frac{1}{2}", 0.0),  # no whole number as Python writes it
        (r"\boxed{0.5}", r"\frac12", 1.0),
        (r"\boxed{.5}", r"\frac12", 1.0),
        (r"\boxed{0.25}", r"\frac14", 0.0),  # only a half is known
        (r"\boxed{x = 5}", "5", 1.0),
        (r"\boxed{xyz = 5}", "5", 0.0),  # more than two letters before the sign
        (r"\boxed{5 \text{ cm}}", "5", 1.0),  # a unit
        (r"\boxed{5\text{cm}}", "5", 0.0),  # only with a blank
        (r"\boxed{1,000}", "1000", 0.0),  # commas stay
        (r"\boxed{50\%}", "50", 1.0),
        (r"\boxed{\$50}", "50", 1.0),
        (r"\boxed{90^\circ}", "90", 1.0),
        (r"\boxed{\left( 1, 2 \right)}", "(1,2)", 1.0),
        (r"\boxed{\frac}", r"\frac", 1.0),  # cannot be normalised: compared as it is written
        (r"\boxed{\frac }", r"\frac", 0.0),
        (r"\boxed{}", "0", 0.0),
    ],
)
def test_hendrycks_math(response: str, truth: str, score: float) -> None:
    assert hendrycks_math(response, truth) == score


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("Answer: 34", "34", 1.0),
        ("answer :34", "34", 1.0),
        ("Answer: 33\nAnswer: 34", "34", 1.0),  # the last one
        ("Answer: 34\nAnswer: 33", "34", -1.0),
        ("Answer: 34\nThat is all.", "34", 1.0),  # text on the lines below
        ("Answer: 34, as above", "34", -1.0),  # and behind it
        ("Answer: $34$", "34", 1.0),
        ("Answer: the sum $x = 34$", "34", 1.0),  # behind the last sign of equality
        (r"Answer: \boxed{34}", "34", 1.0),
        (r"Answer: $\frac12$", r"\frac{1}{2}", 1.0),
        ("Answer: 1,234", "1234", 1.0),
        ("Answer: 34 degrees", "34", 1.0),
        (r"Answer: \text{34}", "34", 1.0),
        (r"\boxed{34}", "34", -1.0),  # no line of an answer
        ("Answer: 34" + "\n" * 290, "34", 1.0),  # within the last 300 characters
        ("Answer: 34" + "\n" * 291, "34", -1.0),
        ("", "34", -1.0),
    ],
)
def test_math_dapo(response: str, truth: str, score: float) -> None:
    assert math_dapo(response, truth) == score


@pytest.mark.parametrize(
    ("response", "targets", "score"),
    [
        ("<answer> The Eiffel Tower. </answer>", ["Eiffel tower"], 1.0),
        ("<answer>Rome</answer> <answer>Paris</answer>", "paris", 1.0),  # one target; the last answer
        ("<answer>Paris</answer> <answer>Rome</answer>", ["Paris"], 0.0),
        ("<answer>in Paris</answer>", ["Paris"], 0.0),  # the whole of it
        ("Paris", ["Paris"], 0.0),
        ("<answer>Paris", ["Paris"], 0.0),  # unclosed
        (
            "<answer><answer>Paris</answer>",
            ["Paris"],
            0.0,
        ),  # from the first that opens: no word of it is lost
        ("<answer>Paris</answer>" * 10, ["Paris"], 1.0),
        ("<answer>Paris</answer>" * 11, ["Paris"], 0.25),
        ("<answer>Paris</answer>" + "</answer>" * 10, ["Paris"], 0.25),
    ],
)
def test_search_match(response: str, targets: Any, score: float) -> None:
    assert search_match(response, {"target": targets}) == score


@pytest.mark.parametrize(
    ("response", "is_right"),
    [
        (r"<think>a</think> \boxed{4} done", True),
        (r"<think></think>\boxed{}", True),
        (r" <think>a</think> \boxed{4}", False),
        (r"<think>a \boxed{4}</think>", False),
        (r"<think>a</think> \boxed{4", False),
        (r"<think>a", False),
    ],
)
def test_thought_first(response: str, is_right: bool) -> None:
    assert thought_first(response) is is_right


def test_which_rule_a_source_has(scorer: Scorer) -> None:
    """Reward and accuracy: math_dapo's differ."""
    assert scorer.names == ("verl", "verl/acc")
    assert scores(scorer, "#### 4", "openai/gsm8k", "4") == (1.0, 1.0)
    for source in ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"):
        assert scores(scorer, r"\boxed{4}", source, "4") == (1.0, 1.0)
    for source in ("math_dapo", "math", "math_dapo_reasoning", "aime_2024", "aime25"):
        assert scores(scorer, "Answer: 4", source, "4") == (1.0, 1.0)
        assert scores(scorer, r"\boxed{4}", source, "4") == (-1.0, 0.0)
    for source in ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle"):
        truth = {"target": ["four"]}
        assert scores(scorer, "<answer>Four.</answer>", f"searchR1_{source}", truth) == (1.0, 1.0)


def test_what_an_answer_votes_for(scorer: Scorer) -> None:
    """math_dapo's `pred`, where there is one; else as of other scorers."""
    said = ["Answer: $1,234$", "Answer: x = 1234 degrees", "so #### 12", r"\boxed{\frac12}", "none"]
    votes = [scorer.answer(make_trajectory(text, **row("aime24", "1234"))) for text in said]
    assert votes == ["1234", "1234", "12", "1/2", None]


def test_code_runs_in_the_sandbox(scorer: Scorer) -> None:
    """The share of the first ten cases that pass. What is behind them costs nothing, as in verl."""
    check_sandbox("auto", 256)
    cases = {"inputs": [f"{n}\n" for n in range(12)], "outputs": [f"{n + 1}\n" for n in range(12)]}
    half = "```python\nn = int(input())\nprint(n + 1 if n % 2 else n)\n```"
    ten = "```python\nn = int(input())\nprint(n + 1 if n < 10 else n)\n```"
    assert scores(scorer, half, "taco", json.dumps(cases)) == (0.5, 0.5)
    assert scores(scorer, ten, "codecontests", json.dumps(cases)) == (1.0, 1.0)
    assert scores(scorer, "no program", "apps", json.dumps(cases)) == (0.0, 0.0)


def test_geometry3k_mathruler(scorer: Scorer) -> None:
    """Where the package is: what verl computes with it."""
    needs("mathruler")
    source = "hiyouga/geometry3k"
    assert scores(scorer, r"<think>a</think> \boxed{2\sqrt{221}}", source, r"2 \sqrt { 221 }") == (1.0, 1.0)
    assert scores(scorer, r"\boxed{12} or \boxed{\frac{1}{2}}", source, "0.5") == (0.9, 0.9)
    assert scores(scorer, r"<think>a</think> \boxed{3}", source, "4") == (0.1, 0.1)
    assert scores(scorer, "4", source, "4") == (0.0, 0.0)


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        (row("my/data", "4"), "data_source 'my/data': verl has no rule"),
        (row("numina_cn_k12", "4"), "data_source 'numina_cn_k12': verl scores it by prime_math"),
        (row("openai/gsm8k", 4), "its ground truth (reward_model.ground_truth) must be a text, got 4"),
        (row("searchR1_nq", {"target": []}), "must be {target: text or texts}, got"),
        (row("taco", None), "must be a text, got None"),
        ({"answer": "4"}, "has a text in 'data_source'; the row has answer"),
    ],
)
def test_a_row_that_cannot_be_scored_is_named(fields: dict[str, Any], wrong: str) -> None:
    """As the rows are read, never a 0."""
    (function,) = load_functions([RewardFunctionConfig("verl")])
    with pytest.raises(DataError) as caught:
        function.check_row(make_trajectory("", source="train", **fields).prompt)
    assert wrong in str(caught.value)
    assert str(caught.value).startswith("prompt train/0/0")


def test_a_function_that_is_chosen_is_looked_at_when_rows_are_read() -> None:
    (function,) = load_functions([RewardFunctionConfig("verl")])
    shown = make_trajectory("", **row("hiyouga/geometry3k", "4")).prompt
    if importlib.util.find_spec("mathruler") is None:
        with pytest.raises(ConfigError, match=re.escape("pip install 'rondo-rl[verl]'")):
            function.check_row(shown)
    else:
        function.check_row(shown)
    no_cases = make_trajectory("", **row("taco", "x")).prompt
    assert function.scoring(no_cases).function.__name__ == "code"


def test_the_penalty_of_the_manager_dapo() -> None:
    """min(-(length - (max_resp_len - len)) / len * penalty_factor, 0), by hand: without a least value."""
    (function,) = load_functions(
        [RewardFunctionConfig("overlong", options={"max_tokens": 10, "buffer": 4, "bounded": False})]
    )

    def penalty(length: int) -> float:
        shown = make_trajectory("")
        ids = np.zeros(length, np.int32)
        rows = (replace(shown.rows[0], response_ids=ids),)
        return float(function.function(shown.prompt, replace(shown, rows=rows), **function.options))

    assert [penalty(n) for n in (0, 6, 7, 10, 12)] == [0.0, 0.0, -0.25, -1.0, -1.5]
