"""The process between a host and the command it starts: python guard.py HOST_PID DESCRIPTOR FOLDER COMMAND…

It starts COMMAND with the socket DESCRIPTOR and waits. When the command ends, or the host is gone, or
somebody sends SIGTERM, it ends the command and whatever that has started (engines have worker processes),
removes FOLDER, which is the command's (empty: it has none), and ends with the command's status. Nothing here
can hang: one thread, no lock, no import but the standard library's. It runs as a file, without rondo, or in a
fork (forkserver.py).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Callable

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_WAKE = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def children_of(parent: int) -> list[int]:
    """Returns the process ids of `parent`'s children, zombies included, from /proc."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:  # it has ended since
            continue
        if int(fields[1]) == parent:
            found.append(int(name))
    return found


def _end_all() -> None:
    """Kills every child until none is left; grandchildren become children of this process, which is their
    subreaper.
    """
    while children := children_of(os.getpid()):
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)


def main(parent: int, descriptor: int, folder: str, start: Callable[[], None]) -> int:
    """Returns the exit status of the command; 128 + signal where a signal ended it.

    parent: the process that started this one; its end is the command's end. start: becomes the command, in a
    process of its own, and does not return.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAKE)
    _prctl(_SET_PDEATHSIG, signal.SIGTERM)  # of the parent's thread that started this process
    _prctl(_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        shutil.rmtree(folder, ignore_errors=True)
        return 0  # the parent was gone before we could ask for its signal
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAKE)
        _prctl(_SET_PDEATHSIG, signal.SIGKILL)
        start()
    os.close(descriptor)
    status: int | None = None
    while status is None and signal.sigwait(_WAKE) == signal.SIGCHLD:
        while True:  # one SIGCHLD may stand for several
            try:
                pid, ended = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == child:
                status = ended
            if pid == 0:
                break
    _end_all()
    shutil.rmtree(folder, ignore_errors=True)
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    command = sys.argv[4:]
    code = main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], lambda: os.execv(command[0], command))
    os._exit(code)
