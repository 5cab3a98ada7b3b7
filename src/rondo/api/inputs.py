"""What a recipe cannot hold, put into files that it can name: rows from memory, and functions without a file.

rows (see `rows`) ─▶ FOLDER/train.parquet or .jsonl ─▶ {type: parquet, path: …}
function ─▶ module:name │ path.py:name │ FOLDER/name-1a2b3c4d.pkl:name (cloudpickle)
"""

from __future__ import annotations

import hashlib
import pickle
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from rondo.api.rows import plain_rows, write_rows
from rondo.config.functions import know, written_down
from rondo.config.schema.data import SOURCE_TYPES
from rondo.core.errors import ConfigError, our_folders
from rondo.system.storage import write_atomic

Recipes = str | Path | Sequence[str | Path]
"""The name of a recipe that rondo ships, a YAML file, or several, merged in order."""


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

    def sources(self, data: Any, name: str, size: int | None = None) -> list[Mapping[str, Any]]:
        """Returns the sources of a recipe that have the rows of `data`.

        data: rows (a list of mappings or of prompts, a pandas DataFrame, an Arrow table, a Hugging Face
        Dataset, any sequence or generator of mappings), a file (.jsonl, .parquet), a dataset's hub id, a
        source as a recipe has it, or a list of files and sources. name: of the file for rows. size: rows of a
        generator at most. Raises ConfigError, DataError.
        """
        if isinstance(data, str | Path) or _is_source(data):
            return [_source(data)]
        if isinstance(data, Sequence) and data and all(map(_is_named, data)):
            return [_source(one) for one in data]
        path = write_rows(plain_rows(data, size), self.folder, name)
        return [{"type": path.suffix[1:], "path": str(path), "name": path.stem}]

    # ---- functions ----

    def named(self, value: Any) -> Any:
        """Returns a setting with names in the place of functions, however deep."""
        if isinstance(value, Mapping):
            return {key: self.named(child) for key, child in value.items()}
        if isinstance(value, list | tuple):
            return [self.named(child) for child in value]
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


def _is_named(one: Any) -> bool:
    return isinstance(one, Path) or _is_source(one)


def _is_source(one: Any) -> bool:
    return isinstance(one, Mapping) and one.get("type") in SOURCE_TYPES and "prompt" not in one


def _source(one: Any) -> Mapping[str, Any]:
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
        raise ConfigError(f"data: {path} is no .jsonl (or .json) and no .parquet file")
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
