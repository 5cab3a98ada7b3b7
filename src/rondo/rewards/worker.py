"""The process behind `run_in="process"`: `python -m rondo.rewards.worker SOCKET` loads and runs a function.

    load(spec), then score(args, options, timeout) again and again

A call over its time limit ends the process through SIGALRM, whatever the call is doing and whether anybody
watches.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from typing import Any

from rondo.config.functions import resolve_function
from rondo.rewards.builtin import BUILTINS
from rondo.rewards.marks import marks_of
from rondo.transport.link import Call, serve_in_turn


class _Function:
    """The loaded function."""

    def __init__(self) -> None:
        self._function: Any = None

    def operate(self, call: Call) -> Any:
        return self._load(*call.args) if call.operation == "load" else self._score(*call.args)

    def _load(self, spec: str) -> None:
        self._function = resolve_function(spec, BUILTINS)
        memory = marks_of(self._function).memory_bytes
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    def _score(self, args: tuple[Any, ...], options: dict[str, Any], timeout: float) -> Any:
        signal.setitimer(signal.ITIMER_REAL, timeout)
        try:
            return self._function(*args, **options)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    os.dup2(2, 1)  # what the function prints goes to the log
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel's own end: works in a loop of C code too
    serve_in_turn(socket.socket(fileno=int(sys.argv[1])), _Function().operate)
