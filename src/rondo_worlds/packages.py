"""What environments of packages share: the remedy where one is missing, and what is the process's."""

from __future__ import annotations

import importlib.util
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import numpy as np

from rondo.core.errors import ConfigError

_BORROWED = threading.RLock()


def require_package(environment: str, module: str) -> None:
    """Raises ConfigError where the module is not installed. environment: also the name of rondo's extra."""
    if importlib.util.find_spec(module) is None:
        extra = environment.replace("_", "-")
        raise ConfigError(f"the environment {environment} needs a package: pip install 'rondo-rl[{extra}]'")


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
