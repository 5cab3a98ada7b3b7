"""The file that a command is asked to write."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rondo.system.storage import storing


@contextmanager
def output_file(name: str | None) -> Iterator[Callable[[Iterable[str]], None]]:
    """Opens the file before the work inside begins, and gives what writes its lines, to be called once. It is
    whole then; before, and where anything fails, it is as it was. A device or a pipe is written to as it is;
    no name is no file. Raises StorageError.
    """
    if name is None:
        yield lambda lines: None
        return
    path = Path(os.path.realpath(name))  # a link stays one
    with storing(name):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        beside = not path.exists() or path.is_file()
        place = path.with_name(f".{path.name}.tmp") if beside else path
        file = place.open("w", encoding="utf-8")

    def write(lines: Iterable[str]) -> None:
        with storing(name):
            file.writelines(f"{line}\n" for line in lines)
            file.close()
            if beside:
                place.replace(path)

    try:
        yield write
    finally:
        with storing(name):
            file.close()
        if beside:
            place.unlink(missing_ok=True)
