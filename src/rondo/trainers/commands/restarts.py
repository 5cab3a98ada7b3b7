"""Who hears of a run; and how it begins again by itself when its processes are lost (trainer.max_restarts):
what the user would do, the same command once more, in this process. So it goes on from its newest
checkpoint, to the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from rondo.config import Config
from rondo.core.errors import ConfigError, RondoError, TrainError, WorkerError, mark_of_the_users
from rondo.system.border import EscapeError, contained, described
from rondo.system.forkserver import kept
from rondo.system.urls import Place
from rondo.tracking import Console
from rondo.trainers.commands.event_loop import run_loop
from rondo.trainers.loop import EvaluationResult

T = TypeVar("T")
OnStep = Callable[[Mapping[str, Any]], object]
OnEvaluation = Callable[[int, EvaluationResult], object]
OnCheckpoint = Callable[[int, Place], object]


@dataclass(frozen=True)
class Callbacks:
    """Functions of the user's that hear of a run. Each may return True to end it there, as if it had been
    that long; the run waits for them, and ends with what they raise. Raises ConfigError for what is none.
    """

    on_step: OnStep | None = None
    """Is given the metrics of each step, `step` among them."""
    on_evaluation: OnEvaluation | None = None
    """Is given the step and what came of each evaluation, once it is written: `metrics` (eval/…), and
    `samples`, the answers with their rewards; a supervised run has none of these.
    """
    on_checkpoint: OnCheckpoint | None = None
    """Is given the step and the folder of each checkpoint, once it is whole (checkpoint.every); the folder
    stays until checkpoint.keep newer ones are there.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            if given is not None and not callable(given):
                raise ConfigError(
                    f"{field.name} must be a function, got {type(given).__name__} {given!r:.80}"
                )

    def call(self, name: str, *arguments: Any) -> bool:
        """Calls one of them, where it is set. Returns whether it ends the run."""
        function = getattr(self, name)
        try:
            with contained():
                return function is not None and bool(function(*arguments))
        except EscapeError as error:
            raise TrainError(f"{name}: {described(error)}") from error
        except Exception as error:  # the boundary: it ends the run, and goes to the caller as it is
            mark_of_the_users(error)
            raise


NOBODY = Callbacks()


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
