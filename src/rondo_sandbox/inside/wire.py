"""What goes between the host, a sandbox's head and its guests."""

from __future__ import annotations

import marshal
import os
import struct

TYPE_CHECKING = False  # importing typing takes 11 ms
if TYPE_CHECKING:
    from typing import Any

ANSWER = ">BidII"
"""Index in STATUSES, return code, seconds, bytes of stdout, bytes of stderr; then these two."""
STATUSES = ("finished", "error", "time_limit", "memory_limit", "output_limit", "disk_limit", "lost")
DONE = 203
"""The descriptor on which a guest says that it is confined, and that a cell is done."""


class HostGoneError(Exception):
    """Nobody waits for answers any more."""


def read_exactly(descriptor: int, size: int) -> bytes:
    """Returns `size` bytes."""
    data = b""
    while len(data) < size:
        chunk = os.read(descriptor, size - len(data))
        if not chunk:
            raise HostGoneError
        data += chunk
    return data


def receive(descriptor: int) -> dict[str, Any]:
    """Returns the next request."""
    (size,) = struct.unpack(">I", read_exactly(descriptor, 4))
    request: dict[str, Any] = marshal.loads(read_exactly(descriptor, size))
    return request


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all of the data."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def answer(status: str, code: int, seconds: float, out: bytes, err: bytes) -> bytes:
    """Returns the message to the host."""
    return struct.pack(ANSWER, STATUSES.index(status), code, seconds, len(out), len(err)) + out + err
