"""SandboxFusion's HTTP API in front of a sandbox of this machine. The one module of these that knows aiohttp.

    POST /run_code       a program in a sandbox of its own: python, bash
    POST /run_jupyter    cells that share their variables, in a sandbox of their own
    GET  /v1/ping

200 and `SandboxError` are said of all that is no program's doing; a body that is not the API's is a 422.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import Coroutine
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from rondo.core.errors import ConfigError, SandboxError
from rondo.system.access import Access, AccessError, check_json
from rondo.system.urls import check_inner
from rondo_sandbox.records import Limits, Result
from rondo_sandbox.runs import Sandbox

try:
    from aiohttp import web
except ImportError:
    web = None  # type: ignore[assignment]

BODY_BYTES = 16 << 20
BODY_SECONDS = 60.0
"""Until a body is there."""
MOST_WAITING = 1024
"""Requests that are being answered or wait for room."""
_PING = "/v1/ping"
_LONGEST_REFUSAL = 4000  # characters: what a client sent is not sent back whole
SHELLS = {"bash": ("bash", "-c")}
# Writes files into a session's folder, and leaves no name behind.
_WRITE = (
    "(lambda os, files: [(os.makedirs(os.path.dirname(name) or '.', exist_ok=True), "
    "open(name, 'wb').write(data)) for name, data in files.items()] and None)(__import__('os'), {!r})"
)

Timeout = Annotated[float, Field(gt=0, le=3600)]
Memory = Annotated[int, Field(ge=-1, le=1 << 17)]
T = TypeVar("T")


@dataclass(frozen=True)
class RunCode:
    """The body of /run_code."""

    code: str
    """The whole program."""
    language: Annotated[str, Field(max_length=64)]
    """python, or a key of SHELLS; another one is answered with SandboxError."""
    compile_timeout: Timeout = 10.0
    """Accepted for the API's sake: nothing is compiled here."""
    run_timeout: Timeout = 10.0
    """Seconds."""
    memory_limit_MB: Memory = -1  # noqa: N815
    """-1: the server's own limit."""
    stdin: str | None = None
    """None: empty."""
    files: dict[str, str | None] = Field(default_factory=dict)
    """Base64, by path in the program's folder; null: left out."""
    fetch_files: list[str] = Field(default_factory=list)
    """The API's; any is refused, with 422."""


@dataclass(frozen=True)
class RunJupyter:
    """The body of /run_jupyter."""

    cells: Annotated[list[str], Field(max_length=1024)]
    """Run one after the other in one session."""
    cell_timeout: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """Seconds for each cell; 0: what is left of `total_timeout`."""
    total_timeout: Timeout = 45.0
    """Seconds for all cells together."""
    memory_limit_MB: Memory = -1  # noqa: N815
    """-1: the server's own limit."""
    kernel: Literal["python3"] = "python3"
    """The API's; there is no other here."""
    files: dict[str, str] = Field(default_factory=dict)
    """Base64, by path in the session's folder, written before the first cell."""
    fetch_files: list[str] = Field(default_factory=list)
    """The API's; any is refused, with 422."""


@dataclass(frozen=True)
class Ran:
    """CommandRunResult of the API."""

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    """Finished, whatever ended it, unless it ran out of time; Error is never used here."""
    execution_time: float | None = None
    """Seconds."""
    return_code: int | None = None
    """Negative: the signal that ended it. None: it ran out of time."""
    stdout: str | None = None
    """Also what came before a limit; for cells empty, as each has its own."""
    stderr: str | None = None
    """Also what came before a limit; for cells, of the one that ended the session."""


class SandboxServer:
    """A sandbox on a port. access: of every request but a ping.

    Raises ConfigError without aiohttp.
    """

    def __init__(self, sandbox: Sandbox, access: Access) -> None:
        if web is None:
            raise ConfigError('a sandbox on a port needs aiohttp: pip install "rondo-rl[serve]"')
        self._sandbox = sandbox
        self._access = access
        self._pending = 0

        @web.middleware
        async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
            return await self._guard(request, handler)

        app = web.Application(client_max_size=BODY_BYTES, middlewares=[guard])
        app.router.add_post("/run_code", self._run_code)
        app.router.add_post("/run_jupyter", self._run_jupyter)
        app.router.add_get(_PING, self._ping)
        # Where a client leaves, its program is ended.
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=1.0,
            auto_decompress=False,  # some bytes could stand for gigabytes
        )

    async def start(self, host: str, port: int) -> str:
        """Listens; returns its URL. port 0: a free one. Raises ConfigError."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except (OSError, OverflowError) as error:
            await self.close()
            raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another port") from error
        host, port = self._runner.addresses[0][:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def close(self) -> None:
        """Stops listening; what runs is ended."""
        await self._runner.cleanup()

    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            if request.path != _PING:
                self._access.check_host(request.headers.get("Host", ""))
                self._access.key_of(request.headers.get("Authorization", ""))
            response: web.StreamResponse = await handler(request)
            return response
        except AccessError as error:
            return web.Response(text=str(error), status=error.status)

    async def _ping(self, request: web.Request) -> web.Response:
        return web.json_response("pong")

    async def _run_code(self, request: web.Request) -> web.Response:
        asked = await self._body(request, RunCode)
        empty = {"compile_result": None, "run_result": None}
        return await self._answered(empty, self._program(asked))

    async def _program(self, asked: RunCode) -> dict[str, Any]:
        if asked.language not in ("python", *SHELLS):
            raise SandboxError(f"language {asked.language!r}: this server runs python, {', '.join(SHELLS)}")
        program = [*SHELLS[asked.language], asked.code] if asked.language in SHELLS else asked.code
        result = await self._sandbox.run(
            program,
            stdin=asked.stdin or "",
            files=files_of_request(asked.files),
            limits=self._limits(asked.memory_limit_MB, asked.run_timeout),
        )
        if result.status == "time_limit":
            ran = Ran("TimeLimitExceeded", result.seconds, None, result.stdout, result.stderr)
        else:
            ran = Ran("Finished", result.seconds, result.return_code, result.stdout, result.stderr)
        return {"status": "Success" if result.ok else "Failed", "run_result": asdict(ran)}

    async def _run_jupyter(self, request: web.Request) -> web.Response:
        asked = await self._body(request, RunJupyter)
        return await self._answered({"driver": None, "cells": []}, self._cells(asked))

    async def _cells(self, asked: RunJupyter) -> dict[str, Any]:
        limits, cells = self._limits(asked.memory_limit_MB, asked.total_timeout), []
        ended: Result | None = None
        async with self._sandbox.room(), self._sandbox.session(limits) as session:
            if asked.files:
                await session.run(_WRITE.format(files_of_request(asked.files)))
            began = time.monotonic()
            for code in asked.cells:
                left = max(0.001, began + asked.total_timeout - time.monotonic())
                result = await session.run(code, seconds=min(asked.cell_timeout or left, left))
                if result.status in ("time_limit", "lost"):
                    ended = result
                    break
                cells.append(_cell(result))
        taken = time.monotonic() - began
        driver = Ran("Finished", taken, 0, "", "")
        if ended is not None:
            over = ended.status == "time_limit"
            driver = Ran(
                "TimeLimitExceeded" if over else "Finished", taken, None if over else 1, "", ended.stderr
            )
        return {"status": "Failed" if ended else "Success", "driver": asdict(driver), "cells": cells}

    def _limits(self, memory_mb: int, seconds: float) -> Limits:
        own = self._sandbox.limits
        return replace(own, seconds=seconds, memory_mb=memory_mb if memory_mb > 0 else own.memory_mb)

    async def _answered(
        self, empty: dict[str, Any], work: Coroutine[Any, Any, dict[str, Any]]
    ) -> web.Response:
        """Returns what comes of the work. empty: an answer's own fields, where nothing does."""
        answer: dict[str, Any] = {"message": "", **empty, "executor_pod_name": None, "files": {}}
        self._pending += 1
        try:
            answer |= await work
        except SandboxError as error:
            answer |= {"status": "SandboxError", "message": str(error)}
        finally:
            self._pending -= 1
        return web.json_response(answer)

    async def _body(self, request: web.Request, kind: type[T]) -> T:
        """Returns what is asked. Raises an answer of HTTP's."""
        check_json(request.headers.get("Content-Type", ""))
        if self._pending >= MOST_WAITING:
            raise web.HTTPTooManyRequests(text=f"{MOST_WAITING} requests are pending; try again later")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                data = await request.read()
        except TimeoutError as error:
            raise web.HTTPRequestTimeout(text=f"the body was not there after {BODY_SECONDS:g} s") from error
        try:
            asked = await asyncio.to_thread(TypeAdapter(kind).validate_json, data)
            files_of_request(asked.files)  # type: ignore[attr-defined]
        except ValidationError as error:
            raise web.HTTPUnprocessableEntity(
                text=error.json(include_url=False, include_input=False)[:_LONGEST_REFUSAL]
            ) from error
        except ValueError as error:
            raise web.HTTPUnprocessableEntity(text=f"files: {error}") from error
        if asked.fetch_files:  # type: ignore[attr-defined]
            raise web.HTTPUnprocessableEntity(text="fetch_files: this server gives no files back; print them")
        return asked


def files_of_request(given: dict[str, Any]) -> dict[str, bytes]:
    """Returns the contents of a request's files. Raises ValueError for what is not base64, or would lie
    elsewhere.
    """
    for name in given:
        try:
            check_inner(name)
        except ValueError as error:
            raise ValueError(f"one {error}") from error
    try:
        return {
            name: base64.b64decode(text, validate=True) for name, text in given.items() if text is not None
        }
    except binascii.Error as error:
        raise ValueError(f"a content is not base64: {error}") from error


def _cell(result: Result) -> dict[str, Any]:
    """Returns CellRunResult of the API: the value of a last line is in stdout, a traceback in stderr."""
    errors = []
    if not result.ok:
        name, _, value = result.stderr.rstrip().rpartition("\n")[2].partition(": ")
        errors = [{"ename": name or result.status, "evalue": value, "traceback": []}]
    return {"stdout": result.stdout, "stderr": result.stderr, "display": [], "error": errors}
