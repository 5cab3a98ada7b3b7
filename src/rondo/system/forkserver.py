"""A process that has imported what takes long, and forks others that begin with it.

    host: ForkServer ── request, descriptors ─▶ main: fork ─▶ guard ─▶ fork ─▶ `python -m COMMAND`

The server itself is started as a program, by a process in whatever state (threads, CUDA), and stays of one
thread, so that its forks are clean. What it forks ends with it, and it ends with the host. Users that ask for
the same share one; within `kept`, one that nobody uses waits for the next that asks: imports take seconds.
"""

from __future__ import annotations

import gc
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rondo.system import guard

END_SECONDS = 10.0
MOST_KEPT = 2  # servers that nobody uses: each holds some 200 MB
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
        # The folder may be among the places where its forks look for modules.
        self._beginning = (tuple(preload), dict(environment), os.getcwd())
        self.users = 0
        """How many have it from `fork_server`."""
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair()
        self._connection = ours
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rondo.system.forkserver", str(theirs.fileno()), *preload],
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
            self.close()
            raise OSError("the fork server has ended; what it printed says why")
        return int(*_NUMBER.unpack(answer))

    def give_back(self) -> None:
        """Notes that what was forked for one user has ended. A server without users ends, unless it is
        `kept`.
        """
        with _sharing:
            self.users -= 1
            _servers.remove(self)
            _servers.append(self)  # behind those that have waited longer
            ended = _without_users(MOST_KEPT if _keepers else 0)
        for server in ended:
            server.close()

    def has_ended(self) -> bool:
        """Says whether it cannot fork any more."""
        return self._process.poll() is not None

    def begins_with(self, preload: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Says whether this server was started with these arguments, so that no new one is needed."""
        return self._beginning == (tuple(preload), dict(environment), os.getcwd())

    def close(self) -> None:
        """Ends the server, and what it forked with it."""
        self._connection.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # it is stopped, or still imports
            self._process.kill()
            self._process.wait()


_sharing = threading.Lock()
_servers: list[ForkServer] = []  # that `fork_server` has lent, and those that are kept
_keepers = 0


def fork_server(preload: Sequence[str], environment: Mapping[str, str]) -> ForkServer:
    """Returns a server, which the caller gives back: one that began with the same arguments, or a new one.
    Arguments: see ForkServer.
    """
    with _sharing:
        for server in _servers:
            if server.begins_with(preload, environment) and not server.has_ended():
                break
        else:
            server = ForkServer(preload, environment)
            _servers.append(server)
        server.users += 1
    return server


def _without_users(most: int) -> list[ForkServer]:
    """Removes and returns the servers without users, except the `most` that were given back last."""
    idle = [server for server in _servers if server.users == 0]
    out = [server for server in idle if server.has_ended() or server in idle[: len(idle) - most]]
    for server in out:
        _servers.remove(server)
    return out


@contextmanager
def kept() -> Iterator[None]:
    """Keeps servers without users until it ends, for code that starts processes again and again, such as a
    run that loses some.
    """
    global _keepers
    with _sharing:
        _keepers += 1
    try:
        yield
    finally:
        with _sharing:
            _keepers -= 1
            ended = [] if _keepers else _without_users(0)
        for server in ended:
            server.close()


def are_kept() -> bool:
    """Says whether servers are kept now."""
    return _keepers > 0


def main(descriptor: int, preload: Sequence[str]) -> None:
    """Serves requests until the host's end of the socket closes."""
    before = dict(os.environ)
    gc.disable()  # imports make a million objects and no garbage
    for module in preload:
        importlib.import_module(module)
    gc.freeze()  # collections in the forks leave alone what they share
    gc.enable()
    assert threading.active_count() == 1, f"threads after importing {preload}: {threading.enumerate()}"
    # What the modules set as they were imported, which a process that had imported them itself would have.
    made = {name: value for name, value in os.environ.items() if before.get(name) != value}
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
            environment = {**request.environment, **made}
            _become_guard(server, replace(request, environment=environment), channel, errors, status)
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
    os._exit(0)  # the host waits: to take down what was imported takes a third of a second
