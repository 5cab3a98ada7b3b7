"""Values that several pieces of code hold and none may change: what is lent to code of the user's.

Writing raises ValueError where it is written, as numpy does for arrays. A copy (`dict(x)`, `list(x)`,
`copy.deepcopy(x)`, `x.copy()`) is a plain one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, NoReturn, Self, SupportsIndex

import numpy as np

# Most values: they cannot be changed, and need no call.
_PLAIN = frozenset({str, int, float, bool, type(None)})


def _refuse(lent: object, *args: object, **kwargs: object) -> NoReturn:
    kind = "dict" if isinstance(lent, dict) else "list"
    raise ValueError(f"this {kind} is lent and read-only; write into a copy: copy.deepcopy(…)")


class ReadOnlyDict(dict[Any, Any]):
    """A dict that cannot be changed."""

    __setitem__ = __delitem__ = __ior__ = _refuse  # type: ignore[assignment]
    clear = pop = popitem = setdefault = update = _refuse  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return ReadOnlyDict, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        return copy.deepcopy(dict(self), memo)

    def __copy__(self) -> dict[Any, Any]:
        return dict(self)


class ReadOnlyList(list[Any]):
    """A list that cannot be changed."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse  # type: ignore[assignment]
    append = extend = insert = pop = remove = clear = sort = reverse = _refuse  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return ReadOnlyList, (list(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        return copy.deepcopy(list(self), memo)

    def __copy__(self) -> list[Any]:
        return list(self)


class Lendable:
    """A row, as a frozen dataclass: its maker's until it is lent."""

    _is_lent = False

    def lent(self) -> Self:
        """Makes the fields of this row `read_only`, and returns it, for the user's code. A copy, pickled or
        not, is not lent, nor is what `dataclasses.replace` makes of it.
        """
        fields = vars(self)
        if "_is_lent" not in fields:
            fields.update(zip(list(fields), _each(fields.values()), strict=True), _is_lent=True)
        return self

    def replaced(self, **changes: Any) -> Self:
        """Returns what `dataclasses.replace` does, several times faster: without calling `__init__`. For
        changes of fields that there are and that nothing follows from.
        """
        fields = vars(self)
        assert changes.keys() <= fields.keys(), (
            f"{type(self).__name__} has no {changes.keys() - fields.keys()}"
        )
        made = object.__new__(type(self))
        vars(made).update(fields, **changes)
        vars(made).pop("_is_lent", None)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the mark behind: arrays may be written again where they are unpickled."""
        return {name: value for name, value in vars(self).items() if name != "_is_lent"}


def read_only(value: Any) -> Any:
    """Returns the value with its dicts, lists, tuples, arrays and rows read-only, at every depth; arrays are
    views. What is none of these is returned as it is.
    """
    return _each([value])[0]


def _each(values: Iterable[Any]) -> list[Any]:
    """Returns each value read-only: of all rows of a step, and so without a call for each."""
    made = []
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            pass
        elif kind is np.ndarray or isinstance(value, np.ndarray):
            if value.flags.writeable:
                value = value.view()
                value.flags.writeable = False
        elif kind is tuple:
            value = tuple(_each(value)) if value else value
        elif kind is dict:
            value = ReadOnlyDict(zip(value, _each(value.values()), strict=True))
        elif kind is list:
            value = ReadOnlyList(_each(value))
        elif isinstance(value, Lendable):
            value = value.lent()
        made.append(value)
    return made
