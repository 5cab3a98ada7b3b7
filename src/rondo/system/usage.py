"""CPU time and memory of this process, of those below it and of the machine, as the kernel counts them; and
its garbage collector while modules are imported.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_TASKS = Path("/proc/self/task")
_PR_SET_NAME = 15  # of Linux's prctl(2): the name of the calling thread, at most 15 bytes


@dataclass(frozen=True)
class Usage:
    """What a process has used so far.

    With children, the peak is the sum of every process's own peak, so shared pages count several times. A
    child that ends while the others are read may be missing from the CPU time until the next reading.
    """

    cpu_seconds: float
    """User and system, of all threads."""
    peak_memory_bytes: int
    """Largest resident size so far."""


class CpuSeconds(NamedTuple):
    """What a process and those below it have used so far."""

    all: float
    """User and system, of all threads, of processes that have ended, too."""
    checks: float
    """Of that, what went into checks (`counted_checks`), in this process alone."""


_checks = [0.0]
_lock = threading.Lock()


@contextmanager
def counted_checks() -> Iterator[None]:
    """Counts the CPU time that this thread spends inside to look at what a run does. Not around `await`, nor
    inside itself.
    """
    started = time.thread_time()
    try:
        yield
    finally:
        with _lock:
            _checks[0] += time.thread_time() - started


def checks_cpu_seconds() -> float:
    """Returns what was counted so far in this process."""
    return _checks[0]


class TeamClock:
    """CPU seconds of the thread that makes it and of all threads that it starts from then on, also inside of
    libraries (OpenMP's), and that those start in turn.

    Linux lets a thread inherit its name, so the thread gets one of its own. Elsewhere it counts alone.
    """

    def __init__(self) -> None:
        thread = threading.get_native_id()
        self._name = f"team-{thread}"
        self._own: dict[str, bool] = {}
        """Of each thread of the process that was looked at: whether it is of the team."""
        self._seconds: dict[str, float] = {}
        """Of each thread of the team: its clock, the last one that was read for those that have ended."""
        if _TASKS.is_dir():
            ctypes.CDLL(None).prctl(_PR_SET_NAME, self._name.encode(), 0, 0, 0)

    def seconds(self) -> float:
        """Returns what the team has used so far. To be called in the thread that made the clock."""
        if not _TASKS.is_dir():
            return time.thread_time()
        for thread in os.listdir(_TASKS):
            try:
                if thread not in self._own:
                    name = (_TASKS / thread / "comm").read_text().strip()
                    self._own[thread] = name == self._name
                if self._own[thread]:
                    # The clock of a thread by its number, as clock_getcpuclockid(3) makes it of a process.
                    self._seconds[thread] = time.clock_gettime((~int(thread) << 3) | 6)
            except OSError:  # it has just ended
                continue
        return sum(self._seconds.values())


def process_usage(children: bool = False) -> Usage:
    """Returns what this process has used; with `children` also what its descendants have."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    peak = own.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    usage = Usage(own.ru_utime + own.ru_stime, peak)
    if not children:
        return usage
    below = [_peak_memory_bytes(pid) for pid in _descendants()]
    return Usage(usage.cpu_seconds + children_cpu_seconds(), usage.peak_memory_bytes + sum(below))


def memory_bytes() -> tuple[int, int]:
    """Returns the machine's memory, all and available, in bytes, within the container's limit; zeros where
    the kernel does not say.
    """
    values = _meminfo()
    if not values:
        return 0, 0
    total, available = values["MemTotal"], values["MemAvailable"]
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and limit.read_text().strip().isdigit():
        total = min(total, int(limit.read_text()))
    return total, min(total, available)


def reachable_bytes() -> int:
    """Returns the most memory that this process can come to have: what is available, free swap, and what it
    has already, of which it may use all again. 0 where the kernel does not say.
    """
    available = memory_bytes()[1]
    if not available:
        return 0
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return available + _meminfo().get("SwapFree", 0) + resident


def children_cpu_seconds() -> float:
    """Returns the CPU time of everything that this process has started and that was started by it in turn:
    live (from /proc) and ended (as the kernel adds them).
    """
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = ended.ru_utime + ended.ru_stime
    if sys.platform == "darwin":  # which has neither waitid nor /proc
        return seconds
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # none is left: no need to look at every process of the machine
        return seconds
    # utime, stime and those of ended children
    live = sum(int(ticks) for fields in _descendants().values() for ticks in fields[11:15])
    return seconds + live / _TICKS


def state_of(process: str) -> tuple[str, float]:
    """Returns what the kernel says of a process or thread, by its path below /proc: a letter (R runs, S
    sleeps, D waits for a disk, T is stopped), and its CPU seconds. Empty and 0 where there is none.
    """
    fields = _stat(process)
    return (fields[0], (int(fields[11]) + int(fields[12])) / _TICKS) if fields else ("", 0.0)


def _meminfo() -> dict[str, int]:
    """Returns the bytes of /proc/meminfo by name; nothing where there is no such file."""
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    parts = (line.partition(":") for line in lines if line.endswith("kB"))
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in parts}


def _stat(process: str) -> list[str]:
    """Returns the fields of /proc/<process>/stat from the state on (the name before may hold spaces); nothing
    where there is no such process.
    """
    try:
        with open(f"/proc/{process}/stat", "rb") as file:  # half the time of Path's: often, of every process
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return text.rpartition(") ")[2].split()


def _descendants() -> dict[int, list[str]]:
    """Returns the fields of `_stat` by pid."""
    folder = Path("/proc")
    if not folder.is_dir():
        return {}
    names = filter(str.isdigit, os.listdir(folder))
    found = {int(name): fields for name in names if (fields := _stat(name))}  # else it has just ended
    below: dict[int, list[str]] = {}
    frontier = {os.getpid()}
    while frontier:
        frontier = {pid for pid, fields in found.items() if int(fields[1]) in frontier}
        below |= {pid: found[pid] for pid in sorted(frontier)}
    return below


def _peak_memory_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


# What the C library keeps of the memory that this process frees. With another one than glibc nothing happens
# here: no result depends on it, only how much there is for others.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h


def give_back_free_memory() -> None:
    """Gives back what is free now."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def give_back_large_blocks() -> None:
    """From now on, blocks of 4 MiB and more go back as soon as they are freed.

    glibc keeps those of up to 32 MiB in its heap. There the activations and gradients of a model of 0.5B lie
    beside each other, and what is free between them fits nothing that comes: torch asks for blocks that begin
    at multiples of 64 bytes, for which glibc 2.36 looks for some 100 bytes more than it then takes, so that
    what one block left is too small for the next of its size. The price are the zeros that the kernel writes
    into each new block.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # mallopt alone may be another library's, with other numbers
        library.mallopt(_MMAP_THRESHOLD, 4 << 20)
        # At the end of the heap as much stays as glibc itself leaves there, once large blocks were freed.
        library.mallopt(_TRIM_THRESHOLD, 64 << 20)


@contextmanager
def nothing_collected(*, for_good: bool = False) -> Iterator[None]:
    """Turns garbage collection off while modules are imported: they make a million objects and no garbage,
    and looking for it took a quarter of the time. for_good: later collections leave out what is there at the
    end, which only a process of our own may decide.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if for_good:
            gc.freeze()
        if was_on:
            gc.enable()
