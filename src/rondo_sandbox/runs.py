"""Programs in sandboxes: one sandbox each, many in one, or cells that share variables.

async with await open_sandbox() as sandbox:
    result = await sandbox.run("print(6 * 7)")             # a fresh sandbox: nothing before, nothing after it
    async with sandbox.session() as session:               # variables stay from cell to cell
        await session.run("x = 41")
        await session.run("x + 1")
    async with sandbox.warm() as warm:                     # a fresh process and an empty folder for each
        results = [await warm.run(program, stdin=case) for case in cases]
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from rondo.core.errors import ConfigError, SandboxError
from rondo.system.urls import check_inner
from rondo_sandbox.backends import NAMES, Backend, backend
from rondo_sandbox.head import LastingHead
from rondo_sandbox.records import Files, Limits, Result
from rondo_sandbox.remote import RemoteHead, Server, server

_log = logging.getLogger(__name__)

REMOTE_AT_ONCE = 64
# Run once before a back end is trusted with more: it holds where this prints nothing but the answer.
_PROBE_SECONDS = 30.0  # whatever programs get: a sandbox of a busy machine is slow, and not unfit
PROBE = """\
import os, socket
for attempt in (socket.socket, lambda: open("/etc/passwd"), lambda: open("/usr/rondo", "w")):
    try:
        attempt()
        print("not refused:", attempt)
    except OSError:
        pass
print(6 * 7)
"""


class Session:
    """Cells that run one after the other in one namespace. After one was `lost`, a new namespace begins."""

    def __init__(self, head: LastingHead | RemoteHead, limits: Limits) -> None:
        self._head = head
        self.limits = limits

    async def run(self, code: str, *, seconds: float | None = None) -> Result:
        """Runs a cell; prints the value of an expression that ends it. seconds: instead of the limit's."""
        return await self._head.ask(
            {"cell": code, "seconds": float(seconds or self.limits.seconds)}, cell=True
        )


class Warm:
    """A sandbox that runs one program after the other, each in a process of its own and an empty folder.

    For programs of one trajectory: those of different trajectories get a sandbox each.
    """

    def __init__(self, head: LastingHead | RemoteHead, limits: Limits) -> None:
        self._head = head
        self.limits = limits

    async def run(
        self,
        program: str | Sequence[str],
        *,
        stdin: str | bytes = b"",
        files: Files | None = None,
        seconds: float | None = None,
    ) -> Result:
        """Runs Python's text, or a command with its arguments. seconds: instead of the limit's."""
        request: dict[str, Any] = {
            "code": program if isinstance(program, str) else "",
            "argv": None if isinstance(program, str) else list(program),
            "stdin": _bytes(stdin),
            "files": {_checked(name): _bytes(content) for name, content in (files or {}).items()},
            "seconds": float(seconds or self.limits.seconds),
        }
        return await self._head.ask(request)


class Sandbox:
    """Starts sandboxes with one back end. `backend` says which, `passed_over` why not a stronger one."""

    def __init__(
        self, chosen: Backend | Server, limits: Limits, passed_over: Mapping[str, str], at_once: int
    ) -> None:
        self.backend = chosen
        self.limits = limits
        self.passed_over = passed_over
        self._room = asyncio.Semaphore(at_once)
        self._heads: set[LastingHead | RemoteHead] = set()
        self._closed = False

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(
        self,
        program: str | Sequence[str],
        *,
        stdin: str | bytes = b"",
        files: Files | None = None,
        limits: Limits | None = None,
    ) -> Result:
        """Runs one program (Python's text, or a command with its arguments) in a sandbox of its own."""
        async with self.room(), self.warm(limits) as warm:
            return await warm.run(program, stdin=stdin, files=files)

    @asynccontextmanager
    async def room(self) -> AsyncIterator[None]:
        """Waits until fewer than `at_once` others hold room here, and holds it. `run` does so by itself; a
        session or warm sandbox, which may stand idle, takes none.
        """
        async with self._room:
            yield

    @asynccontextmanager
    async def session(self, limits: Limits | None = None) -> AsyncIterator[Session]:
        """A sandbox for cells that share their variables and files."""
        async with self._head(limits) as head:
            yield Session(head, limits or self.limits)

    @asynccontextmanager
    async def warm(self, limits: Limits | None = None) -> AsyncIterator[Warm]:
        """A sandbox for many programs, one after the other."""
        async with self._head(limits) as head:
            yield Warm(head, limits or self.limits)

    @asynccontextmanager
    async def _head(self, limits: Limits | None) -> AsyncIterator[LastingHead | RemoteHead]:
        if self._closed:
            raise SandboxError("this sandbox was closed")
        limits = limits or self.limits
        if isinstance(self.backend, Server):
            head: LastingHead | RemoteHead = RemoteHead(self.backend, limits)
        else:
            head = LastingHead(self.backend, limits)
        self._heads.add(head)
        try:
            if isinstance(head, LastingHead):
                await head.start()
            yield head
        finally:
            self._heads.discard(head)
            await head.close()

    async def close(self) -> None:
        """Ends all that runs."""
        self._closed = True
        await asyncio.gather(*(head.close() for head in list(self._heads)))


async def open_sandbox(
    name: str = "auto",
    *,
    limits: Limits | None = None,
    python: str | None = None,
    packages: Sequence[str] = (),
    at_once: int | None = None,
) -> Sandbox:
    """Returns the strongest sandbox that this machine can have, found by trying it.

    Args:
        name: auto, or one of backends.NAMES. `none` holds nothing but limits, and is never chosen by itself.
            http://host:port: another machine's, by SandboxFusion's API; interpreter and packages are its own.
        limits: of every program that brings none of its own.
        python: the interpreter in it; by default the one that this environment was made from.
        packages: folders whose packages its programs may import, as `pip install --target FOLDER` makes them.
        at_once: how many programs have `room` at a time; by default as many as there are processors.
    """
    limits = limits or Limits()
    if "://" in name and (python or packages):
        raise ConfigError(
            f"{name}: interpreter and packages are that machine's own; leave python and packages out",
            key="sandbox.packages" if packages else "sandbox.python",
        )
    for folder in packages:
        if not os.path.isdir(folder):
            raise ConfigError(
                f"packages: there is no folder {folder}; pip install --target {folder} numpy makes one",
                key="sandbox.packages",
            )
    if "://" in name:
        remote = Sandbox(server(name), limits, {}, at_once or REMOTE_AT_ONCE)
        await _probe(remote)
        return remote
    if name not in ("auto", *NAMES):
        raise ConfigError(
            f"{name!r}: no such back end; there are auto, {', '.join(NAMES)}, http://host:port",
            key="sandbox.backend",
        )
    passed_over: dict[str, str] = {}
    for wanted in [each for each in NAMES if each != "none"] if name == "auto" else [name]:
        try:
            chosen = backend(wanted, python, packages)
            sandbox = Sandbox(chosen, limits, passed_over, at_once or os.cpu_count() or 1)
            await _probe(sandbox)
        except SandboxError as error:
            passed_over[wanted] = str(error)
            continue
        _log.info("sandbox: %s", chosen.description)
        return sandbox
    reasons = "; ".join(f"{each}: {why}" for each, why in passed_over.items())
    raise SandboxError(
        f"no sandbox can hold programs on this machine ({reasons}). Backend 'none' runs them "
        "unheld: only its name written out chooses it"
    )


async def _probe(sandbox: Sandbox) -> None:
    """Runs a program that looks whether it is confined. Raises SandboxError where it is not, or could not
    run.
    """
    async with sandbox.warm() as warm:
        result = await warm.run(PROBE, seconds=_PROBE_SECONDS)
    if not result.ok:
        raise SandboxError(
            f"a program on trial did not run ({result.status}): {result.stderr.strip()[-300:]}"
        )
    if sandbox.backend.confines and result.stdout != "42\n":
        raise SandboxError(f"a program on trial was not held: {result.stdout.strip()}")


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def _checked(name: str) -> str:
    try:
        check_inner(name)
    except ValueError as error:
        raise ValueError(f"a program's file {error}") from error
    return name


# ---- what tools and rewards of a process share ----


_OPENED: dict[asyncio.AbstractEventLoop, dict[tuple[str, ...], asyncio.Task[Sandbox]]] = {}


_SMALL = "import json, re\njson.dumps(list(range(1000)))"


def check_sandbox(
    backend: str, memory_mb: int | None = None, packages: Sequence[str] = (), wanted: str = ""
) -> None:
    """Raises SandboxError where programs cannot be held, ConfigError for a back end or a folder of packages
    that there is not, for memory (None: not asked) that a small program does not run in, and where `wanted`,
    an import, fails.
    """

    async def opened() -> None:
        async with await open_sandbox(backend, packages=packages) as sandbox:
            if memory_mb is not None:
                result = await sandbox.run(_SMALL, limits=Limits(memory_mb=memory_mb))
                if not result.ok:
                    raise ConfigError(
                        f"memory_mb={memory_mb}: a program that imports json and re does not run in it "
                        f"({result.status}); raise it"
                    )
            if wanted and not (result := await sandbox.run(wanted)).ok:
                (why,) = result.stderr.strip().splitlines()[-1:] or [result.status]
                raise ConfigError(
                    f"packages: in the sandbox `{wanted}` fails: {why}; name a folder that has it (pip "
                    "install --target FOLDER, by the same Python)"
                )

    with ThreadPoolExecutor(1) as elsewhere:  # a loop may run here
        elsewhere.submit(asyncio.run, opened()).result()


async def shared_sandbox(backend: str, packages: Sequence[str] = ()) -> Sandbox:
    """Returns this event loop's sandbox of a back end and packages, opened when it is first asked for. Raises
    SandboxError; the next call tries anew.
    """
    key = (backend, *packages)
    for over in [loop for loop in _OPENED if loop.is_closed()]:
        del _OPENED[over]
    opened = _OPENED.setdefault(asyncio.get_running_loop(), {})
    if key not in opened:
        opened[key] = asyncio.ensure_future(open_sandbox(backend, packages=packages))
    task = opened[key]
    try:
        return await asyncio.shield(task)
    finally:
        if task.done() and (task.cancelled() or task.exception()):
            opened.pop(key, None)
