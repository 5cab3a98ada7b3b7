"""How many programs a second: a fresh sandbox for each, forked in a warm one, cells of a session.

python benchmarks/sandbox.py [BACKEND]
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from collections.abc import Awaitable, Callable

from rondo_sandbox import Sandbox, open_sandbox


def processor() -> float:
    """Returns the processor seconds of this process and of its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


async def timed(name: str, count: int, work: Callable[[], Awaitable[None]]) -> None:
    """Prints the rate of `work`, which runs `count` programs."""
    began, used = time.monotonic(), processor()
    await work()
    seconds, used = time.monotonic() - began, processor() - used
    print(f"{name:28} {count / seconds:7.0f}/s  {1000 * used / count:6.2f} ms of processor each")


async def measure(sandbox: Sandbox, trajectories: int) -> None:
    """Measures each way to run programs, that many side by side."""

    async def fresh() -> None:
        await asyncio.gather(*(sandbox.run("print(int(input()) + 1)", stdin="1") for _ in range(200)))

    async def forked() -> None:
        async with sandbox.warm() as warm:
            for number in range(1000):
                await warm.run("print(int(input()) + 1)", stdin=str(number))

    async def cells() -> None:
        async with sandbox.session() as session:
            for number in range(5000):
                await session.run(f"x = {number}\nx + 1")

    async def together(work: Callable[[], Awaitable[None]]) -> None:
        await asyncio.gather(*(work() for _ in range(trajectories)))

    print(sandbox.backend.description)
    await timed("fresh sandboxes", 200, fresh)
    await timed("forked, one trajectory", 1000, forked)
    await timed(f"forked, {trajectories} trajectories", 1000 * trajectories, lambda: together(forked))
    await timed("cells, one session", 5000, cells)


async def main() -> None:
    """Measures the back end that was named, or the strongest."""
    async with await open_sandbox(*sys.argv[1:]) as sandbox:
        await measure(sandbox, os.cpu_count() or 1)


if __name__ == "__main__":
    asyncio.run(main())
