"""Finding the answer in a response, and in the prompt's row: texts, numbers and what is in a box. Every
function takes time linear in the text.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import Any, Literal

from rondo.core.errors import DataError
from rondo.core.types import Prompt

Extract = Literal["text", "tag", "hash", "last_line"]

# A maximal run that may be a number: sign and currency (a '-' behind a digit or word is a minus between two),
# digits.
_RUN = re.compile(r"(?:(?<![\w)])[-+$]{1,2})?(?:(?<![0-9])\.)?[0-9][0-9.,/]*", re.ASCII)
_NUMBER = re.compile(r"(?:[-+]?\$?|\$[-+])(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)")
_FRACTION = re.compile(
    r"(-?)(?:\\[dt]?frac(?:\{([0-9]+)\}\{([0-9]+)\}|([0-9])([0-9]))|([0-9]+)/([0-9]+))", re.ASCII
)
_LONGEST_NUMBER = 100
_LONGEST_ANSWER = 1000
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # with what is escaped, which is none
_BOXES = ("\\boxed{", "\\fbox{")


def extract_answer(text: str, how: Extract) -> str | None:
    """Returns the part of a response that is its answer, stripped; None where there is none.

    text: all of it. tag: inside the last complete <answer>…</answer>. hash: what follows the last `####`, to
    the end of its line. last_line: the last line that is not empty.
    """
    if how == "text":
        return text.strip()
    if how == "tag":
        stop = text.rfind("</answer>")
        start = text.rfind("<answer>", 0, max(stop, 0))
        return text[start + len("<answer>") : stop].strip() if start >= 0 else None
    if how == "hash":
        _, marker, rest = text.rpartition("####")
        return rest.split("\n", 1)[0].strip() if marker else None
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else None


def final_answer(text: str) -> str | None:
    """Returns what a majority vote counts where no scorer says: behind the last `####`, else in the last
    <answer>…</answer>, else in the last `\\boxed{…}`, as `comparable`; None where there is none.
    """
    for answer in (extract_answer(text, "hash"), extract_answer(text, "tag"), last_boxed(text)):
        if answer:
            return comparable(answer)
    return None


def comparable(answer: str) -> str:
    """Returns a text that is equal for answers that are equal as numbers (`0.5`, `1/2`, `\\frac{1}{2}`,
    `\\dfrac12`, `$.5$`), or but for white space.
    """
    text = "".join(answer.split()).strip("$")
    number = parse_number(text)
    if number is None and len(text) <= _LONGEST_NUMBER and (found := _FRACTION.fullmatch(text)):
        sign, *parts = found.groups()
        above, below = (int(part) for part in parts if part is not None)
        number = Fraction(-above if sign else above, below) if below else None
    return text if number is None else str(number)


def required_field(prompt: Prompt, key: str, option: str) -> Any:
    """Returns what the prompt's row has at `key` (`Prompt.column`). Raises DataError, naming the columns that
    there are, where that is missing.
    """
    value = prompt.column(key)
    if value is None:
        raise DataError(
            f"prompt {prompt.prompt_id}: the scorer needs column {key!r}, which is missing or null; the row "
            f"has {', '.join(prompt.fields) or 'no other columns'}. Name another with the scorer's option "
            f"{option}"
        )
    return value


@functools.lru_cache(maxsize=1 << 12)  # a prompt's answer comes as often as it has samples
def parse_number(text: str) -> Fraction | None:
    """Reads `-$1,234.50` or `42.` as an exact number; None for anything else (`12,34`, `1.2.3`, `1/2`, `.`,
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
    """Returns the last number anywhere in the text."""
    for run in reversed(_RUN.findall(text)):
        number = parse_number(run)
        if number is not None:
            return number
    return None


def hash_number(text: str) -> Fraction | None:
    """Returns the number right behind the last `####` that has one."""
    for rest in reversed(text.split("####")[1:]):
        run = _RUN.match(rest.lstrip(" \t"))
        number = parse_number(run.group()) if run else None
        if number is not None:
            return number
    return None


def last_boxed(text: str) -> str | None:
    """Returns what is in the last complete `\\boxed{…}` (or `\\fbox{…}`); an unclosed one does not count."""
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
    """Returns `text` up to the brace that closes one opened before it; None: there is none."""
    depth = 1
    for found in _BRACE.finditer(text):
        depth += {"{": 1, "}": -1}.get(found.group(), 0)
        if depth == 0:
            return text[: found.start()]
    return None
