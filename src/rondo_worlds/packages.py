"""What environments of packages share: the remedy where one is missing, and what is the process's."""

from __future__ import annotations

import importlib.util
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.machinery import ModuleSpec

import numpy as np

from rondo.core.errors import ConfigError

_BORROWED = threading.RLock()


def require_package(name: str) -> ModuleSpec:
    """Returns where a module is. name: also the environment's, and rondo's extra's. Raises ConfigError where
    it is not installed.
    """
    found = importlib.util.find_spec(name)
    if found is None:
        extra = name.replace("_", "-")
        raise ConfigError(f"the environment {name} needs a package: pip install 'rondo-rl[{extra}]'")
    return found


@contextmanager
def borrowed_globals(seed: int = 0) -> Iterator[None]:
    """Lends a package what is the process's: Python's and numpy's random streams, which begin at `seed`,
    `sys.argv`, and standard output, of which what is written goes to standard error. All is as before at the
    end. One thread has it at a time.
    """
    with _BORROWED:
        python, arrays, arguments = random.getstate(), np.random.get_state(), sys.argv
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            with redirect_stdout(sys.stderr):
                yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)
            sys.argv = arguments
