"""The process behind a reward function: `python -m rondo.rewards.worker MODE SOCKET` loads and runs it.

    load(spec), then score(args, options, timeout, cpu_seconds) again and again

in_turn: one call after the other; one over its time limit ends the process through SIGALRM, whatever the call
is doing and whether anybody watches. Of a function with a `reference` (see `Marks`) so does one that spends
cpu_seconds of its process: through SIGVTALRM while the row is read, then through SIGPROF. at_once:
coroutines, all on one event loop; one over its limit is cancelled.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import inspect
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rondo.config.functions import resolve_function
from rondo.core.columns import TIMEOUT
from rondo.core.errors import DataError
from rondo.rewards.marks import SPENT, Marks, marks_of
from rondo.system.border import awaited, contained
from rondo.system.link import Call, Link, serve, serve_in_turn
from rondo.system.names import offered


@contextmanager
def _at_most(timer: int, seconds: float) -> Iterator[None]:
    """Has the kernel end the process when the timer gets there first: works in a loop of C code, too."""
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)


class _Function:
    """The loaded function."""

    def __init__(self) -> None:
        self._function: Any = None
        self._marks = Marks()

    def operate(self, call: Call) -> Any:
        """Loads the function, or calls it, until a timer ends the process."""
        if call.operation == "load":
            return self._load(*call.args)
        args, options, timeout, cpu_seconds = call.args
        with _at_most(signal.ITIMER_REAL, timeout), contained():
            if self._marks.reference is not None:
                return self._limited(self._marks.reference, args, options, cpu_seconds)
            value = self._function(*args, **options)
            return asyncio.run(awaited(value)) if inspect.isawaitable(value) else value

    def _limited(self, reference: Any, args: Any, options: Any, cpu_seconds: float) -> dict[str, Any]:
        """Calls a function whose responses have limits, after its row was read within the same limits. Two
        timers, so that the signal that ended the process says which of them was over.
        """
        prompt, _ = args
        try:
            with _at_most(signal.ITIMER_VIRTUAL, cpu_seconds):
                reference(prompt, **options)
        except (MemoryError, RecursionError) as error:
            raise DataError(f"prompt {prompt.prompt_id}: reading its row raised {error!r}") from error
        try:
            with _at_most(signal.ITIMER_PROF, cpu_seconds):
                return {"reward": self._function(*args, **options), TIMEOUT: 0.0}
        except (MemoryError, RecursionError):
            return SPENT

    async def operate_at_once(self, call: Call) -> Any:
        """Loads the coroutine function, or awaits a call of it."""
        if call.operation == "load":
            return self._load(*call.args)
        args, options, timeout, _ = call.args
        return await asyncio.wait_for(awaited(self._function(*args, **options)), timeout)

    def _load(self, spec: str) -> None:
        self._function = resolve_function(spec, offered("rewards"))
        self._marks = marks_of(self._function)
        if self._marks.requires is not None:
            importlib.import_module(self._marks.requires[0])  # its seconds are no call's
        memory = self._marks.memory_bytes
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def main(mode: str, connection: socket.socket) -> None:
    """Answers calls until the host is gone."""
    os.dup2(2, 1)  # what the function prints goes to the log
    for end in (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF):
        signal.signal(end, signal.SIG_DFL)
    faulthandler.enable()  # a crash is told with the line of Python that it came from
    function = _Function()
    if mode == "in_turn":
        serve_in_turn(connection, function.operate)
    else:
        asyncio.run(serve(Link(connection, "rondo-rewards"), function.operate_at_once))


if __name__ == "__main__":
    main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
