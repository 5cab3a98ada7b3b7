"""What a corpus holds: passages of a file of JSON lines, of a folder of texts, or of a function's rows."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rondo.config.functions import resolve_function
from rondo.core.errors import ConfigError, DataError
from rondo.system.border import users_code
from rondo.system.storage import storing

_SUFFIXES = (".txt", ".md")
_PIECE = 1000  # characters of a file's paragraphs that are a passage together


@dataclass(frozen=True)
class Passage:
    """What is found."""

    id: str
    """The row's own id, or its number from 0."""
    title: str
    """One line, may be empty."""
    text: str
    """The passage without its title."""

    @property
    def contents(self) -> str:
        """Both, as Search-R1's corpora have them; `passage_of` reads it back."""
        return f'"{self.title}"\n{self.text}'


def passage_of(row: Any, default_id: str) -> Passage:
    """Returns the passage of {id, title, text} or {id, contents: "title\\ntext"}, Search-R1's. default_id:
    where the row has none. Raises ValueError.
    """
    if not isinstance(row, Mapping):
        raise ValueError("it is no object")
    title, text = row.get("title", ""), row.get("text")
    contents = row.get("contents")
    if text is None and isinstance(contents, str):
        first, line, rest = contents.partition("\n")
        title, text = (_unquoted(first), rest) if line else ("", first)
    if not isinstance(text, str) or not text.strip() or not isinstance(title, str):
        raise ValueError('it has no text: {"title": "…", "text": "…"} is wanted')
    return Passage(str(row.get("id", default_id)), " ".join(title.split()), text)


def _unquoted(title: str) -> str:
    return title[1:-1] if len(title) > 1 and title[0] == title[-1] == '"' else title


def passages_of(corpus: str) -> Iterator[Passage]:
    """Yields what a corpus holds, in its order. Raises DataError with the place of what is no passage."""
    path = _path(corpus)
    if path is None:
        for number, row in enumerate(_rows(corpus)):
            yield _passage(f"{corpus}: row {number}", row, str(number))
    elif path.is_dir():
        for file in _files(path):
            title = str(file.relative_to(path).with_suffix(""))
            for number, piece in enumerate(_pieces(_text(file, file.read_bytes()))):
                yield Passage(f"{title}#{number}", title, piece)
    else:
        yield from _of_lines(path)


def digest_of(corpus: str, identity: str) -> str:
    """Names what a corpus holds. identity: of what is made of it."""
    digest = hashlib.blake2b(f"{identity} {_PIECE}".encode(), digest_size=12)
    path = _path(corpus)
    if path is None:
        for row in _rows(corpus):
            digest.update(json.dumps(row, sort_keys=True, default=repr).encode() + b"\n")
    else:
        add_files(digest, path, _files(path) if path.is_dir() else [path])
    return digest.hexdigest()


def add_files(digest: Any, folder: Path, files: Iterable[Path]) -> None:
    """Adds names and contents of files to a digest."""
    for file in files:
        with storing(file, "read"), file.open("rb") as opened:
            content = hashlib.file_digest(opened, hashlib.blake2b)
        digest.update(f"{file.relative_to(folder)}\0".encode() + content.digest())


def _path(corpus: str) -> Path | None:
    """Returns the file or folder; None: it is a function. Raises ConfigError."""
    path = Path(corpus)
    if path.exists():
        return path
    if ":" in corpus:
        return None
    raise ConfigError(
        f"there is no corpus {corpus}; it is a file of JSON lines or a folder, relative to the working "
        "directory, or a function that returns rows (path/to/file.py:name, package.module:name)"
    )


def _rows(corpus: str) -> list[Any]:
    function = resolve_function(corpus)
    with users_code(corpus, DataError):
        rows = list(function())
    if not rows:
        raise DataError(f"{corpus}: the corpus is empty; there is nothing to search in")
    return rows


def _of_lines(path: Path) -> Iterator[Passage]:
    count = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{path}:{number}"
                text = _text(where, line)
                try:
                    row = json.loads(text)
                except ValueError as error:
                    raise DataError(f"{where}: not a row of a corpus: {error}") from error
                yield _passage(where, row, str(count))
                count += 1
    if not count:
        raise DataError(f"{path}: the corpus is empty; there is nothing to search in")


def _passage(where: str, row: Any, default_id: str) -> Passage:
    try:
        passage = passage_of(row, default_id)
        (passage.id + passage.title + passage.text).encode()
    except ValueError as error:  # half of a surrogate pair is one, too
        raise DataError(f"{where}: not a row of a corpus: {error}") from error
    return passage


def _text(where: object, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: no text in UTF-8: {error}") from error


def _pieces(text: str) -> Iterator[str]:
    """Yields the paragraphs of a file, as many together as are not too long."""
    piece = ""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if piece and len(piece) + len(paragraph) > _PIECE:
            yield piece
            piece = ""
        piece = f"{piece}\n\n{paragraph}" if piece else paragraph
    if piece:
        yield piece


def _files(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.is_file())
    if not files:
        raise DataError(f"{folder}: the corpus is empty: no file in it ends in {' or '.join(_SUFFIXES)}")
    return files
