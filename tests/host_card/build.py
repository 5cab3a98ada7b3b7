"""Builds the host card once per machine, and starts programs on it. Imports no torch.

    python -m tests.host_card.build --cards 2 rondo train quickstart cluster.device=cuda cluster.devices=2

The library lies in the user's cache, under a name that says from what: its source, torch, Python.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "card.cpp"
NAME = "rondo_host_card"
FLAGS = (
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-shared",
    "-w",
    f"-DTORCH_EXTENSION_NAME={NAME}",
    "-D_GLIBCXX_USE_CXX11_ABI=1",
)
LIBRARIES = ("-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10")
REQUIRED = "RONDO_REQUIRED_HOST_CARD"
"""The variable with which `.ci/run` says that a machine without the card is a failure."""


def why_not() -> str:
    """Returns why the card cannot be built here; "" where it can."""
    if shutil.which("g++") is None:
        return "the host card needs g++"
    version = importlib.metadata.version("torch")
    if not version.endswith("+cpu"):
        return f"the host card needs a CPU build of torch, not {version}"
    return ""


def library() -> Path:
    """Returns the compiled card; compiles it (30 s of a core) where nobody has yet.

    Raises RuntimeError with what the compiler said.
    """
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    torch = Path(found.origin).parent
    python = sysconfig.get_paths()["include"]
    of = [SOURCE.read_text(encoding="utf-8"), importlib.metadata.version("torch"), sys.version, str(FLAGS)]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rondo"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a home that cannot be written
        folder = Path(tempfile.gettempdir()) / f"rondo-{os.getuid()}"
        folder.mkdir(exist_ok=True)
    path = folder / f"{NAME}-{hashlib.sha256(repr(of).encode()).hexdigest()[:16]}.so"
    with open(folder / f"{NAME}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker of the tests waits, and finds it
        if path.exists():
            return path
        part = path.with_suffix(".part")
        includes = (torch / "include", torch / "include/torch/csrc/api/include", python)
        command = ["g++", *FLAGS, *(f"-I{folder}" for folder in includes), str(SOURCE)]
        command += [f"-L{torch / 'lib'}", *LIBRARIES, "-o", str(part)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"the host card does not compile:\n{done.stderr[-4000:]}")
        part.replace(path)
    return path


@contextmanager
def environment(cards: int = 1, **settings: str) -> Iterator[dict[str, str]]:
    """Gives the environment of a process that has `cards` cards, and whose children have the same.

    settings: RONDO_HOST_CARD_BYTES (of a card; 80 GiB), RONDO_HOST_CARD_PINNED_BYTES (no limit), and others.
    """
    repository = HERE.parent.parent
    paths = [HERE / "start", repository / "src", repository]
    before = os.environ.get("PYTHONPATH")
    with tempfile.TemporaryDirectory(prefix="rondo-host-card-") as folder:
        card: Mapping[str, str] = {
            "PYTHONPATH": os.pathsep.join([*map(str, paths), *([before] if before else [])]),
            "RONDO_HOST_CARD": str(library()),
            "RONDO_HOST_CARDS": str(cards),
            "RONDO_HOST_CARD_LEDGER": f"{folder}/ledger",
        }
        inherited = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        yield {**inherited, **card, **settings}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Runs a program on cards in host memory.")
    parser.add_argument("--cards", type=int, default=1)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    with environment(arguments.cards) as variables:
        sys.exit(subprocess.run(arguments.command, env=variables).returncode)
