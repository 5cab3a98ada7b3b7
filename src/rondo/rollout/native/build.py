"""Compiles kernels.c once per machine and loads it from the user's cache folder (named by content)."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from rondo.errors import RolloutError

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-fno-math-errno")


def compiler() -> str | None:
    """The C compiler's path: $CC, or cc, gcc, clang."""
    names = (os.environ.get("CC", ""), "cc", "gcc", "clang")
    return next((path for name in names if name and (path := shutil.which(name))), None)


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels, compiled if need be. Raises RolloutError with the compiler's message."""
    command = compiler()
    if command is None:
        raise RolloutError("no C compiler (cc, gcc or clang) found; install one, or set rollout.decode=lean")
    key = hashlib.sha256("\0".join((SOURCE.read_text(), command, *FLAGS, _processor())).encode()).hexdigest()[
        :24
    ]
    path = _cache_folder() / f"kernels-{key}.so"
    if not path.exists():
        _compile(command, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise RolloutError(
            f"the compiled kernels {path} cannot be loaded: {error}; delete the file"
        ) from error


def _compile(command: str, path: Path) -> None:
    """Into a temporary name first: another process may be doing the same."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        out = Path(folder) / path.name
        arguments = [command, *FLAGS, "-o", str(out), str(SOURCE), "-lm"]
        result = subprocess.run(arguments, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise RolloutError(f"compiling {SOURCE} failed ({' '.join(arguments)}):\n{result.stderr[-2000:]}")
        os.replace(out, path)


def _cache_folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rondo"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    folder = Path(tempfile.gettempdir()) / f"rondo-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RolloutError(f"{folder} belongs to somebody else; set XDG_CACHE_HOME to a folder of yours")
    return folder


def _processor() -> str:
    """What -march=native depends on; a shared home folder serves different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform()
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")
