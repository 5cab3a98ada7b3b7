"""What leaves code of the user's: errors do, ends of the run do not."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import threading

import pytest

from rondo.core.errors import ConfigError, DataError
from rondo.system.border import (
    EscapeError,
    all_of,
    alone,
    awaited,
    awaited_within,
    contained,
    described,
    users_code,
)
from tests.messages import full_text


@pytest.mark.parametrize(
    "escape", [SystemExit(0), GeneratorExit(), asyncio.CancelledError(), BaseException("x")]
)
def test_what_would_end_the_caller_is_an_error_with_the_line(escape: BaseException) -> None:
    with pytest.raises(EscapeError) as caught, contained():
        raise escape
    assert str(caught.value).startswith(f"{escape!r} would end or cancel the run")
    assert re.search(r"\(test_border\.py, line \d+\)$", described(caught.value))


def test_errors_of_the_users_are_named_and_those_of_rondo_pass() -> None:
    with pytest.raises(DataError, match=full_text("rows.py:f raised KeyError: 'x'")):
        with users_code("rows.py:f", DataError):
            raise KeyError("x")
    with pytest.raises(ConfigError, match=r"^mine$"), users_code("rows.py:f", DataError):
        raise ConfigError("mine")


def test_the_line_is_the_users_where_a_library_raises() -> None:
    with pytest.raises(DataError, match=full_text("JSONDecodeError")):
        with users_code("f", DataError):
            __import__("json").loads("{")


def test_a_real_ctrl_c_passes_and_one_that_a_thread_raises_does_not() -> None:
    with pytest.raises(KeyboardInterrupt), contained():
        os.kill(os.getpid(), signal.SIGINT)
    seen: list[BaseException] = []

    def raising() -> None:
        try:
            with contained():
                raise KeyboardInterrupt
        except EscapeError as error:
            seen.append(error)

    thread = threading.Thread(target=raising)
    thread.start()
    thread.join()
    assert str(seen[0]).startswith("KeyboardInterrupt() would")


def test_a_task_that_is_cancelled_is_and_one_that_says_so_is_not() -> None:
    async def waits() -> None:
        await asyncio.Event().wait()

    async def says_so() -> None:
        raise asyncio.CancelledError

    async def main() -> None:
        task = asyncio.create_task(awaited(waits()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(awaited(waits()), 0.01)
        with pytest.raises(EscapeError):
            await asyncio.create_task(awaited(says_so()))
        with pytest.raises(EscapeError):
            await asyncio.wait_for(awaited(says_so()), 60)

    asyncio.run(main())


def test_a_coroutine_is_closed_without_an_error() -> None:
    async def waits() -> None:
        await asyncio.Event().wait()

    coroutine = awaited(waits())
    loop = asyncio.new_event_loop()
    try:
        task = loop.create_task(coroutine)
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()
    coroutine.close()
    assert not task.done()


def test_the_first_error_of_several_ends_the_others_before_it_is_raised() -> None:
    ended: list[str] = []

    async def waits(name: str) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(name)
            raise OSError(f"{name} cannot be closed")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise LookupError("first")

    async def main() -> list[str]:
        with pytest.raises(LookupError, match="first"):
            await all_of(waits("a"), fails(), waits("b"))
        return list(ended)

    async def answers() -> list[int]:
        return await all_of(*(asyncio.sleep(0.01 * (3 - number), number) for number in range(3)))

    assert asyncio.run(main()) == ["a", "b"]
    assert asyncio.run(answers()) == [0, 1, 2]


def test_a_call_beyond_its_time_and_one_that_is_cancelled(capfd: pytest.CaptureFixture[str]) -> None:
    async def unclean() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            raise OSError("cannot be closed")

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await awaited_within(asyncio.sleep(3600), 0.01)
        assert await awaited_within(asyncio.sleep(0, "done"), None) == "done"
        call = asyncio.ensure_future(awaited_within(unclean(), 3600))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])

    asyncio.run(main())
    gc.collect()  # the event loop prints what nobody has heard of when it goes
    assert capfd.readouterr().err == ""


def test_what_else_runs_ends_with_main_and_is_one_line(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async def unclean() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            raise OSError("cannot be closed")

    async def main() -> None:
        tasks = [asyncio.ensure_future(unclean()) for _ in range(3)]
        await asyncio.wait(tasks, timeout=0)
        raise LookupError("no such page")

    with pytest.raises(LookupError, match="no such page"):
        asyncio.run(alone(main()))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "3 tasks that were cancelled at the end raised OSError: cannot be closed (test_bord"
    )
    assert "shutdown" not in capfd.readouterr().err
