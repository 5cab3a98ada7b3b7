"""Answers that are numbers: reading them, in time linear in the text, and the reward function that compares
them.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

from rondo.errors import DataError
from rondo.rewards.answers import required_field
from rondo.rewards.functions import reward_function
from rondo.types import Prompt, Trajectory

# A maximal run that may be a number: sign and currency (a '-' behind a digit or word is a minus between two),
# digits.
_RUN = re.compile(r"(?:(?<![\w)])[-+$]{1,2})?(?:(?<![0-9])\.)?[0-9][0-9.,/]*", re.ASCII)
_NUMBER = re.compile(r"(?:[-+]?\$?|\$[-+])(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)")
_LONGEST_NUMBER = 100


@reward_function(run_in="loop")
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
    answer = str(required_field(prompt, answer_key, "answer_key"))
    truth = hash_number(answer) if "####" in answer else parse_number(answer)
    if truth is None:
        raise DataError(
            f"prompt {prompt.prompt_id}: answer {answer!r:.80} (column {answer_key!r}) is no number"
        )
    found = hash_number(trajectory.text) if method == "strict" else last_number(trajectory.text)
    return float(found == truth)


def parse_number(text: str) -> Fraction | None:
    """`-$1,234.50` or `42.` as an exact number; None for anything else (`12,34`, `1.2.3`, `1/2`, `.`,
    nothing).
    """
    text = text.strip()
    if not 0 < len(text) <= _LONGEST_NUMBER:
        return None
    text = text.rstrip(".,")
    if not _NUMBER.fullmatch(text):
        return None
    return Fraction(re.sub(r"[$,]", "", text))


def last_number(text: str) -> Fraction | None:
    """The last number anywhere in the text."""
    for run in reversed(_RUN.findall(text)):
        number = parse_number(run)
        if number is not None:
            return number
    return None


def hash_number(text: str) -> Fraction | None:
    """The number right behind the last `####` that has one."""
    for rest in reversed(text.split("####")[1:]):
        run = _RUN.match(rest.lstrip(" \t"))
        number = parse_number(run.group()) if run else None
        if number is not None:
            return number
    return None
