"""What a sandbox is told and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

Status = Literal["finished", "error", "time_limit", "memory_limit", "output_limit", "disk_limit", "lost"]


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    seconds: float = 10.0
    """By the clock on the wall, for one program or one cell."""
    memory_mb: int = 1024
    """Address space of each process, and memory in use by all of them together, with what the system keeps
    for their descriptors."""
    processes: int = 32
    """How many processes and threads may live at a time."""
    output_bytes: int = 1 << 20
    """Of standard output, and of standard error."""
    disk_mb: int = 64
    """Size of the folder it may write, where an entry has 4 kB at least, and of each file."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            whole = field.name != "seconds"
            if (
                isinstance(value, bool)
                or not isinstance(value, int if whole else int | float)
                or not value > 0
            ):
                kind = "a whole number" if whole else "a number"
                raise ValueError(f"limit {field.name}={value!r}: {kind} above 0 is wanted")


@dataclass(frozen=True)
class Result:
    """What came of a program or a cell."""

    status: Status
    """finished: exit code 0. error: any other end of its own. …_limit: it ended there. lost (cells only): the
    session's process is gone, and with it its variables; the next cell begins with none."""
    stdout: str
    """Cut off after `Limits.output_bytes`; of a cell also the value of a last line."""
    stderr: str
    """Cut off after `Limits.output_bytes`; of a cell that failed, with the traceback."""
    return_code: int | None
    """Negative: the signal that ended it. None: a cell, which has none."""
    seconds: float
    """From the start of its process, or of the cell, to its end."""

    @property
    def ok(self) -> bool:
        """Whether the program ran to its end without an error."""
        return self.status == "finished"


Files = Mapping[str, str | bytes]
"""Relative path -> content: what lies in the program's folder when it starts."""
