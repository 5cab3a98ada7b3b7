"""Tools and agents as users write them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rondo.agents.policy import Policy
from rondo.agents.tools import Toolbox
from rondo.core.errors import ToolError
from rondo.core.types import ToolResult

CLOSED: list[int] = []


def weather(city: str, unit: Literal["C", "F"] = "C", *, stations: str = "all") -> str:
    """Says how the weather is.

    It may be wrong.

    city: its name in English.
    unit (str): of the temperature.
    """
    if city == "Atlantis":
        raise ToolError("no such city")
    return f"{city}: 20 {unit} ({stations})"


async def slow_sum(numbers: list[int], seconds: float = 0.0) -> dict[str, int]:
    """Adds numbers."""
    await asyncio.sleep(seconds)
    return {"sum": sum(numbers)}


class Counter:
    """Counts up, in each episode from its start."""

    def __init__(self, *, start: int = 0) -> None:
        self.value = start

    def __call__(self, by: int = 1) -> int:
        self.value += by
        return self.value

    def close(self) -> None:
        CLOSED.append(self.value)


def breaks(what: str) -> Any:
    """Fails, in a way of your choice."""
    match what:
        case "raises":
            raise LookupError("the database is gone")
        case "exits":
            raise SystemExit(0)
        case "hangs":
            threading.Event().wait(3600)
        case "bytes":
            return b"x"
        case "much":
            return "red " * 2_500_000
    return None


class Keeps:
    """Finds one passage more in each call, and keeps what it says in one place."""

    def __init__(self) -> None:
        self.data: dict[str, list[str]] = {"ids": []}

    def __call__(self) -> ToolResult:
        self.data["ids"].append(str(len(self.data["ids"])))
        return ToolResult("found", self.data)


async def rewrites(policy: Policy, tools: Toolbox) -> str:
    """Searches twice, and writes into what was found."""
    await policy.complete([1, 2, 3], max_tokens=2)
    await tools.call("Keeps", {})
    await tools.call("Keeps", {})
    tools.results[0].data["ids"].append("7")
    return "written"


def no_type(city) -> str:  # type: ignore[no-untyped-def]
    """Lacks one."""
    return str(city)


def no_docstring(city: str) -> str:
    return city


def any_number(*cities: str) -> str:
    """Takes several."""
    return " ".join(cities)


def no_json(city: threading.Event) -> str:
    """Of a type that JSON does not have."""
    return str(city)


async def planner(
    messages: Sequence[Mapping[str, Any]], policy: Policy, tools: Toolbox, *, asks: int = 1
) -> str:
    """An agent that uses a tool by itself, and asks twice in a context of its own."""
    counted = await tools.call("Counter", {"by": 2})
    first = await policy.chat([*messages, {"role": "user", "content": counted}], max_tokens=3)
    more = await policy.choices([{"role": "user", "content": first.text}], asks, max_tokens=2)
    last = await policy.complete([1, 2, 3], max_tokens=2)
    return " ".join([counted, *(answer.text for answer in more), last.text])


async def swallows(messages: Sequence[Mapping[str, Any]], policy: Policy, tools: Toolbox) -> str:
    """Goes on where a tool is down."""
    try:
        await tools.call("breaks", {"what": "raises"})
    except Exception:
        time.sleep(0)
    return (await policy.chat(messages, max_tokens=3)).text


def not_async(policy: Policy) -> None:
    """Cannot await."""
