"""What a pure function asserts of its arguments at its head: the ranks of the tensors that it reads, which
follow from their names (`ranked`), and the bounds of its options (`require`).

A column is one number per row, turn, token or choice of a token (columns.py says which). In estimators rows
lie below each other, [B] and [B, T]; in a loss the tokens of all rows lie behind each other, [N], and what is
per row stands on each of them. Letters: B rows, T tokens of a row, U its turns, G groups, N tokens in all, K
choices or scores, P preference pairs.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

from rondo.core.columns import TABLE
from rondo.core.errors import ConfigError

# pairs: every column is [P]. any: flat where the first column is, else rows.
Layout = Literal["rows", "flat", "pairs", "any"]
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

_SHAPES: Mapping[str, Mapping[str, str]] = {
    "rows": {"row": "[B]", "turn": "[B, U]", "token": "[B, T]", "choice": "[B, T, K]"},
    "flat": {"row": "[N]", "token": "[N]", "choice": "[N, K]"},
}
# Columns whose shape is not that of what the table says they belong to, in any layout.
_OWN_SHAPES = {"scores": "[B, K]", "multiplier": "[]", "cu_seqlens": "[B+1]"}


def ranked(layout: Layout, **others: str) -> Callable[[AnyFunction], AnyFunction]:
    """Makes a function assert the ranks of the columns among its parameters before `*`.

    others: what parameters that are in no table belong to (`gap="token"`); the rest of those is free. The
    AssertionError names function, parameter, what its shape must be and what it is.
    """

    def decorate(function: AnyFunction) -> AnyFunction:
        parameters = inspect.signature(function).parameters.values()
        names = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        possible = ("flat", "rows") if layout == "any" else (layout,)
        expected = {kind: _shapes(names, kind, others) for kind in possible}

        @functools.wraps(function)
        def checked(*args: Any, **named: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | named
            kind = layout
            if kind == "any":
                kind = "flat" if given[names[0]].ndim == 1 else "rows"
            for name, shape in expected[kind].items():
                value = given.get(name)
                rank = shape.count(",") + (shape != "[]")
                assert value is None or value.ndim == rank, (
                    f"{function.__name__}: {name} must be {shape}, its shape is {list(value.shape)}"
                )
            return function(*args, **named)

        return cast(AnyFunction, checked)

    return decorate


def _shapes(names: Sequence[str], layout: str, others: Mapping[str, str]) -> dict[str, str]:
    """Returns the shape ("[B, T]") that each column must have, for the names that are known."""
    if layout == "pairs":
        return dict.fromkeys(names, "[P]")
    belongs_to = {**{column.name: column.per for column in TABLE}, **others}
    known = {name: _SHAPES[layout].get(per) for name, per in belongs_to.items()} | _OWN_SHAPES
    return {name: shape for name in names if (shape := known.get(name)) is not None}


def require(
    what: str,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    **options: float | None,
) -> None:
    """Raises ConfigError for an option that is not within these bounds, NaN included; None always is.

    what: the key and the function, for the message.
    """
    bounds: Sequence[tuple[str, Callable[[Any, Any], bool], float | None]] = (
        (">", operator.gt, above),
        (">=", operator.ge, at_least),
        ("<=", operator.le, at_most),
        ("<", operator.lt, below),
    )
    given = [bound for bound in bounds if bound[2] is not None]
    for name, value in options.items():
        if value is None or all(holds(value, limit) for _, holds, limit in given):
            continue
        needs = " and ".join(f"{sign} {limit}" for sign, _, limit in given)
        raise ConfigError(f"{what} needs {name} {needs}, got {value}")
