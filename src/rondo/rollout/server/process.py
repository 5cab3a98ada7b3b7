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
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

from rondo.errors import ConfigError

_TAIL_LINES = 30
_GUARD = Path(__file__).with_name("guard.py")
_log = logging.getLogger(__name__)


class ChildProcess:
    """command: a Python module and its arguments; descriptor: a socket that it inherits. Its output goes to
    the log at level DEBUG; `tail` has the last lines. folder: temporary, for its files; removed when it ends,
    by the guard, and once more here.
    """

    def __init__(
        self, name: str, command: list[str], descriptor: int, environment: Mapping[str, str]
    ) -> None:
        if sys.platform != "linux":
            raise ConfigError(
                "a rollout engine in its own process needs Linux (its guard asks the kernel to be told when "
                "the trainer dies); use rollout.process=host"
            )
        self.name = name
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._code: int | None = None
        self._ended = threading.Event()
        self.folder = Path(tempfile.mkdtemp(prefix="rondo-engine-"))
        started: Future[subprocess.Popen[str]] = Future()

        def start() -> subprocess.Popen[str]:
            guard = [sys.executable, "-I", "-S", str(_GUARD), str(os.getpid()), str(descriptor)]
            return subprocess.Popen(
                [*guard, str(self.folder), sys.executable, "-m", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(descriptor,),
                env=dict(environment),
                start_new_session=True,  # Ctrl-C is for the host
                text=True,
                errors="replace",
            )

        threading.Thread(
            target=self._watch, args=(start, started), name=f"rondo-watch-{name}", daemon=True
        ).start()
        self._guard = started.result()

    def _watch(
        self, start: Callable[[], subprocess.Popen[str]], started: Future[subprocess.Popen[str]]
    ) -> None:
        try:
            guard = start()
        except OSError as error:
            self.folder.rmdir()
            started.set_exception(error)
            return
        started.set_result(guard)
        assert guard.stderr is not None
        for line in guard.stderr:
            self._tail.append(line.rstrip())
            _log.debug("%s: %s", self.name, line.rstrip())
        self._code = guard.wait()
        guard.stderr.close()
        shutil.rmtree(self.folder, ignore_errors=True)  # the guard itself may have been killed
        self._ended.set()

    def wait(self, seconds: float) -> bool:
        """Until it and all its children have ended; False: they have not."""
        return self._ended.wait(seconds)

    def kill(self) -> None:
        """End it and all its children at once; returns when they have ended."""
        if not self._ended.is_set():
            self._guard.send_signal(signal.SIGTERM)  # the guard kills the others
            if not self.wait(5.0):
                os.killpg(self._guard.pid, signal.SIGKILL)
                self.wait(5.0)

    def how_it_ended(self) -> str:
        """For a message: "exit code 1", "signal SIGKILL"."""
        code = self._code
        if code is None:
            return "it is still there"
        if code > 128:
            return f"signal {signal.Signals(code - 128).name}"
        return f"exit code {code}"

    def tail(self) -> str:
        """The last lines of its output, for a message; empty: it wrote nothing."""
        return "\n".join(self._tail)
