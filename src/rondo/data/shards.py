"""Which files a source's `path` stands for: one, those of a folder or a pattern, or several of these."""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rondo.config.schema import FileSourceConfig
from rondo.core.errors import ConfigError, did_you_mean
from rondo.system.urls import Far, Place, found_at, is_url, matching

_ENDINGS = {
    "parquet": re.compile(r"\.(parquet|parq|pq)$", re.IGNORECASE),
    "jsonl": re.compile(r"\.(jsonl|ndjson|json)(\.(gz|bz2|xz))?$", re.IGNORECASE),
}
"""Of the files of a folder that are read, by the source's type."""
_CHANGES = re.compile(r"etag|md5|digest|checksum|generation|modif|updated|mtime|created", re.IGNORECASE)
"""What a far side says of a file that is another when its content is."""


@dataclass(frozen=True)
class DataFile:
    """A file of a source as it is now."""

    name: str
    """As messages call it."""
    place: Place
    """Where it is."""
    size: int
    """Its bytes."""
    stamp: str | None
    """Is another where its content is; None where nothing says so."""

    def open(self) -> IO[bytes]:
        """Opens the file for reading at any place. Raises OSError, StorageError."""
        opened: IO[bytes] = self.place.open("rb")
        return opened

    def key(self, *made: Any) -> str | None:
        """Returns a name for what is made of this content, with all else that it is made of:
        `<what>-<of which content>`; None where nothing says that the content is the same.
        """
        if self.stamp is None:
            return None
        parts = [str(self.place), *made], [self.size, self.stamp]
        return "-".join(hashlib.sha256(json.dumps(part).encode()).hexdigest()[:20] for part in parts)


def files_of(config: FileSourceConfig) -> list[DataFile]:
    """Returns the source's files: of a list as it is written; of a folder, with all that is below it, and of
    a pattern by their paths' characters. Raises ConfigError where there is none.
    """
    paths = (config.path,) if isinstance(config.path, str) else config.path
    files = [file for path in paths for file in _files_at(path, config.type)]
    names = [file.name for file in files]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"path: {twice} is there twice")
    return files


def stamp_of(files: Sequence[DataFile]) -> str | None:
    """Returns what is another where the content of one of the files is; None where nothing says so."""
    keys = [file.key() for file in files]
    return None if None in keys else " ".join(map(str, keys))


def is_pattern(path: str) -> bool:
    """Says whether a path has a `*`, `?` or `[…]` and stands for all files that fit."""
    text = path.partition("://")[2].partition("?")[0] if is_url(path) else path
    return glob.has_magic(text)


def _files_at(path: str, kind: str) -> Iterator[DataFile]:
    yield from _far_files(path, kind) if is_url(path) else _near_files(Path(path).expanduser(), kind)


def _near_files(path: Path, kind: str) -> Iterator[DataFile]:
    if path.is_file():
        found = [path]
    elif path.is_dir():
        below = (file for file in path.rglob("*") if file.is_file())
        found = [file for file in below if _is_data(file.relative_to(path).as_posix(), kind)]
        if not found:
            raise ConfigError(f"folder {path} has no file that ends as {kind} does: {_shown(kind)}")
    elif is_pattern(str(path)):
        found = [file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file()]
        if not found:
            raise ConfigError(f"no file fits {path}. Paths are relative to the working directory")
    else:
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = did_you_mean(path.name, beside)
        raise ConfigError(f"file {path} is missing{near} Paths are relative to the working directory")
    for file in sorted(found, key=str):
        stat = file.stat()
        yield DataFile(str(file), file, stat.st_size, str(stat.st_mtime_ns))


def _far_files(url: str, kind: str) -> Iterator[DataFile]:
    if is_pattern(url):
        found = matching(url)
        if not found:
            raise ConfigError(f"{Far(url)}: no file fits")
    else:
        found = found_at(url)
        if list(found) != [url]:
            inner = {name.removeprefix(url.rstrip("/") + "/"): name for name in found}
            found = {name: found[name] for short, name in inner.items() if _is_data(short, kind)}
            if not found:
                raise ConfigError(f"{Far(url)}: no file there ends as {kind} does: {_shown(kind)}")
    for name in sorted(found):
        said = {key: str(value) for key, value in sorted(found[name].items()) if _CHANGES.search(key)}
        stamp = json.dumps(said) if any(said.values()) else None
        yield DataFile(str(Far(name)), Far(name), int(found[name]["size"] or 0), stamp)


def _is_data(inner: str, kind: str) -> bool:
    """Says whether a file of a folder is one of rows; what begins with a dot or an underscore is not."""
    is_hidden = any(part.startswith((".", "_")) for part in inner.split("/"))
    return not is_hidden and _ENDINGS[kind].search(inner) is not None


def _shown(kind: str) -> str:
    json_ = ".jsonl, .ndjson, .json, and these with .gz, .bz2, .xz"
    return ".parquet, .parq, .pq" if kind == "parquet" else json_
