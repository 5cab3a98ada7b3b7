"""The Python of another environment, in which an engine is installed (`rollout.engine.python`).

The engine's process runs this rondo, not one of that environment (`system.process`), and finds the user's
modules, but no other package of this environment. What rondo imports beside the engine has to be there.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rondo.core.errors import ConfigError
from rondo.system.process import users_path

_OLDEST = (3, 11)
_SECONDS = 120.0  # a cold file system
_NEEDS = ("cloudpickle", "jinja2", "numpy", "pydantic", "safetensors", "torch", "transformers", "yaml")
_ASK = """
import importlib.util, json, sys
found = {name: importlib.util.find_spec(name) for name in sys.argv[1:]}
folders = {name: spec and [*(spec.submodule_search_locations or [])] for name, spec in found.items()}
print(json.dumps([sys.version_info[:3], [entry for entry in sys.path if entry], folders]))
"""


@dataclass(frozen=True)
class Interpreter:
    """Another Python, and the packages that it finds."""

    executable: str
    """The path of the interpreter."""
    paths: tuple[str, ...]
    """Where it looks for packages."""
    folders: Mapping[str, Sequence[str] | None]
    """Where the packages that were asked for lie, by name; None: it is not there."""


def environment_of(python: str) -> dict[str, str]:
    """Returns variables for a process of the other environment: this process's, as if that was activated, and
    `users_path` as PYTHONPATH.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
    folders = [os.path.dirname(os.path.abspath(python)), *kept.get("PATH", "").split(os.pathsep)]
    return kept | {"PATH": os.pathsep.join(folders), "PYTHONPATH": os.pathsep.join(users_path())}


@functools.cache
def interpreter(python: str, *packages: str) -> Interpreter:
    """Asks the Python at `python` where its packages are. Raises ConfigError: there is none, it is too old,
    or it lacks what rondo imports in an engine's process.
    """

    def wrong(why: str) -> ConfigError:
        return ConfigError(f"rollout.engine.python={python}: {why}", key="rollout.engine.python")

    if not os.path.isfile(python):
        raise wrong("there is no such file; name the interpreter: …/bin/python")
    executable = os.path.abspath(python)  # not resolved: a link is what makes an environment
    try:
        asked = subprocess.run(
            [executable, "-c", _ASK, *_NEEDS, *packages],
            env=environment_of(python) | {"PYTHONPATH": ""},
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        version, paths, folders = json.loads(asked.stdout.splitlines()[-1])
    except OSError as error:
        raise wrong(f"it does not start: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise wrong(f"it did not say within {_SECONDS:.0f} s where its packages are") from error
    except (ValueError, IndexError) as error:
        said = asked.stderr.strip().splitlines()[-1:]
        why = f"exit code {asked.returncode}" if not said else f"exit code {asked.returncode}: {said[0]}"
        raise wrong(f"it is no Python that works ({why})") from error
    if tuple(version) < _OLDEST:
        raise wrong(f"it is Python {'.'.join(map(str, version))}; rondo needs 3.11 or newer")
    missing = [name for name in _NEEDS if folders[name] is None]
    if missing:
        raise wrong(f"its environment has no {', '.join(missing)}, which rondo needs beside the engine")
    return Interpreter(executable, tuple(paths), folders)
