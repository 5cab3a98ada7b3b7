"""The host's side of one sandbox: starts its head (inside/head.py), asks it, and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import signal
import struct
from typing import Any, cast

from rondo.core.errors import SandboxError
from rondo_sandbox.backends import Backend, Start
from rondo_sandbox.inside.head import STATUSES
from rondo_sandbox.inside.wire import ANSWER
from rondo_sandbox.records import Limits, Result, Status

START_SECONDS = 20.0
SPARE_SECONDS = 10.0
"""How much longer than a program's limit its head may take to answer."""


class Head:
    """A running sandbox. One question at a time; a caller that stops waiting ends it."""

    def __init__(self, process: asyncio.subprocess.Process, backend: Backend, start: Start) -> None:
        self._process = process
        self._backend = backend
        self._start = start
        self._one = asyncio.Lock()

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

    async def ask(self, request: dict[str, Any], *, cell: bool = False) -> Result:
        """Returns what came of a request; SandboxError: the sandbox was lost, and is closed."""
        async with self._one:
            try:
                result = await self._exchange(request, request["seconds"] + SPARE_SECONDS)
            except BaseException:  # its answer may still come: nobody would know what it belongs to
                await self.close()
                raise
        status, code, seconds, out, err = result
        return Result(status, _text(out), _text(err), None if cell else code, seconds)

    async def _exchange(
        self, message: dict[str, Any], seconds: float
    ) -> tuple[Status, int, float, bytes, bytes]:
        writer, reader = self._process.stdin, self._process.stdout
        assert writer is not None
        assert reader is not None
        try:
            async with asyncio.timeout(seconds):
                writer.write(_message(message))
                await writer.drain()
                header = await reader.readexactly(struct.calcsize(ANSWER))
                index, code, taken, size, more = struct.unpack(ANSWER, header)
                out, err = await reader.readexactly(size), await reader.readexactly(more)
        except TimeoutError:
            raise SandboxError(f"a sandbox did not answer within {seconds:g} s; it was ended") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise SandboxError(
                f"a sandbox ended by itself or was ended from outside{await self._why()}"
            ) from None
        return cast(Status, STATUSES[index]), code, taken, out, err

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
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode and self._start.settings["made"]:
            await self._clear()

    async def _clear(self) -> None:
        """Has another head do what a killed one could not: end whatever its user runs, remove its folder."""
        process = await _started(self._backend, self._start)
        await process.communicate(_message(self._start.settings))


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
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
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
