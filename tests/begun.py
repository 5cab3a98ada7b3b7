"""Programs that tests start, begun: forked from a process that has imported torch, transformers and rondo.

    from tests import begun

    done = begun.run(["-m", "rondo", "train", "tiny.yaml"], capture_output=True, text=True)
    process = begun.Program(["script.py"], cwd=folder, env=environment)   # a subprocess.Popen

    test: Program ── request, descriptors ─▶ server: fork ─▶ waits, says how it ended: fork ─▶ `python …`

A start of rondo's imports for three seconds of a processor; here they were imported once. All else is as with
`subprocess`: a process of its own with its environment, folder, arguments and standard streams, which runs to
the end of an interpreter. What the imports themselves do, or what of the environment they read, is for a test
that starts `sys.executable`.

Fork servers that rondo starts (rondo.system.forkserver) are begun likewise: those of the tests' own process,
and those of a begun program. It has a server of its own for them, which is its child, as they would be.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
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
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
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
_MOST_BYTES, _MOST_DESCRIPTORS = 200_000, 16  # of a request
_FORK_SERVER = "rondo.system.forkserver"


class Program(subprocess.Popen[Any]):
    """`python ARGUMENTS…`: a file, `-m MODULE` or `-c CODE`, and what comes behind it. options: Popen's."""

    def __init__(self, arguments: Sequence[str], **options: Any) -> None:
        self._status: socket.socket | None = None
        super().__init__(list(arguments), **options)

    def __del__(self, is_finalizing: Any = sys.is_finalizing) -> None:
        """Does nothing where the interpreter ends, which has forgotten this module's names."""
        if not is_finalizing():
            super().__del__()  # type: ignore[misc]

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        """Begins it, in Popen's place: `rest` is what `subprocess` has made of the options."""
        _, _, _, pass_fds, cwd, env, _, _, shell, *pipes_and_more = rest
        pipes, (_, _, _, _, _, new_session, *_) = pipes_and_more[:6], pipes_and_more[6:]
        assert not shell
        environment, numbers = dict(os.environ if env is None else env), [0, 1, 2, *pass_fds]
        request = (args, os.fspath(cwd or os.getcwd()), environment, new_session, numbers)
        streams = [own if given == -1 else given for own, given in enumerate((pipes[0], pipes[3], pipes[5]))]
        self._status, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(_server(), [pickle.dumps(request)], [theirs.fileno(), *streams, *pass_fds])
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


_READ_AT_IMPORT = ("HF_", "CUDA_", "LD_", "OMP_", "RONDO_PLATFORM")
_BEFORE, _PYTHON = dict(os.environ), sys.executable


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


class _Subprocess:
    """What rondo.system.forkserver knows of `subprocess`. It starts its servers, and nothing else."""

    DEVNULL, TimeoutExpired = subprocess.DEVNULL, subprocess.TimeoutExpired

    @staticmethod
    def Popen(command: Sequence[str], *, env: dict[str, str], **options: Any) -> subprocess.Popen[Any]:  # noqa: N802
        """Begins a server whose imports are rondo's own; executes any other."""
        python, *arguments = command
        preload = arguments[4:]
        assert arguments[:3] == ["-P", "-m", _FORK_SERVER]
        imported = preload and not any("vllm" in module or "sglang" in module for module in preload)
        if imported and python == _PYTHON and suits(_with_devices(env)):
            return Program(arguments, env=env, **options)
        return subprocess.Popen(command, env=env, **options)


def _with_devices(environment: dict[str, str]) -> dict[str, str]:
    """Returns an environment in which devices are not hidden, where there are none to hide."""
    import torch

    name = "CUDA_VISIBLE_DEVICES"
    if environment.get(name) != "" or torch.cuda.is_available():
        return environment
    before = {name: _BEFORE[name]} if name in _BEFORE else {}
    return {other: value for other, value in environment.items() if other != name} | before


def _connected() -> tuple[socket.socket, socket.socket]:
    """Returns two ends that keep messages whole: forks of a program ask the same server."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@contextlib.contextmanager
def fork_servers() -> Iterator[None]:
    """Begins what would be executed as a fork server, until it ends."""
    from rondo.system import forkserver

    forkserver.subprocess = _Subprocess  # type: ignore[assignment]
    try:
        yield
    finally:
        forkserver.subprocess = subprocess


def start() -> None:
    """Starts the server, if that has not been: before a test counts which processes there are."""
    _server()


def _number(connection: socket.socket) -> int:
    data = connection.recv(_NUMBER.size, socket.MSG_WAITALL)
    if len(data) < _NUMBER.size:
        raise OSError("the server of begun programs has ended; what it printed says why")
    return int(*_NUMBER.unpack(data))


_given: socket.socket | None = None
"""In a begun program, and in what that forks: to the server of the program."""


@functools.cache
def _server() -> socket.socket:
    """Starts it, once in a process. It ends with this one."""
    if _given is not None:
        return _given
    ours, theirs = _connected()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.begun", str(theirs.fileno()), _ROOM],
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

_ROOM = "." * 2000
"""An argument of the server's, in whose place the longer ones of programs are shown."""


def _serve(connection: socket.socket) -> list[str]:
    """Forks until the other end closes. Returns in forks only: what to run."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects those between
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, _MOST_DESCRIPTORS)
        if not request:
            os._exit(0)  # to take down what was imported takes a third of a second
        if os.fork() == 0:
            connection.close()
            return _begin(*pickle.loads(request), status=descriptors[0], descriptors=descriptors[1:])
        for each in descriptors:
            os.close(each)


def _begin(
    arguments: list[str], folder: str, environment: dict[str, str], new_session: bool, numbers: list[int],
    *, status: int, descriptors: list[int],
) -> list[str]:  # fmt: skip
    """Forks once more; the fork says which one it is, the process between how it ends. That does not return.
    numbers: those that the descriptors have in the program.
    """
    global _given
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid != 0:
        for each in descriptors:
            os.close(each)
        with contextlib.suppress(BrokenPipeError):  # nobody waits any more
            os.write(status, _NUMBER.pack(os.waitpid(pid, 0)[1]))
        os._exit(0)
    if new_session:
        os.setsid()
    os.write(status, _NUMBER.pack(os.getpid()))  # who asked may signal its group now
    os.close(status)
    beyond = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for number, each in zip(numbers, beyond, strict=True):
        os.dup2(each, number)
        os.close(each)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    _given, theirs = _connected()
    if os.fork() == 0:
        _given.close()
        return _serve(_apart(theirs, numbers))
    theirs.close()
    _show(arguments)
    return arguments


def _apart(connection: socket.socket, numbers: list[int]) -> socket.socket:
    """Has this fork of a program keep nothing of its session and descriptors."""
    os.setsid()  # Ctrl-C is for the program
    kept = socket.socket(fileno=fcntl.fcntl(connection.detach(), fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1))
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in numbers:
        os.dup2(nothing, number)
    return kept


def _show(arguments: list[str]) -> None:
    """Writes them where /proc has the arguments of this process, as those who look for programs expect."""
    begin, end = (
        int(field) for field in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47]
    )
    words = b"\0".join(map(os.fsencode, [sys.executable, *arguments]))
    ctypes.memmove(begin, words[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)


def _find_what_is_named() -> None:
    """Puts the folders of PYTHONPATH where modules are looked for, and has fsspec, which looks for packages
    with file systems as it is imported, look for theirs.
    """
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    new = [folder for folder in folders if folder and folder not in sys.path]
    sys.path[:0] = new
    if new and "fsspec" in sys.modules:
        sys.modules["fsspec"].process_entries()


def _become(arguments: list[str]) -> NoReturn:
    """Runs them as Python would. What the program raises is printed without the frames of this file."""
    module = types.ModuleType("__main__")
    _find_what_is_named()
    if arguments[0] == "-P":
        arguments = arguments[1:]
    elif arguments[0] == "-m":
        sys.path.insert(0, os.getcwd())
    kind = arguments[0]
    if kind == "-m":
        with warnings.catch_warnings(action="ignore"):  # it was imported: that is what this file is for
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
        with fork_servers():
            exec(code, module.__dict__)
    except SystemExit:
        raise
    except Exception as error:
        trace = error.__traceback__
        assert trace is not None
        sys.excepthook(type(error), error, trace.tb_next)
        sys.exit(1)
    sys.exit(0)


def _make_what_is_kept() -> None:
    """Makes what a process makes once and keeps: a fifth of a second of each run. No thread begins."""
    from rondo.models.loading import model_on_meta
    from rondo.models.source import ModelSource
    from rondo.recipes.quickstart import tokenizer

    tokenizer().apply_chat_template([{"role": "user", "content": "1"}])
    model_on_meta(ModelSource(config={"model_type": "qwen3", "num_hidden_layers": 1}))


def _main(descriptor: int) -> list[str]:
    gc.disable()  # imports make a million objects and no garbage
    for module in PRELOAD:
        importlib.import_module(module)
    _make_what_is_kept()
    importlib.import_module("tests.frozen")
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return _serve(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    sys.modules["tests.begun"] = sys.modules["__main__"]  # forks that import it have its servers
    _become(_main(int(sys.argv[1])))
