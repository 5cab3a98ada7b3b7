"""Files that survive a kill, and never hold a part of what was to be written. Standard library only.

Each of these raises StorageError where the file system refuses.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rondo.system.storage import storing

# How the names of what is under way begin; a kill leaves it, and who holds the folder's lock removes it.
WRITING, REMOVING = ".writing-", ".removing-"


def sync_path(path: Path) -> None:
    """Forces a file's data, or a directory's entries, to disk."""
    with storing(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def replacing(path: Path, needs: Callable[[], int] = lambda: 0) -> Iterator[Path]:
    """Gives a temporary name beside `path`: a file written there becomes `path` at the end, and is removed
    where that fails. needs: see `storing`.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with storing(path, needs=needs):
        try:
            yield temporary
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Gives a new folder beside `path`, which becomes `path` at the end, and is removed where that fails. An
    empty folder that is there (a mount point, perhaps, or a link to one) stays, and gets what is in the new
    one, which is inside of it until then.
    """
    with storing(path, "made"):
        into = path.is_dir() and not any(path.iterdir())
        part = (path if into else path.parent) / f"{WRITING}{path.name}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    try:
        yield part
        with storing(path):
            if into:
                for entry in list(part.iterdir()):
                    entry.rename(path / entry.name)
                return
            if path.exists():
                shutil.rmtree(path)
            part.rename(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _opener(private: bool) -> Callable[[str, int], int]:
    """Returns what opens a file as usual, or `private`."""

    def opened(path: str, flags: int) -> int:
        descriptor = os.open(path, flags, 0o600 if private else 0o666)
        if private:
            make_private(descriptor)
        return descriptor

    return opened


def make_private(file: Path | int, mode: int = 0o600) -> None:
    """Lets nobody but its owner read a file (or, 0o700, a folder) of this user's. Raises OSError."""
    if os.stat(file).st_uid == os.geteuid():  # another's is for them to close
        os.chmod(file, mode)


def write_atomic(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Replaces `path` by `content`: after a kill it holds the old content or the new one, never a part.
    private: nobody else may read it.
    """
    data = content.encode() if isinstance(content, str) else content
    with (
        replacing(path, lambda: len(data)) as temporary,
        open(temporary, "wb", opener=_opener(private)) as file,
    ):
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_path(path.parent)


class AppendedFile:
    """A file that is only ever appended to, made with the first entry; one that could not be written whole
    is taken back. private: nobody but its owner may read it.
    """

    def __init__(self, path: Path, *, private: bool = False) -> None:
        self.path = path
        self._private = private
        self._file: IO[bytes] | None = None

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def append(self, data: bytes) -> None:
        """Returns when the kernel has it all."""
        with storing(self.path, needs=lambda: len(data)):
            if self._file is None:
                self._file = open(self.path, "ab", buffering=0, opener=_opener(self._private))
            start = self._file.seek(0, os.SEEK_END)
            try:
                left = memoryview(data)
                while left:
                    left = left[self._file.write(left) :]
            except OSError:
                self._file.truncate(start)
                raise

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None


def make_folder(path: Path) -> None:
    """Makes a folder, and those above it, unless they are there."""
    with storing(path, "made"):
        path.mkdir(parents=True, exist_ok=True)


def move(path: Path, target: Path) -> None:
    """Renames a file or folder."""
    with storing(path, f"moved to {target}"):
        path.rename(target)


def entries_of(folder: Path) -> list[Path]:
    """Returns what is in a folder, by name; nothing where there is none."""
    with storing(folder, "read"):
        return sorted(folder.iterdir()) if folder.is_dir() else []


def remove_leftovers(folder: Path) -> None:
    """Removes what a kill left under way in a folder. For whoever holds the lock of the run it is part of."""
    for path in entries_of(folder):
        with storing(path, "removed"):
            if path.name.startswith((WRITING, REMOVING)):
                shutil.rmtree(path)
            elif path.name.startswith(".") and path.suffix == ".tmp":
                path.unlink()


def free_name(path: Path) -> Path:
    """Returns `path`, or the first of `name-2`, `name-3`, … that does not exist (suffix kept)."""
    candidate = path
    number = 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return candidate
