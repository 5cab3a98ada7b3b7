"""One run per folder: an exclusive lock that dies with its process."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
import weakref
from pathlib import Path
from typing import Any

from rondo.core.errors import ConfigError
from rondo.system.storage import storing

_LOOKS, _LOOK_SECONDS = 10, 0.02


def read_holder(path: Path) -> dict[str, Any]:
    """Returns what the last holder wrote (pid, host, started, attempt); nothing where it is not readable."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def is_held(path: Path) -> bool:
    """Says whether a process holds the lock of that file. It asks for a shared one and gives it back at once:
    process ids say less, in containers and on other machines.
    """
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:  # others: there is no such file, or no lock on this file system
        return isinstance(error, BlockingIOError)
    return False


def _lock(descriptor: int) -> None:
    """Takes the lock. Who only asks whether it is held (`is_held`) has it for a moment, and is waited for."""
    for _ in range(_LOOKS):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_LOOK_SECONDS)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


class RunLock:
    """An flock on `path`, which also says who holds it. The kernel drops it when the process ends, however
    it ends.

    A forked child (a process pool, say) inherits the open file and would keep the lock after its parent was
    killed; so every child closes its copy right after the fork.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.existed = False
        """Whether it was there before."""
        self._descriptor: int | None = None
        self._record: dict[str, Any] = {}

    def acquire(self) -> dict[str, Any]:
        """Takes the lock; returns the previous holder's record. Raises ConfigError naming the process that
        holds it, StorageError.
        """
        with storing(self.path):
            self.existed = self.path.exists()
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(descriptor)
            if not self._is_ours(descriptor):
                raise BlockingIOError
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(_refusal(self.path)) from None
        except OSError as error:
            os.close(descriptor)
            where = self.path.parent
            remedy = "set trainer.run_dir to a local folder"
            raise ConfigError(f"{where}: this file system has no file locks ({error}); {remedy}") from error
        self._descriptor = descriptor
        myself = weakref.ref(self)

        def forget_in_child() -> None:
            lock = myself()
            if lock is not None:
                lock.close()

        os.register_at_fork(after_in_child=forget_in_child)
        return read_holder(self.path)

    def _is_ours(self, descriptor: int) -> bool:
        """Says whether the open file still has that name: its holder may have removed it meanwhile."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def remove(self) -> None:
        """Removes the lock's file while the lock is held, unless the file was there before."""
        if self._descriptor is not None and not self.existed:
            with storing(self.path, "removed"):
                self.path.unlink(missing_ok=True)

    def write_holder(self, attempt: int) -> None:
        """Writes pid, host, start time (UNIX seconds) and attempt, for those that find the folder locked."""
        self._record = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": int(time.time()),
            "attempt": attempt,
        }
        self.tell()

    def tell(self, **more: Any) -> None:
        """Writes more of the run beside that, for those that look at it."""
        assert self._descriptor is not None, "acquire first"
        self._record |= more
        data = (json.dumps(self._record) + "\n").encode()
        with storing(self.path):
            os.pwrite(self._descriptor, data, 0)
            os.ftruncate(self._descriptor, len(data))

    def close(self) -> None:
        """Closes this process's copy of the file, which releases the lock, unless this is a forked child.
        Idempotent.
        """
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _refusal(path: Path) -> str:
    holder = read_holder(path)
    pid, host = holder.get("pid", "?"), holder.get("host", "?")
    since, started = "", holder.get("started")
    if isinstance(started, int):
        since = time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(started))
    return (
        f"{path.parent}: another run is writing into this folder (pid {pid} on {host}{since}). "
        f"Wait for it, stop it (kill -INT {pid}), or choose another folder: trainer.run_dir=…"
    )
