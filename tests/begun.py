"""Programs that tests start, begun: forked from a process that has imported torch, transformers and rondo.

    from tests import begun

    done = begun.run(["-m", "rondo", "train", "tiny.yaml"], capture_output=True, text=True)
    process = begun.Program(["script.py"], cwd=folder, env=environment)   # a subprocess.Popen

    test: Program ── request, descriptors ─▶ server: fork ─▶ waits, says how it ended: fork ─▶ `python …`

A start of rondo's imports for three seconds of a processor; here they were imported once. All else is as with
`subprocess`: a process of its own with its environment, folder, arguments and standard streams, which runs to
the end of an interpreter. What the imports themselves do, or what of the environment they read, is for a test
that starts `sys.executable`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
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
import types
from collections.abc import Sequence
from typing import Any, NoReturn

PRELOAD = [
    "transformers.models.qwen3.modeling_qwen3",
    "rondo.api",
    "rondo.trainers.commands.evaluate",
    "rondo.trainers.commands.serve",
    "rondo.trainers.commands.supervised",
    "rondo.trainers.commands.train",
]
_NUMBER = struct.Struct("<q")


class Program(subprocess.Popen[Any]):
    """`python ARGUMENTS…`: a file, `-m MODULE` or `-c CODE`, and what comes behind it. options: Popen's."""

    def __init__(self, arguments: Sequence[str], **options: Any) -> None:
        self._status: socket.socket | None = None
        super().__init__(list(arguments), **options)

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        """Begins it, in Popen's place: `rest` is what `subprocess` has made of the options."""
        _, _, _, _, cwd, env, _, _, shell, *pipes_and_more = rest
        pipes, (_, _, _, _, _, new_session, *_) = pipes_and_more[:6], pipes_and_more[6:]
        assert not shell
        request = (args, os.fspath(cwd or os.getcwd()), dict(os.environ if env is None else env), new_session)
        streams = [own if given == -1 else given for own, given in enumerate((pipes[0], pipes[3], pipes[5]))]
        self._status, theirs = socket.socketpair()
        with theirs:
            data = pickle.dumps(request)
            server = _server()
            socket.send_fds(server, [_NUMBER.pack(len(data))], [*streams, theirs.fileno()])
            server.sendall(data)
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self.pid = _number(self._status)
        self._child_created = True

    def _try_wait(self, flags: int) -> tuple[int, int]:
        """As os.waitpid of a child: its process id, 0 while it runs, and its status."""
        assert self._status is not None
        self._status.settimeout(0.0 if flags & os.WNOHANG else None)
        try:
            status = _number(self._status)
        except BlockingIOError:
            return 0, 0
        self._status.close()
        return self.pid, status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        """As Popen's, of which it is the only other place that waits."""
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid == self.pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


_READ_AT_IMPORT = ("HF_", "CUDA_", "LD_", "OMP_")
_BEFORE = dict(os.environ)


def suits(environment: dict[str, str]) -> bool:
    """Says whether a program with this environment may begin with what was imported in the tests' own: no
    variable differs that is read only then.
    """
    names = {name for name in {*_BEFORE, *environment} if name.startswith(_READ_AT_IMPORT)}
    return all(_BEFORE.get(name) == environment.get(name) for name in names)


def run(
    arguments: Sequence[str], *, timeout: float | None = None, capture_output: bool = False, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Runs a Program to its end, as subprocess.run does."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Program(arguments, **options) as process:
        try:
            out, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(list(arguments), process.returncode, out, errors)


def _number(connection: socket.socket) -> int:
    data = connection.recv(_NUMBER.size, socket.MSG_WAITALL)
    if len(data) < _NUMBER.size:
        raise OSError("the server of begun programs has ended; what it printed says why")
    return int(*_NUMBER.unpack(data))


@functools.cache
def _server() -> socket.socket:
    """Starts it, once in a process. It ends with this one."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.begun", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**_BEFORE, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C is for the tests
        )

    @atexit.register
    def _end() -> None:
        ours.close()
        process.wait()

    return ours


# ---- in the server ----


def _serve(connection: socket.socket) -> list[str] | None:
    """Forks until the other end closes. Returns, in a fork only, what to run."""
    while True:
        size, descriptors, _, _ = socket.recv_fds(connection, _NUMBER.size, 4)
        if not size:
            return None
        request = pickle.loads(connection.recv(int(*_NUMBER.unpack(size)), socket.MSG_WAITALL))
        if os.fork() == 0:
            connection.close()
            return _begin(*request, streams=descriptors[:3], status=descriptors[3])
        for each in descriptors:
            os.close(each)


def _begin(
    arguments: list[str], folder: str, environment: dict[str, str], new_session: bool,
    *, streams: list[int], status: int,
) -> list[str]:  # fmt: skip
    """Forks once more; the process between says which one it is and how it ends, and does not return."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid != 0:
        for each in streams:
            os.close(each)
        os.write(status, _NUMBER.pack(pid))
        with contextlib.suppress(BrokenPipeError):  # nobody waits any more
            os.write(status, _NUMBER.pack(os.waitpid(pid, 0)[1]))
        os._exit(0)
    os.close(status)
    for number, each in enumerate(streams):
        os.dup2(each, number)
        os.close(each)
    if new_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    return arguments


def _become(arguments: list[str]) -> NoReturn:
    """Runs them as Python would. What the program raises is printed without the frames of this file."""
    module = types.ModuleType("__main__")
    kind = arguments[0]
    if kind == "-m":
        sys.path.insert(0, os.getcwd())
        _, spec, code = runpy._get_module_details(arguments[1])  # type: ignore[attr-defined]
        module.__spec__, module.__file__, module.__package__ = spec, spec.origin, spec.parent
        sys.argv = [spec.origin, *arguments[2:]]
    elif kind == "-c":
        sys.path.insert(0, "")
        code = compile(arguments[1], "<string>", "exec")
        sys.argv = ["-c", *arguments[2:]]
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
        with open(kind, "rb") as file:
            code = compile(file.read(), kind, "exec")
        module.__file__ = kind
        sys.argv = arguments
    sys.modules["__main__"] = module
    try:
        exec(code, module.__dict__)
    except SystemExit:
        raise
    except Exception as error:
        trace = error.__traceback__
        assert trace is not None
        sys.excepthook(type(error), error, trace.tb_next)
        sys.exit(1)
    sys.exit(0)


def _main(descriptor: int) -> list[str] | None:
    gc.disable()  # imports make a million objects and no garbage
    for module in PRELOAD:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects those between
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return _serve(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    _given = _main(int(sys.argv[1]))
    if _given is not None:
        _become(_given)
