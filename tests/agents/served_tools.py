"""An MCP server, for tests: python served_tools.py [how it behaves]."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import PIL.Image
from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import EmbeddedResource, TextResourceContents

server = MCPServer("served", log_level="CRITICAL")
CAME: list[int] = []


@server.tool()
def add(a: int, b: int = 1) -> str:
    """Adds two numbers."""
    return str(a + b)


@server.tool()
def fail(why: str) -> str:
    """Cannot."""
    raise ToolError(f"no: {why}")


@server.tool()
async def meet(others: int) -> str:
    """Waits until as many others have come."""
    CAME.append(0)
    while len(CAME) <= others:
        await asyncio.sleep(0.01)
    return f"{others} others"


@server.tool()
def shout() -> str:
    """Prints where the answers go."""
    print("this is no answer", flush=True)
    return "sorry"


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
async def die_once(file: str) -> str:
    """Ends the server, the first time."""
    if not Path(file).exists():
        Path(file).touch()
        os._exit(3)
    return "lived"


@server.tool()
async def die_when(came: int, file: str) -> str:
    """Ends the server: the first time when so many calls have come, then at once."""
    CAME.append(0)
    while len(CAME) < came and not Path(file).exists():
        await asyncio.sleep(0.01)
    Path(file).touch()
    os._exit(3)


@server.tool(structured_output=False)
def much() -> str:
    """Says 10 MB."""
    return "red " * 2_500_000


@server.tool(structured_output=False)
def see(name: str) -> list[object]:
    """Says what it has, in several ways."""
    resource = TextResourceContents(uri="mem://a", text=os.environ.get(name, "unset"))
    return ["first", Image(data=b"1234", format="png"), EmbeddedResource(resource=resource)]


@server.tool(structured_output=False)
def paint(colour: str) -> list[object]:
    """Paints a square."""
    file = io.BytesIO()
    PIL.Image.new("RGB", (32, 32), colour).save(file, "PNG")
    return ["a square", Image(data=file.getvalue(), format="png")]


if __name__ == "__main__":
    print("served_tools is here", file=sys.stderr, flush=True)
    how = sys.argv[1] if len(sys.argv) > 1 else ""
    if how in ("counted", "once"):
        with Path(os.environ["STARTS"]).open("a+") as starts:
            starts.write("+")
            starts.seek(0)
            if how == "once" and starts.read() != "+":
                sys.exit("somebody has it open")
    if how == "dies":
        sys.exit("the database is gone")
    if how == "mute":
        signal.pause()
    if how == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "3600"], stdin=subprocess.DEVNULL)
        with Path(os.environ["ALIVE"]).open("a") as file:
            file.write(f"{os.getpid()}\n{child.pid}\n")
    if how == "http":
        server.run("streamable-http", port=int(sys.argv[2]))
    else:
        server.run()
    if how == "stubborn":
        time.sleep(3600)
