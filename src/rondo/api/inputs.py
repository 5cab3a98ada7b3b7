"""What callers hand over: arguments, whose types are looked at, and what a recipe cannot hold, put into files
that it can name: rows from memory, and functions without a file.

rows (see `rows`) ─▶ FOLDER/train.parquet or .jsonl ─▶ {type: parquet, path: …}
function ─▶ module:name │ path.py:name │ FOLDER/name-1a2b3c4d.pkl:name (cloudpickle)
"""

from __future__ import annotations

import collections.abc
import functools
import hashlib
import inspect
import numbers
import os
import pickle
import re
import sys
import sysconfig
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import cloudpickle

from rondo.api.rows import plain_rows, write_rows
from rondo.config.functions import in_words, know, signature_of, written_down
from rondo.config.schema.data import SOURCE_TYPES
from rondo.config.tree import MOST_LEVELS
from rondo.core.errors import ConfigError, is_deep, our_folders
from rondo.core.masking import is_secret
from rondo.system.storage import write_atomic

P = ParamSpec("P")
T = TypeVar("T")
Recipes = str | Path | Sequence[str | Path]
"""The name of a recipe that rondo ships, a YAML file, or several, merged in order."""


# ---- arguments ----


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Makes a function raise ConfigError for an argument of another type than its annotation says, which
    begins with the argument's name, before it does anything. Annotations that only a type checker can read,
    and those of what it calls by itself, are the function's own business.
    """

    @functools.wraps(function)
    def called(*args: P.args, **named: P.kwargs) -> T:
        signature = signature_of(function)
        try:
            given = signature.bind(*args, **named).arguments
        except TypeError:  # one is missing, or too many: Python says it better, with the function's name
            return function(*args, **named)
        for name, value in given.items():
            parameter = signature.parameters[name]
            is_one = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if is_one and not _is_of(parameter.annotation, value):
                words = in_words(parameter.annotation).removesuffix(" or None")
                shown = "…" if is_secret(name) else f"{value!r:.80}"
                raise ConfigError(f"{name} must be {words}, got {type(value).__name__} {shown}")
        return function(*args, **named)

    return called


def _is_of(kind: Any, value: Any) -> bool:
    """Says whether a value is of an annotated type; of a type that is not known here any value is."""
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return any(_is_of(one, value) for one in inner)
    if origin in (int, float):  # numpy's, too; and 1e3 is a number of steps
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        return is_number and (origin is float or float(value).is_integer())
    if origin is Path:
        return isinstance(value, os.PathLike)
    if origin is collections.abc.Sequence:
        is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return is_list and all(_is_of(inner[0], one) for one in value)
    is_known = isinstance(origin, type) and origin not in (Any, inspect.Parameter.empty)
    return not is_known or isinstance(value, origin)


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings in the order in which they hold: one that is given again comes behind all others, so
    that `steps=` is more than a `trainer` section that stands behind its `trainer.total_steps`.
    """
    found: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            found.pop(key, None)
            found[key] = value
    return found


# ---- recipes, functions, rows ----


def files_of(recipe: Recipes) -> list[str]:
    """Returns the names of one recipe or several."""
    return [str(one) for one in ([recipe] if isinstance(recipe, str | Path) else recipe)]


def functions_of(reward: Any) -> list[Any]:
    """Returns `reward.functions` from one function or several, each with options or without."""
    functions = reward if isinstance(reward, list | tuple) else [reward]
    return [one if isinstance(one, Mapping) else {"name": one} for one in functions]


def acted_in(
    tools: Any, environment: Any, config: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns `rollout.tools` and `rollout.environments` from the arguments of these names: one or several,
    each a function, a class, a name, or {"name": …, **options}. Raises ConfigError where a setting says the
    same.
    """
    made = {}
    for argument, key, given in (
        ("tools", "rollout.tools", tools),
        ("environment", "rollout.environments", environment),
    ):
        if given is None:
            continue
        if any(_says(further, key) for further in (config, settings)):
            raise ConfigError(f"{argument}=… and the setting {key} both say the same; give one of them")
        made[key] = list(given) if isinstance(given, list | tuple) else [given]
    return made


def _says(settings: Mapping[str, Any], key: str) -> bool:
    """Says whether settings, nested or by dotted key, have a key."""
    for name, value in settings.items():
        rest = key.removeprefix(f"{name}.")
        if name == key or (rest != key and isinstance(value, Mapping) and _says(value, rest)):
            return True
    return False


class Inputs:
    """Writes into a folder, which is made when there is something to write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # ---- rows ----

    def sources(
        self, data: Any, name: str, size: int | None = None, *, argument: str = "data"
    ) -> list[Mapping[str, Any]]:
        """Returns the sources of a recipe that have the rows of `data`.

        data: rows (a list of mappings or of prompts, a pandas DataFrame, an Arrow table, a Hugging Face
        Dataset, any sequence or generator of mappings), a file (.jsonl, .parquet), a dataset's hub id, a
        source as a recipe has it, or a list of files and sources. name: of the file for rows. size: rows of a
        generator at most. argument: what messages call `data`. Raises ConfigError, DataError.
        """
        if are_named(data):
            several = [data] if isinstance(data, str | Path | Mapping) else data
            return [_source(one, argument) for one in several]
        path = write_rows(plain_rows(data, None if size is None else int(size), argument), self.folder, name)
        return [{"type": path.suffix[1:], "path": str(path), "name": path.stem}]

    # ---- functions ----

    def named(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns settings with names in the place of functions, however deep; what no recipe holds, because
        it is too deep, as it is.
        """
        return {
            key: value if is_deep(value, MOST_LEVELS) else self._named(value)
            for key, value in settings.items()
        }

    def _named(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: self._named(child) for key, child in value.items()}
        if isinstance(value, list | tuple):
            return [self._named(child) for child in value]
        return self.function(value) if callable(value) else value

    def function(self, function: Callable[..., Any]) -> str:
        """Returns a name under which any process finds a function: that of its module or its file, where it
        has one; else it is written down (cloudpickle). This process goes on with the function itself.
        """
        name = getattr(function, "__qualname__", type(function).__name__)
        where = getattr(function, "__module__", None) or ""
        file = getattr(sys.modules.get(where), "__file__", None)
        if file is not None and where != "__main__" and _found_in(sys.modules[where], name) is function:
            if _is_installed(Path(file)):
                return f"{where}:{name}"
            return know(f"{_here(Path(file))}:{name}", function)
        try:
            data = cloudpickle.dumps(function)
        except (TypeError, pickle.PicklingError) as error:
            raise ConfigError(
                f"{name}: cannot be written down for other processes ({error}); put it into a file of its "
                "own, or make what it holds inside of it"
            ) from error
        plain = re.sub(r"\W", "", name.rpartition(".")[2]) or "function"
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{plain}-{hashlib.sha256(data).hexdigest()[:8]}.pkl"
        write_atomic(path, written_down(data))
        return know(f"{path}:{plain}", function)


def _here(path: Path) -> Path:
    """Returns a path relative to the working directory, where it is below that."""
    path, here = path.resolve(), Path.cwd()
    return path.relative_to(here) if here in path.parents else path


def are_named(data: Any) -> bool:
    """Says whether data are in files, or in what else a recipe names, and not in memory."""
    if isinstance(data, str | Path) or _is_source(data):
        return True
    return isinstance(data, Sequence) and len(data) > 0 and all(map(_is_named, data))


def _is_named(one: Any) -> bool:
    return isinstance(one, Path) or _is_source(one)


def _is_source(one: Any) -> bool:
    return isinstance(one, Mapping) and one.get("type") in SOURCE_TYPES and "prompt" not in one


def _source(one: Any, argument: str) -> Mapping[str, Any]:
    """Returns a source for a file, a hub id, or what is one already."""
    if isinstance(one, Mapping):
        return one
    path = Path(one).expanduser()
    if path.suffix == ".parquet":
        return {"type": "parquet", "path": str(path)}
    compressed = path.suffix in (".gz", ".bz2", ".xz")
    if (path.with_suffix("") if compressed else path).suffix in (".jsonl", ".json"):
        return {"type": "jsonl", "path": str(path)}
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{argument}: {path} is no .jsonl (or .json) and no .parquet file")
    return {"type": "huggingface", "path": str(one)}


def _found_in(module: Any, name: str) -> Any:
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _is_installed(file: Path) -> bool:
    """Says whether any process of this environment imports a module of this file by its name."""
    places = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib", "stdlib")}
    places.update(Path(folder).resolve() for folder in our_folders())
    return any(place in file.resolve().parents for place in places)
