"""The reward function `code`, and how a program is tried in the sandbox.

    stdin, stdout   the program, once for each case; its output is compared here
    fn_name         caller.py with the program and the arguments; the result, as JSON, is compared here
    tests           tester.py with the tests, in a sandbox of their own, until they call a function of the
                    program; caller.py with the program and these arguments; tester.py again, which now knows
                    the answer …

So what is right is never where the program is, and what the program says is data to the one who knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

from rondo.core.errors import ConfigError, DataError
from rondo.core.types import Prompt, Trajectory
from rondo.rewards.marks import reward_function
from rondo_sandbox import Limits, Result, Sandbox, Warm, check_sandbox, shared_sandbox
from rondo_sandbox.cases import (
    AssertCase,
    Case,
    StdinCase,
    last_program,
    read_cases,
    same_output,
    same_result,
)

Verdict = Literal["passed", "wrong_answer", "crashed", "time_limit", "memory_limit"]
PARTS = ("solved", "no_code", "wrong_answer", "crashed", "time_limit", "memory_limit")
MOST_BYTES = 16 << 20
MOST_CALLS = 500
"""Calls that the tests of one case may make of the program; what it returns can lead them on."""
# What a limit says about the program; what is not here ended by itself.
_BEYOND: dict[str, Verdict] = {
    "time_limit": "time_limit",
    "memory_limit": "memory_limit",
    "output_limit": "wrong_answer",
}


def check(
    *,
    backend: str = "auto",
    seconds: float = 5.0,
    memory_mb: int = 1024,
    max_cases: int | None = None,
    packages: Sequence[str] = (),
    **_: object,
) -> None:
    """Raises ConfigError for wrong options, SandboxError where programs cannot be held."""
    _limits(seconds, memory_mb)
    if max_cases is not None and max_cases < 1:
        raise ConfigError(f"reward function code: max_cases must be at least 1, got {max_cases}")
    check_sandbox(backend, memory_mb, packages)


@reward_function(run_in="sandbox", score_names=PARTS, check=check, columns=["{cases_key}"])
async def code(
    prompt: Prompt,
    trajectory: Trajectory,
    *,
    cases_key: str = "cases",
    score: Literal["share", "all"] = "share",
    seconds: float = 5.0,
    memory_mb: int = 1024,
    max_cases: int | None = None,
    backend: str = "auto",
    packages: Sequence[str] = (),
) -> dict[str, float]:
    """The share of the row's cases (the first max_cases of them) that the response's last Python block
    passes, or with score `all` 1 where it passes all of them.

    One part is 1: `solved`, or what the first case failed of that failed. A case that takes longer than it
    may ends the trial, and so does any failed one with score `all`: the cases behind it are not passed.
    """
    cases = read_cases(prompt, cases_key)[:max_cases]
    program = last_program(trajectory.text)
    if program is None:
        return _scores(0.0, "no_code")
    passed = 0
    failed: Verdict | None = None
    async with AsyncExitStack() as opened:
        sandbox = await shared_sandbox(backend, packages)
        await opened.enter_async_context(sandbox.room())
        trial = Trial(program, sandbox, _limits(seconds, memory_mb), opened)
        for case in cases:
            verdict = await trial.verdict(case, prompt)
            if verdict == "passed":
                passed += 1
                continue
            failed = failed or verdict
            if score == "all" or verdict == "time_limit":
                break
    if failed is None:
        return _scores(1.0, "solved")
    return _scores(0.0 if score == "all" else passed / len(cases), failed)


def _limits(seconds: float, memory_mb: int) -> Limits:
    try:
        return Limits(seconds=seconds, memory_mb=memory_mb)
    except ValueError as error:
        raise ConfigError(f"reward function code: {error}") from error


def _scores(reward: float, outcome: str) -> dict[str, float]:
    return {"reward": reward, **{part: float(part == outcome) for part in PARTS}}


class Trial:
    """One program, and the sandboxes of it and of its tests, each from its first use until `opened` ends."""

    def __init__(self, program: str, sandbox: Sandbox, limits: Limits, opened: AsyncExitStack) -> None:
        self._program = program
        self._sandbox = sandbox
        self._limits = limits
        self._opened = opened
        self._programs: Warm | None = None
        self._tests: Warm | None = None

    async def verdict(self, case: Case, prompt: Prompt) -> Verdict:
        """Returns what came of one case. Raises SandboxError, and DataError for tests that cannot be run."""
        if isinstance(case, StdinCase):
            result = await self._run(self._program, case.given)
            return _judged(result, result.ok and same_output(result.stdout, case.expected))
        if isinstance(case, AssertCase):
            return await self._tested(case, prompt)
        result = await self._call(repr((case.name, case.arguments, {})), "json")
        kind, _, value = result.stdout.partition(" ")
        if result.ok and kind != "=":  # it raised, or left before it answered
            return "crashed"
        return _judged(result, same_result(value, case.accepted))

    async def _tested(self, case: AssertCase, prompt: Prompt) -> Verdict:
        """Runs tests to their end, passing their calls to the program. All calls together have the time of
        one case.
        """
        if self._tests is None:
            limits = replace(self._limits, output_bytes=MOST_BYTES)  # a call with its arguments
            self._tests = await self._opened.enter_async_context(self._sandbox.warm(limits))
        answers: dict[str, str] = {}
        left = self._limits.seconds
        while len(answers) <= MOST_CALLS and left > 0:
            tests = await self._tests.run(_script("tester"), stdin=repr((case.text, answers)))
            said, _, rest = tests.stdout.partition(" ")
            if said == "broken" or tests.status == "output_limit":
                why = (
                    rest if said == "broken" else f"a call has more than {MOST_BYTES >> 20} MiB of arguments"
                )
                raise DataError(f"prompt {prompt.prompt_id}: its tests cannot be run: {why}")
            if tests.ok and said != "call" and not answers:
                raise DataError(
                    f"prompt {prompt.prompt_id}: its tests ask nothing of the program, and say nothing about "
                    "it: they call no function that Python does not have, or are functions that nobody calls "
                    "(a column `entry_point` says what `check` is given). Mend the row or take it out"
                )
            if said != "call":
                return "crashed" if said == "raised" else _judged(tests, said == "passed")
            result = await self._call(rest, "text")
            if not result.ok or result.stdout[:2] not in ("= ", "! "):
                return "crashed" if result.ok else _judged(result, False)
            answers[rest] = result.stdout
            left -= result.seconds
        return "time_limit"

    async def _call(self, call: str, form: Literal["json", "text"]) -> Result:
        """Has the program answer a call: the Python text of (function, arguments, named arguments)."""
        return await self._run(_script("caller"), repr((self._program, call, form)))

    async def _run(self, program: str, stdin: str) -> Result:
        if self._programs is None:
            self._programs = await self._opened.enter_async_context(self._sandbox.warm(self._limits))
        return await self._programs.run(program, stdin=stdin)


def _judged(result: Result, right: bool) -> Verdict:
    """Returns the verdict on a program after a run. right: whether its output is the expected one."""
    if result.ok:
        return "passed" if right else "wrong_answer"
    return _BEYOND.get(result.status, "crashed")


@cache
def _script(name: str) -> str:
    """Returns the text of a script that runs in the sandbox."""
    return (Path(__file__).parent / "inside" / f"{name}.py").read_text(encoding="utf-8")
