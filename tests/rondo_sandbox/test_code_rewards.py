"""Code rewards: what is read of responses and rows; real programs in the sandbox, also ones that cheat."""

from __future__ import annotations

import asyncio
import functools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from rondo.config.schema import RewardConfig, RewardFunctionConfig
from rondo.core.errors import ConfigError, DataError, RewardError, SandboxError
from rondo.rewards import Scorer
from rondo_sandbox import head, runs
from rondo_sandbox.cases import (
    AssertCase,
    CallCase,
    StdinCase,
    last_program,
    read_cases,
    same_output,
    same_result,
)
from rondo_sandbox.code_rewards import code
from tests.rewards.conftest import make_trajectory
from tests.sandboxes import need_sandbox
from tests.trainers.conftest import RECIPE, cli, metrics, weights

ADDS = {"inputs": ["1 2\n", "3 4\n", "5 6\n", "7 8\n"], "outputs": ["3\n", "7", "11 ", "15\n\n"]}
SQUARES = ["assert square(2) == 4", "assert square(3) == 9", "assert square(-3) == 9"]
SUM = "print(sum(map(int, input().split())))"


@functools.cache
def runner() -> asyncio.Runner:
    """One event loop for all tests, and so one sandbox, which is opened once."""
    return asyncio.Runner()


@pytest.fixture(scope="module", autouse=True)
def held() -> Iterator[None]:
    """These tests need something that holds programs."""
    need_sandbox()
    yield
    runner().close()


def block(program: str) -> str:
    return f"I think:\n```python\n{program}\n```\n"


def scored(
    text: str, *, rewarded: Any = ADDS, row: dict[str, Any] | None = None, **options: Any
) -> tuple[float, str]:
    """The reward of a response, and the part that is 1."""
    trajectory = make_trajectory(text, **(row or {"cases": rewarded}))
    scores = runner().run(code(trajectory.prompt, trajectory, **options))
    (part,) = [name for name, value in scores.items() if name != "reward" and value]
    assert set(scores.values()) <= {0.0, 1.0, scores["reward"]}
    return scores["reward"], part


# ---- reading


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nno:\n```py\nx = 2\n\ny = 3\n```", "x = 2\n\ny = 3\n"),
        ("```python\nx = 1\n```\noutput:\n```\n1\n```", "x = 1\n"),  # a marked one goes before
        ("```\nx = 1\n```\n```\nx = 2\n```", "x = 2\n"),
        ("```cpp\nint x;\n```", None),
        ("```python\nx = 1\n```\n```python\nx = 2", "x = 1\n"),  # cut off: not closed
        ("```python\nx = 1", None),
        ("  ```Python\n  x = 1\n  ```", "  x = 1\n"),
        ("```python\nx = 1\n```python\nx = 2\n```", "x = 2\n"),
        ("```python\n```", "\n"),
        ("x = 1", None),
        ("", None),
    ],
)
def test_which_program_counts(text: str, program: str | None) -> None:
    assert last_program(text) == program


def test_cases_in_the_shapes_of_data_sets() -> None:
    def cases(key: str = "cases", **row: Any) -> Any:
        return read_cases(make_trajectory("", **row).prompt, key)

    pairs = [StdinCase("1\n", "2\n"), StdinCase("3\n4", "7")]
    table = {"inputs": ["1\n", ["3", "4"]], "outputs": ["2\n", [7]]}
    assert cases(cases=table) == cases(cases=json.dumps(table)) == pairs
    truth = {"style": "rule", "ground_truth": json.dumps(table)}  # verl's rows
    assert cases("reward_model.ground_truth", reward_model=truth) == pairs
    called = {"fn_name": "f", "inputs": ["[1, 2]\n3", [[4], 5]], "outputs": ["[4]", [6]]}
    assert cases(cases=called) == [CallCase("f", [[1, 2], 3], ([4],)), CallCase("f", [[4], 5], ([6], 6))]
    mbpp = {"test_list": ["assert f(1) == 2", "assert f(2) == 3"], "test_setup_code": "k = 1"}
    assert cases("test_list", **mbpp) == [
        AssertCase("k = 1\nassert f(1) == 2\n"),
        AssertCase("k = 1\nassert f(2) == 3\n"),
    ]
    check = "def check(candidate):\n    assert candidate(1) == 2"
    assert cases("test", test=check, entry_point="f") == [AssertCase(f"{check}\ncheck(f)\n")]
    assert cases(cases={"tests": check, "entry_point": "f"}) == [AssertCase(f"{check}\ncheck(f)\n")]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"tests": ["assert 1"]}, "needs column 'cases', which is missing"),
        ({"cases": {"inputs": ["1"], "outputs": []}}, "lists of one length"),
        ({"cases": {"inputs": [], "outputs": []}}, "not empty"),
        ({"cases": {"inputs": "12", "outputs": "12"}}, "must be lists"),
        ({"cases": {"fn_name": "f", "inputs": ["x"], "outputs": ["1"]}}, r"with fn_name \(f\)"),
        ({"cases": {"tests": []}}, "has no cases that can be run"),
        ({"cases": 7}, "it is 7"),
    ],
)
def test_rows_without_cases(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        read_cases(make_trajectory("", **row).prompt, "cases")


def test_what_is_the_same() -> None:
    assert same_output(" 1  2\r\n3\n\n", "1 2\n3")
    assert not same_output("1 2 3", "1 23")
    assert not same_output("1.0", "1")
    assert same_result("[1, 2.0]", ([1, 2],))
    assert same_result('{"a": null}\n', ([], {"a": None}))
    for text in ("", "1 2", "[" * 10_000, "9" * 10_000, "Infinity"):
        assert not same_result(text, (1,))


# ---- programs


@pytest.mark.parametrize(
    ("program", "reward", "part"),
    [
        (SUM, 1.0, "solved"),
        ("a, b = map(int, input().split())\nprint(a + b if a < 5 else 0)", 0.5, "wrong_answer"),
        ("a, b = map(int, input().split())\nprint(a + b if a > 1 else 1 / 0)", 0.75, "crashed"),
        (f"{SUM}\nraise SystemExit(1)", 0.0, "crashed"),
        (f"{SUM}\nimport os\nos._exit(0)", 0.0, "wrong_answer"),  # what it printed was not written yet
        ("print(", 0.0, "crashed"),
        ("a, b = map(int, input().split())\nwhile a == 3: pass\nprint(a + b)", 0.25, "time_limit"),
        ("bytearray(1 << 30)", 0.0, "memory_limit"),
        ("print('3' * 2_000_000)", 0.0, "wrong_answer"),
        ("import socket; socket.socket()", 0.0, "crashed"),
    ],
)
def test_programs_that_read_and_print(program: str, reward: float, part: str) -> None:
    assert scored(block(program), seconds=1.0, memory_mb=256) == (reward, part)


def test_all_or_nothing_and_the_first_cases_only() -> None:
    three = block("a, b = map(int, input().split())\nprint(a + b if a < 7 else 0)")
    assert scored(three) == (0.75, "wrong_answer")
    assert scored(three, score="all") == (0.0, "wrong_answer")
    assert scored(three, max_cases=3) == (1.0, "solved")
    assert scored(three, max_cases=3, score="all") == (1.0, "solved")
    assert scored("print(3)") == (0.0, "no_code")


def test_functions_that_are_called() -> None:
    cases = {
        "fn_name": "twice",
        "inputs": ['["a", 1]', "[2.5]", "[]"],
        "outputs": ['["a", 1, "a", 1]', "[2.5, 2.5]", "[]"],
    }
    good = (
        "class Solution:\n    def twice(self, x: List[int]) -> List[int]:\n"
        "        print('noise')\n        return x + x"
    )
    assert scored(block(good), rewarded=cases) == (1.0, "solved")
    assert scored(block("def twice(x): return tuple(x) * 2"), rewarded=cases) == (1.0, "solved")
    assert scored(block("def twice(x): return x and x + x[:1] * len(x)"), rewarded=cases) == (
        2 / 3,
        "wrong_answer",
    )
    assert scored(block("def thrice(x): return x"), rewarded=cases) == (0.0, "crashed")
    assert scored(block("def twice(x): return {1, 2}"), rewarded=cases) == (0.0, "crashed")
    assert scored(block("def twice(x): raise ValueError"), rewarded=cases) == (0.0, "crashed")


def test_unit_tests() -> None:
    assert scored(block("def square(x): return x * x"), rewarded=SQUARES) == (1.0, "solved")
    assert scored(block("def square(x): return x + x"), rewarded=SQUARES) == (1 / 3, "wrong_answer")
    assert scored(block("def square(x): return x * x if x > 0 else 1 / 0"), rewarded=SQUARES) == (
        2 / 3,
        "crashed",
    )
    assert scored(block("def square(x):\n    while True: pass"), rewarded=SQUARES, seconds=0.5) == (
        0.0,
        "time_limit",
    )


def test_unit_tests_as_humaneval_has_them() -> None:
    check = """
def check(candidate):
    assert candidate([3, 1]) == ([1, 3], {"least": 1, "most": 3.0}), "sorted"
    for n in range(4):
        assert candidate([n])[1]["least"] == n
    try:
        candidate([])
    except ValueError:
        return
    assert False
"""
    humaneval = {"cases": check, "entry_point": "summary"}
    good = "def summary(x): return sorted(x), {'least': min(x), 'most': float(max(x))}"
    assert scored(block(good), row=humaneval) == (1.0, "solved")
    assert scored(
        block(good.replace("min(x)", "min(x or [0])").replace("max(x)", "max(x or [0])")), row=humaneval
    ) == (
        0.0,
        "wrong_answer",
    )


@pytest.mark.slow
def test_tests_and_programs_of_other_kinds() -> None:
    dataclass = "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\ndef f(a): return A(a).x"
    assert scored(block(dataclass), rewarded=["assert f(3) == 3"]) == (1.0, "solved")
    size = ["assert f(list(range(200000))) == 200000"]
    assert scored(block("def f(a): return len(a)"), rewarded=size) == (1.0, "solved")
    decode = ["try:\n    f(b'\\xff')\nexcept ValueError:\n    pass\nelse:\n    assert False"]
    assert scored(block("def f(a): return a.decode()"), rewarded=decode)[1] in ("solved", "crashed")


@pytest.mark.slow
def test_all_calls_of_a_case_have_the_time_of_one() -> None:
    program = block("import time\ndef f(i):\n    time.sleep(0.6)\n    return i")
    calls = ["for i in range(6): assert f(i) == i"]
    assert scored(program, rewarded=calls, seconds=1.0) == (0.0, "time_limit")
    assert scored(program, rewarded=calls, seconds=20.0) == (1.0, "solved")


@pytest.mark.parametrize("tests", ["assert max(3, 5) == 5", "def test():\n    assert f(1)", "import nothing"])
def test_tests_that_ask_nothing_of_the_program_say_nothing_about_it(tests: Any) -> None:
    with pytest.raises(DataError, match="its tests ask nothing of the program"):
        scored(block("pass"), rewarded=tests)


def test_an_answer_that_ends_iterations_ends_none_of_the_tests() -> None:
    every = ["assert all(map(lambda x: f(x) == 1, [1, 2]))"]
    assert scored(block("def f(a): raise StopIteration"), rewarded=every) == (0.0, "crashed")
    assert scored(block("def f(a): return 1"), rewarded=every) == (1.0, "solved")


def test_a_forged_answer_that_is_no_data_breaks_no_tests() -> None:
    forges = (
        "import os\ndef f(x): return x\ndef g(x):\n    for target in range(3, 20):\n        try:\n"
        "            os.write(target, b'= 1j')\n        except OSError:\n            pass\n    os._exit(0)"
    )
    assert scored(block(forges), rewarded=["assert f(g(1)) == 1"]) == (0.0, "crashed")


CHEATS = {
    "exits": "import sys; sys.exit(0)",
    "ends": "import os; os._exit(0)",
    "ends in the call": "import os\ndef square(x): os._exit(0)",
    "says so": "print('passed')\ndef square(x):\n    print('passed')",
    "equals everything": "class All:\n    def __eq__(self, other): return True\ndef square(x): return All()",
    "an int that equals everything": (
        "class All(int):\n    def __eq__(self, other): return True\n    __repr__ = lambda self: '4'\n"
        "def square(x): return All(5)"
    ),
    "patches builtins": (
        "import builtins, sys\nbuiltins.AssertionError = type('Never', (BaseException,), {})\n"
        "sys.excepthook = lambda *_: None\nbuiltins.repr = lambda _: 'True'\ndef square(x): return 5"
    ),
    "forges answers": (
        "import os\ndef square(x):\n    for target in range(256):\n        try:\n"
        "            os.write(target, b'passed')\n        except OSError:\n            pass\n    os._exit(0)"
    ),
    "an answer that is code": (
        "import os\ndef square(x):\n    for target in range(256):\n        try:\n"
        '            os.write(target, b\'= __import__("os").write(1, b"passed")\')\n'
        "        except OSError:\n            pass\n    os._exit(0)"
    ),
    "looks for the tests": (
        "import gc, sys\ndef square(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        for value in [*frame.f_locals.values(), *gc.get_objects()]:\n"
        "            if isinstance(value, str) and ''.join(['assert squ', 'are(2)']) in value:\n"
        "                return 4\n        frame = frame.f_back\n    return 5"
    ),
    "leaves a child that answers": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(0.2)\n"
        "    os.write(1, b'passed')\n"
        "def square(x): return 5"
    ),
    "leaves files": "open('tests.py', 'w').write('passed')\ndef square(x): return open('tests.py').read()",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_programs_that_cheat(cheat: str) -> None:
    reward, part = scored(block(CHEATS[cheat]), rewarded=SQUARES)
    assert (reward, part != "solved") == (0.0, True)


@pytest.mark.parametrize(
    ("program", "cases", "secret"),
    [
        (SUM, {"inputs": ["4000 321"], "outputs": ["4321"]}, "4321"),
        ("def f(x): return x + 4000", {"fn_name": "f", "inputs": ["321"], "outputs": ["4321"]}, "4321"),
        ("def f(x): return x + 4000", ["assert f(321) == 4321"], "4321"),
    ],
)
def test_what_is_right_never_is_where_the_program_is(
    program: str, cases: Any, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[Any, str] = {}
    ask = head.Head.ask

    async def noting(self: Any, request: dict[str, Any], **more: Any) -> Any:
        asked[self] = asked.get(self, "") + repr(request)
        return await ask(self, request, **more)

    monkeypatch.setattr(head.Head, "ask", noting)
    assert scored(block(program), rewarded=cases) == (1.0, "solved")
    (where_it_is,) = [said for said in asked.values() if program in said]
    assert "321" in where_it_is
    assert secret not in where_it_is
    assert any(secret in said for said in asked.values()) == isinstance(cases, list)


# ---- what is no score


def test_tests_that_cannot_be_run_are_the_datas_fault() -> None:
    for tests in (["assert square(2) =="], ["assert square(lambda x: x) == 4"]):
        with pytest.raises(DataError, match="its tests cannot be run"):
            scored(block("def square(x): return x * x"), rewarded=tests)


def test_a_sandbox_that_is_down_is_no_reward_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[Any] = []
    start = head.Head.start

    async def dying(*arguments: Any) -> Any:
        starts.append(arguments)
        if len(starts) in (2, 3):  # the first is the trial of the back end
            raise SandboxError("no room in the host")
        return await start(*arguments)

    monkeypatch.setattr(head.Head, "start", dying)
    functions = (RewardFunctionConfig("code"),)

    async def score(**policy: Any) -> Any:
        starts.clear()
        scorer = Scorer(RewardConfig(functions=functions, **policy))
        try:
            made = await scorer.score(make_trajectory(block(SUM), cases=ADDS))
            return made, scorer.stats().values()
        finally:
            scorer.close()

    with pytest.raises(RewardError, match="no room in the host"):
        asyncio.run(score())
    dropped, counts = asyncio.run(score(on_error="drop"))
    assert (dropped.outcome, dropped.scores, counts["reward/errors"]) == ("reward_error", {}, 1)
    again, counts = asyncio.run(score(on_error="retry"))
    assert (again.reward, again.scores["code/solved"], counts["reward/retries"]) == (1.0, 1.0, 2)


def test_no_more_at_a_time_than_there_are_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    open_now, most = 0, 0
    start, close = head.Head.start, head.Head.close

    async def starting(*arguments: Any) -> Any:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        return await start(*arguments)

    async def closing(self: Any) -> None:
        nonlocal open_now
        await close(self)
        open_now -= 1

    monkeypatch.setattr(head.Head, "start", starting)
    monkeypatch.setattr(head.Head, "close", closing)
    monkeypatch.setattr(runs.os, "cpu_count", lambda: 2)

    async def score() -> list[Any]:
        scorer = Scorer(RewardConfig(functions=(RewardFunctionConfig("code"),), timeout_seconds=0.01))
        made = [make_trajectory(block(SUM), cases=ADDS, sample_index=i) for i in range(8)]
        try:
            return await asyncio.gather(*map(scorer.score, made))
        finally:
            scorer.close()

    # Waiting for room is not a program's time, nor reward.timeout_seconds.
    assert [made.reward for made in asyncio.run(score())] == [1.0] * 8
    assert (most, open_now) == (2, 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seconds": 0.0}, "limit seconds=0.0"),
        ({"max_cases": 0}, "max_cases must be at least 1"),
        ({"backend": "docker"}, "'docker': no such back end"),
    ],
)
def test_options_are_checked_before_the_run(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        code.reward_marks.check(**options)  # type: ignore[attr-defined]


def test_packages_are_an_option(tmp_path: Path) -> None:
    """Without it a program that imports NumPy has crashed."""
    need_sandbox("bubblewrap")
    program = block("import numpy\nprint(int(numpy.arange(int(input())).sum()))")
    cases = {"inputs": ["4", "5"], "outputs": ["6", "10"]}
    installed = str(Path(np.__file__).parents[1])
    assert scored(program, rewarded=cases) == (0.0, "crashed")
    assert scored(program, rewarded=cases, packages=[installed], backend="bubblewrap") == (1.0, "solved")
    with pytest.raises(ConfigError, match="pip install --target"):
        code.reward_marks.check(packages=[str(tmp_path / "none")])  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="packages are that machine's own"):
        code.reward_marks.check(packages=[installed], backend="http://127.0.0.1:1")  # type: ignore[attr-defined]


# ---- training

AGENT = """
PROGRAMS = ["print(sum(map(int, input().split())))", "print(3)", "1 / 0", "print(input())"]

async def writes(messages, policy):
    answer = await policy.chat(messages)
    program = PROGRAMS[int(answer.token_ids[0]) % 4]
    return f"```python\\n{program}\\n```"
"""


@pytest.mark.slow
def test_two_steps_of_training(tmp_path: Path) -> None:
    """The real command on rows of a file: a tiny policy's first token chooses the program, so that every
    reward is known.
    """
    rows = [{"prompt": f"Add {n}", "reward_model": {"ground_truth": json.dumps(ADDS)}} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "agent.py").write_text(AGENT)
    recipe = RECIPE | {
        "data": {
            "train": [{"type": "jsonl", "path": str(tmp_path / "rows.jsonl")}],
            "batch_size": 4,
            "max_prompt_tokens": 64,
        },
        "rollout": RECIPE["rollout"] | {"agent": f"{tmp_path}/agent.py:writes"},
        "reward": {
            "functions": [{"name": "code", "cases_key": "reward_model.ground_truth"}],
            "accuracy": "code/solved",
            "isolation": "process",
        },
        "trainer": {"total_steps": 2},
    }
    (tmp_path / "code.yaml").write_text(yaml.safe_dump(recipe))
    run = tmp_path / "run"
    cli("train", str(tmp_path / "code.yaml"), f"trainer.run_dir={run}")
    known = {0: (1.0, "solved"), 1: (0.25, "wrong_answer"), 2: (0.0, "crashed"), 3: (0.0, "wrong_answer")}
    for step, line in enumerate(metrics(run)[-2:], start=1):
        table = pq.read_table(run / f"rollouts/step-{step:06d}.parquet").to_pylist()
        assert len(table) == 16
        programs = [int(row["response_ids"][0]) % 4 for row in table]
        assert [row["reward"] for row in table] == [known[program][0] for program in programs]
        parts = Counter(known[program][1] for program in programs)
        assert {part: line[f"reward/score/code/{part}"] for part in parts} == {
            part: pytest.approx(count / 16) for part, count in parts.items()
        }
        assert line["reward/errors"] == 0


DISTURBED = """
import asyncio, contextlib, contextvars, itertools, os, signal
from rondo.system.guard import children_of
from rondo_sandbox import head

asked = itertools.count(1)
ask, done = head.Head.ask, head.LastingHead._done
head.LOOK_SECONDS = 0.1
runs_once_more = contextvars.ContextVar("runs_once_more", default=False)
disturbed = []

async def noting(self, request, cell, before=None):
    runs_once_more.set(before is not None)
    return await done(self, request, cell, before)

async def disturbing(self, request):
    # Kills or freezes the head, or the program in it, in some of the calls. Not what runs once more: what is
    # killed then, too, counts as a program that kills itself. Nothing twice: three lost heads are an error.
    if runs_once_more.get() or any(request is one for one in disturbed):
        return await ask(self, request)
    number, running = next(asked), asyncio.ensure_future(ask(self, request))
    if number % 5 == 0 and number < 60:
        disturbed.append(request)
        (own,) = children_of(self._process.pid) if BUBBLEWRAP else [self._process.pid]
        while not running.done():
            within = children_of(own)
            if within or number % 10 == 0:
                with contextlib.suppress(ProcessLookupError):  # it may just have ended
                    os.kill((within or [own])[0], signal.SIGSTOP if number % 15 == 0 else signal.SIGKILL)
                    open(MARKS, "a").write("x")
                    break
            await asyncio.sleep(0.001)
    return await running

if DISTURBS:
    head.Head.ask, head.LastingHead._done = disturbing, noting

async def computes(messages, policy, tools):
    for turn in range(2):
        answer = await policy.chat(messages)
        code = f"import time; time.sleep(0.05)\\nn = globals().get('n', 1) * 7 + {len(answer.text)}\\nn"
        said = await tools.call("python", {"code": code})
        messages = [*messages, answer.message, {"role": "user", "content": said}]
    return f"```python\\nimport time; time.sleep(0.05); print({said.strip()} % 3)\\n```"
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
def test_a_run_whose_sandboxes_were_killed_and_frozen_ends_with_the_same_bits(
    backend: str, tmp_path: Path
) -> None:
    """Sessions of the tool, and the programs of the reward."""
    need_sandbox(backend)
    cases = {"inputs": [""], "outputs": ["1"]}
    rows = [{"prompt": f"Add {n}", "cases": cases} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    marks = tmp_path / "marks"
    marks.touch()
    recipe = RECIPE | {
        "data": {
            "train": [{"type": "jsonl", "path": str(tmp_path / "rows.jsonl")}],
            "batch_size": 4,
            "max_prompt_tokens": 900,
        },
        "model": {
            **RECIPE["model"],
            "config": {**RECIPE["model"]["config"], "max_position_embeddings": 1200},
        },
        "actor": RECIPE["actor"] | {"token_budget": 2400},
        "reward": {"functions": [{"name": "code", "backend": backend, "seconds": 2.0}]},
        "trainer": {"total_steps": 2},
    }
    (tmp_path / "code.yaml").write_text(yaml.safe_dump(recipe))

    def run(name: str, disturbs: bool) -> Path:
        agent = tmp_path / f"{name}.py"
        told = f"BUBBLEWRAP, DISTURBS, MARKS = {backend == 'bubblewrap'}, {disturbs}, {str(marks)!r}\n"
        agent.write_text(told + DISTURBED)
        rollout = RECIPE["rollout"] | {
            "agent": f"{agent}:computes",
            "tools": [{"name": "python", "backend": backend, "seconds": 2.0}],
            "max_tokens": 160,
        }
        (tmp_path / "code.yaml").write_text(yaml.safe_dump(recipe | {"rollout": rollout}))
        cli("train", str(tmp_path / "code.yaml"), f"trainer.run_dir={tmp_path / name}")
        return tmp_path / name

    whole, hurt = run("whole", False), run("hurt", True)
    assert len(marks.read_text()) >= 8
    assert weights(hurt) == weights(whole)
    for ours, theirs in zip(metrics(hurt), metrics(whole), strict=True):
        assert ours["reward/failed_share"] == theirs["reward/failed_share"] == 0
        assert ours["reward/mean"] == theirs["reward/mean"]
        assert ours["agent/tool_failures/python"] == 0
    assert any(0 < line["reward/mean"] < 1 for line in metrics(whole))
