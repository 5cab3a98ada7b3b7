"""CPU time and memory of this process and of those below it, as the kernel counts them."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """cpu_seconds: user + system of all threads. peak_memory_bytes: largest resident size so far.

    With children, the peak is the sum of every process's own peak: pages that processes share count several
    times; and a child that ends while the others are read may be in no sum of CPU time until the next one.
    """

    cpu_seconds: float
    peak_memory_bytes: int


def process_usage(children: bool = False) -> Usage:
    """Of this process, and with `children` also of its descendants."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    peak = own.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    usage = Usage(own.ru_utime + own.ru_stime, peak)
    if not children:
        return usage
    below = [_peak_memory_bytes(pid) for pid in _descendants(os.getpid())]
    return Usage(usage.cpu_seconds + children_cpu_seconds(), usage.peak_memory_bytes + sum(below))


def children_cpu_seconds() -> float:
    """Of everything that this process has started and that was started by it in turn: live (from /proc) and
    ended (as the kernel adds them).
    """
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime + sum(map(_cpu_seconds, _descendants(os.getpid())))


def _descendants(root: int) -> list[int]:
    parents: dict[int, int] = {}
    folder = Path("/proc")
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.name.isdigit() and (fields := _stat_fields(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
    found, frontier = [], {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        found += sorted(frontier)
    return found


def _stat_fields(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on (the name before may hold spaces); empty when the
    process is gone."""
    try:
        return (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(") ")[2]
            .split()
        )
    except OSError:
        return []


def _cpu_seconds(pid: int) -> float:
    """utime, stime and those of ended children; 0 when the process is gone."""
    return sum(int(ticks) for ticks in _stat_fields(pid)[11:15]) / _TICKS


def _peak_memory_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)
