"""Ends what Ray has started for a process, once that process is gone: python ray_leftovers.py PID

Ray's own processes notice late, or never, that the one for which they were started was killed: its agents
outlive their raylet, a worker that is just starting waits for one. While PID lives, this process remembers
what Ray has started for it. When PID is gone without a word on standard input, it ends all that is left, and
says so: that may be the only word, as Ray ends the process of a node that it declares dead. It runs as a
file, without rondo.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

EARLY_SECONDS, INTERVAL, LATER_INTERVAL = 60.0, 0.5, 5.0  # most of Ray's processes are started at its start
END_SECONDS = 10.0  # a process in an uninterruptible sleep does not end by SIGKILL
_DONE = b"done\n"

# A process by its id, and when the kernel started it: ids are used again.
Known = dict[int, str]


class Watcher:
    """The process that waits for the end of this one."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
        # A session of its own: a signal to this process's group is none to it.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def end(self) -> None:
        """Says that Ray was stopped as it should be."""
        self._process.communicate(_DONE)


def main(parent: int) -> None:
    """Waits for the end of `parent`."""
    started = time.monotonic()
    known: Known = {}
    while os.getppid() == parent:
        early = time.monotonic() - started < EARLY_SECONDS
        if select.select([0], [], [], INTERVAL if early else LATER_INTERVAL)[0]:
            if os.read(0, len(_DONE)):
                return
            break
        known |= of_ray(parent, known)
    ended = _end(parent, known)
    if ended:
        sys.stderr.write(
            f"rondo: the controller (process {parent}) ended without a word: it was killed, or Ray ended it "
            f"after its node was declared dead (see /tmp/ray/session_*_{parent}/logs). {ended} processes of "
            "Ray were left and have been ended; the same command goes on from the newest checkpoint\n"
        )


def of_ray(parent: int, known: Known) -> Known:
    """Returns the processes of the Ray session that `parent` began: those whose command names it, those that
    are `known` and live, and all below them.
    """
    session = re.compile(rf"/session_[-_0-9]+_{parent}(/|\0|$)".encode())
    parents, starts = _processes()
    found = {pid for pid, start in starts.items() if known.get(pid) == start or _names(pid, session)}
    while below := {pid for pid, above in parents.items() if above in found} - found:
        found |= below
    return {pid: starts[pid] for pid in found}


def _processes() -> tuple[dict[int, int], dict[int, str]]:
    """Returns, by process that has not ended, its parent and the time of its start."""
    parents, starts = {}, {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{name}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # it has ended since
            continue
        fields = stat.rpartition(")")[2].split()
        if fields[0] != "Z":
            parents[int(name)], starts[int(name)] = int(fields[1]), fields[19]
    return parents, starts


def _names(pid: int, session: re.Pattern[bytes]) -> bool:
    try:
        return session.search(Path(f"/proc/{pid}/cmdline").read_bytes()) is not None
    except OSError:
        return False


def _end(parent: int, known: Known) -> int:
    """Kills what is left, and what that starts meanwhile. Returns how many there were."""
    ended: Known = {}
    deadline = time.monotonic() + END_SECONDS
    while (left := of_ray(parent, known | ended)) and time.monotonic() < deadline:
        ended |= left
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)
    return len(ended)


if __name__ == "__main__":
    main(int(sys.argv[1]))
