"""The journal of a run: everything that time decided, in order.

    buffer ──admit, put, drop, give back, take, publish, resume──▶ journal.jsonl, as they happen

Every line is one change of the buffer's ledger, and all of them together are what is trained when. How
another run follows them is in `replay/journal.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from itertools import islice
from typing import Any

from rondo.core.errors import CheckpointError
from rondo.system.storage import DAMAGE, AppendedFile, storing
from rondo.tracking import RunFolder

JOURNAL_FILE = "journal.jsonl"
JOURNAL_FORMAT = 1
_PIECE = 1 << 12  # bytes in which the beginning of the last line is looked for first


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
        self._end = 0  # bytes
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
        self._end = self._file.append("".join(json.dumps(line) + "\n" for line in lines).encode())
        self.position += len(lines)
        if kind in ("publish", "resume"):
            self._step = what["version"] + 1

    @property
    def mark(self) -> tuple[int, int] | None:
        """Returns, for a checkpoint, what to `restore`: the number of lines, and of bytes."""
        return None if self._off else (self.position, self._end)

    def restore(self, mark: Sequence[int] | int | None) -> None:
        """Goes on from a checkpoint that was cut at `mark` (an older rondo's: how many lines; None: there was
        no journal). What was written beyond it moves to discarded/. Raises CheckpointError.
        """
        if isinstance(mark, Sequence):
            position, (end, line) = mark[0], self._line_before(mark[1])
        else:
            position, (end, line) = mark or 0, self._end_of(mark or 0)
        if mark is None or end is None:
            self._without_a_start(f"{self.path} does not reach back to the start of this run")
            position = end = 0
        try:
            if position and not line.endswith(b"\n"):
                raise ValueError("no line ends there")
            last = json.loads(line) if position else {}
            self._step = last.get("step", 1) + (last.get("kind") == "publish")
            if last.get("kind") == "resume":
                self._step = last["version"] + 1
        except DAMAGE as error:
            raise CheckpointError(
                f"{self.path}:{position}: damaged ({error}). Remove the file: the run goes on without it, "
                "and cannot be replayed"
            ) from error
        self._folder.discard_rest(JOURNAL_FILE, end)
        self.position = position
        self._end = end

    def _line_before(self, end: int) -> tuple[int | None, bytes]:
        """Returns this byte, None where the file is shorter, and the line that ends there."""
        with storing(self.path, "read"), open(self.path, "rb") if self.path.exists() else BytesIO() as file:
            if file.seek(0, os.SEEK_END) < end:
                return None, b""
            start, line = end, b""
            while start and b"\n" not in line[:-1]:
                start = max(0, start - max(_PIECE, len(line)))
                file.seek(start)
                line = file.read(end - start)
        return end, line[line.rfind(b"\n", 0, -1) + 1 :]

    def _end_of(self, number: int) -> tuple[int | None, bytes]:
        """Returns at which byte the line with this number (1 is the first) ends, None where there are fewer,
        and that line.
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
