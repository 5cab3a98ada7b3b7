"""Turns errors in code of the user's, which a recipe names, into clear messages.

What such code raises becomes an error of rondo's that names the function, the key that chose it and the
user's own line. So does what would end or cancel its caller (`sys.exit`, a CancelledError that nobody
asked for); a real Ctrl-C and a real cancellation pass through. Standard library only.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from traceback import FrameSummary
from typing import Any, TypeVar

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
    """Lets nothing but Exceptions out. What is none becomes an EscapeError with the same traceback, and so
    does StopIteration, which no future takes: its caller would never stop waiting.

    awaiting: a coroutine is awaited inside, which may be closed from outside.
    """
    try:
        yield
    except BaseException as error:
        escape = _escape(error, awaiting)
        if escape is None:
            raise
        raise escape from None


def _escape(error: BaseException, awaiting: bool) -> EscapeError | None:
    """Returns what an error of the user's code becomes; None: what it is."""
    if isinstance(error, Exception):
        end = _end_of_iteration(error)
    else:
        end = None if _asked_for(error, awaiting) else error
    return None if end is None else EscapeError(end).with_traceback(end.__traceback__)


async def awaited(answer: Awaitable[T]) -> T:
    """Returns what a coroutine of the user's returns; `contained`. To be run as (part of) a task, which
    SystemExit would otherwise leave together with the event loop.
    """
    with contained(awaiting=True):
        return await answer


async def awaited_within(answer: Awaitable[T], seconds: float | None) -> T:
    """Returns what a coroutine of the user's returns; `contained`. Raises TimeoutError after `seconds` (None:
    never).
    """
    task = asyncio.ensure_future(awaited(answer))
    task.add_done_callback(heard)  # cancelled with the others of its group it may raise, and nobody waits
    return await asyncio.wait_for(task, seconds)


def heard(task: asyncio.Future[Any]) -> None:
    """Takes what a task raised for heard: the event loop prints what nobody has asked for."""
    if not task.cancelled():
        task.exception()


async def all_of(*calls: Awaitable[T]) -> list[T]:
    """Returns the results of calls that run at once, in their order. The first error, or a cancellation,
    cancels the others; it is raised when all have ended.
    """
    if len(calls) == 1:  # mostly so for the endpoint, and without a task of its own it costs less
        return [await calls[0]]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def alone(main: Awaitable[T]) -> T:
    """Returns what `main` does when all else on the event loop has ended, too: it is cancelled, as
    `asyncio.run` would do, which prints a traceback for each task that raises then. Here one line tells them.
    """
    try:
        result = await main
    except (Exception, asyncio.CancelledError):
        await _end_others()
        raise
    await _end_others()
    return result


async def _end_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    ends = await asyncio.gather(*others, return_exceptions=True)
    errors = [end for end in ends if isinstance(end, Exception)]
    if errors:
        _log.warning("%d tasks that were cancelled at the end raised %s", len(errors), described(errors[0]))


@contextmanager
def users_code(who: str, kind: type[RondoError]) -> Iterator[None]:
    """Turns errors of the user's code inside, `contained`, into rondo's: what is none of rondo's becomes a
    `kind` that begins with `who`.

    who: the key or source that chose the code, and its name in the recipe.
    """
    try:
        yield
    except RondoError:
        raise
    except BaseException as error:
        cause = _escape(error, awaiting=False) or error
        if not isinstance(cause, Exception):
            raise
        raise kind(f"{who} raised {described(cause)}") from cause


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
    """Says whether an error is a real Ctrl-C, or a real cancellation of the task or coroutine around it."""
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        task = None
    if isinstance(error, asyncio.CancelledError):
        return task is not None and task.cancelling() > 0
    return isinstance(error, GeneratorExit) and awaiting and task is None


# ---- running users' code where it can block nobody but its like ----


Out = TypeVar("Out")
_log = logging.getLogger(__name__)


def in_thread(call: Callable[[], Out], name: str) -> Future[Out]:
    """Calls a plain function in a thread of its own; one that hangs blocks nothing else."""
    result: Future[Out] = Future()

    def run() -> None:
        if not result.set_running_or_notify_cancel():
            return
        try:
            with contained():
                result.set_result(call())
        except Exception as error:  # the boundary: it travels to those who wait for the result
            result.set_exception(error)

    threading.Thread(target=run, name=f"rondo-{name}", daemon=True).start()
    return result


def on_agents_loop(call: Callable[[], Awaitable[Out]], at_end: Callable[[], Awaitable[None]]) -> Future[Out]:
    """Awaits a coroutine on the agents' loop. Cancelling the future cancels it. at_end: is awaited after it,
    however it ended.
    """

    async def run() -> Out:
        try:
            return await awaited(call())
        finally:
            await at_end()

    return asyncio.run_coroutine_threadsafe(run(), _agents_loop())


async def said_by(agent: Awaitable[Any]) -> tuple[str, str]:
    """Returns an agent's final text, and why it failed; one of the two is empty."""
    try:
        said = await agent
    except Exception as error:  # the boundary: what the user's agent raises is a failed trajectory
        return "", f"the agent raised {described(error)}"
    if said is not None and not isinstance(said, str):
        return "", f"the agent returned {type(said).__name__}; it must return None or its final text"
    return said or "", ""


@functools.cache
def _agents_loop() -> asyncio.AbstractEventLoop:
    """Returns one loop for the life of the process, so that agents may keep their clients from run to run."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run_forever, args=(loop,), name="rondo-agents", daemon=True).start()
    return loop


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    """Runs the loop on when a task that an agent started without awaiting it would end the loop."""
    while True:
        try:
            with contained():
                loop.run_forever()
        except EscapeError as error:
            _log.error("a task that an agent started raised %s", described(error))
