"""Other processes and threads: those of engines, and waiting for what one does: long, because machines
differ, and named when in vain.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import psutil

T = TypeVar("T")


@contextlib.contextmanager
def served_by(*command: str, **variables: str) -> Iterator[str]:
    """The URL that `rondo COMMAND…` prints first; Ctrl-C ends it, as it says."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rondo.cli.main", *command, "--port", "0"],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip().removeprefix("url=")
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        process.stdout.close()


def wait_for(what: str, get: Callable[[], T], seconds: float = 240.0) -> T:
    """The first result of `get` that is true. AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not (got := get()):
        assert time.monotonic() < end, f"{what}: not after {seconds:.0f} s"
        time.sleep(0.01)
    return got


def is_gone(pid: int) -> bool:
    """Dead, or a zombie that its parent has not collected yet."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return ") Z " in file.read()
    except (FileNotFoundError, ProcessLookupError):
        return True


def is_program(process: psutil.Process, module: str) -> bool:
    """Whether it is `python [-P] -m MODULE`, or an actor whose class is there, executed or forked: then its
    command is the fork server's, as is its guard's, whose parent that is. One that has just died is none.
    """
    try:
        command = process.cmdline()
        above = [one.cmdline() for one in process.parents()[:2]]
    except psutil.NoSuchProcess:
        return False
    executed = [word for word in command[1:5] if word not in ("-P", "-m", "rondo.system.actor_program")][:1]
    is_forked = module in command and above == [command, command]
    return [word.partition(":")[0] for word in executed] == [module] or is_forked


def is_fork_server(process: psutil.Process) -> bool:
    """Whether it forks programs (rondo.system.forkserver, tests/begun.py). Not what it has forked."""
    if is_program(process, "tests.begun"):
        return True
    try:
        return (
            is_program(process, "rondo.system.forkserver") and process.cmdline() != process.parent().cmdline()
        )
    except (psutil.NoSuchProcess, AttributeError):  # it has just died, or its parent has
        return False


def engine_processes(pid: int | None = None, but: Iterable[int] = ()) -> list[psutil.Process]:
    """Of the engines that this process (or `pid`) serves; none that has just died, and is not collected.
    but: process ids of those that an earlier test has left to the next.
    """
    children = psutil.Process(pid).children(recursive=True)
    return [one for one in children if one.pid not in but and is_program(one, "rondo.rollout.server.child")]


def wait_until_gone(pids: Iterable[int]) -> None:
    """Until none of these processes of this machine is left."""
    pids = list(pids)
    wait_for(f"the end of processes {pids}", lambda: all(map(is_gone, pids)))
