"""A sandbox on another machine, by SandboxFusion's HTTP API: `rondo sandbox serve`, or SandboxFusion's own.

What it calls SandboxError, and whatever goes wrong with HTTP, is a SandboxError here; Failed is the program's
own doing. The API knows no sessions: a session's cells are sent anew with each further cell, but for those
that took too long or ended their process.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import re
import shlex
import socket
import threading
import urllib.parse
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rondo.core.errors import ConfigError, SandboxError
from rondo.core.masking import warn_of_open_way
from rondo.system.access import SANDBOX_KEY, bearing
from rondo_sandbox.records import Limits, Result, Status

WAITING_SECONDS = 120.0
"""How much longer than a program's limit its answer may take: others may be before it."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Server:
    """Where it is."""

    name: str
    """Its URL, without a path of the API's."""
    python: str = "its own Python"
    """Shown beside the name; which Python runs there is its host's business."""
    confines: bool = False
    """Whether a trial can tell that it holds programs: that is its host's business."""

    @property
    def description(self) -> str:
        """Says what holds programs."""
        return f"{self.name}: whatever holds programs there"


def server(url: str) -> Server:
    """Returns the server at a URL. Raises ConfigError."""
    parts = urllib.parse.urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = 0
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or port == 0
        or parts.username
        or parts.query
    ):
        raise ConfigError(
            f"{url!r} is no address of a sandbox; write http://host:port (a key goes into {SANDBOX_KEY})",
            key="sandbox.backend",
        )
    warn_of_open_way("sandbox", url, key=bool(bearing(SANDBOX_KEY)))
    return Server(url.rstrip("/").removesuffix("/run_code"))


class RemoteHead:
    """A head at a server: it answers what a `Head` has a process of its own answer."""

    def __init__(self, server: Server, limits: Limits) -> None:
        self._server = server
        self._limits = limits
        self._cells: list[str] = []

    async def ask(self, request: Mapping[str, Any], *, cell: bool = False) -> Result:
        """Returns what came of a program or a cell. Raises SandboxError."""
        return await (self._cell(request) if cell else self._program(request))

    async def close(self) -> None:
        """Does nothing: no connection is open between two questions."""

    async def _program(self, request: Mapping[str, Any]) -> Result:
        seconds, argv = request["seconds"], request["argv"]
        answer = await self._post(
            "/run_code",
            {
                # `exec`: the exit code and the limits are the command's, with no shell around it.
                "code": f"exec {shlex.join(argv)}" if argv else request["code"],
                "language": "bash" if argv else "python",
                "stdin": request["stdin"].decode("utf-8", "replace"),
                "files": {name: base64.b64encode(data).decode() for name, data in request["files"].items()},
                "compile_timeout": seconds,
                "run_timeout": seconds,
                "memory_limit_MB": self._limits.memory_mb,
            },
            seconds,
        )
        try:
            ran = answer["run_result"] or answer["compile_result"]
            out, err, code = ran["stdout"] or "", ran["stderr"] or "", ran["return_code"]
            taken, over = float(ran["execution_time"] or 0.0), ran["status"] == "TimeLimitExceeded"
        except (KeyError, TypeError, ValueError) as error:
            raise self._odd(answer) from error
        status: Status = "error"
        if over:
            status, code = "time_limit", -9
        elif len(out.encode("utf-8", "replace")) > self._limits.output_bytes:
            status = "output_limit"
        elif code == 0:
            status = "finished"
        elif _last_line(err).startswith("MemoryError"):
            status = "memory_limit"
        return Result(status, out, err, code, taken)

    async def _cell(self, request: Mapping[str, Any]) -> Result:
        seconds = request["seconds"]
        # The API keeps no session: all earlier cells run again before the new one.
        cells = [*self._cells, request["cell"]]
        answer = await self._post(
            "/run_jupyter",
            {
                "cells": cells,
                "cell_timeout": seconds,
                "total_timeout": seconds * len(cells),
                "memory_limit_MB": self._limits.memory_mb,
            },
            seconds * len(cells),
        )
        try:
            driver = answer["driver"] or {}
            taken = float(driver.get("execution_time") or 0.0)
            if answer["status"] == "Failed":
                over = driver.get("status") == "TimeLimitExceeded"
                why = driver.get("stderr") or "the cell ended its process; what it did is undone\n"
                return Result("time_limit" if over else "error", "", "" if over else why, None, taken)
            said = answer["cells"][-1]
            shown = [data["text/plain"] + "\n" for data in said["display"] if "text/plain" in data]
            raised = ["\n".join(one.get("traceback") or ()) for one in said["error"]]
            out, err = said["stdout"] + "".join(shown), said["stderr"] + "\n".join(filter(None, raised))
            name = said["error"][0].get("ename") if said["error"] else None
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._odd(answer) from error
        # Only now: a cell that failed as a whole is undone, and not run again.
        self._cells = cells
        status: Status = (
            "finished" if not said["error"] else "memory_limit" if name == "MemoryError" else "error"
        )
        return Result(status, out, _COLOURS.sub("", err), None, taken)

    def _odd(self, answer: Any) -> SandboxError:
        return SandboxError(
            f"{self._server.name} answered what is no answer of SandboxFusion's API: {answer!r:.300}"
        )

    async def _post(self, path: str, body: dict[str, Any], seconds: float) -> Any:
        """Returns the answer. Raises SandboxError."""
        call = _Call(self._server.name + path, json.dumps(body), seconds + WAITING_SECONDS)
        try:
            status, data = await asyncio.wrap_future(call.answer)
        except (OSError, http.client.HTTPException) as error:
            raise SandboxError(f"sandbox {self._server.name}: {type(error).__name__}: {error}") from error
        finally:
            call.end()
        if status != 200:
            raise SandboxError(f"sandbox {self._server.name}{path} answered {status}: {data[:300]!r}")
        try:
            answer = json.loads(data)
            failed = answer["status"] == "SandboxError"
        except (ValueError, KeyError, TypeError) as error:
            raise self._odd(data) from error
        if failed:
            raise SandboxError(
                f"sandbox {self._server.name}: {answer.get('message') or 'SandboxError'!s:.300}"
            )
        return answer


class _Call:
    """One POST, in a thread of its own; its caller ends it when it stops waiting."""

    def __init__(self, url: str, body: str, seconds: float) -> None:
        parts = urllib.parse.urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname or "", parts.port, timeout=seconds)
        self._path, self._body = parts.path, body.encode()
        self.answer: Future[tuple[int, bytes]] = Future()
        threading.Thread(target=self._work, name="rondo-sandbox", daemon=True).start()

    def _work(self) -> None:
        headers = {"Content-Type": "application/json", **bearing(SANDBOX_KEY)}
        try:
            self._connection.connect()
            # Its caller has left while it connected; nothing was asked yet.
            if self.answer.cancelled():
                return
            self._connection.request("POST", self._path, self._body, headers)
            response = self._connection.getresponse()
            answer = response.status, response.read()
        except (OSError, http.client.HTTPException, ValueError) as error:
            if self.answer.set_running_or_notify_cancel():
                self.answer.set_exception(error)
        else:
            if self.answer.set_running_or_notify_cancel():
                self.answer.set_result(answer)
        finally:
            self._connection.close()

    def end(self) -> None:
        """Closes the connection, by which the server sees that nobody waits."""
        if self.answer.cancel() or self.answer.cancelled():
            with suppress(OSError, AttributeError):  # it is not connected yet, or no more
                self._connection.sock.shutdown(socket.SHUT_RDWR)


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2]
