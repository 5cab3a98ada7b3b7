"""The host's side of one sandbox: starts its head (inside/head.py), asks it, and ends it.

LastingHead ─▶ Head ══ pipes ══ inside/head.py        killed or frozen: another Head, the cells so far,
                                                      and what was asked, once more
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import marshal
import os
import signal
import struct
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from rondo.core.errors import SandboxError
from rondo.system.guard import children_of
from rondo.system.usage import state_of
from rondo_sandbox.backends import Backend, Start
from rondo_sandbox.inside.head import STATUSES
from rondo_sandbox.inside.wire import ANSWER
from rondo_sandbox.records import Limits, Result, Status

START_SECONDS = 20.0
SPARE_SECONDS = 10.0
"""How much longer than a program's limit its head may take to answer."""
TRIES = 3
"""Sandboxes that one question is given, one after the other, where they are lost."""
LOOK_SECONDS = 1.0
MOST_STOPPED = 5
"""Looks in a row that find a head stopped (SIGSTOP) before it is ended."""
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # the order of a set of texts, and so what a program prints, is the same again
}
T = TypeVar("T")
_log = logging.getLogger(__name__)


class HeadLostError(SandboxError):
    """A sandbox ended or did not answer, which no program in it can bring about."""


class Head:
    """A running sandbox. One question at a time; a caller that stops waiting ends it."""

    def __init__(self, process: asyncio.subprocess.Process, backend: Backend, start: Start) -> None:
        self._process = process
        self._backend = backend
        self._start = start
        self._num_stopped = 0
        self._heads: list[int] = []

    @classmethod
    async def start(cls, backend: Backend, limits: Limits) -> Head:
        """Starts a head, and returns it once it is ready. Raises SandboxError with the reason where it does
        not start.
        """
        start = backend.start(limits)
        head = cls(await _started(backend, start), backend, start)
        try:
            await head._exchange(start.settings, START_SECONDS)
        except BaseException:
            await head.close()
            raise
        return head

    async def ask(self, request: dict[str, Any]) -> Result:
        """Returns what came of a request, of a cell with a return code, too: see inside/head.py. Raises
        HeadLostError; the sandbox is closed then.
        """
        try:
            result = await self._exchange(request, request["seconds"] + SPARE_SECONDS)
        except BaseException:  # its answer may still come: nobody would know what it belongs to
            await self.close()
            raise
        status, code, seconds, out, err = result
        return Result(status, _text(out), _text(err), code, seconds)

    async def _exchange(
        self, message: dict[str, Any], seconds: float
    ) -> tuple[Status, int, float, bytes, bytes]:
        writer, reader = self._process.stdin, self._process.stdout
        assert writer is not None
        assert reader is not None
        self._looking = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)
        try:
            async with asyncio.timeout(seconds):
                writer.write(_message(message))
                await writer.drain()
                header = await reader.readexactly(struct.calcsize(ANSWER))
                index, code, taken, size, more = struct.unpack(ANSWER, header)
                out, err = await reader.readexactly(size), await reader.readexactly(more)
        except TimeoutError:
            raise HeadLostError(f"a sandbox did not answer within {seconds:g} s; it was ended") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise HeadLostError(
                f"a sandbox ended by itself or was ended from outside{await self._why()}"
            ) from None
        finally:
            self._looking.cancel()
        return cast(Status, STATUSES[index]), code, taken, out, err

    def _look(self) -> None:
        """Ends a head that is stopped and stays so: its answer would not come."""
        if self._backend.name == "bubblewrap" and not self._heads:
            # Its process only waits for its child, the head. Found once: it is a look at all processes.
            self._heads = children_of(self._process.pid)
        is_stopped = any(state_of(str(pid))[0] == "T" for pid in (self._process.pid, *self._heads))
        self._num_stopped = self._num_stopped + 1 if is_stopped else 0
        if self._num_stopped == MOST_STOPPED:
            self._kill()
        self._looking = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _why(self) -> str:
        """Returns the last line that the head wrote."""
        assert self._process.stderr is not None
        said = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                said = await self._process.stderr.read(65536)
        last = _text(said).strip().splitlines()[-1:]
        return f": {last[0]}" if last else ""

    async def close(self) -> None:
        """Ends the head with everything in its sandbox; returns when it has ended."""
        process = self._process
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(SPARE_SECONDS):
                await process.wait()
        except TimeoutError:
            self._kill()
            await process.wait()
        if process.returncode and self._start.settings["made"]:
            await self._clear()

    async def _clear(self) -> None:
        """Has another head do what a killed one could not: end whatever its user runs, remove its folder."""
        process = await _started(self._backend, self._start)
        await process.communicate(_message(self._start.settings))


class LastingHead:
    """A head, and another in its place where it was killed or frozen: what was asked is done again there. A
    session's earlier cells run again before it, in their order. So the end is that of a sandbox that nothing
    happened to, where a program does the same each time.

    A program's own process that was killed (SIGKILL), or stood still at its limit (SIGSTOP), may have done
    that to itself: nobody can tell. It runs once more, in a fresh sandbox, so that it finds nothing that it
    left; what comes of it then counts. No program can bring about an error so: where its session's earlier
    cells come to something else, what came of it at first stands, and the session is lost.
    """

    def __init__(self, backend: Backend, limits: Limits) -> None:
        self._backend = backend
        self._limits = limits
        self._one = asyncio.Lock()
        self._head: Head | None = None
        self._closed = False
        self._has_worked = False
        self.num_again = 0
        """How often something was killed or stopped here, and ran again."""
        # The session's cells, and what came of each; how many of them its process has run.
        self._cells: list[tuple[dict[str, Any], tuple[Status, str, str]]] = []
        self._num_run = 0

    async def start(self) -> None:
        """Starts the first head. Raises SandboxError with the reason where none starts."""
        await self._lasting(self._begun)

    async def ask(self, request: dict[str, Any], *, cell: bool = False) -> Result:
        """Returns what came of a request. Raises SandboxError where sandboxes were lost TRIES times, or a
        session's cell says something else the second time; it is closed then.
        """
        async with self._one:
            result = await self._lasting(partial(self._done, request, cell))
            if _may_be_from_outside(result):
                _log.info("a program was killed or stopped, by itself or from outside; it runs once more")
                self.num_again += 1
                result = await self._lasting(partial(self._done, request, cell, result))
        if result.status == "lost":
            self._cells, self._num_run = [], 0
        elif cell:
            self._cells.append((request, _said(result)))
            self._num_run += 1
        code = -signal.SIGKILL if result.return_code == -signal.SIGSTOP else result.return_code
        return replace(result, return_code=None if cell else code)

    async def _lasting(self, work: Callable[[], Awaitable[T]]) -> T:
        for left in reversed(range(TRIES)):
            if self._closed:
                raise SandboxError("this sandbox was closed")
            try:
                return await work()
            except HeadLostError as error:
                self._head = None
                self.num_again += 1
                if self._closed:
                    raise
                if not left:
                    self._closed = True
                    raise SandboxError(f"{error} ({TRIES} of them, one after the other)") from error
                # Where none has worked, this machine cannot have it, which its caller is told.
                level = logging.WARNING if self._has_worked else logging.DEBUG
                _log.log(level, "%s; another takes its place", error)
            except BaseException:
                await self.close()
                raise
        raise AssertionError("unreachable")

    async def _begun(self) -> Head:
        if self._head is None:
            self._num_run = 0
            self._head = await Head.start(self._backend, self._limits)
            self._has_worked = True
        if self._closed:  # as it started
            await self._head.close()
            raise SandboxError("this sandbox was closed")
        return self._head

    async def _done(self, request: dict[str, Any], cell: bool, before: Result | None = None) -> Result:
        """Returns what came of a request. before: what came of it at first, where it runs once more."""
        if before is not None:
            await self._end()
        head = await self._begun()
        while cell and self._num_run < len(self._cells):
            earlier, said = self._cells[self._num_run]
            again = await head.ask(earlier)
            if before is not None and _said(again) != said:
                await self._end()
                return before
            if _may_be_from_outside(again):
                await head.close()
                raise HeadLostError("a session's process was killed or stopped")
            if _said(again) != said:
                raise SandboxError(
                    f"a session was ended from outside, and its cell {self._num_run + 1} came to something "
                    f"else when it ran again: {_said(again)[:2]!r:.300}; it was {said[:2]!r:.300}"
                )
            self._num_run += 1
        return await head.ask(request)

    async def _end(self) -> None:
        if self._head is not None:
            await self._head.close()
        self._head = None

    async def close(self) -> None:
        """Ends the head with everything in its sandbox; returns when it has ended."""
        self._closed = True
        if self._head is not None:
            await self._head.close()


def _may_be_from_outside(result: Result) -> bool:
    if result.status == "time_limit":
        return result.return_code == -signal.SIGSTOP
    return result.status in ("error", "lost") and result.return_code in (-signal.SIGKILL, -signal.SIGSTOP)


def _said(result: Result) -> tuple[Status, str, str]:
    """Returns what is kept of a cell's result as long as its session: how it began, and a hash of it all."""
    text = repr((result.stdout, result.stderr))
    return result.status, text[:300], hashlib.sha256(text.encode()).hexdigest()


async def _started(backend: Backend, start: Start) -> asyncio.subprocess.Process:
    passed: list[int] = []
    try:
        if start.filter is not None:
            passed.append(_file_of(start.filter))
        argv = [argument.replace("{filter}", str(passed[0]) if passed else "") for argument in start.argv]
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=ENVIRONMENT,
            start_new_session=True,
            pass_fds=passed,
        )
    except OSError as error:
        raise SandboxError(f"sandbox ({backend.name}): {start.argv[0]} did not start: {error}") from error
    finally:
        for descriptor in passed:
            os.close(descriptor)


def _message(content: dict[str, Any]) -> bytes:
    data = marshal.dumps(content, 2)
    return struct.pack(">I", len(data)) + data


def _file_of(data: bytes) -> int:
    descriptor = os.memfd_create("filter")
    os.write(descriptor, data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
