"""The index of a corpus, in the cache folder, which all processes of a machine read.

    corpus ──passages_of──▶ folder/passages.sqlite ──Backend.build──▶ further files of the folder
    query  ──Backend.best──▶ (row, score), best first ──▶ Hit

The folder's name is a digest of what the corpus holds and of what ranks it: of a corpus that has changed
another one is built.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rondo.core.errors import ConfigError, StorageError, ToolError, did_you_mean
from rondo.system.storage import cache_folder, storing
from rondo_search.corpus import Passage, digest_of, passages_of
from rondo_search.dense import Dense
from rondo_search.tantivy_index import Tantivy
from rondo_search.words import Words, read

MOST_RESULTS = 100  # of a query
LONGEST_QUERY = 10_000  # characters
_PASSAGES = "CREATE TABLE passages (row INTEGER PRIMARY KEY, id TEXT, title TEXT, text TEXT)"

# By corpus, backend and encoder, as far as this process has looked.
_INDEXES: dict[tuple[str, str, str], Index] = {}
_LOCK = threading.Lock()


class Backend(Protocol):
    """What ranks passages. Making one raises ConfigError where this machine lacks what it needs."""

    identity: str
    """What its files follow from, beside the corpus."""

    def build(self, database: Path, passages: Iterable[Passage]) -> None:
        """Writes its files beside the database, or into it. passages: row by row, from 1."""

    def open(self, database: Path) -> None:
        """Gets ready to rank, once."""

    def best(self, query: str, k: int) -> list[tuple[int, float]]:
        """Returns the k best rows and their scores, higher ones first, equal ones in the corpus's order. From
        any thread.
        """


BACKENDS: Mapping[str, Callable[[str], Backend]] = {
    "sqlite": lambda encoder: Words(),
    "tantivy": lambda encoder: Tantivy(),
    "dense": Dense,
}


@dataclass(frozen=True)
class Hit:
    """A passage, and how well it fits the query: comparable within one answer only."""

    passage: Passage
    """The passage found."""
    score: float
    """How well it fits; higher is better."""


class Index:
    """The index of one corpus, opened."""

    def __init__(self, database: Path, backend: Backend) -> None:
        self.database = database
        self._backend = backend
        backend.open(database)

    def search(self, query: str, k: int) -> list[Hit]:
        """Returns the k passages that fit a query best, best first. Raises ToolError (`check_query`)."""
        check_query(query)
        best = self._backend.best(query, k)
        one = "SELECT id, title, text FROM passages WHERE row = ?"
        with read(self.database) as database:
            return [Hit(Passage(*database.execute(one, (row,)).fetchone()), score) for row, score in best]


def check_query(query: str) -> None:
    """Raises ToolError, which the policy reads, for a query without a word, or with too many characters."""
    if len(query) > LONGEST_QUERY:
        raise ToolError(f"the query has {len(query)} characters; it may have {LONGEST_QUERY}")
    if not re.search(r"\w", query):
        raise ToolError("the query has no word in it")


def index_of(corpus: str, *, backend: str = "sqlite", encoder: str = "", anew: bool = False) -> Index:
    """Returns the index of a corpus (`passages_of`). encoder: a model's folder, for `dense`. anew: looks
    whether the corpus has changed since this process looked first. Raises ConfigError, DataError,
    StorageError.
    """
    if backend not in BACKENDS:
        raise ConfigError(
            f"there is no index {backend!r}{did_you_mean(backend, BACKENDS)} There are {', '.join(BACKENDS)}"
        )
    if bool(encoder) != (backend == "dense"):
        raise ConfigError("encoder is the model's folder that index: dense needs, and no other index has")
    key = (corpus, backend, encoder)
    with _LOCK:
        index = _INDEXES.get(key)
        if anew or index is None or not index.database.exists():
            ranks = BACKENDS[backend](encoder)
            index = _INDEXES[key] = Index(_in_cache(corpus, ranks), ranks)
        return index


def _in_cache(corpus: str, backend: Backend) -> Path:
    digest = digest_of(corpus, f"{_PASSAGES} {backend.identity}")
    folder = cache_folder() / "search"
    database = folder / digest / "passages.sqlite"
    if database.exists():
        return database
    with storing(database):
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as alone:  # another process may be doing the same
            made = Path(alone) / digest
            made.mkdir()
            try:
                _write(made / database.name, passages_of(corpus))
                backend.build(made / database.name, _stored(made / database.name))
            except sqlite3.OperationalError as error:
                raise StorageError(
                    f"{database}: cannot be written ({error}); free some space, or set XDG_CACHE_HOME"
                ) from error
            try:
                os.replace(made, database.parent)
            except OSError:
                if not database.exists():  # else the other process was faster
                    raise
    return database


def _write(path: Path, passages: Iterable[Passage]) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode=OFF")  # half an index is thrown away
        database.execute("PRAGMA synchronous=OFF")
        database.execute(_PASSAGES)
        rows = ((passage.id, passage.title, passage.text) for passage in passages)
        database.executemany("INSERT INTO passages(id, title, text) VALUES (?, ?, ?)", rows)
        database.commit()


def _stored(path: Path) -> Iterator[Passage]:
    with read(path) as database:
        for row in database.execute("SELECT id, title, text FROM passages ORDER BY row"):
            yield Passage(*row)
