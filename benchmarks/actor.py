"""What a call of a process of ours costs: round trip and processor time, against the bytes that go.

    python benchmarks/actor.py [--calls 2000]

An actor in a process of its own (system/actor.py) returns what it gets. InTurn: plain methods in its main
thread; OnLoop: coroutines. alone: one call after the other, the median of the round trips; together: all at
once, for each. by pickle: a numpy array travels in the frame, there and back; shared: it lies in anonymous
memory, written for the call and mapped there. processor: of both processes, for a call (alone and together).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from rondo.system.actor import Actor, ActorHandle, spawn
from rondo.system.frames import SharedObject
from rondo.system.process import import_path


class InTurn(Actor):
    """Plain methods."""

    def echo(self, value: Any) -> Any:
        """Returns what it gets."""
        return value

    def total(self, value: SharedObject) -> int:
        """Returns the sum of an array in shared memory."""
        return int(value.load().sum())

    def seconds(self) -> float:
        """Returns the processor time that its process has used."""
        return time.process_time()


class OnLoop(Actor):
    """The same as coroutines."""

    async def echo(self, value: Any) -> Any:
        """Returns what it gets."""
        return value

    async def total(self, value: SharedObject) -> int:
        """Returns the sum of an array in shared memory."""
        return int(value.load().sum())

    async def seconds(self) -> float:
        """Returns the processor time that its process has used."""
        return time.process_time()


def alone(call: Callable[[], Future[Any]], calls: int) -> float:
    """Returns the median of round trips, in seconds."""
    took = []
    for _ in range(calls):
        start = time.perf_counter()
        call().result()
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def together(call: Callable[[], Future[Any]], calls: int) -> float:
    """Returns the seconds for each of calls that are all under way."""
    start = time.perf_counter()
    for answer in [call() for _ in range(calls)]:
        answer.result()
    return (time.perf_counter() - start) / calls


def measured(handle: ActorHandle, array: np.ndarray, shared: bool, calls: int) -> tuple[float, float, float]:
    """Returns alone, together and processor, in seconds."""

    def call() -> Future[Any]:
        # Shared: written for this call; the process adds it up, as it would read it.
        return handle.call("total", SharedObject.of(array)) if shared else handle.call("echo", array)

    def used() -> float:
        return time.process_time() + float(handle.call("seconds").result())

    alone(call, calls // 10 + 1)
    before = used()
    return alone(call, calls), together(call, calls), (used() - before) / (2 * calls)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    most = parser.parse_args().calls
    environment = {**os.environ, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"}
    print("actor     what                      alone     together    processor")
    for actor in (InTurn, OnLoop):
        handle = spawn(actor, "the benchmark's process", environment)
        try:
            handle.begin().result(60)
            for name, size in (("nothing", 0), ("1 KiB", 1 << 10), ("1 MiB", 1 << 20), ("16 MiB", 1 << 24)):
                for shared in (False, True) if size >= 1 << 20 else (False,):
                    calls = max(10, most if size < 1 << 20 else (most << 16) // size)
                    figures = measured(handle, np.zeros(size, np.uint8), shared, calls)
                    what = f"{name}, {'shared' if shared else 'by pickle'}"
                    print(f"{actor.__name__:9} {what:19}", *(f"{1e6 * each:8.0f} µs" for each in figures))
        finally:
            handle.close()


if __name__ == "__main__":
    import actor  # the processes find the classes in a module that they can import

    actor.main()
