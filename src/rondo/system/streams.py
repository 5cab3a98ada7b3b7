"""Standard output and error that outlive what they lead to (a full disk, a pipe whose reader has gone, a
terminal that was closed), and that spell out what would control a terminal: much of what is printed and
logged was written by others (a model's answer, a passage, an exception's text). Standard library only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, cast

_log = logging.getLogger(__name__)
_JOINERS = "\u200c\u200d"  # of Persian and of emoji; they print nothing, and change nothing else


def clean_text(text: str, encoding: str = "utf-8") -> str:
    """Returns text of others for a terminal: control characters but newline and tab (C1, too, of which a
    terminal takes 0x9b for ESC and [), marks of direction, and what else prints nothing are spelled out
    (`\\x1b`), and so is what the encoding does not have.
    """
    if not text.replace("\n", "").isprintable():
        text = "".join(
            one if _is_shown(one) else one.encode("unicode_escape").decode("ascii") for one in text
        )
    return text.encode(encoding, errors="backslashreplace").decode(encoding)


def _is_shown(one: str) -> bool:
    return one.isprintable() or one in "\n\t" or one in _JOINERS or unicodedata.category(one) == "Zs"


class CleanStream:
    """Writes `clean_text`. It takes no escape sequences, and so calls itself no terminal: libraries do not
    colour their lines then.
    """

    def __init__(self, stream: TextIO) -> None:
        self.drawn_on = stream
        """Takes everything as it is: for code that draws on a terminal, and cleans what is not its own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drawn_on, name)  # encoding, fileno, flush, …

    def isatty(self) -> bool:
        """Returns False."""
        return False

    def write(self, text: str) -> int:
        """Returns the length of what was given."""
        self.drawn_on.write(clean_text(text, self.drawn_on.encoding or "utf-8"))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes lines, one after the other."""
        for line in lines:
            self.write(line)


def drawn_on(stream: TextIO) -> TextIO:
    """Returns a stream that takes escape sequences, for code that draws on a terminal; see CleanStream."""
    return stream.drawn_on if isinstance(stream, CleanStream) else stream


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Lets escape sequences through to standard error: a library's progress bars are drawn with them."""
    before = sys.stderr
    sys.stderr = drawn_on(before)
    try:
        yield
    finally:
        sys.stderr = before


class LogFormatter(logging.Formatter):
    """Writes records as `clean_text`. Lines behind a record's first are indented, so that no text that is
    logged can begin a line like a record of its own.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record's lines."""
        return clean_text(super().format(record)).replace("\n", "\n    ")


def log_to_stderr(layout: str) -> None:
    """Sends what this process logs, from INFO on, to standard error. layout: the format of a record."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter(layout))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class LastingStream:
    """Writes to a stream until that fails; then it says so once, and drops what is written."""

    def __init__(self, stream: TextIO | None, name: str) -> None:
        """stream: None where it was closed before this process began."""
        self.fault: str | None = None
        """Why nothing is written any more."""
        self._stream = stream
        self._name = name
        self._tell: Callable[[str], None] = lambda message: None
        if stream is None:
            self._stream = open(os.devnull, "w", encoding="utf-8")
            self._fail("it is closed")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)  # encoding, isatty, fileno, …

    def write(self, text: str) -> int:
        """Returns the length, as if all were well."""
        self._tried(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._tried(lambda stream: stream.flush())

    def tell(self, tell: Callable[[str], None]) -> None:
        """Calls `tell` with the reason once nothing can be written any more: at once where that is so
        already.
        """
        self._tell = tell
        if self.fault is not None:
            tell(self.fault)

    def _tried(self, action: Callable[[TextIO], object]) -> None:
        if self.fault is not None:
            return
        try:
            action(cast(TextIO, self._stream))
        except UnicodeError:  # the text's fault, not the stream's
            raise
        except (OSError, ValueError) as error:  # ValueError: it was closed in this process
            silence(cast(TextIO, self._stream))
            self._fail(os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error))

    def _fail(self, why: str) -> None:
        self.fault = f"{self._name} cannot be written ({why}): nothing more is shown, and the run goes on"
        _log.warning(self.fault)
        self._tell(self.fault)


def lasting(stream: TextIO | None, name: str) -> TextIO:
    """Returns a stream that does not fail when what it leads to is gone."""
    return stream if isinstance(stream, LastingStream) else cast(TextIO, LastingStream(stream, name))


@contextlib.contextmanager
def command_streams(*, output: bool, to_the_end: bool = False) -> Iterator[None]:
    """Inside, standard error is clean and outlives what it leads to. Standard output is clean on a terminal
    (elsewhere it may be data), and outlives what it leads to where the command's work is elsewhere
    (`output`), or where it was closed before. to_the_end: nothing is printed behind what is inside
    but Python's traceback of an exception, which has text of others, too.
    """
    for number in range(3):  # else the next file that is opened gets the number, and what is printed
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
    before = sys.stdout, sys.stderr
    sys.stderr = cast(TextIO, CleanStream(lasting(sys.stderr, "standard error")))
    if output or sys.stdout is None:
        sys.stdout = lasting(sys.stdout, "standard output")
    if sys.stdout.isatty():
        sys.stdout = cast(TextIO, CleanStream(sys.stdout))
    try:
        yield
    finally:
        sys.stdout.flush()
        if not to_the_end:
            sys.stdout, sys.stderr = before


def silence(stream: TextIO) -> None:
    """Redirects a stream to /dev/null, so that what is still in its buffer causes no error when the process
    ends.
    """
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
