"""Equivalence of mathematical answers, by the math-verify library (`pip install 'rondo-rl[math]'`)."""

from __future__ import annotations

import functools
import logging
from typing import Any

from rondo.errors import DataError
from rondo.rewards.answers import required_field
from rondo.rewards.functions import reward_function
from rondo.types import Prompt, Trajectory

_LONGEST_ANSWER = 1000
_BOXES = ("\\boxed{", "\\fbox{")


def last_boxed(text: str) -> str | None:
    """What is inside the last complete `\\boxed{…}` (or `\\fbox{…}`); an unclosed one does not count."""
    stop = len(text)
    while True:
        at, box = max((text.rfind(box, 0, stop), box) for box in _BOXES)
        if at < 0:
            return None
        inside = _closed(text[at + len(box) : at + len(box) + _LONGEST_ANSWER])
        if inside is not None:
            return inside
        stop = at


def _closed(text: str) -> str | None:
    """`text` up to the brace that closes what was opened before it."""
    depth, i = 1, 0
    while i < len(text):
        if text[i] == "\\":
            i += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[:i]
        i += 1
    return None


@reward_function(run_in="process", requires=("math_verify", "rondo-rl[math]"), memory_bytes=4 << 30)
def math(
    prompt: Prompt, trajectory: Trajectory, *, answer_key: str = "answer", require_box: bool = True
) -> float:
    """1 when the answer is mathematically equal to the row's answer (LaTeX or plain; a box in it counts).

    The answer is the content of the last complete `\\boxed{…}`: a later box corrects an earlier one. Without
    a box the score is 0, or with require_box=false what math-verify finds in the text. Runs in a process of
    its own that is killed at the time limit (math-verify's own limit uses signals, which do not work off the
    main thread).
    """
    answer = str(required_field(prompt, answer_key, "answer_key"))
    found = last_boxed(trajectory.text)
    if found is None and require_box:
        return 0.0
    gold = _parsed(_boxed(last_boxed(answer) or answer))
    if not gold:
        raise DataError(
            f"prompt {prompt.prompt_id}: math-verify reads no answer in {answer!r:.80} (column "
            f"{answer_key!r})"
        )
    target = _parse(_boxed(found) if found is not None else trajectory.text)

    from math_verify import verify

    return float(verify(list(gold), target, timeout_seconds=None))


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer.strip().strip('$')}}}"


def _parse(text: str) -> list[Any]:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off
    from math_verify import parse

    return list(parse(text, parsing_timeout=None))


@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> tuple[Any, ...]:
    return tuple(_parse(text))
