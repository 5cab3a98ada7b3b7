"""A run that begins again by itself when its processes are lost (trainer.max_restarts): what the user would
do, the same command once more, in this process. So it goes on from its newest checkpoint, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from rondo.config import Config
from rondo.core.errors import RondoError, WorkerError
from rondo.system.forkserver import kept
from rondo.tracking import Console
from rondo.trainers.commands.event_loop import run_loop

T = TypeVar("T")


@dataclass(frozen=True)
class ProcessLoss:
    """Where a run lost its processes."""

    step: int | None
    """That was done last; None: the run had not begun to train."""
    call: str
    """That failed, as "actor.update_actor"; the kind of the error where it was no call."""

    @property
    def place(self) -> str:
        """Says in words where that was."""
        when = "before the first step" if self.step is None else f"in step {self.step + 1}"
        return f"{self.call} {when}"


class Restarts:
    """The restarts of one command. config: of the run."""

    def __init__(self, config: Config, console: Console) -> None:
        self._most = config.trainer.max_restarts
        self._hang_seconds = config.cluster.hang_seconds
        self._console = console
        self._last: ProcessLoss | None = None
        self.number = 0
        """How many there were."""
        self.reached: int | None = None
        """The last step that this attempt has done, or begins behind; None: it does not train yet."""
        self.stopping = False
        """The user has asked the run to stop: then it does."""

    @property
    def name(self) -> str:
        """Returns what messages call this attempt, where it is a restart."""
        return f"restart {self.number} of {self._most} (trainer.max_restarts)"

    def run(self, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs a command, for each attempt anew, in an event loop of its own; as `around`."""
        return self.around(lambda: run_loop(main(), self._hang_seconds))

    def around(self, attempt: Callable[[], T]) -> T:
        """Makes attempts until one ends, or fails for good. Raises what the last one raised."""
        with kept():  # an attempt's processes begin with the imports of those before
            return self._around(attempt)

    def _around(self, attempt: Callable[[], T]) -> T:
        while True:
            self.reached = None
            try:
                return attempt()
            except RondoError as error:
                loss = ProcessLoss(self.reached, _call(error))
                if not self._goes_on(error, loss):
                    raise
                why = str(error).partition("\n")[0]
            self._last = loss
            self.number += 1
            self._console.warn(f"{why}: lost in {loss.place}; {self.name}")

    def _goes_on(self, error: RondoError, loss: ProcessLoss) -> bool:
        """Says whether to begin again after an error, and notes at the error why not where it might have
        been.
        """
        if not error.is_outage or self.stopping:
            return False
        if self.number == self._most:
            if self._most:
                error.add_note(f"the run was begun again {self._most} times already (trainer.max_restarts)")
            return False
        if loss == self._last:
            error.add_note(
                f"not begun again (trainer.max_restarts={self._most}): the run was lost in {loss.place} the "
                "last time, too. Something there ends the process: out of memory, a crash of a library"
            )
            return False
        return True


def _call(error: RondoError) -> str:
    return f"{error.role}.{error.method}" if isinstance(error, WorkerError) else type(error).__name__
