"""What a guest does once it is confined: a Python program, a command, or the cells of a session."""

from __future__ import annotations

import _signal as signal
import atexit
import builtins
import os
import sys
from _sitebuiltins import Quitter

from .wire import DONE, STATUSES, HostGoneError, receive

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

SOURCES: dict[str, str] = {}
"""Name of a file that is none -> its text, for tracebacks."""
HERE = os.path.dirname(__file__)


class CellTimeLimit(BaseException):
    """The time limit of a cell; a BaseException, so that `except Exception` does not catch it."""


def prepare_to_show() -> None:
    """Imports beforehand what `show` and its `traceback` need: that takes longer than most programs."""
    import ast  # noqa: F401
    import linecache  # noqa: F401
    import traceback  # noqa: F401


def show(error: BaseException) -> None:
    """Prints an error with the frames that are the guest's own."""
    import linecache
    import traceback

    for name, code in SOURCES.items():
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    told = traceback.TracebackException(type(error), error, error.__traceback__)
    told.stack[:] = [frame for frame in told.stack if not frame.filename.startswith(HERE)]
    sys.stderr.write("".join(told.format()))


def compiled(code: str, name: str) -> CodeType:
    """Returns the code object, its lines known to tracebacks."""
    SOURCES[name] = code
    return compile(code, name, "exec", dont_inherit=True)


def fresh_main() -> dict[str, Any]:
    """Returns the namespace of a new `__main__`."""
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    # Python has these from `site`, which is not imported here; programs end by them.
    builtins.exit = Quitter("exit", "Ctrl-D")  # type: ignore[assignment]
    builtins.quit = Quitter("quit", "Ctrl-D")  # type: ignore[assignment]
    return module.__dict__


def run_code(code: str) -> int:
    """Runs a whole Python program as `__main__`; returns its exit code."""
    namespace = fresh_main()
    sys.argv = ["program.py"]
    try:
        exec(compiled(code, "program.py"), namespace)
        result = 0
    except SystemExit as stopped:
        result = _exit_code(stopped.code)
    except BaseException as error:
        show(error)
        result = 1
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()  # waits for its threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return result


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 255
    sys.stderr.write(f"{code}\n")
    return 1


def run_command(argv: list[str], environment: dict[str, str]) -> int:
    """Becomes the command; returns only if there is none such."""
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
    return 127


def write_files(files: dict[str, bytes]) -> None:
    """Writes what the host gave into the folder."""
    for name, content in files.items():
        if os.path.dirname(name):
            os.makedirs(os.path.dirname(name), exist_ok=True)
        with open(name, "wb") as file:
            file.write(content)


def cells() -> int:
    """Runs cells in one namespace until stdin ends; prints the value of an expression that ends one."""
    namespace = fresh_main()
    requests = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    number = 0

    def alarm(*_: object) -> None:
        raise CellTimeLimit("this cell took longer than it may")

    signal.signal(signal.SIGALRM, alarm)
    while True:
        try:
            request = receive(requests)
        except HostGoneError:
            return 0
        number += 1
        status = "finished"
        try:
            signal.setitimer(signal.ITIMER_REAL, request["seconds"], 0.1)
            _cell(request["code"], f"cell {number}", namespace)
        except CellTimeLimit as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            status = "time_limit"
            show(error)
        except MemoryError as error:
            status = "memory_limit"
            show(error)
        except BaseException as error:
            status = "error"
            show(error)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.write(DONE, bytes([STATUSES.index(status)]))


def _cell(code: str, name: str, namespace: dict[str, Any]) -> None:
    import _ast

    SOURCES[name] = code
    tree: Any = compile(code, name, "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, _ast.Expr):
        tree.body.pop()
    exec(compile(tree, name, "exec"), namespace)
    if isinstance(last, _ast.Expr):
        value = eval(compile(_ast.Expression(last.value), name, "eval"), namespace)
        if value is not None:
            sys.stdout.write(f"{value!r}\n")
