"""Reward functions in TRL's form run as they are: with what TRL would give them, for what they return
there.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rondo.config.schema import RewardConfig, RewardFunctionConfig, RewardModelConfig
from rondo.core.columns import SCORE
from rondo.core.errors import ConfigError, RewardError
from rondo.core.types import Trajectory
from rondo.data.rows import rows_from_trajectories
from rondo.rewards import Scorer, score_names
from tests.messages import full_text
from tests.rewards.conftest import make_trajectory

# As TRL's documentation has them: of texts, of messages, with columns, of some rows only, as a coroutine.
FUNCTIONS = '''
from __future__ import annotations
import asyncio, json, os, re

def length(completions, **kwargs):
    return [float(len(c)) for c in completions]

def same_format(completions, **kwargs):
    contents = [c[0]["content"] for c in completions]
    return [1.0 if re.match(r"^<think>.*</think>", x) else 0.0 for x in contents]

def right(prompts, completions, answer, **kwargs):
    return [float(c.endswith(a)) for p, c, a in zip(prompts, completions, answer, strict=True)]

def only_math(prompts, completions, task, **kwargs):
    return [float(len(c)) if t == "math" else None for c, t in zip(completions, task)]

def odd_is_none(completions, **kwargs):
    return [None if i % 2 else 2.0 for i in range(len(completions))]

def never(completions, **kwargs):
    return [None] * len(completions)

async def slow(prompts, completions, completion_ids, **kwargs):
    await asyncio.sleep(0.01)
    return [len(ids) / 10 for ids in completion_ids]

class Rewarding:
    async def __call__(self, completions, scale=1.0, **kwargs):
        return [scale * len(c) for c in completions]

rewarding = Rewarding()

def scaled(completions, *, scale: float = 1.0, words: list[str] = ()):
    return [scale * len(c) + len(words) for c in completions]

def told(prompts, completions, completion_ids, **kwargs):
    lacking = ("trainer_state", "log_extra", "log_metric")
    shown = {name: value for name, value in kwargs.items() if name not in lacking}
    told.last = (prompts, completions, completion_ids, shown)
    return [0.0] * len(prompts)

def short(completions, **kwargs):
    return [1.0]

def raises(completions, **kwargs):
    raise KeyError("solution")

def nan(completions, **kwargs):
    return [float("nan")] * len(completions)

def by_step(completions, **kwargs):
    return [1.0 if kwargs["trainer_state"].global_step > 10 else 0.0 for _ in completions]

def by_step_if_any(completions, **kwargs):
    state = kwargs.get("trainer_state")
    return [1.0 if state and state.global_step > 10 else 0.0 for _ in completions]

def logs(completions, **kwargs):
    kwargs["log_metric"]("length", 3.0)
    return [0.0] * len(completions)

def reads_prompts(prompts, completions, **kwargs):
    return [float(len(p)) for p in prompts]

def may_log(completions, log_extra=None, log_metric=None, **kwargs):
    if log_metric:
        log_metric("length", 3.0)
    return [float(log_extra is None and log_metric is None) for _ in completions]

def dies(completions, **kwargs):
    if any("die" in c for c in completions):
        os._exit(3)
    return [1.0 for _ in completions]

def own(prompt, trajectory):
    return 10.0
'''  # fmt: skip


@pytest.fixture
def scorer(path: Path) -> Iterator[Callable[..., Scorer]]:
    made: list[Scorer] = []

    def make(*functions: str | RewardFunctionConfig, **config: Any) -> Scorer:
        configs = [f if isinstance(f, RewardFunctionConfig) else named(path, f) for f in functions]
        made.append(Scorer(RewardConfig(functions=tuple(configs), **config)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def named(path: Path, name: str, weight: float = 1.0, **options: Any) -> RewardFunctionConfig:
    return RewardFunctionConfig(f"{path}:{name}", weight, options=options)


def by_hand(path: Path) -> Any:
    """The module, as a program of TRL's would import it."""
    spec = importlib.util.spec_from_file_location("theirs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts(*answers: str, asked: str = "How many?", **fields: Any) -> list[Trajectory]:
    """Answers to a row whose prompt is a text; by the template, the model saw messages all the same."""
    made = [make_trajectory(answer, i, **fields) for i, answer in enumerate(answers)]
    prompt = replace(made[0].prompt, text=asked, messages=({"role": "user", "content": asked},))
    return [replace(t, prompt=prompt) for t in made]


def chats(*answers: str, **fields: Any) -> list[Trajectory]:
    """Answers to a row whose prompt is messages."""
    made = [make_trajectory(answer, i, **fields) for i, answer in enumerate(answers)]
    prompt = replace(made[0].prompt, messages=({"role": "user", "content": "How many?"},))
    return [replace(t, prompt=prompt) for t in made]


def scored(scorer: Scorer, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    async def main() -> list[Trajectory]:
        return await scorer.score_group([await scorer.score(t) for t in trajectories])

    return asyncio.run(main())


# ---- what it is given ----


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_score_is_what_the_function_gives_by_hand(path: Path, scorer: Any, isolation: str) -> None:
    theirs, answers = by_hand(path), ["4", "it is 4", "no", "<think>x</think>4"]
    s = scorer("length", named(path, "right", 0.5), named(path, "slow", 3.0), isolation=isolation)
    assert s.names == ("length", "right", "slow")
    group = scored(s, texts(*answers, answer="4"))
    expected = {
        "length": theirs.length(completions=answers),
        "right": theirs.right(prompts=["How many?"] * 4, completions=answers, answer=["4"] * 4),
        "slow": asyncio.run(theirs.slow(prompts=[""] * 4, completions=answers, completion_ids=[[0]] * 4)),
    }
    for name, scores in expected.items():
        assert [t.scores[name] for t in group] == scores
    assert [t.reward for t in group] == [
        a + 0.5 * b + 3.0 * c for a, b, c in zip(*expected.values(), strict=True)
    ]
    s = scorer("same_format", isolation=isolation)
    said = [[{"role": "assistant", "content": answer}] for answer in answers]
    assert [t.reward for t in scored(s, chats(*answers))] == theirs.same_format(completions=said)


def test_text_rows_get_texts_and_chat_rows_messages_with_columns_repeated(path: Path, scorer: Any) -> None:
    s = scorer("told")
    told = s._functions[0].function.__wrapped__
    fields = {"answer": "4", "numbers": [1, 3], "prompt": "taken out", "completion": "taken out"}
    scored(s, texts("4", "no", **fields))
    columns = {"answer": ["4", "4"], "numbers": [[1, 3], [1, 3]]}
    assert told.last == (["How many?"] * 2, ["4", "no"], [[0], [0]], columns)
    scored(s, chats("4", "no", **fields))
    assert told.last == (
        [[{"role": "user", "content": "How many?"}]] * 2,
        [[{"role": "assistant", "content": "4"}], [{"role": "assistant", "content": "no"}]],
        [[0], [0]],
        columns,
    )
    scored(s, [t for t in texts("4", "failed", "no") if t.text != "failed"])  # called once, for who is left
    assert told.last[1] == ["4", "no"]


def test_options_of_the_recipe_stand_in_the_place_of_columns(path: Path, scorer: Any) -> None:
    group = scored(scorer(named(path, "scaled", scale=2.0, words=["a", "b"])), texts("abc", "", scale=7))
    assert [t.reward for t in group] == [8.0, 2.0]
    group = scored(scorer(named(path, "rewarding", scale=2.0)), texts("abc"))
    assert [t.reward for t in group] == [6.0]
    with pytest.raises(ConfigError, match=full_text("'scale' of scaled must be float, got str")):
        scorer(named(path, "scaled", scale="two"))
    with pytest.raises(ConfigError, match=full_text("scaled has no option 'scael'; did you")):
        scorer(named(path, "scaled", scael=2.0))
    with pytest.raises(ConfigError, match=full_text("its option completions has the name of")):
        scorer(named(path, "length", completions=2.0))


def test_a_column_that_the_row_lacks_stops_whatever_the_policy(scorer: Any) -> None:
    for missing in (texts("4", question="?"), texts("4")):
        with pytest.raises(RewardError, match="needs column 'answer'; the row has "):
            scored(scorer("right", on_error="drop"), missing)


# ---- what it returns ----


def test_none_leaves_a_function_out_of_the_sum(path: Path, scorer: Any) -> None:
    s = scorer(named(path, "odd_is_none", 0.5), named(path, "length", 0.25), "own")
    group = scored(s, texts("abcd", "ab", ""))
    assert [dict(t.scores) for t in group] == [
        {"own": 10.0, "odd_is_none": 2.0, "length": 4.0},
        {"own": 10.0, "length": 2.0},
        {"own": 10.0, "odd_is_none": 2.0, "length": 0.0},
    ]
    assert [t.reward for t in group] == [12.0, 10.5, 11.0]
    columns = {SCORE(name): name for name in s.names}
    rows = rows_from_trajectories(group, columns)
    assert np.isnan(rows.scalars(SCORE("odd_is_none"))).tolist() == [False, True, False]
    assert rows.scalars("reward").tolist() == [12.0, 10.5, 11.0]


def test_functions_of_tasks_share_a_batch_by_column(path: Path, scorer: Any) -> None:
    s = scorer("only_math", "length")
    assert [t.reward for t in scored(s, texts("abc", task="math"))] == [6.0]
    assert [t.reward for t in scored(s, texts("abc", task="code"))] == [3.0]


@pytest.mark.parametrize("functions", [("odd_is_none",), ("odd_is_none", "never")])
def test_an_answer_to_which_none_applies_has_no_reward(scorer: Any, functions: tuple[str, ...]) -> None:
    said = "odd_is_none: ValueError: it returned None, as do all that score this source"
    if len(functions) == 1:
        said = "odd_is_none: ValueError: it returned None, and it is what says right or wrong"
    with pytest.raises(RewardError, match=said):
        scored(scorer(*functions), texts("a", "b", "c"))
    s = scorer(*functions, on_error="drop")
    group = scored(s, texts("a", "b", "c"))
    assert [t.outcome for t in group] == ["scored", "reward_error", "scored"]
    assert [t.reward for t in group if t.outcome == "scored"] == [2.0, 2.0]
    assert math.isnan(group[1].reward)
    assert group[1].failure.startswith(said)
    assert s.stats().sums["reward/errors"] == 1


def test_what_says_right_or_wrong_says_it_of_all(scorer: Any) -> None:
    s = scorer("odd_is_none", "length", accuracy="odd_is_none", on_error="drop")
    assert [t.outcome for t in scored(s, texts("a", "b"))] == ["scored", "reward_error"]
    s = scorer("odd_is_none", "length", accuracy="length")
    assert [t.reward for t in scored(s, texts("a", "b"))] == [3.0, 1.0]


def test_a_reward_model_may_be_all_that_applies(scorer: Any) -> None:
    s = scorer("never", "odd_is_none", models=(RewardModelConfig(path="m"),))
    assert [t.reward for t in scored(s, texts("a", "b"))] == [2.0, 0.0]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("raises", "KeyError: 'solution'"),
        ("short", "must return 2 scores, one per trajectory"),
        ("nan", "score must be a finite number, got nan"),
    ],
)
def test_a_failure_is_never_a_zero(scorer: Any, function: str, said: str) -> None:
    with pytest.raises(RewardError, match=said):
        scored(scorer(function), texts("a", "b"))
    group = scored(scorer(function, "length", on_error="drop"), texts("a", "b"))
    assert [t.outcome for t in group] == ["reward_error"] * 2


def test_a_process_that_dies_is_one_failure(scorer: Any) -> None:
    s = scorer("dies", isolation="process", on_error="drop")
    assert [t.outcome for t in scored(s, texts("a", "die"))] == ["reward_error"] * 2
    assert [t.reward for t in scored(s, texts("a", "b"))] == [1.0, 1.0]


# ---- what there is not here ----


@pytest.mark.parametrize(
    ("signature", "lacking"),
    [
        ("(completions, trainer_state, **kwargs)", "trainer_state=None"),
        ("(completions, trainer_state=None, **kwargs)", "trainer_state=None"),
        ("(prompts, completions, answer, environments, scale=2)", "environments=None"),
        ("(completions, answer, log_extra, log_metric, **kwargs)", "log_extra=None, log_metric=None"),
    ],
)
def test_what_is_not_here_is_refused_by_name_and_the_lines_shown_run(
    tmp_path: Path, signature: str, lacking: str
) -> None:
    file = tmp_path / "theirs.py"
    file.write_text(f"def theirs{signature}:\n    return [1]\n")
    with pytest.raises(ConfigError, match=r"theirs.py:theirs\(.* is written for TRL") as caught:
        Scorer(RewardConfig((RewardFunctionConfig(f"{file}:theirs"),)))
    message = str(caught.value)
    for name in lacking.replace("=None", "").split(", "):
        assert f"{name} (" in message
    shown = "def score" + message.partition("\ndef score")[2]
    assert f", {lacking})[0]" in shown
    # The lines that it shows do what TRL does, for both kinds of rows.
    given: dict[str, Any] = {}
    names: dict[str, Any] = {"theirs": lambda **arguments: given.update(arguments) or [0.25]}
    exec(shown, names)
    (text,), (chat,) = texts("four", answer="4"), chats("four", answer="4")
    rest = dict.fromkeys(lacking.replace("=None", "").split(", "), None) | {"answer": ["4"]}
    if "**kwargs" in signature:
        rest["completion_ids"] = [[0]]
    assert names["score"](text.prompt, text) == 0.25
    assert given == {"prompts": ["How many?"], "completions": ["four"], **rest}
    assert names["score"](chat.prompt, chat) == 0.25
    assert given == {
        "prompts": [[{"role": "user", "content": "How many?"}]],
        "completions": [[{"role": "assistant", "content": "four"}]],
        **rest,
    }
    # And as a reward function, with the original beside it.
    (tmp_path / "around.py").write_text(f"{file.read_text()}\n{shown}\n")
    s = Scorer(RewardConfig((RewardFunctionConfig(f"{tmp_path / 'around.py'}:score", 0.5),)))
    assert [t.reward for t in scored(s, texts("four", "no", answer="4"))] == [0.5, 0.5]
    s.close()


@pytest.mark.parametrize(
    ("signature", "said"),
    [
        ("(prompt, completions)", "which gives no prompt: there a function has `completions`"),
        ("(completions, /, **kwargs)", "which gives arguments by name, and completions has none"),
        ("(completion, completions)", "which gives no completion: there"),
    ],
)
def test_what_is_not_trls_form_is_never_called(tmp_path: Path, signature: str, said: str) -> None:
    file = tmp_path / "theirs.py"
    file.write_text(f"def theirs{signature}:\n    return [1]\n")
    with pytest.raises(ConfigError, match=re.escape(said)):
        Scorer(RewardConfig((RewardFunctionConfig(f"{file}:theirs"),)))


def test_a_mark_of_groups_is_of_ours(tmp_path: Path) -> None:
    file = tmp_path / "theirs.py"
    file.write_text(
        "from rondo.rewards import reward_function\n\n"
        "@reward_function(group=True)\ndef theirs(completions):\n    return completions\n"
    )
    with pytest.raises(ConfigError, match="leave out the mark group=True"):
        Scorer(RewardConfig((RewardFunctionConfig(f"{file}:theirs"),)))


@pytest.mark.parametrize(
    ("function", "name"),
    [("by_step", "trainer_state"), ("by_step_if_any", "trainer_state"), ("logs", "log_metric")],
)
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_what_is_asked_of_kwargs_and_not_here_stops_the_run(
    scorer: Any, function: str, name: str, isolation: str
) -> None:
    with pytest.raises(RewardError, match=f"{name} of TRL is not given here: "):
        scored(scorer(function, on_error="drop", isolation=isolation), texts("a", "b"))


def test_logs_may_be_left_out_where_they_have_a_default(scorer: Any) -> None:
    assert [t.reward for t in scored(scorer("may_log"), texts("a", "b"))] == [1.0, 1.0]


def test_prompts_that_are_tokens_alone_have_no_text(scorer: Any) -> None:
    bare = [make_trajectory(text, i) for i, text in enumerate(["ab", "c"])]
    assert [t.reward for t in scored(scorer("length"), bare)] == [2.0, 1.0]
    with pytest.raises(RewardError, match=full_text("prompts of TRL is not given here")):
        scored(scorer("reads_prompts"), bare)


def test_score_names_are_the_functions(path: Path) -> None:
    config = RewardConfig((named(path, "length"), named(path, "odd_is_none")))
    assert score_names(config, ["s"]) == ("length", "odd_is_none")
