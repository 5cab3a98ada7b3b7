"""Hand-made tables for the built-in reward functions, the pitfalls of ALGORITHMS §12.1 among them."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from fractions import Fraction

import numpy as np
import pytest

from rondo.config.schema import RewardConfig, RewardFunctionConfig
from rondo.core.arithmetic import evaluate_expression
from rondo.core.errors import ConfigError, DataError
from rondo.core.types import ToolResult, Turn
from rondo.rewards import Scorer, load_functions
from rondo.rewards.answers import (
    comparable,
    extract_answer,
    hash_number,
    last_boxed,
    last_number,
    parse_number,
)
from rondo.rewards.builtin import (
    countdown,
    exact_match,
    format_tags,
    gsm8k,
    overlong,
    tool_use,
    verdict,
)
from tests.messages import full_text


def score(function, t, **options):
    return function(t.prompt, t, **options)


@pytest.mark.parametrize(
    ("text", "how", "answer"),
    [
        (" a b \n", "text", "a b"),
        ("<answer>1</answer> no, <answer> 2 </answer> end", "tag", "2"),
        ("<answer>1 <answer>2</answer>", "tag", "2"),
        ("<answer>1</answer><answer>2", "tag", "1"),  # the unclosed one does not count
        ("</answer>1<answer>", "tag", None),
        ("1", "tag", None),
        ("#### 1\n#### 2 apples\nend", "hash", "2 apples"),
        ("no marker", "hash", None),
        ("a\nb \n\n", "last_line", "b"),
        ("", "last_line", None),
        ("", "text", ""),
    ],
)
def test_extract_answer(text, how, answer):
    assert extract_answer(text, how) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42),
        ("42.", 42),
        ("-42.0", -42),
        ("$1,234.50", Fraction("1234.5")),
        ("-$5", -5),
        ("$-5", -5),
        ("+7", 7),
        (".5", Fraction(1, 2)),
        ("12,34", None),
        ("1.2.3", None),
        ("1/2", None),
        (".", None),
        (",", None),
        ("", None),
        ("５", None),  # a full-width digit
        ("1" * 101, None),
    ],
)
def test_parse_number(text, number):
    assert parse_number(text) == number


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("3+9=12\n12+9=21\n#### 21", 21, 21),
        ("####21", 21, 21),
        ("#### 21.", 21, 21),
        ("#### $1,234", 1234, 1234),
        ("#### -3", -3, -3),
        ("#### 1\nwait\n#### 2", 2, 2),
        ("#### 5\n####", 5, 5),
        ("#### 5 and 6", 5, 6),
        ("#### 12,34", None, None),
        ("#### 1/2", None, None),
        ("#### .", None, None),
        ("the answer is 42.", None, 42),
        ("it is 1,234, yes", None, 1234),
        ("7-4", None, 4),  # a minus between numbers is no sign
        ("x = -4", None, -4),
        ("nothing", None, None),
        ("", None, None),
        ("#### 42" + " padding" * 500, 42, 42),  # the whole text is searched, not its last 300 characters
    ],
)
def test_numbers_in_text(text, strict, flexible):
    assert hash_number(text) == strict
    assert last_number(text) == flexible


def test_number_search_is_linear_in_the_text():
    for text in ("-" * 200_000, "1" * 200_000 + "/1", "1,1" * 70_000, "####" * 50_000, "$-." * 70_000):
        hash_number(text)
        last_number(text)


def test_gsm8k(trajectory):
    t = trajectory("6*7=42\n#### 42.", answer="Six times seven is 42.\n#### 42")
    assert score(gsm8k, t) == 1.0
    assert score(gsm8k, trajectory("42", answer="42")) == 0.0
    assert score(gsm8k, trajectory("42", answer="42"), method="flexible") == 1.0
    assert score(gsm8k, trajectory("#### 42", answer=42)) == 1.0
    assert score(gsm8k, trajectory("#### 43", answer="42")) == 0.0
    assert score(gsm8k, trajectory("#### 42", solution="42"), answer_key="solution") == 1.0
    with pytest.raises(DataError, match=full_text("needs column 'answer', which is missing")):
        score(gsm8k, trajectory("#### 42", solution="42"))
    with pytest.raises(DataError, match=r"answer 'many' .* is no number"):
        score(gsm8k, trajectory("#### 42", answer="many"))


def test_gsm8k_scores_the_quickstart():
    from rondo.recipes.quickstart import demonstrations, train_rows
    from tests.rewards.conftest import make_trajectory

    for row in train_rows(100):
        assert score(gsm8k, make_trajectory(row["solution"], answer=row["answer"])) == 1.0
        assert score(gsm8k, make_trajectory("#### 99", answer=row["answer"])) == 0.0
    assert all("####" in row["response"] for row in demonstrations(100))


def test_exact_match(trajectory):
    assert score(exact_match, trajectory(" Paris\n", answer="Paris")) == 1.0
    assert score(exact_match, trajectory("paris", answer="Paris")) == 0.0
    assert score(exact_match, trajectory("paris", answer=["Lutetia", "Paris"]), ignore_case=True) == 1.0
    assert score(exact_match, trajectory("3.14", answer="314")) == 0.0
    assert score(exact_match, trajectory("so <answer>5</answer>", answer=5), extract="tag") == 1.0
    assert score(exact_match, trajectory("so 5", answer=5), extract="tag") == 0.0


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("(2+3)*4", (20, [2, 3, 4])),
        ("1/3*3", (1, [1, 3, 3])),  # exact, not floating point
        ("-2+5", (3, [2, 5])),
        ("2**9", None),
        ("7//2", None),
        ("1.5*2", None),
        ("1/0", None),
        ("abs(1)", None),
        ("__import__('os')", None),
        ("True+1", None),
        ("2+", None),
        ("", None),
        ("(" * 150 + "1" + ")" * 150, None),
        ("1" + "+1" * 200, None),
    ],
)
def test_evaluate_expression(expression, result):
    assert evaluate_expression(expression) == result


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>(7-2)*5</answer>", 1.0),
        ("<answer>5*(7-2)</answer>", 1.0),
        ("<answer>25</answer>", 0.1),  # the value, but not from the numbers
        ("<answer>5*5</answer>", 0.1),  # a number twice
        ("<answer>7*5-2*5</answer>", 0.1),
        ("<answer>(7+2)*5</answer>", 0.1),
        ("<answer>(7-2)*5 = 25</answer>", 0.0),
        ("(7-2)*5", 0.0),
    ],
)
def test_countdown(trajectory, text, reward):
    assert score(countdown, trajectory(text, nums=[2, 5, 7], target=25), format_score=0.1) == reward


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think>\n<answer>b</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("x <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> x", 0.0),
        ("<think>a</think> x <answer>b</answer>", 0.0),
        ("<think>a<think></think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("", 0.0),
    ],
)
def test_format(trajectory, text, reward):
    assert score(format_tags, trajectory(text), tags=["think", "answer"]) == reward


@pytest.mark.parametrize(
    ("text", "opening", "reward"),
    [
        ("a</think>\n<answer>b</answer>", "<|im_start|>assistant\n<think>\n", 1.0),
        ("<think>a</think>\n<answer>b</answer>", "<|im_start|>assistant\n<think>\n", 0.0),  # opened twice
        ("a</think>\n<answer>b</answer>", "<|im_start|>assistant\n", 0.0),
        ("a</answer>", "<answer>", 0.0),  # the first tag only
    ],
)
def test_format_counts_the_tag_that_the_template_opened(trajectory, text, opening, reward):
    t = trajectory(text)
    t = dataclasses.replace(t, prompt=dataclasses.replace(t.prompt, opening=opening))
    assert score(format_tags, t, tags=["think", "answer"]) == reward


def test_format_needs_a_list(trajectory):
    with pytest.raises(ConfigError, match="list of tag names"):
        score(format_tags, trajectory("x"), tags="think")


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{4} then \boxed{5}", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{4} then \boxed{5", "4"),
        (r"\boxed{5", None),
        (r"\fbox{6}", "6"),
        (r"\boxed 5", None),
        ("5", None),
        ("\\boxed{" * 1000, None),
        (r"\boxed{a\}b}", r"a\}b"),
        (r"\boxed{\\}", r"\\"),
        ("\\boxed{" * 100_000 + "5}", "5"),
    ],
)
def test_last_boxed(text, inside):
    assert last_boxed(text) == inside


@pytest.mark.parametrize(
    "texts",
    [
        ("0.5", ".5", "1/2", r"\frac{1}{2}", r"\dfrac12", r"\tfrac{2}{4}", "$0.5$", " 1 / 2 ", "0.50"),
        ("-1/2", r"-\frac{1}{2}", "-.5"),
        ("1,234", "$1234", "1234.0", "1234."),
        ("x + 1", "x+1", "$x +1$"),
    ],
)
def test_equal_answers_are_one_vote(texts):
    assert len({comparable(text) for text in texts}) == 1


def test_answers_that_differ_are_several_votes():
    assert (
        len({comparable(text) for text in ("1/2", "1/0", "2/1", r"\frac{1}{x}", "12", "x", "X", "1.2.3")})
        == 8
    )
    assert comparable("9" * 5000) == "9" * 5000  # bounded


@pytest.mark.parametrize(
    ("function", "options", "text", "vote"),
    [
        ("math", {}, r"#### 7 \boxed{3}, no: \boxed{\frac{1}{2}}", "1/2"),
        ("math", {}, "#### 7", None),
        ("gsm8k", {}, "#### 1,200.", "1200"),
        ("gsm8k", {}, "it is 5", None),
        ("gsm8k", {"method": "flexible"}, "it is 5", "5"),
        ("exact_match", {"extract": "last_line", "ignore_case": True}, "a\nBlue", "blue"),
        ("countdown", {}, "<answer>1 + 2</answer>", "1 + 2"),
        ("format", {"tags": ["a"]}, r"\boxed{\frac12}", "1/2"),  # reads none: as anybody's is found
    ],
)
def test_a_vote_is_what_the_scorer_reads(trajectory, function, options, text, vote):
    scorer = Scorer(RewardConfig(functions=(RewardFunctionConfig(function, options=options),)))
    assert scorer.answer(trajectory(text)) == vote
    scorer.close()


MATH_CASES = [
    (r"\boxed{4} no, \boxed{5}", "5", 1.0),
    (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
    (r"\boxed{\sqrt{8}}", r"the answer is \boxed{2\sqrt{2}}", 1.0),
    (r"\boxed{\{1,2\}}", r"$\{2,1\}$", 1.0),
    (r"\boxed{[1,2)}", "[1,2]", 0.0),
    (r"\boxed{204.}", "204", 1.0),
    (r"\boxed{0.5.}", "1/2", 1.0),
    (r"\boxed{500}", "5", 0.0),
    (r"\boxed{0.05}", "5", 0.0),
    (r"\boxed{12,34}", "1234", 0.0),
    (r"\boxed{5", "5", 0.0),
    ("5", "5", 0.0),
    # math-verify's own leniencies, kept and documented
    (r"\boxed{5\%}", "5", 1.0),
    (r"\boxed{x=5}", "5", 1.0),
]


def run_scorer(trajectories, *functions):
    """Each trajectory scored by one Scorer, with time enough for a slow machine."""
    scorer = Scorer(RewardConfig(functions=functions, timeout_seconds=400.0))

    async def run():
        return [await scorer.score(trajectory) for trajectory in trajectories]

    try:
        return asyncio.run(run())
    finally:
        scorer.close()


@pytest.mark.slow
def test_math_in_its_process(trajectory):
    pytest.importorskip("math_verify")
    trajectories = [trajectory(text, answer=answer) for text, answer, _ in MATH_CASES]
    scored = run_scorer(trajectories, RewardFunctionConfig("math"))
    for (text, answer, reward), t in zip(MATH_CASES, scored, strict=True):
        assert t.scores == {"math": reward, "math/timeout": 0.0}, (text, answer)


@pytest.mark.slow
def test_reasoning_gym_scores_its_own_entries():
    pytest.importorskip("reasoning_gym")
    from rondo.config.schema import TaskSourceConfig
    from rondo.data.sources import open_source
    from tests.rewards.conftest import make_trajectory

    row = open_source(TaskSourceConfig(type="reasoning_gym", task="chain_sum", size=1)).rows[0]
    fields = {key: value for key, value in row.items() if key != "prompt"}
    texts = [row["answer"], f"<answer>{row['answer']}</answer>", "no"]
    state = random.getstate()
    trajectories = [make_trajectory(text, **fields) for text in texts]
    scored = run_scorer(trajectories, RewardFunctionConfig("reasoning_gym", options={"extract": "tag"}))
    assert [t.reward for t in scored][1:] == [1.0, 0.0]
    assert scored[0].reward == 0.0
    assert random.getstate() == state


@pytest.mark.parametrize(
    ("length", "reward"),
    [
        (0, 0.0),
        (59, 0.0),
        (60, 0.0),
        (61, -1 / 40),
        (80, -0.5),
        (99, -39 / 40),
        (100, -1.0),
        (101, -1.0),
        (500, -1.0),
    ],
)
def test_overlong_at_its_boundaries(trajectory, length, reward):
    short = trajectory("x")
    row = dataclasses.replace(short.rows[0], response_ids=np.zeros(length, np.int32))
    long = dataclasses.replace(short, rows=(row,))
    assert overlong(long.prompt, long, max_tokens=100, buffer=40) == reward


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_overlong_without_a_slope(trajectory, buffer):
    with pytest.raises(ConfigError, match=f"got buffer={buffer}, max_tokens=100"):
        overlong(trajectory("x").prompt, trajectory("x"), max_tokens=100, buffer=buffer)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("because it is right: [[A]]", 1.0),  # the reference's: label A
        ("because it is right: [[B]]", -1.0),
        ("because it is right", -1.0),
        ("[[A]], and not [[B]]", -1.0),
        ("[[B]]? " + "-" * 80 + "[[A]]", 1.0),  # what is before the last characters does not count
        ("[[A]]" + "-" * 76, -1.0),
    ],
)
def test_a_verdict_is_in_the_last_characters(trajectory, text, value):
    for answer in ("A", "[[A]]"):
        assert score(verdict, trajectory(text, answer=answer)) == value
    with pytest.raises(DataError, match=r"none of \[\[A\]\]"):
        score(verdict, trajectory(text, answer="C"))


@pytest.mark.parametrize(
    ("said", "errors", "text", "turns", "value"),
    [
        (["1", "2", "3"], 1, "<answer>a</answer>" * 3, 5, 0.25 + 0.4),  # the reference's two
        ([], 0, "<answer>a</answer>", 1, 0.5),
        (["1", "an ERROR came", "3", "4"], 0, "<answer>a</answer>", 5, 0.25),
        (["1"], 0, "<answer>a</answer><answer>", 5, 1.0),
        (["1"], 0, "no answer", 5, 1.0),
        (["1"], 0, "<answer>a</answer>" * 9, 2, 1.0),
        ([], 2, "<answer>a</answer>", 0, 2.0),
    ],
)
def test_how_ill_tools_were_used(trajectory, said, errors, text, turns, value):
    made = trajectory(text)
    row = dataclasses.replace(made.rows[-1], turns=tuple(Turn("policy", i, i + 1) for i in range(turns)))
    results = tuple(ToolResult(one, {}, "python") for one in said)
    made = dataclasses.replace(made, rows=(row,), tool_results=results, tool_errors=errors)
    assert score(tool_use, made) == pytest.approx(value)
    if text == "no answer":
        assert score(tool_use, made, opening="no", closing=None) == 0.0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("overlong", {"max_tokens": 4, "buffer": 5}),
        ("format", {"tags": []}),
        ("regex", {"pattern": "("}),
        ("verdict", {"window": 0}),
        ("recall", {"k": 0}),
    ],
)
def test_options_are_looked_at_before_a_run(name, options):
    (function,) = load_functions([RewardFunctionConfig(name=name, options=options)])
    with pytest.raises(ConfigError):
        function.marks.check(**function.options)
