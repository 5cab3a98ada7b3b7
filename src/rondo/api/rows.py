"""Rows from memory, written where a recipe can name them: as they were given, with few of them in memory.

rows (list, pandas, Arrow, Dataset, generator) ─▶ a spool on disk, in batches ─┬▶ FOLDER/train.parquet
                                                  (a generator is asked once)  └▶ FOLDER/train.jsonl
"""

from __future__ import annotations

import itertools
import json
import pickle
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from rondo.core.errors import ConfigError, DataError, is_deep
from rondo.data.plain import (
    MOST_LEVELS,
    AddedNulls,
    check_names,
    check_schema,
    plain,
    with_mappings,
    without_added_nulls,
)
from rondo.system.storage import make_folder, replacing, storing, sync_path

MOST_ROWS = 10_000_000  # of a generator: more is one that never ends
BATCH = 10_000  # rows in memory at one time
_NOT_ARROWS = (pa.ArrowException, OverflowError, UnicodeEncodeError)

Row = dict[str, Any]


def plain_rows(data: Any, size: int | None, argument: str) -> Iterator[Row]:
    """Yields rows as plain mappings, `size` of them at most. argument: what messages call `data`. Raises
    ConfigError, DataError.
    """
    of_arrow = isinstance(data, pa.Table) or type(data).__module__.startswith("datasets.")
    if hasattr(data, "to_dict") and hasattr(data, "iloc"):
        data = _of_pandas(data, argument)
    elif isinstance(data, pa.Table):
        check_schema(data.schema, argument)
        parts = data.to_batches(max_chunksize=BATCH)
        kinds = {field.name: field.type for field in data.schema}
        data = (
            {name: with_mappings(value, kinds[name]) for name, value in row.items()}
            for part in parts
            for row in part.to_pylist()
        )
    elif not isinstance(data, Iterable) and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        data = (data[i] for i in range(len(data)))
    if not isinstance(data, Iterable) or isinstance(data, Mapping | Set | str | bytes):
        raise ConfigError(
            f"{argument}: {type(data).__name__} is no rows in an order; give a list of mappings, or a file's "
            "path"
        )
    nulls = AddedNulls(argument)
    for number, given in enumerate(itertools.islice(data, size)):
        if size is None and number == MOST_ROWS:
            raise DataError(f"{argument}: more than {MOST_ROWS} rows; say how many to take: size=…")
        if is_deep(given, MOST_LEVELS):
            raise DataError(
                f"{argument}, row {number}: is nested more than {MOST_LEVELS} deep, or holds itself"
            )
        row = plain({"prompt": given} if isinstance(given, str) else given)
        if not isinstance(row, dict):
            raise DataError(
                f"{argument}, row {number}: a row is a mapping (or a prompt), got {type(row).__name__}"
            )
        yield {name: nulls.left_out(name, value) for name, value in row.items()} if of_arrow else row


def _of_pandas(frame: Any, argument: str) -> Iterator[Row]:
    """Yields the rows of a DataFrame: what its cells hold, and None where a value is missing."""
    check_names([str(name) for name in frame.columns], argument)
    for first in range(0, len(frame), BATCH):
        for row in frame.iloc[first : first + BATCH].to_dict("records"):
            yield {name: _cell(value) for name, value in row.items()}


def _cell(value: Any) -> Any:
    if hasattr(value, "to_pydatetime"):  # NaT, too, which is not equal to itself
        value = value.to_pydatetime()
    is_missing = type(value).__name__ == "NAType" or (not hasattr(value, "__len__") and value != value)
    return None if is_missing else value


def write_rows(rows: Iterator[Row], folder: Path, name: str) -> Path:
    """Writes rows as FOLDER/NAME.parquet where Parquet gives the same rows back, else as NAME.jsonl; returns
    the path. A failure leaves no file. Raises DataError.
    """
    make_folder(folder)
    try:
        with tempfile.TemporaryFile(dir=folder) as spool:
            path = folder / f"{name}.parquet"
            schema = _spool(rows, spool, path)
            if schema is None or not _write_parquet(path, spool, schema):
                path = folder / f"{name}.jsonl"
                _write_json(path, spool)
    except BaseException:
        with suppress(OSError):  # other things are in there
            folder.rmdir()
        raise
    sync_path(folder)
    return path


def _spool(rows: Iterator[Row], spool: IO[bytes], path: Path) -> pa.Schema | None:
    """Writes rows down in batches; returns the schema that may hold all of them, None: there is none. path:
    where they will be.
    """
    schema: pa.Schema | None = pa.schema([])
    number = 0
    while batch := list(itertools.islice(rows, BATCH)):
        if schema is not None:  # nulls that were given inside tools and arguments would be taken for Arrow's
            cells = (cell for row in batch for cell in row.items())
            has_nulls = any(without_added_nulls(name, value) is not value for name, value in cells)
            schema = None if has_nulls else _wider(schema, batch)
        if schema is None:
            _lines(batch, number, path.stem)  # raises for what no file, and perhaps no pickle, holds
        with storing(path):
            pickle.dump(batch, spool)
            spool.flush()
        number += len(batch)
    if not number:
        raise DataError(f"{path.stem}: there are no rows")
    return schema


def _batches(spool: IO[bytes]) -> Iterator[list[Row]]:
    spool.seek(0)
    with suppress(EOFError):
        while True:
            yield pickle.load(spool)


def _wider(schema: pa.Schema, batch: list[Row]) -> pa.Schema | None:
    """Returns one schema for a batch and all batches before it; None: a column has values of several kinds,
    or of a kind that Arrow lacks.
    """
    try:
        found = pa.Table.from_pylist(batch).schema
        return pa.unify_schemas([schema, found], promote_options="permissive")
    except _NOT_ARROWS:
        return None


class _ChangedError(Exception):
    """A row does not come back as it was."""


def _write_parquet(path: Path, spool: IO[bytes], schema: pa.Schema) -> bool:
    """Writes a Parquet file. Returns False, and leaves no file, where a row would not come back as it was."""
    try:
        with replacing(path) as temporary:
            with pq.ParquetWriter(temporary, schema) as writer:
                for batch in _batches(spool):
                    table = pa.Table.from_pylist(batch, schema=schema)
                    if not _same(table.to_pylist(), batch):
                        raise _ChangedError
                    writer.write_table(table)
            sync_path(temporary)
    except (*_NOT_ARROWS, _ChangedError):
        return False
    return True


def _write_json(path: Path, spool: IO[bytes]) -> None:
    number = 0
    with replacing(path) as temporary:
        with temporary.open("w", encoding="utf-8") as file:
            for batch in _batches(spool):
                file.writelines(_lines(batch, number, path.stem))
                number += len(batch)
        sync_path(temporary)


def _lines(batch: list[Row], first: int, name: str) -> list[str]:
    """Returns rows as JSON lines. first: the number of the first row. Raises DataError for one that does not
    come back from that.
    """
    lines = [_as_json(row) for row in batch]
    for number, (row, line) in enumerate(zip(batch, lines, strict=True), start=first):
        if line is None:
            column, value = next((key, value) for key, value in row.items() if _as_json({key: value}) is None)
            raise DataError(
                f"{name}, row {number}: column {column!r} holds {type(value).__name__}, which does not come "
                "back from a file as it was given; use text, numbers, lists or mappings"
            )
    return [f"{line}\n" for line in lines]


def _as_json(row: Row) -> str | None:
    """Returns a row as a line; None where it does not come back from that as it was."""
    try:
        line = json.dumps(row, ensure_ascii=False, allow_nan=False)
        return line if _same(json.loads(line.encode()), row) else None
    except (TypeError, ValueError):
        return None


def _same(one: Any, other: Any) -> bool:
    """Says whether two values are equal and of equal types, however deep: 1 is not 1.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
