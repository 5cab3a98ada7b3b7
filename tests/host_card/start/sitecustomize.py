"""Puts the host card into a Python process before it imports torch; see README.md.

Python runs this file at the start where its folder is on PYTHONPATH, so that child processes have the card,
too. A process that does not import torch starts as fast as before.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so")


class TorchFinder(importlib.abc.MetaPathFinder):
    """Finds torch as usual, and has the card loaded before it and installed after it."""

    def find_spec(
        self, name: str, path: object, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = TorchLoader(name, spec.loader.path)
        return spec


class TorchLoader(importlib.machinery.SourceFileLoader):
    """Executes torch between the two."""

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, TorchFinder)]
        for library in LIBRARIES:
            ctypes.CDLL(str(Path(self.path).parent / "lib" / library), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(os.environ["RONDO_HOST_CARD"])
        super().exec_module(module)
        path = Path(__file__).resolve().parent.parent / "card.py"
        spec = importlib.util.spec_from_file_location("rondo_host_card_python", path)
        assert spec is not None
        assert spec.loader is not None
        card = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(card)
        card.install()


if "RONDO_HOST_CARD" in os.environ:
    sys.meta_path.insert(0, TorchFinder())
