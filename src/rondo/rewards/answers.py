"""Finding the answer in a response, and in the prompt's row. Every function takes time linear in the text."""

from __future__ import annotations

import re
from typing import Any, Literal

from rondo.errors import DataError
from rondo.types import Prompt

Extract = Literal["text", "tag", "hash", "last_line"]


def extract_answer(text: str, how: Extract) -> str | None:
    """The part of a response that is its answer, stripped; None where there is none.

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
    """What a majority vote counts: behind the last `####`, else in the last <answer>…</answer>, else in the
    last `\\boxed{…}` (without braces inside); None where there is none.
    """
    for how in ("hash", "tag"):
        answer = extract_answer(text, how)  # type: ignore[arg-type]
        if answer:
            return answer
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return boxed[-1].strip() if boxed else None


def required_field(prompt: Prompt, key: str, option: str) -> Any:
    """A column of the prompt's row. DataError naming the columns there are when it is missing or null."""
    value = prompt.fields.get(key)
    if value is None:
        raise DataError(
            f"prompt {prompt.prompt_id}: the scorer needs column {key!r}, which is missing or null; the row "
            "has "
            f"{', '.join(prompt.fields) or 'no other columns'}. Name another with the scorer's option "
            f"{option}"
        )
    return value
