"""What the controller logs, in a file of the run's folder, too."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import cast

from rondo.system.streams import LogFormatter, lasting

# Output of engines and scorers, which the processes that started them log.
_PROCESSES = logging.getLogger("rondo.system.process")
_OURS = logging.getLogger("rondo")


class _RunLog(logging.FileHandler):
    """Makes its file, and the folder, when there is something to write: behind a line for the attempt. What
    cannot be written is dropped: whoever logs is not the one to end a run.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        super().__init__(path, encoding="utf-8", delay=True)
        self._attempt = attempt

    def _open(self) -> TextIOWrapper:
        path = Path(self.baseFilename)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stream = super()._open()
        except OSError:
            return open(os.devnull, "w", encoding="utf-8")
        stream.write(f"=== attempt {self._attempt}, started {time.strftime('%Y-%m-%d %H:%M:%S')} ===\n")
        return cast(TextIOWrapper, lasting(stream, str(path)))


@contextmanager
def logged_to(path: Path, attempt: int) -> Iterator[None]:
    """Inside, what is logged goes behind what is in a file, beside where it went before. Where the program
    has set up no logging, messages that are no warnings go to the file alone.
    """
    root = logging.getLogger()
    levels = {logger: logger.level for logger in (_OURS, _PROCESSES)}
    file = _RunLog(path, attempt)
    file.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handlers: list[logging.Handler] = [file]
    shown = logging.lastResort  # Python's way to show warnings while nobody else does
    layout = shown.formatter if shown is not None else None
    if not root.handlers:
        _OURS.setLevel(logging.INFO)
        _PROCESSES.setLevel(logging.DEBUG)
        if shown is not None:
            shown.setFormatter(LogFormatter())
            handlers.append(shown)
    for handler in handlers:
        root.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            root.removeHandler(handler)
        file.close()
        if shown is not None:
            shown.setFormatter(layout)
        for logger, level in levels.items():
            logger.setLevel(level)
