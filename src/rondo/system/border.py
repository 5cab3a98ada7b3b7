"""The border to code of the user's: whatever rondo calls or imports because a recipe names it.

What such code raises becomes an error of rondo's that names the function, the key that chose it and the
user's own line. So does what would end or cancel whoever called it (`sys.exit`, a CancelledError that nobody
asked for); a real Ctrl-C and a real cancellation pass through. Standard library only.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import FrameSummary
from typing import TypeVar

from rondo.core.errors import RondoError, users_frames, without_libraries
from rondo.core.masking import masked_urls

T = TypeVar("T")

_SHOWN_CHARACTERS = 400


class EscapeError(Exception):
    """Code of the user's raised what would have ended or cancelled its caller."""

    def __init__(self, error: BaseException) -> None:
        text = written(error, repr)
        super().__init__(
            f"{text} would end or cancel the run from inside; raise an exception that says what is wrong"
        )


@contextmanager
def contained(*, awaiting: bool = False) -> Iterator[None]:
    """What is raised inside is an Exception: EscapeError, with the same traceback, for what is none, and for
    the end of an iteration, which no future takes: whoever waits would wait for ever.

    awaiting: a coroutine is awaited inside, which may be closed from outside.
    """
    try:
        yield
    except Exception as error:
        end = _end_of_iteration(error)
        if end is None:
            raise
        raise EscapeError(end).with_traceback(end.__traceback__) from None
    except BaseException as error:
        if _asked_for(error, awaiting):
            raise
        raise EscapeError(error).with_traceback(error.__traceback__) from None


async def awaited(answer: Awaitable[T]) -> T:
    """Returns what a coroutine of the user's returns; `contained`. To be run as (part of) a task, which
    SystemExit would otherwise leave together with the event loop.
    """
    with contained(awaiting=True):
        return await answer


@contextmanager
def users_code(who: str, kind: type[RondoError]) -> Iterator[None]:
    """What is raised inside is an error of rondo's: `kind`, which begins with `who`, for all that is none.

    who: the key or source that chose the code, and its name in the recipe.
    """
    try:
        with contained():
            yield
    except RondoError:
        raise
    except Exception as error:
        raise kind(f"{who} raised {described(error)}") from error


def inside(call: Callable[[], T], who: str, kind: type[RondoError]) -> Callable[[], T]:
    """Returns a function of the user's that is called within `users_code`."""

    def called() -> T:
        with users_code(who, kind):
            return call()

    return called


def described(error: BaseException) -> str:
    """Writes `ValueError: … (agent.py, line 12)` in one line: the innermost line that is the user's own."""
    text = f"{type(error).__name__}: {' '.join(written(error).split())[:_SHOWN_CHARACTERS]}"
    if isinstance(error, SyntaxError):  # says its place itself
        return text
    frames = users_frames(error)
    own = without_libraries(frames) or frames
    return f"{text} ({place(own[-1])})" if own else text


def place(frame: FrameSummary) -> str:
    """Writes `agent.py, line 12`."""
    return f"{Path(frame.filename).name}, line {frame.lineno}"


def _end_of_iteration(error: Exception) -> BaseException | None:
    """Returns the end of an iteration that an error is, or that a coroutine or generator raised (which Python
    tells as a RuntimeError, without the line).
    """
    ends = (StopIteration, StopAsyncIteration)
    if isinstance(error, RuntimeError) and "raised Stop" in written(error):
        return error.__cause__ if isinstance(error.__cause__, ends) else None
    return error if isinstance(error, ends) else None


def written(error: BaseException, write: Callable[[BaseException], str] = str) -> str:
    """Returns an error's text by `str` or `repr`, which are the user's own code, too; without passwords in
    URLs.
    """
    try:
        return masked_urls(write(error))
    except Exception as failure:
        return f"<{type(error).__name__}, whose text cannot be had: {type(failure).__name__}>"


def _asked_for(error: BaseException, awaiting: bool) -> bool:
    """Says whether it is a real Ctrl-C, or a real end of the task or coroutine in which it came."""
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        task = None
    if isinstance(error, asyncio.CancelledError):
        return task is not None and task.cancelling() > 0
    return isinstance(error, GeneratorExit) and awaiting and task is None
