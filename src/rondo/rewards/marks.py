"""How a reward function wants to be run. A plain function needs no mark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from rondo.core.columns import TIMEOUT

RunIn = Literal["loop", "thread", "process", "sandbox"]
F = TypeVar("F", bound=Callable[..., Any])

SPENT = {"reward": 0.0, TIMEOUT: 1.0}
"""The scores of a response that spent the limits of a function with a `reference`."""


@dataclass(frozen=True)
class Marks:
    """What `reward_function` says of a function."""

    run_in: RunIn = "thread"
    """`thread`; `process`: a process of its own, which is killed at the time limit, for code that may hang,
    crash or hold Python's lock; `loop`: at once on the event loop, without a time limit, only for a few
    microseconds; `sandbox`: a coroutine that has all such code run in a sandbox and ends by itself, on the
    event loop whatever reward.isolation says, and without a time limit of ours.
    """
    score_names: tuple[str, ...] = ()
    """The keys of the mapping that it returns."""
    group: bool = False
    """Whether it is given the list of a prompt's scored trajectories, `fn(trajectories, **options)`, and
    returns one score for each.
    """
    requires: tuple[str, str] | None = None
    """A module that it needs, and what to pip install."""
    memory_bytes: int | None = None
    """The most address space that its process may take."""
    check: Callable[..., None] | None = None
    """Called with its options before a run: looks at them, and whether this machine has what it needs."""
    answer: Callable[..., str | None] | None = None
    """Called with a response's text and its options: what the response answers, as it reads that, in a form
    that is equal for equal answers; None: nothing. For majority votes.
    """
    reference: Callable[..., object] | None = None
    """Called before it, in its process, with the prompt and its options: reads all that is no response's
    doing. What is spent of the process's CPU time, memory or stack then is an error of the row; what is spent
    after it is the response's doing, and a score of 0. Such a function has one more score, `timeout`, which
    is 1 there. For functions with run_in="process" that are no coroutines and score one trajectory.
    """
    columns: tuple[str, ...] = ()
    """The columns of a row that it reads, by `Prompt.column`: each must be there, and not null. In braces is
    the name of an option that says which: `{answer_key}`.
    """
    row: Callable[..., object] | None = None
    """Called with a prompt without tokens and its options for every row, as the rows are read: raises
    DataError for one that it cannot score.
    """
    chooses: Callable[..., Mapping[str, Any] | None] | None = None
    """Called with a prompt and its options: the entry of reward.functions that scores this row in its place,
    where there is one. All its scores are then that one's.
    """
    trl: bool = False
    """Whether it is TRL's, and called so (trl.py): None among its scores means that it does not apply."""
    verl: bool = False
    """Whether it scores rows of verl's as verl does (verl.py): what else is in its mapping is a score, too,
    and evaluation reports by the row's `data_source`.
    """


def reward_function(
    *,
    run_in: RunIn = "thread",
    score_names: Sequence[str] = (),
    group: bool = False,
    requires: tuple[str, str] | None = None,
    memory_bytes: int | None = None,
    check: Callable[..., None] | None = None,
    answer: Callable[..., str | None] | None = None,
    reference: Callable[..., object] | None = None,
    columns: Sequence[str] = (),
    row: Callable[..., object] | None = None,
    chooses: Callable[..., Mapping[str, Any] | None] | None = None,
    verl: bool = False,
) -> Callable[[F], F]:
    """Says how a reward function wants to be run; see `Marks`."""
    assert reference is None or (run_in == "process" and not score_names and not group)
    parts = tuple(score_names) if reference is None else (TIMEOUT,)

    def mark(function: F) -> F:
        read = (tuple(columns), row, chooses)
        marks = Marks(
            run_in, parts, group, requires, memory_bytes, check, answer, reference, *read, verl=verl
        )
        function.reward_marks = marks  # type: ignore[attr-defined]
        return function

    return mark


def marks_of(function: Callable[..., Any]) -> Marks:
    """Returns the marks of a function."""
    return getattr(function, "reward_marks", Marks())
