"""What the process behind a reward function serves: score(args, options, timeout, cpu_seconds), again and
again.

Function: one call after the other; one over its time limit ends the process through SIGALRM, whatever the
call is doing and whether anybody watches. Of a function with a `reference` (see `Marks`) so does one that
spends cpu_seconds of its process: through SIGVTALRM while the row is read, then through SIGPROF. Coroutines:
all on one event loop; one over its limit is cancelled.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import resource
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rondo.config.functions import resolve_function
from rondo.core.columns import TIMEOUT
from rondo.core.errors import DataError
from rondo.rewards.marks import SPENT, marks_of
from rondo.rewards.trl import called_as_trl, is_for_trl
from rondo.rewards.verl import called_as_verl, is_for_verl
from rondo.system.actor import Actor
from rondo.system.border import awaited, awaited_within, contained
from rondo.system.names import offered


@contextmanager
def _at_most(timer: int, seconds: float) -> Iterator[None]:
    """Has the kernel end the process when the timer gets there first: works in a loop of C code, too."""
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)


class _Loaded(Actor):
    """A reward function, by its name."""

    def __init__(self, spec: str) -> None:
        for end in (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF):
            signal.signal(end, signal.SIG_DFL)
        self._function: Any = resolve_function(spec, offered("rewards"))
        if is_for_trl(self._function):
            self._function = called_as_trl(self._function)
        elif is_for_verl(self._function):
            self._function = called_as_verl(self._function)
        self._marks = marks_of(self._function)
        if self._marks.requires is not None:
            importlib.import_module(self._marks.requires[0])  # its seconds are no call's
        memory = self._marks.memory_bytes
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    def _lent(self, args: Any) -> Sequence[Any]:
        """Returns what a function is called with. The list of a group is its own, as it is in threads."""
        return ([t.lent() for t in args[0]],) if self._marks.group else [row.lent() for row in args]


class Function(_Loaded):
    """Calls a plain reward function, one call after the other."""

    def score(self, args: Any, options: Any, timeout: float, cpu_seconds: float) -> Any:
        """Calls the function, until a timer ends the process."""
        with _at_most(signal.ITIMER_REAL, timeout), contained():
            if self._marks.reference is not None:
                return self._limited(self._marks.reference, self._lent(args), options, cpu_seconds)
            value = self._function(*self._lent(args), **options)
            return asyncio.run(awaited(value)) if inspect.isawaitable(value) else value

    def _limited(self, reference: Any, args: Any, options: Any, cpu_seconds: float) -> dict[str, Any]:
        """Calls a function that limits responses, after reading its row within the same limits. Each has a
        timer of its own, so that the signal that ended the process says which of the two was over.
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


class Coroutines(_Loaded):
    """Awaits the calls of a coroutine function, all at once."""

    async def score(self, args: Any, options: Any, timeout: float, cpu_seconds: float) -> Any:
        """Awaits the coroutine function."""
        return await awaited_within(self._function(*self._lent(args), **options), timeout)
