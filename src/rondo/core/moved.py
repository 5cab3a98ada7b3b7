"""Where modules and names of an older rondo are now, by the table `moved.tsv` beside this file. Read where
something was not found, and by `rondo migrate`. Standard library only.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from rondo.core.errors import users_frames, without_libraries

_NOT_IN_MODULE = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")


@functools.cache
def rows() -> Mapping[str, str]:
    """Returns the table: dotted names of modules, and of names in modules, by those that they had."""
    text = Path(__file__).with_name("moved.tsv").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return dict(line.split("\t") for line in lines)


def successor(dotted: str) -> str | None:
    """Returns what a dotted name (`a.b.Name`, or `a.b:Name`) is called today; None where it has not moved."""
    module, colon, name = dotted.partition(":")
    within = name.split(".") if colon else []
    parts = [*module.split("."), *within]
    for stop in range(len(parts), 0, -1):
        new = rows().get(".".join(parts[:stop]))
        if new is not None:
            moved = [*new.split("."), *parts[stop:]]
            border = len(moved) - len(within)
            return ".".join(moved[:border]) + colon + ".".join(moved[border:])
    return None


def advice(error: Exception) -> str:
    """Returns what the message of an error that came of a moved name says beside it: the new name, and how to
    change the file of the user's that has the old one. Empty for all other errors.
    """
    old = _not_found(error)
    new = successor(old) if old else None
    if new is None:
        return ""
    files = [frame.filename for frame in without_libraries(users_frames(error))]
    file = shlex.quote(files[-1]) if files and files[-1].endswith(".py") else "FILE"
    return f". {old} is {new} now: `rondo migrate {file}` shows the change, and makes it with --write"


def _not_found(error: Exception) -> str | None:
    """Returns the dotted name that an error says is not there."""
    if isinstance(error, ModuleNotFoundError):
        return error.name
    if isinstance(error, ImportError):
        said = _NOT_IN_MODULE.match(error.msg or "")  # Python 3.12 has the name beside the text, too
        return f"{said[2]}.{said[1]}" if said else None
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        return f"{error.obj.__name__}.{error.name}"
    return None
