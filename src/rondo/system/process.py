"""Starting and watching a process (and whatever it starts), so that it never outlives the host.

The watching thread starts the guard: Linux signals the guard when the *thread* that started it ends, so this
must be one that lives as long as the process. See guard.py for the other side.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import IO, Protocol, TextIO

from rondo.core.errors import ConfigError, our_folders
from rondo.system.forkserver import ForkServer
from rondo.system.guard import children_of
from rondo.system.storage import storing
from rondo.system.streams import clean_text, lasting
from rondo.system.usage import state_of

TAIL_LINES = 30  # of what a process said, in the error that tells of its end: a traceback fits
_GUARD = Path(__file__).with_name("guard.py")
_log = logging.getLogger(__name__)


class _Started(Protocol):
    """A guard process, forked or spawned. stderr: the command's output."""

    pid: int
    stderr: IO[str] | None

    def wait(self) -> int:
        """Waits for the end of the guard; returns its exit status."""


class _Forked:
    """A guard that a fork server made: not a child of this process, so its status comes through a pipe."""

    def __init__(self, pid: int, errors: int, status: int) -> None:
        self.pid = pid
        self._status = status
        self.stderr: IO[str] | None = os.fdopen(errors, encoding="utf-8", errors="replace")

    def wait(self) -> int:
        with os.fdopen(self._status, "rb") as pipe:
            said = pipe.read()
        return int(said) if said else -signal.SIGKILL  # nothing: the guard itself was killed


class ChildProcess:
    """`python -m COMMAND… DESCRIPTOR`, under a guard.

    descriptor: a socket that it inherits. Its output goes behind what is in the file `log`, as long as that
    can be written; None: it is logged at level DEBUG. `tail` has the last lines. folder: temporary, for its
    files; removed when it ends, by the guard, and once more here.
    forkserver: forks the process, with its imports done; None executes a new interpreter: `python`, which
    may be of another environment and imports this very package, or this process's.
    Raises StorageError where the log cannot be opened.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        descriptor: int,
        environment: Mapping[str, str],
        forkserver: ForkServer | None = None,
        log: Path | None = None,
        python: str | None = None,
    ) -> None:
        if sys.platform != "linux":
            raise ConfigError(
                f"{name} in a process of its own needs Linux (its guard asks the kernel to be told when this "
                "process dies)"
            )
        self.name = name
        self.log = log
        self._log = None if log is None else _opened(log, name)
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._code: int | None = None
        self._pid: int | None = None  # of the process under the guard; None: nobody has asked yet
        self._ended = threading.Event()
        self.folder = Path(tempfile.mkdtemp(prefix="rondo-process-"))
        if python is not None:
            environment = _with_these_packages(environment, self.folder / "packages")
        start = partial(_executed, python) if forkserver is None else partial(_forked, forkserver)
        begin = partial(start, command, descriptor, environment, self.folder)
        started: Future[_Started] = Future()
        threading.Thread(
            target=self._watch, args=(begin, started), name=f"rondo-watch-{name}", daemon=True
        ).start()
        self._guard = started.result()

    def _watch(self, begin: Callable[[], _Started], started: Future[_Started]) -> None:
        try:
            guard = begin()
        except BaseException as error:
            self.folder.rmdir()
            self._close_log()
            started.set_exception(error)
            return
        started.set_result(guard)
        assert guard.stderr is not None
        for line in guard.stderr:  # to the end, whatever becomes of the log: a full pipe stops the process
            text = clean_text(line.rstrip())
            self._tail.append(text)
            if self._log is None:
                _log.debug("%s: %s", self.name, text)
            else:
                self._log.write(f"{text}\n")
        self._close_log()
        self._code = guard.wait()
        guard.stderr.close()
        shutil.rmtree(self.folder, ignore_errors=True)  # the guard itself may have been killed
        self._ended.set()

    def _close_log(self) -> None:
        if self._log is not None:
            self._log.close()

    def wait(self, seconds: float) -> bool:
        """Waits until the process and all its children have ended; False: they have not."""
        return self._ended.wait(seconds)

    def is_stopped(self) -> bool:
        """Says whether the process is frozen, by SIGSTOP."""
        if self._pid is None:
            self._pid = next(iter(children_of(self._guard.pid)), None)
        return self._pid is not None and state_of(str(self._pid))[0] == "T"

    def kill(self) -> None:
        """Kills the process and all its children; returns when they have ended."""
        if not self._ended.is_set():
            self._signal(signal.SIGTERM)  # the guard kills the others
            if not self.wait(5.0):
                self._signal(signal.SIGKILL, group=True)
                self.wait(5.0)

    def _signal(self, number: signal.Signals, group: bool = False) -> None:
        try:
            (os.killpg if group else os.kill)(self._guard.pid, number)
        except ProcessLookupError:  # it has just ended
            return

    def how_it_ended(self) -> str:
        """Says how the process ended, for a message: "exit code 1", "signal SIGKILL"."""
        code = self._code
        if code is None:
            return "it is still there"
        if code < 0 or code > 128:
            return f"signal {signal.Signals(-code if code < 0 else code - 128).name}"
        return f"exit code {code}"

    def tail(self) -> str:
        """Returns the last lines of the process's output, for a message; empty: it wrote nothing."""
        return "\n".join(self._tail)


def import_path() -> str:
    """Returns the PYTHONPATH with which a process finds what this one does."""
    return os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in sys.path))


def users_path() -> list[str]:
    """Returns where this process looks for modules besides what is installed in its environment."""
    installed = tuple(os.path.realpath(path) for path in sysconfig.get_paths().values())
    entries = [os.path.realpath(entry) for entry in sys.path if os.path.exists(entry or ".")]
    return list(dict.fromkeys(entry for entry in entries if not entry.startswith(installed)))


def header(name: str) -> str:
    """Returns the line of a log file behind which the output of a process begins."""
    return f"=== {name}, started {time.strftime('%Y-%m-%d %H:%M:%S')} ===\n"


def guarded(command: Sequence[str], descriptor: int, folder: str = "") -> list[str]:
    """Returns the command line of a guard over `command`, whose first word is a path. To be started by a
    thread that lives as long as this process. descriptor: one that the command inherits and the guard closes.
    """
    guard = [sys.executable, "-I", "-S", str(_GUARD)]
    return [*guard, str(os.getpid()), str(descriptor), folder, *command]


def _opened(path: Path, name: str) -> TextIO:
    with storing(path):
        log = lasting(path.open("a", encoding="utf-8", buffering=1), str(path))
    log.write(header(name))
    return log


def _with_these_packages(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Returns environment variables with which another environment's Python imports these packages of rondo,
    whatever is installed there, and nothing else that is installed here. folder: is made, and holds links to
    the packages.
    """
    folder.mkdir()
    for package in our_folders():
        (folder / os.path.basename(package)).symlink_to(os.path.realpath(package))
    path = [str(folder), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return {**environment, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


def _executed(
    python: str | None,
    command: Sequence[str],
    descriptor: int,
    environment: Mapping[str, str],
    folder: Path,
) -> subprocess.Popen[str]:
    # -P: not from the working directory, whose `random.py` would be imported before Python's own.
    runs = [sys.executable, "-P", "-m"] if python is None else [python, "-m"]  # says `_with_these_packages`
    return subprocess.Popen(
        guarded([*runs, *command, str(descriptor)], descriptor, str(folder)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=(descriptor,),
        env=dict(environment),
        start_new_session=True,  # Ctrl-C is for the host
        text=True,
        errors="replace",
    )


def _forked(
    forkserver: ForkServer,
    command: Sequence[str],
    descriptor: int,
    environment: Mapping[str, str],
    folder: Path,
) -> _Forked:
    errors, their_errors = os.pipe()
    status, their_status = os.pipe()
    try:
        pid = forkserver.fork(command, str(folder), environment, (descriptor, their_errors, their_status))
    except OSError:
        os.close(errors)
        os.close(status)
        raise
    finally:
        os.close(their_errors)
        os.close(their_status)
    return _Forked(pid, errors, status)
