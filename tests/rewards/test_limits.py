"""What a response costs the scorer's process is its own doing, and a 0; the clock and the row are not."""

from __future__ import annotations

import asyncio

import pytest

from rondo.config.schema import RewardConfig, RewardFunctionConfig
from rondo.core.errors import RewardError
from rondo.rewards import Scorer, accuracy_score, execution
from tests.messages import full_text
from tests.rewards.conftest import make_trajectory

FUNCTIONS = """
import time
from rondo.rewards import reward_function

def deeper():
    return deeper()

DOES = {
    "burn": lambda: 9 ** 9 ** 9 ** 9,
    "swell": lambda: bytearray(1 << 60),
    "dive": deeper,
    "sleep": lambda: time.sleep(3600),
}

def read(prompt, **options):
    DOES.get(prompt.fields["row"], bool)()

@reward_function(run_in="process", reference=read)
def limited(prompt, trajectory):
    DOES.get(trajectory.text, bool)()
    return float(trajectory.text == "right")

@reward_function(run_in="process")
def users(prompt, trajectory):
    return limited(prompt, trajectory)
"""
SPENT, RIGHT = {"limited": 0.0, "limited/timeout": 1.0}, {"limited": 1.0, "limited/timeout": 0.0}
NO_FAILURES = {"reward/errors": 0.0, "reward/timeouts": 0.0, "reward/retries": 0.0}


@pytest.fixture
def score(tmp_path, monkeypatch):
    """Scores trajectories one after the other: (scored, stats, processes that are left)."""
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)

    def scored(function, *trajectories, timeout_seconds=400.0, cpu_seconds=1.0):
        monkeypatch.setattr(execution, "_CPU_SHARE", cpu_seconds / timeout_seconds)
        name = function if isinstance(function, RewardFunctionConfig) else f"{path}:{function}"
        config = name if name is function else RewardFunctionConfig(name)
        scorer = Scorer(RewardConfig((config,), timeout_seconds=timeout_seconds))

        async def run():
            return [await scorer.score(one) for one in trajectories]

        try:
            found = asyncio.run(run())
            (pool,) = scorer._pools.values()
            left = [one for one in pool.processes if one is not None and not one.ended]
            return found, scorer.stats().sums, len(left)
        finally:
            scorer.close()

    return scored


def responses(*texts, row="", **fields):
    return [make_trajectory(text, number, row=row, **fields) for number, text in enumerate(texts)]


@pytest.mark.slow
def test_what_a_response_spends_is_a_zero_with_a_name(score):
    """Processor time, memory, stack; and a new process serves what comes after."""
    found, counts, processes = score("limited", *responses("right", "burn", "right", "swell", "dive", "no"))
    no = {"limited": 0.0, "limited/timeout": 0.0}
    assert [one.scores for one in found] == [RIGHT, SPENT, RIGHT, SPENT, SPENT, no]
    assert [one.reward for one in found] == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert {one.outcome for one in found} == {"scored"}
    assert (counts, processes) == (NO_FAILURES, 1)


def test_the_clock_is_nobodys_doing(score):
    """It runs while a process sleeps, which costs no processor time."""
    found, counts, processes = score("limited", *responses("sleep"), timeout_seconds=1.0, cpu_seconds=0.9)
    assert [one.outcome for one in found] == ["reward_timeout"]
    assert (counts["reward/timeouts"], processes) == (1.0, 0)


@pytest.mark.slow
def test_a_users_function_has_the_clock_alone(score):
    (spent, swollen), counts, _ = score("users", *responses("burn", "swell"), timeout_seconds=2.0)
    assert (spent.outcome, swollen.outcome) == ("reward_timeout", "reward_timeout")
    assert counts["reward/timeouts"] == 2.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("burn", "reading its row, without any response, took more than 1 s of processor time"),
        ("swell", r"reading its row raised MemoryError\("),
        ("dive", r"reading its row raised RecursionError\("),
    ],
)
def test_what_a_row_spends_is_an_error_that_names_it(score, row, said):
    with pytest.raises(RewardError, match=f"reward function limited: prompt s/0/0: {said}"):
        score("limited", *responses("right", row=row))


def test_the_score_of_limits_judges_nothing(tmp_path):
    """Beside it the only score is the accuracy; several are several."""
    scorer = Scorer(RewardConfig((RewardFunctionConfig("regex", options={"pattern": "a"}),)))
    assert (scorer.names, scorer.accuracy) == (("regex", "regex/timeout"), "regex")
    scorer.close()
    one = RewardFunctionConfig("regex", options={"pattern": "a"})
    assert accuracy_score(RewardConfig((one, one))) is None
    assert accuracy_score(RewardConfig((one, one), accuracy="regex_2")) == "regex_2"
    assert accuracy_score(RewardConfig((one,), accuracy="regex/timeout")) == "regex/timeout"


MATH = RewardFunctionConfig("math")


@pytest.mark.slow
@pytest.mark.parametrize(
    "busy",
    [
        ("9^{9^{9}}", "100000000!", r"\frac{1}{" * 60 + "2" + "}" * 60),
        (r"\sum_{n=1}^{10^9} n^{n}", "x^" * 100 + "x", r"e^{e^{e^{e^{e}}}}"),
    ],
    ids=["numbers", "others"],
)
def test_math_is_not_kept_busy_by_an_answer(score, busy):
    pytest.importorskip("math_verify")
    texts = [rf"\boxed{{{each}}}" for each in ("5", *busy, "5")]
    found, counts, processes = score(MATH, *responses(*texts, answer="5"), cpu_seconds=2.0)
    right, spent = {"math": 1.0, "math/timeout": 0.0}, {"math": 0.0, "math/timeout": 1.0}
    assert [one.scores for one in found] == [right, spent, spent, spent, right]
    assert {one.outcome for one in found} == {"scored"}
    assert (counts, processes) == (NO_FAILURES, 1)


@pytest.mark.slow
def test_a_pattern_that_backtracks_without_end_is_not_matched(score):
    function = RewardFunctionConfig("regex", options={"pattern": "(a+)+b"})
    found, counts, _ = score(function, *responses("aab", "a" * 40, "c"))
    assert [one.scores["regex"] for one in found] == [1.0, 0.0, 0.0]
    assert [one.scores["regex/timeout"] for one in found] == [0.0, 1.0, 0.0]
    assert counts == NO_FAILURES


@pytest.mark.slow
def test_a_rows_answer_that_math_cannot_evaluate_names_the_row(score):
    """It is parsed in no time; compared with whatever else, it would be every response's timeout."""
    pytest.importorskip("math_verify")
    with pytest.raises(RewardError, match=full_text("2 s of processor time. Write its answer")):
        score(MATH, *responses(r"\boxed{5}", answer="9^{9^{9}}"), cpu_seconds=2.0)


@pytest.mark.slow
def test_reasoning_gym_is_not_kept_busy_by_an_answer_nor_does_one_stop_the_run(score):
    gym = pytest.importorskip("reasoning_gym")
    given = []
    for task, texts in {"prime_factorization": ("abc", "9" * 5000), "countdown": ("9**9**9**9",)}.items():
        entry = gym.create_dataset(task, size=1, seed=1)[0]
        given += responses(entry["answer"], *texts, task=task, entry=entry)
    found, counts, _ = score(RewardFunctionConfig("reasoning_gym"), *given, cpu_seconds=2.0)
    assert [one.scores["reasoning_gym"] for one in found] == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert [one.scores["reasoning_gym/timeout"] for one in found] == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert counts == NO_FAILURES


@pytest.mark.slow
def test_a_task_that_raises_at_its_own_answer_is_an_error(score):
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset("prime_factorization", size=1, seed=1)[0] | {"answer": "abc"}
    with pytest.raises(RewardError, match=full_text("reward function reasoning_gym")):
        score(RewardFunctionConfig("reasoning_gym"), *responses("x", task="prime_factorization", entry=entry))
