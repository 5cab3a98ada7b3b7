"""What a request gets that cannot be answered: OpenAI's error object."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from rondo.core.errors import RondoError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
# pydantic's kinds of errors in OpenAI's codes; what is not here is a wrong type.
_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "literal_error": "unsupported_value",
    "unsupported_value": "unsupported_value",
} | dict.fromkeys(
    (
        *("greater_than", "greater_than_equal", "less_than_equal", "finite_number", "invalid_value"),
        *("string_too_short", "string_too_long", "too_short", "too_long"),
    ),
    "invalid_value",
)
# Characters: what a client sent is not sent back whole.
_LONGEST_MESSAGE, _LONGEST_PARAM = 4000, 200
_NO_VALUE = {"missing": "is missing", "extra_forbidden": "is no parameter here"}

T = TypeVar("T")


class Missing(NamedTuple):
    """What clients ask of other servers, and there is not here."""

    neutral: tuple[Any, ...]
    """The values of a parameter that ask for nothing."""
    instead: str
    """Says what to use instead, or why there is none."""


@cache
def missing_here() -> Mapping[str, Missing]:
    """Returns the parameters and paths of missing.tsv."""
    text = Path(__file__).with_name("missing.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    return {name: Missing(tuple(json.loads(neutral or "[]")), instead) for name, neutral, instead, _ in rows}


class ApiError(RondoError):
    """status: of the HTTP answer. param: the offending parameter. code: OpenAI's word for it, or ours."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "", status: int = 400) -> None:
        super().__init__(message[:_LONGEST_MESSAGE])
        self.status = status
        self.param = param and param[:_LONGEST_PARAM]
        self.code = code or None

    def body(self) -> dict[str, Any]:
        """Writes `{"error": {message, type, param, code}}`."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, default)
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def unknown_model(asked: str, served: str) -> ApiError:
    """Returns the 404 of a request for another model than the one that is served."""
    text = f"the model {asked!r:.200} does not exist here; there is {served!r}"
    return ApiError(text, param="model", code="model_not_found", status=404)


def unknown_path(path: str, served: Sequence[str]) -> ApiError:
    """Returns the 404 of a path that is none of those that are served."""
    for start, missing in missing_here().items():
        if start.startswith("/") and f"{path}/".startswith(f"{start}/"):
            text = f"{path} is not supported here: {missing.instead}"
            return ApiError(text, code="unsupported_endpoint", status=404)
    return ApiError(f"{path} is no path here; there are: {', '.join(served)}", code="unknown_url", status=404)


def refuse(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """Returns a 400 about one parameter."""
    return ApiError(f"{param[:_LONGEST_PARAM]}: {message}", param=param, code=code)


def checked(kind: TypeAdapter[T], value: Any, *where: str) -> T:
    """Returns `value` as `kind` reads it. where: its parameter. Raises ApiError (400) for the first fault."""
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
    text = _NO_VALUE.get(fault["type"])
    if text is None:
        text = f"{fault['msg'].replace('Input should be', 'must be')}, got {reprlib.repr(fault['input']):.40}"
    param = ".".join(map(str, (*where, *fault["loc"])))
    raise refuse(param, text, _CODES.get(fault["type"], "invalid_type"))
