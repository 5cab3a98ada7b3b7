"""What a reward function reads of a row: known before it is called, and given by name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rondo.config.schema import RewardConfig, RewardFunctionConfig
from rondo.core.errors import ConfigError, DataError, RewardError
from rondo.rewards import RewardFunction, Scorer, check_names, load_functions
from tests.messages import full_text
from tests.rewards.conftest import make_trajectory

FUNCTIONS = """
from rondo.rewards import reward_function

def third(prompt, trajectory, answer): return float(trajectory.text == answer)
def both(prompt, trajectory, answer, level, *, weight=1.0):
    return weight * level * (trajectory.text == answer)
async def waits(prompt, trajectory, answer): return float(trajectory.text == answer)
def seeded(prompt, trajectory, seed, answer): return float(seed > 0 and trajectory.text == answer)
@reward_function(group=True)
def of_all(trajectories, answer): return [float(t.text == answer) for t in trajectories]
@reward_function(columns=["reward_model.ground_truth"])
def marked(prompt, trajectory): return float(prompt.column("reward_model.ground_truth") == trajectory.text)
def named_a(answer, trajectory): return 1.0
def named_b(question, answer): return 1.0
def swapped(trajectory, prompt): return 1.0
def unknown(a, b): return 1.0
@reward_function(group=True)
def of_one(prompt): return [1.0]
def option(prompt, trajectory, *, answer="x"): return 1.0
def theirs(completions, answer, level=None): return [float(c == answer[0]) for c in completions]
"""


@pytest.fixture
def load(tmp_path: Path) -> Any:
    (tmp_path / "own.py").write_text(FUNCTIONS)

    def loaded(name: str, **options: Any) -> RewardFunction:
        own = f"{tmp_path / 'own.py'}:{name}" if f"def {name}(" in FUNCTIONS else name
        (function,) = load_functions([RewardFunctionConfig(own, options=options)])
        return function

    return loaded


def score(function: RewardFunction, text: str, isolation: str = "thread", **fields: Any) -> float:
    async def scored() -> float:
        scorer = Scorer(RewardConfig((function.config,), isolation=isolation))  # type: ignore[arg-type]
        try:
            one = await scorer.score(make_trajectory(text, **fields))
            return (await scorer.score_group([one]))[0].reward
        finally:
            scorer.close()

    return asyncio.run(scored())


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("name", ["third", "waits", "seeded", "of_all"])
def test_a_parameter_is_given_the_column_of_its_name(load: Any, name: str, isolation: str) -> None:
    function = load(name)
    assert (function.columns, function.handed) == (("answer",), ("answer",))
    assert score(function, "7", isolation, answer="7") == 1.0
    assert score(function, "7", isolation, answer="8") == 0.0


def test_an_option_stands_in_the_place_of_a_column(load: Any) -> None:
    assert load("both").handed == ("answer", "level")
    given = load("both", answer="5", weight=2.0)
    assert given.handed == ("level",)
    assert score(given, "5", answer="7", level=3) == 6.0


def test_a_column_inside_another_one(load: Any) -> None:
    marked = load("marked")
    assert marked.columns == ("reward_model.ground_truth",)
    assert score(marked, "7", reward_model={"ground_truth": "7"}) == 1.0
    assert score(marked, "7", reward_model='{"ground_truth": "7"}') == 1.0  # as JSON, too
    assert score(marked, "7", **{"reward_model.ground_truth": "7"}) == 1.0
    gsm8k = load("gsm8k", answer_key="reward_model.ground_truth")
    assert score(gsm8k, "#### 7", reward_model={"ground_truth": "7"}) == 1.0
    with pytest.raises(DataError, match=r"reads column 'reward_model\.ground"):
        gsm8k.check_row(make_trajectory("", reward_model={"ground": "7"}).prompt)


@pytest.mark.parametrize(
    ("name", "options", "right", "wrong"),
    [
        ("gsm8k", {}, {"answer": "#### 7"}, [{}, {"answer": None}, {"answer": "seven"}]),
        ("exact_match", {"answer_key": "a"}, {"a": ["x"]}, [{"answer": "x"}, {"a": None}]),
        ("math", {}, {"answer": "7"}, [{"answer": None}]),
        ("countdown", {}, {"nums": [1, 2], "target": 3}, [{"nums": [1]}, {"nums": ["a"], "target": 3}]),
        ("verdict", {}, {"answer": "A"}, [{"answer": "C"}, {}]),
        ("reasoning_gym", {}, {"task": "t", "entry": {}}, [{"task": "t"}]),
        ("recall", {}, {"gold": ["p"]}, [{"gold": []}, {}]),
        ("code", {}, {"cases": {"inputs": ["1"], "outputs": ["1"]}}, [{"cases": None}]),
        ("third", {}, {"answer": "7"}, [{"answer": None}, {"anser": "7"}]),
        ("theirs", {}, {"answer": None}, [{"level": 1}]),  # TRL gives nulls
        ("overlong", {"max_tokens": 4, "buffer": 2}, {}, []),
    ],
)
def test_rows_are_judged_without_an_answer_to_them(
    load: Any, name: str, options: dict[str, Any], right: dict[str, Any], wrong: list[dict[str, Any]]
) -> None:
    function = load(name, **options)
    function.check_row(make_trajectory("", **right).prompt)
    for fields in wrong:
        with pytest.raises(DataError):
            function.check_row(make_trajectory("", **fields).prompt)


def test_the_column_of_the_prompt_is_none_of_the_others(load: Any) -> None:
    with pytest.raises(DataError, match="own column asks is"):
        load("third").check_row(make_trajectory("", level=1).prompt)
    with pytest.raises(DataError, match="is null") as raised:
        load("third").check_row(make_trajectory("", answer=None).prompt)
    assert "prompt.text" not in str(raised.value)


def test_a_row_of_the_programs_own_is_checked_when_it_is_scored(load: Any) -> None:
    with pytest.raises(RewardError, match="reads column 'answer', which is missing"):
        score(load("third"), "7")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("named_a", full_text("named_a(answer, trajectory): answer")),
        ("named_b", full_text("named_b(question, answer): question is a")),
        ("swapped", full_text("trajectory stands in another's place")),
        ("of_one", "prompt stands .* given the trajectories"),
        ("option", full_text("answer='x'): answer is a column")),
    ],
)
def test_names_that_are_columns_and_given_something_else(load: Any, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_names([load(name)], {"d": ("question", "answer", "level")}, {"d": "question"})


@pytest.mark.parametrize("name", ["unknown", "third", "both", "of_all", "theirs", "gsm8k"])
def test_names_that_are_right_or_unknown(load: Any, name: str) -> None:
    columns = {"d": ("prompt", "answer", "level", "method", "trajectory")}
    check_names([load(name)], columns, {"d": "prompt"})


def test_an_option_that_is_set_is_no_column(load: Any) -> None:
    check_names([load("option", answer="y")], {"d": ("prompt", "answer")}, {"d": "prompt"})
    # Of sources that the function does not score.
    (elsewhere,) = load_functions([RewardFunctionConfig(load("option").config.name, sources=("e",))])
    check_names([elsewhere], {"d": ("prompt", "answer")}, {"d": "prompt"})


def test_signals_in_a_thread_work_in_a_process(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import signal\ndef score(prompt, trajectory):\n"
        "    signal.signal(signal.SIGALRM, signal.SIG_DFL)\n    return 1.0\n"
    )
    (function,) = load_functions([RewardFunctionConfig(f"{tmp_path / 'own.py'}:score")])
    with pytest.raises(RewardError, match=r"set reward\.isolation=process, or mark"):
        score(function, "7")
    assert score(function, "7", "process") == 1.0
