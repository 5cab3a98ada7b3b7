"""What is to be run and what should come out: the program in a response, the cases in a prompt's row, and
when two outputs are the same. Pure functions, in time linear in the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rondo.core.errors import DataError
from rondo.core.types import Prompt, value_of_json

_FENCE = "```"
_PYTHON = ("python", "python3", "py")
_SHAPES = (
    "{inputs: […], outputs: […]}, with fn_name where a function is called; {tests: text or list}; or tests "
    "alone, as text or a list of texts"
)


@dataclass(frozen=True)
class StdinCase:
    """A whole program: what it reads, and what it should print."""

    given: str
    """The whole of standard input."""
    expected: str
    """On standard output; only its words count, not the white space between them."""


@dataclass(frozen=True)
class CallCase:
    """A function of the program: its arguments, and the results that are right."""

    name: str
    """Of the function, or of the method of a class `Solution`."""
    arguments: Sequence[Any]
    """By position."""
    accepted: tuple[Any, ...]
    """Any of them is right."""


@dataclass(frozen=True)
class AssertCase:
    """Python with assertions about the program's functions."""

    text: str
    """The whole test; it passes when it runs to its end."""


Case = StdinCase | CallCase | AssertCase


def last_program(text: str) -> str | None:
    """Returns the last closed block between lines of three backticks that is marked as Python; where none is
    marked so, the last one without a mark; None where there is neither.
    """
    marked: str | None = None
    plain: str | None = None
    language: str | None = None
    lines: list[str] = []
    for line in text.splitlines():
        said = line.strip()
        if said == _FENCE and language is not None:
            block = "\n".join(lines) + "\n"
            if language in _PYTHON:
                marked = block
            elif not language:
                plain = block
            language = None
        elif said.startswith(_FENCE):
            language, lines = said.removeprefix(_FENCE).strip().lower(), []
        else:
            lines.append(line)
    return plain if marked is None else marked


def read_cases(prompt: Prompt, key: str) -> list[Case]:
    """Returns the cases in a column, or in one inside it (`reward_model.ground_truth`). Raises DataError."""
    value = value_of_json(_column(prompt, key))
    wrong = f"prompt {prompt.prompt_id}: column {key!r} has no cases that can be run"
    if isinstance(value, Mapping) and "inputs" in value and "outputs" in value:
        return _pairs(value, wrong)
    about: Mapping[str, Any] = prompt.fields
    if isinstance(value, Mapping) and "tests" in value:
        about, value = value, value["tests"]
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{wrong}; it may be {_SHAPES}, or such as JSON; it is {value!r:.200}")
    before, after = _around(about)
    return [AssertCase(f"{before}{text}\n{after}") for text in texts]


def _column(prompt: Prompt, key: str) -> Any:
    value = prompt.column(key)
    if value is None:
        raise DataError(
            f"prompt {prompt.prompt_id}: the scorer code needs column {key!r}, which is missing or null; the "
            f"row has {', '.join(prompt.fields) or 'no other columns'}. Name another with its option "
            "cases_key"
        )
    return value


def _pairs(value: Mapping[str, Any], wrong: str) -> list[Case]:
    inputs, outputs, name = value["inputs"], value["outputs"], value.get("fn_name")
    lists = isinstance(inputs, Sequence) and isinstance(outputs, Sequence)
    if not lists or isinstance(inputs, str) or len(inputs) != len(outputs) or not inputs:
        sizes = f"{len(inputs)} inputs and {len(outputs)} outputs" if lists else "they are no lists"
        raise DataError(
            f"{wrong}: inputs and outputs must be lists of one length, and not empty; here {sizes}. Mend the "
            "row or take it out"
        )
    if name is None:
        return [StdinCase(_text(i), _text(o)) for i, o in zip(inputs, outputs, strict=True)]
    try:
        return [_call(name, i, o) for i, o in zip(inputs, outputs, strict=True)]
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{wrong}: with fn_name ({name}) an input is a list of arguments, or JSON, an argument a line, "
            f"and an output a value, or its JSON: {error}"
        ) from error


def _text(value: Any) -> str:
    """Returns what stdin has or stdout should have: lists are lines."""
    return value if isinstance(value, str) else "\n".join(map(str, value))


def _call(name: str, given: Any, expected: Any) -> CallCase:
    arguments = [json.loads(line) for line in given.split("\n")] if isinstance(given, str) else list(given)
    if isinstance(expected, str):
        return CallCase(name, arguments, (json.loads(expected),))
    accepted: tuple[Any, ...] = (expected,)
    if isinstance(expected, list) and len(expected) == 1:  # APPS and TACO wrap some results
        accepted = (expected, expected[0])
    return CallCase(name, arguments, accepted)


def _around(about: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the code in front of tests (from MBPP's columns) and behind them (from HumanEval's)."""
    before = [*(about.get("test_imports") or ()), about.get("test_setup_code") or ""]
    entry = about.get("entry_point")
    return "".join(f"{text}\n" for text in before if text), f"check({entry})\n" if entry else ""


def same_output(printed: str, expected: str) -> bool:
    """Says whether two outputs have the same words in the same order: white space does not count."""
    return printed.split() == expected.split()


def same_result(text: str, accepted: Sequence[Any]) -> bool:
    """Says whether a result, as JSON, is one of the accepted ones."""
    try:
        result = json.loads(text)
        return any(result == each for each in accepted)
    except (ValueError, RecursionError):
        return False
