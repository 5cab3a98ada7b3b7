"""JSON of clients and of models, read so that the value can always be written again."""

from __future__ import annotations

import json
import math
from typing import Any

from rondo.core.errors import half_of_a_pair

MAX_DEPTH = 64
_LONGEST_NUMBER = 400  # characters; no double needs more, and int() is quadratic in them


class JsonError(ValueError):
    """path: of what is wrong (`messages.0.content`); empty for the text as a whole."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path} {message}" if path else message)
        self.path = path


def read_json(text: str) -> Any:
    """Returns the value of a JSON text. Raises JsonError for what is no JSON (NaN, infinities and numbers out
    of their range too), has half of a surrogate pair, or is nested deeper than MAX_DEPTH.
    """
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise JsonError("", f"is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise JsonError("", str(error)) from None
    _check([value])
    return value


def json_parts(text: str) -> list[tuple[str, str]]:
    """Returns (name, value as it is written) of the members of an object, or ("", value) of the items of a
    list. text: one of them, which `read_json` reads.
    """
    at = _behind_space(text, 0)
    close = {"{": "}", "[": "]"}[text[at]]
    at = _behind_space(text, at + 1)
    parts = []
    while text[at] != close:
        name = ""
        if close == "}":
            name, at = _DECODER.raw_decode(text, at)
            at = _behind_space(text, _behind_space(text, at) + 1)  # the colon
        _, end = _DECODER.raw_decode(text, at)
        parts.append((name, text[at:end]))
        at = _behind_space(text, end)
        if text[at] == ",":
            at = _behind_space(text, at + 1)
    return parts


def _behind_space(text: str, at: int) -> int:
    while text[at] in " \t\n\r":
        at += 1
    return at


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _LONGEST_NUMBER else math.inf  # which _check refuses by name


def _fraction(digits: str) -> float:
    return float(digits) if len(digits) <= _LONGEST_NUMBER else math.nan


_DECODER = json.JSONDecoder(parse_int=_integer, parse_float=_fraction)


def _check(root: list[Any]) -> None:
    """Looks through a list whose one item is the value."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), root)]
    while waiting:
        path, container = waiting.pop()
        if len(path) > MAX_DEPTH:
            raise JsonError(_said(path[:4]) + "…", f"is nested deeper than {MAX_DEPTH} levels")
        if isinstance(container, dict):
            for name in container:
                if half_of_a_pair(name) is not None:
                    raise JsonError(_said(path), f"has a name with half of a surrogate pair, {name!a:.40}")
        for name, item in container.items() if isinstance(container, dict) else enumerate(container):
            kind = type(item)
            if kind is dict or kind is list:
                waiting.append(((*path, str(name)), item))
            elif kind is str and half_of_a_pair(item) is not None:
                raise JsonError(_said((*path, str(name))), "has half of a surrogate pair, which is no text")
            elif kind is float and not math.isfinite(item):
                raise JsonError(_said((*path, str(name))), "is no finite number")


def _said(path: tuple[str, ...]) -> str:
    return ".".join(path[1:])
