"""Rows as plain Python, whatever they came in: what other programs' values are here, and what none can be."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rondo.config.schema import SourceConfig
from rondo.core.errors import ConfigError, DataError, did_you_mean

_log = logging.getLogger(__name__)

Row = Mapping[str, Any]

MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns that hold pictures, films or sound in everybody's data."""
MOST_LEVELS = 100  # of lists and mappings in a row; what pickles and prints them has a limit of its own
_ROWS_AT_HAND = 256
_FILE = frozenset({"bytes", "path"})  # `datasets` keeps a picture or a sound so


@dataclass(frozen=True)
class Rows:
    """What was found behind a configured source."""

    rows: Sequence[Row]
    """The rows, in the order of the source."""
    origin: str
    """What the rows came from, for messages."""
    place: Callable[[int], str] | None = None
    """Says where a row is, if not at `<origin>, row <position>`."""
    media: Sequence[str] | None = None
    """The columns that may hold pictures, films or sound; None: any may."""
    stamp: str | None = None
    """Is another where the rows are; None where nothing says so."""


def plain(value: Any) -> Any:
    """Returns mappings as dicts, sequences and arrays as lists, and the scalars of numpy as Python's."""
    if type(value) is str:  # most
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(child) for key, child in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    return [plain(child) for child in value] if isinstance(value, list | tuple) else value


class RowsAtHand(Sequence[Row]):
    """Rows that are made on request; the latest are kept, as each is requested several times in a row."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._made: dict[int, Row] = {}

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[one] for one in range(*row.indices(len(self)))]
        found = self._made.get(row)
        if found is None:
            if not 0 <= row < len(self):
                raise IndexError(row)
            if len(self._made) >= _ROWS_AT_HAND:
                self._made.clear()
            found = self._made[row] = self.make(row)
        return found

    def make(self, row: int) -> Row:
        """Reads a row."""
        raise NotImplementedError


class WithoutColumns(RowsAtHand):
    """Rows without some of their columns."""

    def __init__(self, rows: Sequence[Row], dropped: Sequence[str]) -> None:
        super().__init__(len(rows))
        self._rows = rows
        self._dropped = dropped

    def make(self, row: int) -> Row:
        return {name: value for name, value in self._rows[row].items() if name not in self._dropped}


class DatasetRows(RowsAtHand):
    """Rows of a data set of the package `datasets`, without the nulls that Arrow has added."""

    def __init__(self, rows: Sequence[dict[str, Any]], origin: str) -> None:
        super().__init__(len(rows))
        self._rows = rows
        self._nulls = AddedNulls(origin)

    def make(self, row: int) -> Row:
        found = self._rows[row]
        return {name: self._nulls.left_out(name, value) for name, value in found.items()}


class ArrowRow(Mapping[str, Any]):
    """A row of Arrow's columns, without the nulls that it has added. A cell is read when it is asked for."""

    __slots__ = ("_at", "_columns", "_nulls", "_read")

    def __init__(self, columns: Mapping[str, Any], at: int, nulls: AddedNulls) -> None:
        self._columns = columns
        self._at = at
        self._nulls = nulls
        self._read: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._read:
            column = self._columns[name]
            cell = with_mappings(column[self._at].as_py(), column.type)
            self._read[name] = self._nulls.left_out(name, cell)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


def with_mappings(value: Any, kind: Any) -> Any:
    """Returns a value of Arrow's type `kind` with its maps as mappings: Arrow gives lists of pairs."""
    if value is None or not _has_maps(kind):
        return value
    if isinstance(value, dict):
        return {name: with_mappings(child, kind.field(name).type) for name, child in value.items()}
    if hasattr(kind, "item_type"):
        return {key: with_mappings(child, kind.item_type) for key, child in value}
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [with_mappings(child, kind.value_type) for child in value]
    return value


@functools.cache
def _has_maps(kind: Any) -> bool:
    inner = (kind.field(i).type for i in range(kind.num_fields))
    return hasattr(kind, "item_type") or any(map(_has_maps, inner))


class AddedNulls:
    """Leaves out the nulls that Arrow adds, and says so once. origin: what the rows came from."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._has_told = False

    def left_out(self, name: str, value: Any) -> Any:
        """Removes the nulls that Arrow added to a column's value; returns the same object where there are
        none.
        """
        less = without_added_nulls(name, value)
        if less is not value and not self._has_told:
            self._has_told = True
            _log.warning(
                "%s: nulls inside tools and arguments are left out, as Arrow (Parquet, datasets) gives every "
                "mapping the keys of all others. To keep nulls that you wrote, write these columns as JSON "
                "text",
                self._origin,
            )
        return less


def without_added_nulls(name: str, value: Any) -> Any:
    """Returns a column's value without the nulls that Arrow adds inside schemas of tools and arguments of
    calls; the value itself where there are none.
    """
    return _less(value) if name == "tools" else _of_calls(value)


def _less(value: Any) -> Any:
    """Returns a value without the keys of mappings that are null, however deep; itself where none is."""
    if isinstance(value, dict):
        less = {key: _less(child) for key, child in value.items() if child is not None}
        same = len(less) == len(value) and all(less[key] is value[key] for key in less)
        return value if same else less
    return _each(value, _less) if isinstance(value, list) else value


def _each(values: list[Any], change: Callable[[Any], Any]) -> list[Any]:
    """Returns a list with each item changed; itself where none was."""
    changed = [change(value) for value in values]
    return changed if any(one is not value for one, value in zip(changed, values, strict=True)) else values


def _of_calls(value: Any) -> Any:
    """Returns messages, or one, without the nulls inside the arguments of their calls; itself else."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return _each(value, _of_calls)
    if not isinstance(value, dict) or not isinstance(value.get("tool_calls"), list):
        return value
    calls = _each(value["tool_calls"], _of_call)
    return value if calls is value["tool_calls"] else {**value, "tool_calls": calls}


def _of_call(call: Any) -> Any:
    changed = {}
    if isinstance(call, dict):
        for key, less in (
            ("function", _of_call(call.get("function"))),
            ("arguments", _less(call.get("arguments"))),
        ):
            if less is not call.get(key):
                changed[key] = less
    return {**call, **changed} if changed else call


def is_media(name: str, value: Any) -> bool:
    """Says whether a column of this name and value holds pictures, films or sound."""
    if value is None or (isinstance(value, str | list) and not value):
        return False
    return name.lower() in MEDIA or (not isinstance(value, str | int | float) and _is_file(value))


def _is_file(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and _is_file(value[0])
    return (isinstance(value, dict) and value.keys() == _FILE) or type(value).__module__.startswith("PIL.")


def media_columns(fields: Iterable[Any]) -> list[str]:
    """Returns those of Arrow's columns that may hold pictures, films or sound, by name or type."""
    return [field.name for field in fields if field.name.lower() in MEDIA or _is_file_type(field.type)]


def _is_file_type(kind: Any) -> bool:
    inner = [kind.field(i) for i in range(kind.num_fields)]
    if {field.name for field in inner} == _FILE:
        return True
    return len(inner) == 1 and _is_file_type(inner[0].type)  # a list of them


def kept_columns(columns: Iterable[str], config: SourceConfig, origin: str) -> list[str]:
    """Returns the columns that a source does not drop. Raises ConfigError where one to drop is not there."""
    there = list(columns)
    for name in config.drop_columns:
        if name not in there:
            raise ConfigError(f"drop_columns: {origin} has no column {name!r}{did_you_mean(name, there)}")
    return [name for name in there if name not in config.drop_columns]


def check_names(names: Sequence[str], where: str) -> None:
    """Raises DataError where two columns, or fields of one, have the same name: only one would be read."""
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"{where}: {names.count(name)} columns are called {name!r}; rename or remove one")


def check_schema(schema: Any, where: str) -> None:
    """Raises DataError where an Arrow schema, or a struct anywhere in it, has a name twice."""
    fields = [schema.field(i) for i in range(len(schema))]
    check_names([field.name for field in fields], where)
    for field in fields:
        _check_type(field.type, f"{where}, column {field.name!r}")


def _check_type(kind: Any, where: str) -> None:
    fields = [kind.field(i) for i in range(kind.num_fields)]
    check_names([field.name for field in fields], where)
    for field in fields:
        _check_type(field.type, where)
