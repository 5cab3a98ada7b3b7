"""The built-in reward functions. Each is deterministic, draws from no random stream, and gives 1.0 or 0.0
unless it says otherwise.

A reward function is `fn(prompt, trajectory, *, options…) -> float`. `trajectory.text` is the decoded
response; the prompt's other columns (`answer`, …) are `prompt.fields`. Those that always take short, bounded
time run on the event loop itself.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal

from rondo.core.arithmetic import evaluate_expression, reads_literals
from rondo.core.errors import ConfigError, DataError
from rondo.core.types import Prompt, Trajectory, Turn
from rondo.rewards.answers import (
    Extract,
    comparable,
    extract_answer,
    hash_number,
    last_boxed,
    last_number,
    parse_number,
    required_field,
)
from rondo.rewards.marks import reward_function


def _matched(text: str, *, extract: Extract = "text", ignore_case: bool = False, **_: Any) -> str | None:
    found = extract_answer(text, extract)
    return found.casefold() if found is not None and ignore_case else found


@reward_function(run_in="loop", answer=_matched, columns=["{answer_key}"])
def exact_match(
    prompt: Prompt,
    trajectory: Trajectory,
    *,
    answer_key: str = "answer",
    extract: Extract = "text",
    ignore_case: bool = False,
) -> float:
    """1 when the extracted answer equals the row's answer (or one of them, if it is a list); ends are
    stripped.
    """
    answer = required_field(prompt, answer_key, "answer_key")
    accepted = answer if isinstance(answer, list | tuple) else [answer]
    found = _matched(trajectory.text, extract=extract, ignore_case=ignore_case)
    texts = [str(one).strip() for one in accepted]
    return float(found in ([text.casefold() for text in texts] if ignore_case else texts))


def _number(text: str, *, method: Literal["strict", "flexible"] = "strict") -> Fraction | None:
    return hash_number(text) if method == "strict" else last_number(text)


def _number_voted(text: str, *, method: Literal["strict", "flexible"] = "strict", **_: Any) -> str | None:
    number = _number(text, method=method)
    return None if number is None else str(number)


def _read_number(prompt: Prompt, *, answer_key: str = "answer", **_: Any) -> Fraction:
    answer = str(required_field(prompt, answer_key, "answer_key"))
    truth = hash_number(answer) if "####" in answer else parse_number(answer)
    if truth is None:
        raise DataError(
            f"prompt {prompt.prompt_id}: answer {answer!r:.80} (column {answer_key!r}) is no number"
        )
    return truth


@reward_function(run_in="loop", answer=_number_voted, columns=["{answer_key}"], row=_read_number)
def gsm8k(
    prompt: Prompt,
    trajectory: Trajectory,
    *,
    method: Literal["strict", "flexible"] = "strict",
    answer_key: str = "answer",
) -> float:
    """1 when the answer is the row's number. strict: the number behind the last `####`; flexible: the last
    number.

    The row's answer is a number or a GSM8K solution that ends in `#### number`. Numbers are compared as
    numbers: `$`, thousands commas and a trailing full stop do not matter (`42.` = `42` = `42.0`). The whole
    text is searched.
    """
    return float(_number(trajectory.text, method=method) == _read_number(prompt, answer_key=answer_key))


def _box_voted(text: str, **_: Any) -> str | None:
    found = last_boxed(text)
    return None if found is None else comparable(found.strip().removesuffix("."))


def _read_math(prompt: Prompt, *, answer_key: str = "answer", **_: Any) -> list[Any]:
    answer = str(required_field(prompt, answer_key, "answer_key"))
    gold = _readable(_boxed(last_boxed(answer) or answer))
    if not gold:
        unread = f"{answer!r:.80} (column {answer_key!r})"
        raise DataError(f"prompt {prompt.prompt_id}: math-verify reads no answer in {unread}")
    return list(gold)


@reward_function(
    run_in="process",
    requires=("math_verify", "rondo-rl[math]"),
    memory_bytes=4 << 30,
    answer=_box_voted,
    reference=_read_math,
    columns=["{answer_key}"],
)
def math(
    prompt: Prompt, trajectory: Trajectory, *, answer_key: str = "answer", require_box: bool = True
) -> float:
    """1 when the answer is mathematically equal to the row's (LaTeX or plain; a box in it counts), by
    math-verify.

    The answer is the content of the last complete `\\boxed{…}`: a later box corrects an earlier one. Without
    a box the score is 0, or with require_box=false what math-verify finds in the text. Runs in a process of
    its own that is killed at the time limit (math-verify's own limit uses signals, which do not work off the
    main thread).
    """
    found = last_boxed(trajectory.text)
    if found is None and require_box:
        return 0.0
    gold = _read_math(prompt, answer_key=answer_key)
    return _verified(gold, _parse(_boxed(found) if found is not None else trajectory.text))


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer.strip().strip('$').removesuffix('.')}}}"  # a full stop is no part of it


def _parse(text: str) -> list[Any]:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off
    from math_verify import parse

    return list(parse(text, parsing_timeout=None))


def _verified(gold: list[Any], target: list[Any]) -> float:
    from math_verify import verify

    return float(verify(gold, target, timeout_seconds=None))


@functools.lru_cache(maxsize=1024)
def _readable(text: str) -> tuple[Any, ...]:
    """Returns a row's answer, after comparing it with 0, so that `9^{9^9}`, which is parsed quickly and never
    evaluated, fails here.
    """
    gold = _parse(text)
    _verified(gold, _parse(_boxed("0")))
    return tuple(gold)


def _check_overlong(*, max_tokens: int, buffer: int, bounded: bool = True) -> None:
    if not 0 < buffer <= max_tokens:
        raise ConfigError(
            f"reward function overlong: buffer must be above 0 and at most max_tokens, got buffer={buffer}, "
            f"max_tokens={max_tokens}"
        )


@reward_function(run_in="loop", check=_check_overlong)
def overlong(
    prompt: Prompt, trajectory: Trajectory, *, max_tokens: int, buffer: int, bounded: bool = True
) -> float:
    """DAPO's soft punishment of long responses (2503.14476, equation 13), from 0 to -1.

    0 up to max_tokens - buffer response tokens, -1 above max_tokens, and in between
    (max_tokens - buffer - length) / buffer. bounded=false: above max_tokens it falls further, as in verl.
    """
    _check_overlong(max_tokens=max_tokens, buffer=buffer)
    length = trajectory.num_tokens
    punishment = min(0.0, (max_tokens - buffer - length) / buffer)
    return max(-1.0, punishment) if bounded else punishment


def _tag_voted(text: str, *, extract: Extract = "tag", **_: Any) -> str | None:
    return extract_answer(text, extract) or None


def _read_countdown(
    prompt: Prompt, *, numbers_key: str = "nums", target_key: str = "target", **_: Any
) -> tuple[list[int], Fraction]:
    numbers = required_field(prompt, numbers_key, "numbers_key")
    target = required_field(prompt, target_key, "target_key")
    try:
        return [int(n) for n in numbers], Fraction(str(target))
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise DataError(
            f"prompt {prompt.prompt_id}: {numbers!r:.80} (column {numbers_key!r}) are no whole numbers, or "
            f"{target!r:.80} ({target_key!r}) is no number"
        ) from error


@reward_function(
    run_in="loop", answer=_tag_voted, columns=["{numbers_key}", "{target_key}"], row=_read_countdown
)
def countdown(
    prompt: Prompt,
    trajectory: Trajectory,
    *,
    numbers_key: str = "nums",
    target_key: str = "target",
    extract: Extract = "tag",
    format_score: float = 0.0,
) -> float:
    """1 when the answer is an expression over the row's numbers, each used exactly once, that equals the
    target.

    format_score: for an answer that is such an expression, but wrong in its numbers or its value.
    """
    numbers, target = _read_countdown(prompt, numbers_key=numbers_key, target_key=target_key)
    answer = extract_answer(trajectory.text, extract)
    evaluated = evaluate_expression(answer) if answer else None
    if evaluated is None:
        return 0.0
    value, used = evaluated
    return 1.0 if value == target and sorted(used) == sorted(numbers) else float(format_score)


def _check_tags(*, tags: Sequence[str]) -> None:
    if not tags or isinstance(tags, str):
        raise ConfigError("reward function format: tags must be a list of tag names, e.g. [think, answer]")


@reward_function(run_in="loop", check=_check_tags)
def format_tags(prompt: Prompt, trajectory: Trajectory, *, tags: Sequence[str]) -> float:
    """1 when the response is `<a>…</a>` for each tag, in this order, each once, and nothing but white space
    around. The first tag may be opened by the chat template (R1, Qwen3-Thinking).
    """
    _check_tags(tags=tags)
    rest = trajectory.text.strip()
    if prompt.opening.rstrip().endswith(f"<{tags[0]}>"):
        rest = f"<{tags[0]}>{rest}"
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if not rest.startswith(opening) or rest.count(opening) != 1 or rest.count(closing) != 1:
            return 0.0
        rest = rest.partition(closing)[2].lstrip()
    return float(not rest)


def _check_window(*, window: int = 80, **_: Any) -> None:
    if window < 1:
        raise ConfigError(f"reward function verdict: window must be at least 1, got {window}")


_CHOICES = ("[[A]]", "[[B]]")


def _read_tag(prompt: Prompt, *, tags: Sequence[str] = _CHOICES, answer_key: str = "answer", **_: Any) -> str:
    answer = str(required_field(prompt, answer_key, "answer_key"))
    right = [tag for tag in tags if answer in (tag, tag.strip("[]"))]
    if len(right) != 1:
        raise DataError(
            f"prompt {prompt.prompt_id}: answer {answer!r:.80} (column {answer_key!r}) is none of "
            f"{', '.join(tags)}"
        )
    return right[0]


@reward_function(run_in="loop", check=_check_window, columns=["{answer_key}"], row=_read_tag)
def verdict(
    prompt: Prompt,
    trajectory: Trajectory,
    *,
    tags: Sequence[str] = _CHOICES,
    answer_key: str = "answer",
    window: int = 80,
) -> float:
    """1 when the tag of the row's answer is in the last characters of a judgement and no other tag is, else
    -1 (RM-R1, 2505.02387, its code).

    tags: of the choices; the row's answer is one of them, or what is between its brackets (`A`). window:
    characters at the end that are looked at.
    """
    _check_window(window=window)
    right, end = _read_tag(prompt, tags=tags, answer_key=answer_key), trajectory.text[-window:]
    return 1.0 if [tag for tag in tags if tag in end] == [right] else -1.0


@reward_function(run_in="loop")
def tool_use(
    prompt: Prompt, trajectory: Trajectory, *, opening: str = "<answer>", closing: str | None = "</answer>"
) -> float:
    """How ill an episode used its tools and its format, from 0 to 2: the penalty p of GRPO-RoC (2508.20722),
    which `algorithm.select: resample_on_correct` reads. Its weight in the reward is 0.

    Of rollout.tools' answers the share with an error (.5 without any); and, of the answers in all turns but
    one, the share of the turns (1 without an answer, where `opening` and `closing` are not in pairs, or
    without a turn). closing: null: nothing closes an answer.
    """
    errors = trajectory.tool_errors + sum("error" in said.text.lower() for said in trajectory.tool_results)
    responses = trajectory.tool_errors + len(trajectory.tool_results)
    turns = sum(turn.kind == "policy" for row in trajectory.rows for turn in row.turns)
    text = trajectory.transcript or trajectory.text
    answers = text.count(opening)
    paired = closing is None or text.count(closing) == answers
    ill_formed = min((answers - 1) / turns, 1.0) if answers and paired and turns else 1.0
    return (errors / responses if responses else 0.5) + ill_formed


def _compiled(prompt: Prompt | None = None, *, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(
            f"reward function regex: pattern {pattern!r} is no regular expression: {error}"
        ) from error


def _check_pattern(*, pattern: str) -> None:
    _compiled(pattern=pattern)


@reward_function(run_in="process", reference=_compiled, check=_check_pattern)
def regex(prompt: Prompt, trajectory: Trajectory, *, pattern: str) -> float:
    """1 when the whole response, ends stripped, matches the pattern (`.` matches newlines too).

    Runs in its own process: a pattern that backtracks without end can only be stopped by killing it.
    """
    return float(_compiled(pattern=pattern).fullmatch(trajectory.text.strip()) is not None)


@reward_function(run_in="loop")
def environment(prompt: Prompt, trajectory: Trajectory) -> float:
    """What the steps of `rollout.environments` were given, in sum."""
    return sum(turn.reward or 0.0 for turn in _steps(trajectory))


@reward_function(run_in="loop")
def success(prompt: Prompt, trajectory: Trajectory) -> float:
    """1 where the environment says that the task was done."""
    return float(any("success" in turn.flags for turn in _steps(trajectory)))


def _steps(trajectory: Trajectory) -> list[Turn]:
    """Returns the turns that were given a reward. Raises DataError where there are none."""
    steps = [turn for row in trajectory.rows for turn in row.turns if turn.reward is not None]
    if not steps:
        raise DataError(
            f"trajectory {trajectory.trajectory_id}: no step was given a reward; environment and success are "
            "for rollout.environments, and an agent that acts in one"
        )
    return steps


def _read_entry(prompt: Prompt, **_: Any) -> tuple[Any, Any]:
    task = required_field(prompt, "task", "task of a reasoning_gym source")
    entry = required_field(prompt, "entry", "entry of a reasoning_gym source")
    options = json.dumps(prompt.fields.get("task_options", {}), default=repr)
    return _reasoning_gym_task(task, options), entry


@reward_function(
    run_in="process",
    requires=("reasoning_gym", "rondo-rl[reasoning-gym]"),
    memory_bytes=4 << 30,  # some tasks evaluate the answer
    reference=_read_entry,
    columns=["task", "entry"],
)
def reasoning_gym(prompt: Prompt, trajectory: Trajectory, *, extract: Extract = "text") -> float:
    """The task's own score of the answer, from 0 to 1, for prompts of a reasoning_gym source.

    extract `tag` is the library's own convention (`<answer>…</answer>`); without an answer the score is 0,
    and so it is where the task raises at the answer, but not at the entry's own.
    """
    dataset, entry = _read_entry(prompt)
    answer = extract_answer(trajectory.text, extract)
    if answer is None:
        return 0.0
    try:
        return float(dataset.score_answer(answer, entry))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        # Some tasks read an answer as JSON or a number without asking whether it is one.
        dataset.score_answer(entry["answer"], entry)  # raises, too, where it is not the answer's doing
        return 0.0


@functools.lru_cache(maxsize=64)
def _reasoning_gym_task(task: str, options: str) -> Any:
    import reasoning_gym as gym

    return reads_literals(gym.create_dataset(task, **json.loads(options)))
