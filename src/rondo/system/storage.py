"""What a file system refuses, as one error: where, why, what is free where the disk is full, and what helps;
and files that survive a kill and never hold a part of what was to be written. Standard library only.

All writing and reading is done inside `with storing(path):`. Damage (a file that can be read, and holds
something else than it should) is found by the code that knows what it should hold.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rondo.core.errors import RondoError, StorageError, WorkerError

_log = logging.getLogger(__name__)

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_OTHER_THING = "Something else has that name: move it away, or choose another folder"
FAULTS: Mapping[int, str] = {
    errno.ENOSPC: "Free some space there, or choose another folder",
    errno.EDQUOT: "Your quota is used up: free some space there, or choose another folder",
    errno.EFBIG: "Files may not grow so large here: see `ulimit -f`",
    errno.EROFS: "The file system is mounted read-only: choose another folder, or mount it for writing",
    errno.EACCES: "This user may not do that there: change the permissions, or choose another folder",
    errno.EPERM: "The file system does not allow it (an attribute, see `lsattr`?): choose another folder",
    errno.EIO: "The device or its connection fails: see `dmesg`; `rondo doctor RUN` says what is whole",
    errno.ESTALE: "The network file system has lost it: mount it again",
    errno.EEXIST: _OTHER_THING,
    errno.ENOTDIR: _OTHER_THING,
    errno.EISDIR: _OTHER_THING,
    errno.ENOTEMPTY: _OTHER_THING,
    errno.ENOENT: "It, or a folder above it, is not there: was it removed?",
    errno.ENAMETOOLONG: "Choose a shorter name",
    errno.ELOOP: "Links there go in a circle: choose another folder",
    errno.EMFILE: "Too many files are open: raise `ulimit -n`",
    errno.ENFILE: "Too many files are open on this machine",
}
"""What helps, by errno."""

DAMAGE = (ValueError, LookupError, TypeError, AttributeError)
"""What reading a file raises that holds something else than was written. Code that knows what should be in it
makes an error of that, with a way out.
"""


@contextmanager
def storing(
    path: str | os.PathLike[str], what: str = "written", *, needs: Callable[[], int] = lambda: 0
) -> Iterator[None]:
    """Turns what a file system refuses inside into a StorageError: `path` cannot be `what`. It also reads the
    errors of libraries that hide an OSError, and of workers that report one.

    needs: the bytes that are to be written, asked for where the disk is full.
    """
    try:
        yield
    except Exception as error:
        told = error.cause_error if isinstance(error, WorkerError) else error
        if isinstance(told, RondoError):
            raise
        fault = fault_in(error)
        if fault is None:
            raise
        raise refused(path, what, fault, needs()) from error


def refused(path: str | os.PathLike[str], what: str, fault: int, needed: int = 0) -> StorageError:
    """Returns the error that says so. fault: an errno. needed: bytes, 0 where that is not known."""
    room = ""
    if fault in DISK_FULL:
        free = size_text(shutil.disk_usage(_there(Path(path))).free)
        room = (
            f" (it needs at least {size_text(needed)}, {free} are free)" if needed else f" ({free} are free)"
        )
    helps = FAULTS.get(fault, "Choose another folder")
    return StorageError(f"{path}: cannot be {what}: {os.strerror(fault)}{room}. {helps}", fault)


# Whose own errors tell of faults of a file system in words only.
_LIBRARIES = ("torch", "pyarrow", "safetensors", "safetensors_rust", "tokenizers")


def fault_in(error: BaseException | None) -> int | None:
    """Returns the errno of what a file system refused, in an error or in what it came from; None where that
    is something else.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        # These two are OSErrors as well, but of a network.
        if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
            return error.errno if error.errno is not None else _said(error)
        said = _said(error)
        if said is not None:
            return said
        error = error.__cause__ or error.__context__
    return None


def _said(error: BaseException) -> int | None:
    """Returns what a library's error says in words, which has lost the number on its way; a user's may say
    the same of something else.
    """
    is_ours = isinstance(error, WorkerError | RuntimeError | OSError)
    if not is_ours and type(error).__module__.partition(".")[0] not in _LIBRARIES:
        return None
    text = str(error)
    return next((fault for fault in FAULTS if os.strerror(fault) in text), None)


def size_text(count: int) -> str:
    """Returns a number of bytes for people."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def is_ours(path: Path) -> bool:
    """Says whether a file or folder, and the link to it where it is one, is this user's, and nobody else may
    write to it. False where there is none.
    """
    try:
        link, found = path.lstat(), path.stat()
    except OSError:
        return False
    return {link.st_uid, found.st_uid} == {os.getuid()} and not found.st_mode & 0o022


def cache_folder() -> Path:
    """Returns where things are kept that can be made again: $XDG_CACHE_HOME/rondo, ~/.cache/rondo, or, where
    that cannot be written or others may write there, a folder of this user's in the temporary one. Compiled
    code is among them. Raises StorageError.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rondo"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mode = folder.stat().st_mode
        if mode & 0o022 and folder.stat().st_uid == os.getuid():  # made under a lenient umask
            folder.chmod(mode & ~0o022)
        if is_ours(folder) and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    private = Path(tempfile.gettempdir()) / f"rondo-{os.getuid()}"
    with storing(private):
        private.mkdir(mode=0o700, exist_ok=True)
    if private.is_symlink() or not is_ours(private):
        raise StorageError(
            f"{private} belongs to somebody else, or others may write there; set XDG_CACHE_HOME to a folder "
            "of yours"
        )
    if folder.is_dir():
        _say_elsewhere(folder, private)
    return private


def kept_folder() -> Path | None:
    """Returns where what took long to make is kept for later runs: RONDO_CACHE (empty: None, nothing is
    kept), else the folder of all caches. It may be removed at any time.
    """
    folder = os.environ.get("RONDO_CACHE")
    if folder is None:
        try:
            return cache_folder()
        except StorageError:
            return None
    return Path(folder).absolute() if folder else None


@functools.cache
def _say_elsewhere(folder: Path, private: Path) -> None:
    _log.warning("%s cannot be written, or others may write there: the cache is %s", folder, private)


def _there(path: Path) -> Path:
    """Returns the nearest folder above that exists."""
    return next((folder for folder in (path, *path.absolute().parents) if folder.is_dir()), Path("/"))


# ---- whole files and folders: each of these raises StorageError where the file system refuses ----


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
        # On the same file system in both cases, as renaming needs: a mount point is another one than its
        # parent.
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
    """Makes a file (or, 0o700, a folder) of this user's readable by its owner only. Raises OSError."""
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

    def append(self, data: bytes) -> int:
        """Returns, when the kernel has it all, the length of the file."""
        with storing(self.path, needs=lambda: len(data)):
            if self._file is None:
                self._file = open(self.path, "ab", buffering=0, opener=_opener(self._private))
            start = self._file.seek(0, os.SEEK_END)
            try:
                left = memoryview(data)
                while left:
                    left = left[self._file.write(left) :]
            except OSError:
                # A part of an entry would spoil the line that comes after it.
                self._file.truncate(start)
                raise
        return start + len(data)

    def close(self) -> None:
        """Closes the file. A second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None


def missing_folders(path: Path) -> list[Path]:
    """Returns those of a folder and the ones above it that do not exist, innermost first."""
    with storing(path, "read"):
        return [folder for folder in (path, *path.parents) if not folder.exists()]


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
    """Removes what a kill left under way in a folder. Only for the holder of the run's lock."""
    for path in entries_of(folder):
        with storing(path, "removed"):
            if path.name.startswith((WRITING, REMOVING)):
                shutil.rmtree(path)
            elif path.name.startswith(".") and path.suffix == ".tmp":
                path.unlink()


def remove_whole(path: Path) -> None:
    """Removes a file or folder. A kill leaves it whole or under a temporary name."""
    aside = path.with_name(REMOVING + path.name)
    with storing(path, "removed"):
        if not path.is_dir():
            path.unlink()
            return
        path.rename(aside)
        shutil.rmtree(aside)


def free_name(path: Path) -> Path:
    """Returns `path`, or the first of `name-2`, `name-3`, … that does not exist (suffix kept)."""
    candidate = path
    number = 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return candidate
