"""The journal of a run: everything that time decided, in order.

    buffer ──admit, put, drop, give back, take, publish, resume──▶ journal.jsonl, as they happen

Every line is one change of the buffer's ledger, and all of them together are what is trained when. How
another run follows them is in `replay/journal.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from io import BytesIO
from itertools import islice
from typing import Any

from rondo.core.errors import CheckpointError
from rondo.system.storage import DAMAGE, AppendedFile, storing
from rondo.tracking import RunFolder

JOURNAL_FILE = "journal.jsonl"
JOURNAL_FORMAT = 1


class RunJournal:
    """In the folder of a run. settings: those that a replay must share. say: for the log."""

    def __init__(
        self,
        folder: RunFolder,
        settings: Mapping[str, Any],
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._say = say
        self.path = folder.path / JOURNAL_FILE
        self.position = 0  # lines written
        self._step = 1  # in progress
        self._file = AppendedFile(self.path, private=True)
        self._off = False

    def note(self, kind: str, **what: Any) -> None:
        """Writes down what has been done. Raises TrainError where a journal that is followed has something
        else here.
        """
        if self._off:
            return
        if kind == "resume":
            what["settings"] = self._settings
        lines = [{"step": self._step, "kind": kind, **what}]
        if not self.position:
            lines.insert(0, {"kind": "journal", "format": JOURNAL_FORMAT, "settings": self._settings})
        self._file.append("".join(json.dumps(line) + "\n" for line in lines).encode())
        self.position += len(lines)
        if kind in ("publish", "resume"):
            self._step = what["version"] + 1

    @property
    def mark(self) -> int | None:
        """Returns, for a checkpoint, what to `restore`."""
        return None if self._off else self.position

    def restore(self, position: int | None) -> None:
        """Goes on from a checkpoint that was cut at `position` (`mark`; None: there was no journal). What was
        written beyond it moves to discarded/. Raises CheckpointError.
        """
        end, line = self._end_of(position or 0)
        if position is None or end is None:
            self._without_a_start(f"{self.path} does not reach back to the start of this run")
            position = end = 0
        self._folder.discard_rest(JOURNAL_FILE, end)
        self.position = position
        try:
            last = json.loads(line) if position else {}
            self._step = last.get("step", 1) + (last.get("kind") == "publish")
            if last.get("kind") == "resume":
                self._step = last["version"] + 1
        except DAMAGE as error:
            raise CheckpointError(
                f"{self.path}:{position}: damaged ({error}). Remove the file: the run goes on without it, "
                "and cannot be replayed"
            ) from error

    def _end_of(self, number: int) -> tuple[int | None, bytes]:
        """Returns at which byte the line with this number (1 is the first) ends, None where there are fewer,
        and that line. Reads line by line: the file grows with the run.
        """
        end, line = 0, b""
        with storing(self.path, "read"), open(self.path, "rb") if self.path.exists() else BytesIO() as file:
            for line in islice(file, number):
                end += len(line)
                number -= 1
        return (None if number else end), line

    def _without_a_start(self, why: str) -> None:
        self._say(f"{why}: no journal is written, and this run cannot be replayed")
        self._off = True

    def close(self) -> None:
        self._file.close()
