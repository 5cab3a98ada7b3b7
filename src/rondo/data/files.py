"""Rows in files, here or at a URL: Parquet, and JSON in lines or as one list, compressed or not.

What is in a source of up to `content.HELD` bytes is all read when it is opened. Of a larger one a row is read
when it is asked for.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

import numpy as np

from rondo.config.schema import FileSourceConfig
from rondo.core.errors import DataError, half_of_a_pair, is_deep
from rondo.core.masking import masked_urls
from rondo.data.content import HELD, Content, content_of, counted, line_starts, look, made, reading
from rondo.data.plain import (
    MOST_LEVELS,
    AddedNulls,
    ArrowRow,
    Row,
    Rows,
    RowsAtHand,
    check_schema,
    kept_columns,
    media_columns,
)
from rondo.data.shards import DataFile, files_of, stamp_of

_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_MARK = b"\xef\xbb\xbf"  # of UTF-8, at the beginning of a file
_BATCH_BYTES = 1 << 23  # of a batch of Arrow that a Parquet file is made into


def _origin_of(config: FileSourceConfig) -> str:
    """Returns what messages call the files of a source together."""
    return masked_urls(config.path if isinstance(config.path, str) else ", ".join(config.path))


class _RowsOfFiles(RowsAtHand):
    """The rows of several files, one file's behind the other's. sizes: rows of each. size: of all together at
    most.
    """

    def __init__(self, sizes: Sequence[int], size: int | None) -> None:
        super().__init__(sum(sizes) if size is None else min(size, sum(sizes)))
        self._ends = np.cumsum(sizes)

    def place(self, row: int) -> tuple[int, int]:
        """Returns the index of the file with this row, and the row's index in that file."""
        file = int(np.searchsorted(self._ends, row, side="right"))
        return file, row - (int(self._ends[file - 1]) if file else 0)


# ---- Parquet ----


class _Table:
    """A Parquet file: in memory, or made into a file of Arrow when the first row is asked for."""

    def __init__(self, file: DataFile) -> None:
        import pyarrow.parquet as pq

        self._file = file
        self._lock = threading.Lock()
        self._columns: dict[str, Any] = {}
        with _as_parquet(file), file.open() as opened:
            found = pq.ParquetFile(opened)
            self.schema = found.schema_arrow
            self.num_rows = int(found.metadata.num_rows)
            groups = range(found.metadata.num_row_groups)
            self.num_bytes = sum(found.metadata.row_group(i).total_byte_size for i in groups)
            check_schema(self.schema, file.name)

    def columns(self, names: Sequence[str], *, held: bool = False) -> Mapping[str, Any]:
        """Returns these columns, by name. held: they are read into memory."""
        with self._lock:  # of two threads one makes it, and the other waits
            if not self._columns:
                own = [name for name in self.schema.names if name in names]
                table = self._held(own) if held else self._mapped(own)
                self._columns = {name: table.column(name) for name in own}
            return self._columns

    def _held(self, names: list[str]) -> Any:
        import pyarrow.parquet as pq

        with _as_parquet(self._file), self._file.open() as opened:
            table = pq.ParquetFile(opened).read(columns=names)
            table.validate(full=True)  # texts are UTF-8
            return table

    def _mapped(self, names: list[str]) -> Any:
        import pyarrow as pa

        key = self._file.key("arrow", names)
        mapped = made(key, lambda into: self._convert(names, into), self._file.name)
        return pa.ipc.open_file(pa.py_buffer(mapped)).read_all()

    def _convert(self, names: list[str], into: IO[bytes]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = max(1, self.num_rows * _BATCH_BYTES // max(1, self.num_bytes))
        with _as_parquet(self._file), self._file.open() as opened:
            # Without these two a column of a row group is read whole.
            found = pq.ParquetFile(opened, buffer_size=1 << 20, pre_buffer=False)
            schema = pa.schema([self.schema.field(name) for name in names])
            with pa.ipc.new_file(into, schema) as writer:
                for number, batch in enumerate(found.iter_batches(min(rows, 1 << 16), columns=names)):
                    batch.validate(full=True)
                    writer.write_batch(batch)
                    look(f"{self._file.name}: {number * rows} of {self.num_rows} rows made into Arrow")
        pa.default_memory_pool().release_unused()


@contextmanager
def _as_parquet(file: DataFile) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{file.name} cannot be read as Parquet: {error}") from error


class _TableRows(_RowsOfFiles):
    """The rows of Parquet files, of which a cell is made into Python when it is asked for."""

    def __init__(self, tables: Sequence[_Table], names: Sequence[str], size: int | None, origin: str) -> None:
        super().__init__([table.num_rows for table in tables], size)
        self._tables = tables
        self._names = names
        self._nulls = AddedNulls(origin)

    def make(self, row: int) -> Row:
        file, at = self.place(row)
        return ArrowRow(self._tables[file].columns(self._names), at, self._nulls)


def open_parquet(config: FileSourceConfig) -> Rows:
    """Opens Parquet files. Raises ConfigError, DataError."""
    files = files_of(config)
    tables = list(map(_Table, counted(files, "Parquet files")))
    names = list(dict.fromkeys(name for table in tables for name in table.schema.names))
    origin = _origin_of(config)
    kept = kept_columns(names, config, origin)
    if sum(table.num_bytes for table in tables) <= HELD:
        for table in tables:
            table.columns(kept, held=True)
    rows = _TableRows(tables, kept, config.size, origin)

    def where(row: int) -> str:
        file, at = rows.place(row)
        return f"{files[file].name}, row {at}"

    fields = [field for table in tables for field in table.schema if field.name in kept]
    return Rows(rows, origin, where, media_columns(fields), stamp_of(files))


# ---- JSON ----


class _Lines:
    """The rows of a file of JSON lines."""

    def __init__(self, file: DataFile, content: Content) -> None:
        self._name = file.name
        self._content = content
        self._starts = line_starts(content, file.key("lines"), file.name)

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, at: int) -> Row:
        end = int(self._starts[at + 1]) if at + 1 < len(self) else len(self._content)
        line = self._content[int(self._starts[at]) : end]
        return _checked_row(_json(line), is_odd=_is_odd(line))

    def where(self, at: int) -> str:
        line, start = 1, int(self._starts[at])
        for begin in range(0, start, HELD):  # counted only when somebody is told
            line += self._content[begin : min(begin + HELD, start)].count(b"\n")
        return f"{self._name}, line {line}"


class _Items:
    """The rows of a file that is one list of JSON. It is read whole: JSON cannot be read by pieces."""

    def __init__(self, file: DataFile, content: bytes) -> None:
        self._name = file.name
        try:
            self._rows, self._is_odd = _json(content), _is_odd(content)
        except _RowError as error:
            raise DataError(f"{file.name}: {error}") from error

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, at: int) -> Row:
        return _checked_row(self._rows[at], is_odd=self._is_odd)

    def where(self, at: int) -> str:
        return f"{self._name}, item {at}"


class JsonRows(_RowsOfFiles):
    """The rows of files of JSON, of which a line is parsed when it is asked for."""

    def __init__(self, files: Sequence[_Lines | _Items], size: int | None) -> None:
        super().__init__(list(map(len, files)), size)
        self._files = files

    def make(self, row: int) -> Row:
        file, at = self.place(row)
        try:
            return self._files[file].row(at)
        except _RowError as error:
            raise DataError(f"{self.where(row)}: {error}") from error

    def where(self, row: int) -> str:
        """Says which line, or item, of which file a row is."""
        file, at = self.place(row)
        return self._files[file].where(at)


def open_jsonl(config: FileSourceConfig) -> Rows:
    """Opens files of JSON: an object in each line, or one list of objects. Raises ConfigError, DataError."""
    files, origin = files_of(config), _origin_of(config)
    rows = JsonRows([_read_json(file) for file in counted(files, "files of JSON")], config.size)
    if sum(file.size for file in files) <= HELD:
        return Rows(list(counted(rows, origin)), origin, rows.where, stamp=stamp_of(files))
    return Rows(rows, origin, rows.where, stamp=stamp_of(files))


def _read_json(file: DataFile) -> _Lines | _Items:
    with reading(file):
        content = content_of(file)
        begin = content[0 : min(4096, len(content))].removeprefix(_MARK).lstrip()
        is_list = begin.startswith(b"[")
        return _Items(file, content[0 : len(content)]) if is_list else _Lines(file, content)


class _RowError(Exception):
    """A fault of a row; whoever catches it adds where the row is."""


def _json(content: bytes) -> Any:
    try:
        return _DECODER.decode(content.decode("utf-8-sig").strip())
    except UnicodeDecodeError as error:
        raise _RowError(
            f"not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        # Of a list over many lines the line is the error's own.
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        text = content.decode("utf-8-sig").strip().splitlines()[error.lineno - 1][:80]
        problem = f"{error.msg.removesuffix(' at')} at {line}column {error.colno}"
        raise _RowError(f"broken JSON: {problem}: {text!r}") from error
    except (RecursionError, ValueError) as error:  # ValueError: of an integer of more than 4,300 digits
        raise _RowError(f"JSON that cannot be read: {error}") from error


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object of its members. Raises for a name that is there twice: only one of the values would be
    read.
    """
    made = dict(members)
    if len(made) != len(members):
        names = [name for name, _ in members]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key {twice!r} twice")
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _is_odd(content: bytes) -> bool:
    """Says whether JSON may be nested too deep, or hold half of a surrogate pair; most is neither."""
    # What is UTF-8 has half of a pair as an escape only.
    return content.count(b"[") + content.count(b"{") > MOST_LEVELS or _HALF.search(content) is not None


def _checked_row(row: Any, *, is_odd: bool) -> Row:
    if is_odd:
        if is_deep(row, MOST_LEVELS):
            raise _RowError(f"the row is nested more than {MOST_LEVELS} deep")
        _check_text(row)
    if not isinstance(row, dict):
        raise _RowError(f'a row must be an object {{"prompt": …}}, got {type(row).__name__}: {row!r:.80}')
    return row


def _check_text(row: Any) -> None:
    """Raises _RowError for half of a surrogate pair, which no tokenizer and no file takes."""
    text = json.dumps(row, ensure_ascii=False)
    half = half_of_a_pair(text)
    if half is not None:
        raise _RowError(f"{text[half]!a} is half of a character (a surrogate pair); mend it")
