"""Rows in files, here or at a URL: Parquet, and JSON in lines or as one list, compressed or not."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any, TypeVar

from rondo.config.schema import FileSourceConfig
from rondo.core.errors import ConfigError, DataError, did_you_mean, half_of_a_pair
from rondo.data.plain import ArrowRows, Row, Rows, check_schema, kept_columns
from rondo.system.urls import check_url, fetched, is_url

MOST_LEVELS = 100  # of lists and mappings in a row; what pickles and prints them has a limit of its own
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_COMPRESSED: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}
"""By how a file begins."""
_MARK = b"\xef\xbb\xbf"  # of UTF-8, at the beginning of a file
_ZSTANDARD = b"\x28\xb5\x2f\xfd"


def check_file(config: FileSourceConfig) -> None:
    """Raises ConfigError for a file that is not there, without reading it."""
    if is_url(config.path):
        check_url(config.path)
    else:
        _existing_file(config)


def _opened(config: FileSourceConfig) -> IO[bytes]:
    return fetched(config.path) if is_url(config.path) else _existing_file(config).open("rb")


def _existing_file(config: FileSourceConfig) -> Path:
    path = Path(config.path).expanduser()
    if not path.is_file():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        kind = "a folder" if path.is_dir() else "missing"
        near = did_you_mean(path.name, beside)
        raise ConfigError(f"file {path} is {kind}{near} Paths are relative to the working directory")
    return path


class _TableRows(Sequence[Row]):
    """Rows of an Arrow table, made into mappings one at a time."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, row: Any) -> Any:
        if not 0 <= row < len(self):
            raise IndexError(row)
        return self._table.slice(row, 1).to_pylist()[0]


T = TypeVar("T")
_LOOK: ContextVar[Callable[[str], None]] = ContextVar("look", default=lambda so_far: None)
_CHUNK = 512  # rows between two looks


@contextlib.contextmanager
def looking(look: Callable[[str], None]) -> Iterator[None]:
    """Inside, `look` hears how far reading is, every so many rows. What it raises ends the reading."""
    token = _LOOK.set(look)
    try:
        yield
    finally:
        _LOOK.reset(token)


def look(so_far: str) -> None:
    """Lets who is `looking` look."""
    _LOOK.get()(so_far)


def counted(rows: Iterable[T], what: str) -> Iterator[T]:
    """Yields the rows, and lets who is `looking` look. what: whose rows they are."""
    for number, row in enumerate(rows):
        if number % _CHUNK == 0:
            look(f"{what}: {number} rows read")
        yield row


def open_parquet(config: FileSourceConfig) -> Rows:
    """Reads a Parquet file as a table. Raises ConfigError, DataError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with _opened(config) as file:
            parquet = pq.ParquetFile(file)
            check_schema(parquet.schema_arrow, config.path)
            table = parquet.read(columns=kept_columns(parquet.schema_arrow.names, config, config.path))
        table.validate(full=True)  # texts are UTF-8
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{config.path} cannot be read as Parquet: {error}") from error
    return Rows(ArrowRows(_TableRows(table.slice(0, config.size)), config.path), config.path)


def open_jsonl(config: FileSourceConfig) -> Rows:
    """Reads a file of JSON: an object in each line, or one list of objects. Raises ConfigError, DataError."""
    path = config.path
    rows: list[Row] = []
    places: list[str] = []
    try:
        with _content(config) as file:
            for number, line in enumerate(counted(file, path), 1):
                if config.size is not None and len(rows) == config.size:
                    break
                if not rows and line.removeprefix(_MARK).lstrip().startswith(b"["):
                    return _from_list(line + file.read(), config)
                if line.strip():
                    rows.append(_parse(line, f"{path}, line {number}"))
                    places.append(f"line {number}")
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return Rows(rows, path, places)


@contextlib.contextmanager
def _content(config: FileSourceConfig) -> Iterator[IO[bytes]]:
    """Gives what is in a file, compressed or not."""
    with _opened(config) as file:
        begin = file.read(6)
        file.seek(0)
        if begin.startswith(_ZSTANDARD):
            raise DataError(
                f"{config.path} is compressed by zstd, which is not read; decompress it, or use gzip"
            )
        opener = next((one for head, one in _COMPRESSED.items() if begin.startswith(head)), None)
        if opener is None:
            yield file
        else:
            with opener(file) as content:
                yield content


def _from_list(content: bytes, config: FileSourceConfig) -> Rows:
    """Reads rows that are the items of one list of JSON."""
    rows, odd = _json(content, config.path)[: config.size], _is_odd(content)
    places = [f"item {i}" for i in range(len(rows))]
    for row, place in zip(rows, places, strict=True):
        _check_row(row, f"{config.path}, {place}", is_odd=odd)
    return Rows(rows, config.path, places)


def _parse(line: bytes, where: str) -> Row:
    row: Row = _json(line, where)
    _check_row(row, where, is_odd=_is_odd(line))
    return row


def _json(content: bytes, where: str) -> Any:
    try:
        return _DECODER.decode(content.decode("utf-8-sig").strip())
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        # Of a list over many lines the line is the error's own.
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        text = content.decode("utf-8-sig").strip().splitlines()[error.lineno - 1][:80]
        problem = f"{error.msg.removesuffix(' at')} at {line}column {error.colno}"
        raise DataError(f"{where}: broken JSON: {problem}: {text!r}") from error
    except (RecursionError, ValueError) as error:  # ValueError: of an integer of more than 4,300 digits
        raise DataError(f"{where}: JSON that cannot be read: {error}") from error


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object of its members, none of which may be there twice: only one would be read."""
    made = dict(members)
    if len(made) != len(members):
        names = [name for name, _ in members]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key {twice!r} twice")
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _is_odd(content: bytes) -> bool:
    """Says whether what is read of it may be nested too deep, or hold half of a character: little does."""
    # What is UTF-8 has half of a pair as an escape only.
    return content.count(b"[") + content.count(b"{") > MOST_LEVELS or _HALF.search(content) is not None


def _check_row(row: Any, where: str, *, is_odd: bool) -> None:
    if is_odd:
        if _is_deep(row):
            raise DataError(f"{where}: the row is nested more than {MOST_LEVELS} deep")
        _check_text(row, where)
    if not isinstance(row, dict):
        raise DataError(
            f'{where}: a row must be an object {{"prompt": …}}, got {type(row).__name__}: {row!r:.80}'
        )


def _is_deep(row: Any) -> bool:
    level = [row]
    for _ in range(MOST_LEVELS):
        holders = [one for one in level if isinstance(one, list | dict)]
        level = [below for one in holders for below in (one.values() if isinstance(one, dict) else one)]
    return any(isinstance(one, list | dict) for one in level)


def _check_text(row: Any, where: str) -> None:
    """Raises DataError for half of a surrogate pair, which no tokenizer and no file takes."""
    text = json.dumps(row, ensure_ascii=False)
    half = half_of_a_pair(text)
    if half is not None:
        raise DataError(f"{where}: {text[half]!a} is half of a character (a surrogate pair); mend it")
