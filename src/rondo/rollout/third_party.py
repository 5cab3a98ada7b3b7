"""What is asked of every third-party engine before it is imported: its version, its folder, its options."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rondo.config.functions import did_you_mean
from rondo.errors import ConfigError


def check_version(engine: str, version: str, oldest: tuple[int, ...], newer: tuple[int, ...]) -> None:
    """Raises ConfigError unless oldest <= version < newer."""
    numbers = tuple(int(piece) for piece in re.findall(r"\d+", version.split("+")[0])[:3])
    if not oldest <= numbers < newer:
        wanted = [".".join(str(number) for number in bound) for bound in (oldest, newer)]
        raise ConfigError(
            f"{engine} {version} is installed; rondo needs {wanted[0]} or newer, before {wanted[1]} "
            "(docs/engines.md)"
        )


def check_options(
    options: Mapping[str, Any],
    *,
    engine: str,
    known: Iterable[str],
    governed: Mapping[str, str],
    refused: Callable[[str], str | None],
) -> None:
    """Raises ConfigError for an option of rollout.engine that must not be passed on.

    engine: its name and version. known: its arguments. governed: those that rondo sets, and the key for each.
    refused: why an argument is not supported, or None.
    """
    names = sorted(known)
    for name in options:
        where = f"rollout.engine.{name}"
        if name in governed:
            raise ConfigError(f"{where}: rondo sets this; it is governed by {governed[name]}")
        reason = refused(name)
        if reason is not None:
            raise ConfigError(f"{where} is not supported with rondo: {reason}")
        if name not in names:
            raise ConfigError(f"{where}: {engine} has no engine argument {name!r}{did_you_mean(name, names)}")


def package_folder(name: str, how_to_install: str) -> Path:
    """The folder of an installed package; ConfigError with `how_to_install` where there is none."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(how_to_install)
    return Path(next(iter(spec.submodule_search_locations)))


def annotated_fields(paths: Iterable[Path], class_name: str | None = None) -> Iterator[str]:
    """Names of the annotated fields of the classes in these source files (only of `class_name`)."""
    for path in paths:
        for node in ast.parse(path.read_text(encoding="utf-8"), str(path)).body:
            if isinstance(node, ast.ClassDef) and class_name in (None, node.name):
                targets = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
                yield from (target.id for target in targets if isinstance(target, ast.Name))
