"""The rollouts of a run, to be searched: small columns, and the first characters of each trajectory, in
SQLite in the cache folder. It can be made again at any time. It is kept up while the run goes on: a step
whose file is new, or another one than it was, is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rondo.core.errors import DataError, StorageError
from rondo.system.storage import cache_folder
from rondo.tracking.trajectories import ShownTrajectory, files_of, trajectories_of

# Characters of a prompt, and of what was said to it, in which text is looked for.
PROMPT, SAID = 512, 2048
HEAD = 200  # characters of them in a list
_KEPT_DAYS = 30  # that nobody looks at a run
_VERSION = 1  # of the tables below
_COLUMNS = (
    *("step", "id", "prompt_id", "source", "sample", "reward", "tokens", "contexts", "outcome", "failure"),
    *("finish", "staleness", "tools", "images"),
)
_TABLES = f"""
CREATE TABLE IF NOT EXISTS files (step INTEGER PRIMARY KEY, stamp TEXT, wrong TEXT);
CREATE TABLE IF NOT EXISTS rows (number INTEGER PRIMARY KEY, {", ".join(_COLUMNS)});
CREATE INDEX IF NOT EXISTS by_step ON rows (step);
CREATE TABLE IF NOT EXISTS texts (number INTEGER PRIMARY KEY, text TEXT);
"""
# What a call of a tool begins with, in the formats of templates (behind a colon an object is an argument),
# and where turns begin in a transcript.
_CALL = re.compile(
    r'(?:(?<!:)(?<!: )\{\s*"name"\s*:\s*"|<function=|to=functions\.|<tool_call>\s*)([A-Za-z_][\w.:-]{0,63})'
)
_TURN = re.compile(r"^\[(policy|tool|environment|user|context)\] ", re.MULTILINE)

# The conditions of filters, by their names in an address, each with one value.
_NUMBERS = {
    "step": "step = ?",
    "from": "step >= ?",
    "to": "step <= ?",
    "least": "reward >= ?",
    "most": "reward <= ?",
    "shortest": "tokens >= ?",
    "longest": "tokens <= ?",
    "staleness": "staleness >= ?",
}
_WORDS = {
    "source": "source = ?",
    "outcome": "outcome = ?",
    "finish": "finish = ?",
    "prompt": "prompt_id = ?",
    "tool": "instr(tools, ' ' || ? || ' ')",
    # The last one, as it costs the most. Upper and lower case are the same, in ASCII.
    "text": "(SELECT text FROM texts WHERE texts.number = rows.number) LIKE ? ESCAPE '\\'",
}
FILTERS = (*_NUMBERS, *_WORDS)
ORDERS = {
    "newest": "step DESC, number",
    "oldest": "step, number",
    "best": "reward IS NULL, reward DESC, step DESC, number",
    "worst": "reward IS NULL, reward, step DESC, number",
    "longest": "tokens DESC, step DESC, number",
    "shortest": "tokens, step DESC, number",
}


class Index:
    """The rollouts of one run. run: its folder."""

    def __init__(self, run: Path) -> None:
        """Reads nothing yet. Raises StorageError where there is no cache folder."""
        self._run = run
        self._path = _folder() / f"{hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:24]}.sqlite"
        self._reading = threading.Lock()
        self._steps = 0

    def keep_up(self, wait: float = 0.0) -> None:
        """Reads what is new in the run's folder, in a thread, the newest step first. wait: so many seconds
        for it, as a run that is not large is read in them.
        """
        if self._reading.acquire(blocking=False):
            thread = threading.Thread(target=self._read, daemon=True)
            thread.start()
            thread.join(wait)

    def _read(self) -> None:
        try:
            with contextlib.suppress(StorageError):  # the next question meets it, too, and says it
                self.read()
        finally:
            self._reading.release()

    def read(self) -> None:
        """Reads what is new in the run's folder. Raises StorageError."""
        files = files_of(self._run, "rollouts")
        stamps = {step: stamp for step, file in files.items() if (stamp := _stamp(file))}
        self._steps = len(stamps)
        with self._opened() as database:
            known = dict(database.execute("SELECT step, stamp FROM files"))
            for step in known.keys() - stamps.keys():
                with database:
                    _forget(database, step)
            for step in sorted((step for step in stamps if known.get(step) != stamps[step]), reverse=True):
                try:
                    rows, wrong = trajectories_of(files[step], step), ""
                except DataError as error:
                    rows, wrong = [], str(error)
                with database:  # all of a step, or nothing
                    _forget(database, step)
                    database.execute("INSERT INTO files VALUES (?, ?, ?)", (step, stamps[step], wrong))
                    _insert(database, rows)

    def state(self) -> dict[str, Any]:
        """Returns how many steps there are and have been read, which could not be, and the values that there
        are of what is chosen from a list.
        """
        with self._opened() as database:
            (read,) = database.execute("SELECT count(*) FROM files").fetchone()
            wrong = database.execute("SELECT wrong FROM files WHERE wrong != '' ORDER BY step LIMIT 20")
            found = {"read": read, "steps": max(self._steps, read), "wrong": [text for (text,) in wrong]}
            for name in ("source", "outcome", "finish"):
                values = database.execute(f"SELECT DISTINCT {name} FROM rows ORDER BY 1 LIMIT 100")
                found[name] = [value for (value,) in values if value]
            tools = database.execute("SELECT DISTINCT tools FROM rows LIMIT 1000")
            return found | {"tool": sorted({name for (names,) in tools for name in names.split()})}

    def search(self, filters: Mapping[str, str], order: str, first: int, number: int) -> dict[str, Any]:
        """Returns how many trajectories are like that (`total`), `number` of them from `first` on (`rows`),
        and how rewards, lengths and versions are spread over all of them. Raises DataError for a filter or
        an order that there is not.
        """
        if order not in ORDERS:
            raise DataError(f"order={order}: the orders are {', '.join(ORDERS)}")
        where, values = _condition(filters)
        with self._opened() as database:
            asked = (
                f"SELECT number, reward, tokens, staleness FROM rows WHERE {where} ORDER BY {ORDERS[order]}"
            )
            found = database.execute(asked, values).fetchall()
            page = [row[0] for row in found[first : first + number]]
            cells = database.execute(
                f"SELECT rows.number, {', '.join(_COLUMNS)}, substr(text, 1, {PROMPT + HEAD + 1}) FROM rows "
                f"JOIN texts USING (number) WHERE rows.number IN ({', '.join('?' * len(page))})",
                page,
            ).fetchall()
        rows = {number: _listed(dict(zip(_COLUMNS, cell, strict=False)), cell[-1]) for number, *cell in cells}
        names = ("reward", "tokens", "staleness")
        spread = {name: _histogram([row[at] for row in found]) for at, name in enumerate(names, 1)}
        return {"total": len(found), "rows": [rows[one] for one in page if one in rows], "spread": spread}

    def chosen(self, filters: Mapping[str, str]) -> dict[int, list[str]]:
        """Returns the ids of all trajectories that are like that, by step. Raises DataError."""
        where, values = _condition(filters)
        by_step: dict[int, list[str]] = {}
        with self._opened() as database:
            for step, name in database.execute(
                f"SELECT step, id FROM rows WHERE {where} ORDER BY step", values
            ):
                by_step.setdefault(step, []).append(name)
        return by_step

    @contextlib.contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """Opens the tables; those of another rondo, or damaged ones, are begun anew. Raises StorageError."""
        try:
            try:
                database = _connected(self._path)
            except sqlite3.OperationalError:  # it is locked, or there is no room
                raise
            except sqlite3.DatabaseError:
                self._path.unlink(missing_ok=True)
                database = _connected(self._path)
            with contextlib.closing(database):
                yield database
        except sqlite3.Error as error:
            raise StorageError(f"{self._path}: the index of {self._run}: {error}; remove it") from error


def _folder() -> Path:
    """Returns where indexes are, less those that nobody has used for long."""
    folder = cache_folder() / "view"
    folder.mkdir(mode=0o700, exist_ok=True)
    for path in folder.glob("*.sqlite"):
        with contextlib.suppress(OSError):  # another one may remove it, too
            if time.time() - path.stat().st_mtime > _KEPT_DAYS * 86400:
                path.unlink()
    return folder


def _connected(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=30, isolation_level="IMMEDIATE")
    try:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version == 0:
            database.executescript(f"PRAGMA page_size = 16384; {_TABLES} PRAGMA user_version = {_VERSION};")
        elif version != _VERSION:
            raise sqlite3.DatabaseError("of another rondo")
        database.execute("PRAGMA synchronous = OFF")  # what a crash of the machine takes is made again
        path.touch()
    except BaseException:
        database.close()
        raise
    return database


def _stamp(file: Path) -> str:
    """Returns what says whether a step's file, or its folder's files, are those that were read; "" where it
    is gone.
    """
    try:
        files = sorted(file.iterdir()) if file.is_dir() else [file]
        return ";".join(f"{found.st_size}-{found.st_mtime_ns}" for found in (one.stat() for one in files))
    except OSError:
        return ""


def _forget(database: sqlite3.Connection, step: int) -> None:
    database.execute("DELETE FROM texts WHERE number IN (SELECT number FROM rows WHERE step = ?)", (step,))
    database.execute("DELETE FROM rows WHERE step = ?", (step,))
    database.execute("DELETE FROM files WHERE step = ?", (step,))


def _insert(database: sqlite3.Connection, rows: Iterable[ShownTrajectory]) -> None:
    for one in rows:
        # The step's policy had been published step - 1 times.
        staleness = None if one.oldest_version < 0 else one.step - 1 - one.oldest_version
        reward = one.reward if one.outcome == "scored" else None
        cells = (
            *(one.step, one.trajectory_id, one.prompt_id, one.source, one.sample_index, reward, one.tokens),
            *(one.rows, one.outcome, one.failure, one.finish_reason, staleness, _tools(one.said)),
            len(one.images),
        )
        added = database.execute(f"INSERT INTO rows VALUES (NULL{', ?' * len(cells)})", cells)
        prompt = one.prompt[:PROMPT].replace("\x1f", " ")
        database.execute(
            "INSERT INTO texts VALUES (?, ?)", (added.lastrowid, f"{prompt}\x1f{one.said[:SAID]}")
        )


def _tools(said: str) -> str:
    """Returns the names of the tools that a transcript calls, each once, between spaces."""
    turns = _TURN.split(said)  # what was before, then a kind and its text, in turn
    if "tool" not in turns[1::2]:
        return " "
    texts = (text for kind, text in zip(turns[1::2], turns[2::2], strict=True) if kind == "policy")
    return " ".join(["", *dict.fromkeys(name for text in texts for name in _CALL.findall(text)), ""])


def _condition(filters: Mapping[str, str]) -> tuple[str, list[Any]]:
    """Returns a condition of SQL and its values. Raises DataError."""
    conditions, values = ["1"], list[Any]()
    for name in (name for name in FILTERS if name in filters):
        value: Any = filters[name]
        if name in _NUMBERS:
            try:
                value = float(value)
            except ValueError as error:
                raise DataError(f"{name}={value}: must be a number") from error
        elif name == "text":
            value = "%" + re.sub(r"([%_\\])", r"\\\1", value) + "%"
        conditions.append(_NUMBERS.get(name) or _WORDS[name])
        values.append(value)
    return " AND ".join(conditions), values


def _listed(row: dict[str, Any], text: str) -> dict[str, Any]:
    """Returns a trajectory as a list has it, with the beginnings of its texts."""
    prompt, _, said = text.partition("\x1f")
    return row | {"tools": row["tools"].split(), "prompt": prompt[:HEAD], "said": said[:HEAD]}


def _histogram(values: Iterable[float | None]) -> dict[str, list[float]]:
    """Returns the edges of at most 40 bins, and how many values are in each."""
    there = np.asarray([value for value in values if value is not None], float)
    there = there[np.isfinite(there)]
    if not len(there):
        return {"edges": [], "counts": []}
    whole = bool((there == np.round(there)).all()) and np.ptp(there) <= 40
    bins: Any = np.arange(there.min() - 0.5, there.max() + 1) if whole else 40
    counts, edges = np.histogram(there, bins)
    return {"edges": edges.tolist(), "counts": counts.tolist()}
