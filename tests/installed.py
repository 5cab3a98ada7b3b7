"""What tests of what `make test-environments` installs need. Where it is missing they are skipped, but not
where it has to be there: RONDO_REQUIRED_PACKAGES=1 says so of packages, RONDO_REQUIRED_PROGRAMS of the
programs that it names.
"""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest


def needs(*modules: str) -> None:
    """Skips the test, or the test file, that calls it where one of the modules is missing."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    _require(missing, required=missing if os.environ.get("RONDO_REQUIRED_PACKAGES") else [])


def needs_programs(*names: str) -> None:
    """Skips the test file that calls it where one of the programs is missing."""
    missing = [name for name in names if shutil.which(name) is None]
    required = os.environ.get("RONDO_REQUIRED_PROGRAMS", "").split()
    _require(missing, required=[name for name in missing if name in required])


def _require(missing: list[str], required: list[str]) -> None:
    if required:
        raise RuntimeError(f"{', '.join(required)} must be installed here, and is not")
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: make test-environments", allow_module_level=True)
