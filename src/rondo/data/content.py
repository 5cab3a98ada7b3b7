"""What a file of rows holds, to be read at any place: here or far, compressed or not.

What is small is held in memory. What is large and cannot be read at any place (compressed, far, a Parquet
file) is made into a file that can, once, in the cache: FOLDER/data/<key>, by the file's name, size and time,
in place of what was made of an earlier content. FOLDER: see `storage.kept_folder`. Who waits for data sees
how far reading is, and can end it (`looking`).
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import mmap
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import numpy as np

from rondo.core.errors import DataError
from rondo.data.shards import DataFile
from rondo.system.storage import kept_folder, make_folder, storing

T = TypeVar("T")
_LOOK: ContextVar[Callable[[str], None]] = ContextVar("look", default=lambda so_far: None)
_CHUNK = 512  # rows between two looks

HELD = 1 << 24
"""Bytes of a source that are held in memory at most."""
_STRIDE = 1 << 24  # bytes that are read at a time
_COMPRESSED: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}
"""By how a file begins."""
_ZSTANDARD = b"\x28\xb5\x2f\xfd"


@contextlib.contextmanager
def looking(look: Callable[[str], None]) -> Iterator[None]:
    """Calls `look` with the progress of all reading inside, every so many rows. What it raises ends the
    reading.
    """
    token = _LOOK.set(look)
    try:
        yield
    finally:
        _LOOK.reset(token)


def look(so_far: str) -> None:
    """Reports progress to the `looking` around it."""
    _LOOK.get()(so_far)


def counted(rows: Iterable[T], what: str) -> Iterator[T]:
    """Yields the rows, and reports the progress to `looking`. what: whose rows they are."""
    for number, row in enumerate(rows):
        if number % _CHUNK == 0:
            look(f"{what}: {number} rows read")
        yield row


class Content(Protocol):
    """Bytes by their places."""

    def __len__(self) -> int: ...

    def __getitem__(self, places: slice) -> bytes: ...


class _Here:
    """A file of this machine, which must stay as it is while it is read."""

    def __init__(self, file: DataFile) -> None:
        self._file = file

    def __len__(self) -> int:
        return self._file.size

    def __getitem__(self, places: slice) -> bytes:
        # Opened anew each time: a source may have more files than a process may hold open.
        with self._file.open() as opened:
            stat = os.fstat(opened.fileno())
            if (stat.st_size, str(stat.st_mtime_ns)) != (self._file.size, self._file.stamp):
                raise DataError(
                    f"{self._file.name} was changed while the run reads it: which row comes next would not "
                    "be known any more; start again, with a file that stays as it is"
                )
            return os.pread(opened.fileno(), places.stop - places.start, places.start)


def content_of(file: DataFile) -> Content:
    """Returns what a file holds, decompressed. Raises DataError."""
    with reading(file), file.open() as opened:
        begin = opened.read(6)
        opened.seek(0)
        if begin.startswith(_ZSTANDARD):
            raise DataError(
                f"{file.name} is compressed by zstd, which is not read; decompress it, or use gzip"
            )
        opener = next((one for head, one in _COMPRESSED.items() if begin.startswith(head)), None)
        if opener is None:
            if file.size <= HELD:
                return opened.read()
            if isinstance(file.place, Path):
                return _Here(file)
        with opened if opener is None else opener(opened) as plain:
            first = b"" if opener is None else plain.read(HELD + 1)
            if opener is not None and len(first) <= HELD:
                return bytes(first)
            return made(file.key("content"), lambda into: _copy(plain, into, first, file.name), file.name)


@contextlib.contextmanager
def reading(file: DataFile) -> Iterator[None]:
    """Turns errors of a file system or a compressed file inside into DataErrors."""
    try:
        yield
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{file.name} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _copy(plain: IO[bytes], into: IO[bytes], first: bytes, name: str) -> None:
    copied, part = 0, first or plain.read(_STRIDE)
    while part:
        into.write(part)
        copied += len(part)
        look(f"{name}: {copied >> 20} MiB read")
        part = plain.read(_STRIDE)


def made(key: str | None, make: Callable[[IO[bytes]], None], what: str) -> mmap.mmap:
    """Returns what `make` writes: from the cache, where it was made before. key: of the entry; None: nothing
    is kept, as it is not known whether it would be the same. what: it is of, for messages. Raises
    StorageError.
    """
    folder = kept_folder()
    if key is None or folder is None:
        with tempfile.TemporaryFile(prefix="rondo-") as file, storing(tempfile.gettempdir(), "written"):
            make(file)
            return _mapped(file)
    entry = folder / "data" / key
    if not entry.exists():
        make_folder(entry.parent)
        with storing(entry, f"written, which {what} is made into"):
            # Two runs may make it at a time; each has a name of its own until it is whole.
            with tempfile.NamedTemporaryFile(dir=entry.parent, prefix=".making-", delete=False) as file:
                try:
                    make(file)
                    file.flush()
                    os.fsync(file.fileno())
                    os.replace(file.name, entry)
                except BaseException:
                    os.unlink(file.name)
                    raise
            _forget_others(entry)
    with storing(entry, "read"), entry.open("rb") as file:
        return _mapped(file)


def _forget_others(entry: Path) -> None:
    """Removes what was made of the same file with another content; who has it open keeps it."""
    for other in entry.parent.glob(f"{entry.name.partition('-')[0]}-*"):
        if other != entry:
            other.unlink(missing_ok=True)


def _mapped(file: IO[bytes]) -> mmap.mmap:
    file.flush()
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def line_starts(content: Content, key: str | None, name: str) -> np.ndarray:
    """Returns where each line begins that is not blank: int64 [lines]. key: of what the content is of, by
    which it is kept where it is large.
    """
    if len(content) <= HELD:
        return _starts(content, name)

    def write(into: IO[bytes]) -> None:
        into.write(_starts(content, name).tobytes())

    return np.frombuffer(made(key, write, name), np.int64)


def _starts(content: Content, name: str) -> np.ndarray:
    found, before = [], b"\n"
    for start in range(0, len(content), _STRIDE):
        part = before + content[start : min(start + _STRIDE, len(content))]
        octets = np.frombuffer(part, np.uint8)
        begins = np.flatnonzero(octets[:-1] == ord("\n"))
        # Few lines begin with what a blank one consists of.
        may_be_blank = begins[octets[begins + 1] <= ord(" ")]
        blank = [i for i in may_be_blank.tolist() if _is_blank(content, start + i)]
        found.append(np.setdiff1d(begins, blank, assume_unique=True) + start)
        before = part[-1:]
        look(f"{name}: {(start + len(part)) >> 20} of {len(content) >> 20} MiB read")
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _is_blank(content: Content, start: int) -> bool:
    while start < len(content):
        line, end, _ = content[start : min(start + 4096, len(content))].partition(b"\n")
        if line.strip() or end:
            return not line.strip()
        start += len(line)
    return True
