"""Files that survive a kill: written under a temporary name, synced, renamed. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Forces a file's data, or a directory's entries, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, text: str) -> None:
    """Replaces `path` by `text`: after a kill it holds the old text or the new one, never a part.

    Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_path(path.parent)


def free_name(path: Path) -> Path:
    """Returns `path`, or the first of `name-2`, `name-3`, … that does not exist (suffix kept)."""
    candidate = path
    number = 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return candidate
