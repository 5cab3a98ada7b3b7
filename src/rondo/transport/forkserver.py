"""A process that has imported what takes long, and forks others that begin with it.

    host: ForkServer ── request, descriptors ─▶ main: fork ─▶ guard ─▶ fork ─▶ `python -m COMMAND`

The server itself is started as a program, by a process in whatever state (threads, CUDA), and stays of one
thread, so that its forks are clean. What it forks ends with it, and it ends with the host.
"""

from __future__ import annotations

import importlib
import os
import pickle
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rondo.transport import guard

END_SECONDS = 10.0
_NUMBER = struct.Struct("<Q")


@dataclass(frozen=True)
class _Request:
    """One process to fork; its socket, standard error and status pipe come beside."""

    command: tuple[str, ...]
    folder: str
    directory: str
    environment: dict[str, str]


class ForkServer:
    """preload: modules that every fork begins with. environment: of the server; libraries read some of it
    once (OMP_NUM_THREADS), so it should be that of the processes to come.
    """

    def __init__(self, preload: Sequence[str], environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair()
        self._connection = ours
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rondo.transport.forkserver", str(theirs.fileno()), *preload],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=dict(environment),
                start_new_session=True,  # Ctrl-C is for the host
            )

    def fork(
        self,
        command: Sequence[str],
        folder: str,
        environment: Mapping[str, str],
        descriptors: tuple[int, int, int],
    ) -> int:
        """Starts `python -m COMMAND` under a guard, and returns the guard's process id.

        descriptors: the command's socket (its number there is put behind COMMAND), its standard error, and
        where the guard writes the exit status. Raises OSError when the server is gone.
        """
        request = _Request(tuple(command), folder, os.getcwd(), dict(environment))
        data = pickle.dumps(request)
        with self._lock:
            try:
                socket.send_fds(self._connection, [_NUMBER.pack(len(data))], descriptors)
                self._connection.sendall(data)
                answer = self._connection.recv(_NUMBER.size, socket.MSG_WAITALL)
            except OSError:
                answer = b""
        if len(answer) < _NUMBER.size:
            raise OSError("the fork server has ended; what it printed says why")
        return int(*_NUMBER.unpack(answer))

    def close(self) -> None:
        """Ends the server, and what it forked with it."""
        self._connection.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # it is stopped, or still imports
            self._process.kill()
            self._process.wait()


def main(descriptor: int, preload: Sequence[str]) -> None:
    """Serves requests until the host's end of the socket closes."""
    for module in preload:
        importlib.import_module(module)
    assert threading.active_count() == 1, f"threads after importing {preload}: {threading.enumerate()}"
    # The kernel collects the guards; their status comes by pipe.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    while True:
        size, descriptors, _, _ = socket.recv_fds(connection, _NUMBER.size, 3)
        if len(size) < _NUMBER.size:
            return
        request = pickle.loads(connection.recv(int(*_NUMBER.unpack(size)), socket.MSG_WAITALL))
        channel, errors, status = descriptors
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            connection.close()
            _become_guard(server, request, channel, errors, status)
        for each in (channel, errors, status):
            os.close(each)
        connection.sendall(_NUMBER.pack(pid))


def _become_guard(server: int, request: _Request, channel: int, errors: int, status: int) -> None:
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(errors, 2)
        os.close(errors)
        code = guard.main(server, channel, request.folder, lambda: _become_command(request, channel, status))
        os.write(status, str(code).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _become_command(request: _Request, channel: int, status: int) -> None:
    code = 1
    try:
        os.close(status)
        os.environ.clear()
        os.environ.update(request.environment)
        os.chdir(request.directory)
        module, *arguments = request.command
        sys.argv = [module, *arguments, str(channel)]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
