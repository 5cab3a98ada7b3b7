"""Passages ranked by BM25 over words: SQLite's FTS5, in the database that has the passages."""

from __future__ import annotations

import contextlib
import functools
import re
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

from rondo.core.errors import ConfigError
from rondo_search.corpus import Passage

_TABLE = (
    "CREATE VIRTUAL TABLE words USING "
    "fts5(title, text, content='passages', content_rowid='row', tokenize='porter unicode61')"
)
_MOST_WORDS = 64  # of a query


def read(database: Path) -> contextlib.closing[sqlite3.Connection]:
    """Opens the finished database of an index for reading."""
    return contextlib.closing(
        sqlite3.connect(f"file:{quote(str(database))}?mode=ro&immutable=1", uri=True, check_same_thread=False)
    )


def words_of(query: str) -> list[str]:
    """Returns the first 64 different words of a query, without case."""
    return list(dict.fromkeys(re.findall(r"\w+", query.lower())))[:_MOST_WORDS]


class Words:
    """English words are stemmed; any other text is what stands between spaces and marks."""

    identity = _TABLE

    def __init__(self) -> None:
        try:
            sqlite3.connect(":memory:").execute(_TABLE)
        except sqlite3.OperationalError as error:
            raise ConfigError(
                f"this Python's SQLite {sqlite3.sqlite_version} cannot search texts ({error}): use one with "
                "FTS5, another index (index: tantivy), or a retriever (url)"
            ) from error
        self._is_common = functools.lru_cache(maxsize=1 << 16)(self._look_whether_common)

    def build(self, database: Path, passages: Iterable[Passage]) -> None:
        """Indexes the table of the passages."""
        with contextlib.closing(sqlite3.connect(database)) as opened:
            opened.execute("PRAGMA journal_mode=OFF")
            opened.execute("PRAGMA synchronous=OFF")
            opened.execute(_TABLE)
            for command in ("rebuild", "optimize"):
                opened.execute("INSERT INTO words(words) VALUES (?)", (command,))
            opened.commit()

    def open(self, database: Path) -> None:
        """Has nothing to keep open: a connection is a query's own, and costs 50 µs."""
        self._database = database

    def best(self, query: str, k: int) -> list[tuple[int, float]]:
        """Returns the best rows; see `Backend`."""
        words = words_of(query)
        # Words of more than half of the passages weigh nothing in BM25, and most of its time is theirs.
        rare = [word for word in words if not self._is_common(word)]
        found = self._matching(rare, k) if rare else []
        if len(found) < k and rare != words:
            found = self._matching(words, k)
        return found

    def _matching(self, words: Sequence[str], k: int) -> list[tuple[int, float]]:
        by_score = (
            "SELECT rowid, -bm25(words) FROM words WHERE words MATCH ? ORDER BY bm25(words), rowid LIMIT ?"
        )
        with read(self._database) as database:
            return database.execute(by_score, (" OR ".join(map(_quoted, words)), k)).fetchall()

    def _look_whether_common(self, word: str) -> bool:
        count = "SELECT 2 * count(*) > (SELECT max(row) FROM passages) FROM words WHERE words MATCH ?"
        with read(self._database) as database:
            return bool(database.execute(count, (_quoted(word),)).fetchone()[0])


def _quoted(word: str) -> str:
    return f'"{word}"'  # else it may be one of FTS5's own
