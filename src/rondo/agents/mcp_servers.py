"""The tools of an MCP server: a command's, over its standard input and output, or those behind a URL.

    load_tools ─running─▶ McpServer ── one connection ──▶ guard ──▶ the command  (its stderr: our log)
    episodes   ──call───▶    │  ▲                └──────▶ or a URL
                             └──┘ died: connected again

One server serves all in a process that want the same one: the check of a recipe, the prompts, and all
episodes, which ask it at the same time. One more serves the calls that it may have died of, one by one. All
connections live on one event loop in a thread of its own: what opens one (and its process) closes it, and the
loop is never the user's. The command runs under a guard (system/guard.py): it ends with this process,
whatever it thinks of SIGTERM.

`mcp` is imported here only, when there is a server.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import shlex
import shutil
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from rondo.config.functions import NEVER_HANDED_OVER
from rondo.core.errors import ConfigError, ToolError
from rondo.core.images import of_base64
from rondo.core.masking import masked_urls, warn_of_open_way
from rondo.core.types import ToolResult
from rondo.system.border import described
from rondo.system.pool import Pool, Pooled, Supervision
from rondo.system.process import TAIL_LINES, guarded

if TYPE_CHECKING:
    from mcp import ClientSession
    from mcp.types import CallToolResult, ContentBlock

T = TypeVar("T")
SUPERVISION = Supervision(restarts=4, deaths=2)  # in a row: with no answer between them
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedTool:
    """A tool, as its server describes it."""

    name: str
    """The name that calls give."""
    description: str
    """What it does, in words for the policy."""
    parameters: Mapping[str, Any]
    """JSON schema."""


class ServerDownError(Exception):
    """The server cannot be started or reached, or has died."""


class McpServer:
    """The tools of an MCP server; see `running`.

    command: a command line that starts it. url: of one that runs, instead (streamable HTTP). tools: the names
    of those that are wanted; none: all. env: variables of the run's environment that the command gets beside
    PATH, HOME and the like. start_seconds: until it has said which tools there are. Raises ConfigError, whose
    message begins with `where`.
    """

    def __init__(
        self,
        where: str,
        *,
        command: str = "",
        url: str = "",
        tools: Sequence[str] = (),
        env: Sequence[str] = (),
        start_seconds: float = 60.0,
    ) -> None:
        try:
            import mcp  # noqa: F401
        except ImportError:
            raise ConfigError(
                f'{where}: tools of an MCP server need the package mcp: pip install "rondo-rl[mcp]"'
            ) from None
        if bool(command) == bool(url):
            raise ConfigError(
                f"{where}: an MCP server is a command (command: python server.py) or a url, one of the two"
            )
        if url and urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError(f"{where}: url: {url!r} is no http:// or https:// URL")
        if url and env:
            raise ConfigError(f"{where}: env is for a command, and there is a url; remove it")
        if start_seconds <= 0:
            raise ConfigError(f"{where}: start_seconds must be above 0, got {start_seconds}")
        self._where = where
        self._url = url
        self._command = _executable(command, where) if command else []
        self._environment = _chosen_environment(env, where)
        self._wanted = tuple(tools)
        self._start_seconds = start_seconds
        self.users = 0
        """How many use it, as `running` counts."""
        self._pool: Pool[_Connection] = Pool(1, self._connect, SUPERVISION)

    def start(self) -> list[ServedTool]:
        """Connects, and returns the tools that are wanted. Raises ConfigError."""
        warn_of_open_way(self._where, self._url, key=False)
        try:
            there = _on_loop(self._listed())
        except ServerDownError as error:
            raise ConfigError(f"{self._where}: {error}") from error
        names = [tool.name for tool in there]
        missing = [name for name in self._wanted if name not in names]
        if missing or not there:
            listed = ", ".join(names) or "none"
            what = f"has no tool {missing[0]!r}" if missing else "has no tools"
            raise ConfigError(f"{self._where}: {self} {what}; it has {listed}")
        return [tool for tool in there if not self._wanted or tool.name in self._wanted]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Returns what a tool answers: its text, and its images. Raises ToolError for what the tool calls an
        error, ServerDownError, DataError.
        """
        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self._answered(name, arguments), _loop())
        )

    def close(self) -> None:
        """Ends the connections, and the processes of a command with all that they have started."""
        _on_loop(self._close())

    def __str__(self) -> str:
        return f"the MCP server `{masked_urls(self._url) or shlex.join(self._command)}`"

    # ---- on the loop of the connections

    async def _listed(self) -> list[ServedTool]:
        async with self._pool.place("") as connection:
            await self._ready(connection)
            return connection.tools

    async def _answered(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS, INVALID_REQUEST

        call, result = object(), None
        while result is None:
            async with self._pool.place(call) as connection:
                session = await self._ready(connection)
                try:
                    result = await session.call_tool(name, dict(arguments))
                except MCPError as error:
                    if error.code == INVALID_PARAMS:
                        raise ToolError(error.message) from error
                    forgot = bool(self._url) and error.code == INVALID_REQUEST  # the session
                    if error.code != CONNECTION_CLOSED and not forgot:
                        raise
                    guilty = self._pool.died(connection, connection.running)
                    await connection.gone()
                    if guilty is call:
                        raise ServerDownError(f"{self} died{connection.last_words()}") from error
        self._pool.supervisor.worked()
        text = _text_of(result)
        if result.is_error:
            raise ToolError(text)
        images = [block for block in result.content if block.type == "image"]
        return ToolResult(text, images=[of_base64(block.data, f"image of {name}") for block in images])

    async def _ready(self, connection: _Connection) -> ClientSession:
        try:
            return await asyncio.shield(connection.ready)  # a call that is cancelled leaves it to the others
        except ServerDownError:
            self._pool.died(connection)
            raise

    def _connect(self, number: int, before: _Connection | None) -> _Connection:
        supervisor = self._pool.supervisor
        if self._command and supervisor.gives_up:
            raise ServerDownError(
                f"{self} died {supervisor.num_unexplained} times and answered nothing between; it is not "
                "started again"
            )
        return _Connection(self._streams, str(self), self._start_seconds)

    async def _close(self) -> None:
        self._pool.close()
        for connection in self._pool.processes:
            if connection is not None:
                await connection.gone()

    @asynccontextmanager
    async def _streams(self, last_lines: deque[str]) -> AsyncIterator[Sequence[Any]]:
        from mcp.client.stdio import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        if self._url:
            async with streamable_http_client(self._url) as streams:
                yield streams
            return
        program, *arguments = guarded(self._command, 0)
        parameters = StdioServerParameters(command=program, args=arguments, env=self._environment)
        reading, writing = os.pipe()
        reader = threading.Thread(
            target=_log_lines, args=(reading, self._where, last_lines), name="rondo-mcp-log", daemon=True
        )
        reader.start()
        with os.fdopen(writing, "w") as errors:
            async with stdio_client(parameters, errlog=errors) as streams:
                yield streams
        await asyncio.to_thread(reader.join, 1.0)  # all that the process said, for the error about its end


_RUNNING: dict[str, McpServer] = {}  # by their settings
_LOCK = threading.Lock()


def running(use: ExitStack, where: str, **options: Any) -> tuple[McpServer, list[ServedTool]]:
    """Returns a server of these options, with its tools: the one that runs in this process already, or a new
    one. It ends when the last `use` of it is closed. Raises ConfigError.
    """
    new = McpServer(where, **options)
    settings = repr((where, new._command, new._environment, sorted(options.items())))
    with _LOCK:
        server = _RUNNING.setdefault(settings, new)
        server.users += 1
    use.callback(_through, settings)
    return server, server.start()


def _through(settings: str) -> None:
    with _LOCK:
        server = _RUNNING[settings]
        server.users -= 1
        is_last = server.users == 0
        if is_last:
            del _RUNNING[settings]
    if is_last:
        server.close()


class _Connection(Pooled):
    """One start of a server. A task of its own opens and closes it: what enters `mcp`'s contexts has to leave
    them.
    """

    def __init__(self, streams: _Streams, who: str, start_seconds: float) -> None:
        super().__init__()
        self.tools: list[ServedTool] = []
        self.ready: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        """Done when `tools` are there, too; ServerDownError: they will not be."""
        self._over = asyncio.Event()
        self._who = who
        self._start_seconds = start_seconds
        self._last_lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._task = asyncio.create_task(self._live(streams))

    @property
    def ended(self) -> bool:
        """Says whether it can be asked no more."""
        return self._over.is_set()

    def end(self) -> None:
        """Asks for its end; `gone` waits for that."""
        self._over.set()
        if not self.ready.done():
            self._task.cancel()

    async def gone(self) -> None:
        """Ends it, and returns when it is closed, and its process has ended."""
        self.end()
        await asyncio.wait([self._task])

    def last_words(self) -> str:
        """Returns the last lines of the command's standard error, for the end of a message."""
        return ":\n" + "\n".join(self._last_lines) if self._last_lines else ""

    async def _live(self, streams: _Streams) -> None:
        from mcp import ClientSession, MCPError
        from mcp.types import CONNECTION_CLOSED

        fault = "was closed while it started"
        try:
            async with streams(self._last_lines) as (reads, writes), ClientSession(reads, writes) as session:
                async with asyncio.timeout(self._start_seconds):
                    await session.initialize()
                    self.tools = await _tools_of(session)
                self.ready.set_result(session)
                await self._over.wait()
        except Exception as error:  # the boundary: it travels to those who wait for `ready`
            first = _first(error)
            if isinstance(first, TimeoutError):
                fault = f"has not said within start_seconds = {self._start_seconds:g} which tools it has"
            elif isinstance(first, MCPError) and first.code == CONNECTION_CLOSED:
                fault = "ended before it said which tools it has"
            else:
                fault = f"cannot be reached: {described(first)}"
        finally:
            self._over.set()
            if not self.ready.done():
                self.ready.set_exception(ServerDownError(f"{self._who} {fault}{self.last_words()}"))
                self.ready.exception()  # it may be that nobody waits any more


_Streams = Callable[[deque[str]], AbstractAsyncContextManager[Sequence[Any]]]


async def _tools_of(session: ClientSession) -> list[ServedTool]:
    from mcp.types import PaginatedRequestParams

    found: list[ServedTool] = []
    cursor = None
    while True:
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
        found += [ServedTool(tool.name, tool.description or "", tool.input_schema) for tool in page.tools]
        cursor = page.next_cursor
        if not cursor:
            return found


def _text_of(result: CallToolResult) -> str:
    """Returns what the policy reads: texts, and of what is no text what it is."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(map(_text_of_block, result.content))


def _text_of_block(block: ContentBlock) -> str:
    if block.type == "text":
        return block.text
    if block.type == "resource_link":
        return f"[link to {block.uri}: {block.name}]"
    if block.type == "resource":
        text: str | None = getattr(block.resource, "text", None)  # else it is binary
        about = f"{block.resource.mime_type or 'data'} from {block.resource.uri}"
        return text if text is not None else f"[{about}, which cannot be shown]"
    if block.type == "image":  # shown before the text, where the model reads images
        return f"[image, {block.mime_type}]"
    return f"[{block.type}, {block.mime_type}, which cannot be shown]"


def _first(error: BaseException) -> BaseException:
    """Returns what was raised first inside groups of tasks."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _log_lines(descriptor: int, where: str, last_lines: deque[str]) -> None:
    with os.fdopen(descriptor, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            last_lines.append(line.rstrip())
            _log.info("%s: %s", where, line.rstrip())


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Returns the loop of all connections. Its thread lives as long as the process, as a guard's must."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rondo-mcp", daemon=True).start()
    return loop


def _on_loop(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, _loop()).result()


# ---- options


def _executable(command: str, where: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"{where}: command: {command!r} is no command line: {error}") from error
    path = shutil.which(words[0]) if words else None
    if path is None:
        raise ConfigError(
            f"{where}: command: there is no program {''.join(words[:1])!r} that could be run; install it, or "
            "write its path"
        )
    return [os.path.abspath(path), *words[1:]]


def _chosen_environment(env: Sequence[str], where: str) -> dict[str, str]:
    for name in env:
        if name not in os.environ:
            raise ConfigError(f"{where}: env: there is no variable {name!r} in the environment; set it")
        if name in NEVER_HANDED_OVER:
            raise ConfigError(f"{where}: env: {name} opens what is yours elsewhere, and is never handed over")
    return {name: os.environ[name] for name in env}
