"""Rows from files, datasets, procedural tasks and functions. Nothing here knows tokens.

A source gives mappings by position, and can say where a row came from, so that every error names file and
line.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rondo.config.functions import check_options, did_you_mean, resolve_function
from rondo.config.schema import (
    FileSourceConfig,
    HuggingfaceSourceConfig,
    SourceConfig,
    TaskSourceConfig,
)
from rondo.errors import ConfigError, DataError

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Source:
    """The rows of one configured source."""

    name: str
    config: SourceConfig
    rows: Sequence[Row]
    # What the rows came from, for messages.
    origin: str
    # Where each row stands there (line numbers), if not at `row <position>`.
    places: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, row: int) -> str:
        """`prompts.jsonl, line 17`: for messages."""
        return f"{self.origin}, {self.places[row] if self.places is not None else f'row {row}'}"

    def error(self, row: int, message: str) -> DataError:
        """A DataError that says which row of which source it is about."""
        return DataError(f"source {self.name!r} ({self.where(row)}): {message}")

    def prompt(self, row: int) -> Any:
        """Returns the prompt of a row as it was written. Raises DataError for an absent or empty one."""
        found, key = self.rows[row], self.config.prompt_key
        if key not in found:
            raise self.error(
                row,
                f"no column {key!r}{did_you_mean(key, found)} "
                f"Columns: {', '.join(found)}. Set prompt_key to the column that holds the prompt",
            )
        prompt = found[key]
        if prompt is None or prompt == [] or (isinstance(prompt, str) and not prompt.strip()):
            raise self.error(row, f"the prompt (column {key!r}) is empty; take the row out")
        return prompt


def source_name(config: SourceConfig) -> str:
    """The configured name, or the last part of path or task without its suffix."""
    if config.name:
        return config.name
    text = config.task if isinstance(config, TaskSourceConfig) else config.path
    if config.type == "function":
        return text.replace(":", ".").rsplit(".", 1)[-1]
    return Path(text).stem if config.type in ("parquet", "jsonl") else Path(text).name


def open_source(config: SourceConfig) -> Source:
    """Read or make the rows of one source.

    Raises ConfigError for missing files, packages and functions; DataError for content: broken lines, rows
    that are no objects, no rows at all. Which keys a type has is checked when a configuration is loaded.
    """
    name = source_name(config)
    source = _OPENERS[config.type](config, name)
    if not len(source):
        raise DataError(f"source {name!r} ({source.origin}) has no rows")
    return source


def check_source(config: SourceConfig) -> None:
    """Raises ConfigError, as `open_source` would, without reading rows: for the file, or the function and its
    options.
    """
    name = source_name(config)
    if isinstance(config, FileSourceConfig):
        _existing_file(config, name)
    elif isinstance(config, TaskSourceConfig) and config.type == "function":
        _function_of(config, name)


def open_sources(configs: Sequence[SourceConfig]) -> tuple[Source, ...]:
    """All sources; ConfigError when there are none or two have one name (names go into prompt ids and
    metrics).
    """
    if not configs:
        raise ConfigError(
            "data: no source of rows is configured; add one under data.train, e.g. {type: jsonl, path: …}"
        )
    names = [source_name(config) for config in configs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"data: {names.count(name)} sources are called {name!r}; give each its own name: {{name: …}}"
            )
        if "/" in name:
            raise ConfigError(f"data: source name {name!r} must not contain '/'; it is a part of prompt ids")
    return tuple(open_source(config) for config in configs)


def _existing_file(config: FileSourceConfig, name: str) -> Path:
    path = Path(config.path).expanduser()
    if not path.is_file():
        near = (
            did_you_mean(path.name, (p.name for p in path.parent.iterdir())) if path.parent.is_dir() else "."
        )
        kind = "a folder" if path.is_dir() else "missing"
        raise ConfigError(
            f"source {name!r}: file {path} is {kind}{near} Paths are relative to the working directory"
        )
    return path


# -----------------------------------------------------------------------------------------------------------
# files


class _TableRows(Sequence[Row]):
    """Rows of an Arrow table, made into mappings one at a time."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, row: Any) -> Any:
        if not 0 <= row < len(self):
            raise IndexError(row)
        return self._table.slice(row, 1).to_pylist()[0]


def _open_parquet(config: FileSourceConfig, name: str) -> Source:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = _existing_file(config, name)
    try:
        table = pq.ParquetFile(path).read()
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"source {name!r}: {path} cannot be read as Parquet: {error}") from error
    return Source(name, config, _TableRows(table.slice(0, config.size)), str(path))


def _open_jsonl(config: FileSourceConfig, name: str) -> Source:
    path = _existing_file(config, name)
    rows: list[Row] = []
    places: list[str] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if config.size is not None and len(rows) == config.size:
                break
            if line.strip():
                rows.append(_parse_line(line, f"source {name!r}: {path}, line {number}"))
                places.append(f"line {number}")
    return Source(name, config, rows, str(path), places)


def _parse_line(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line.decode("utf-8-sig").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        text = line.decode("utf-8-sig").strip()
        hint = (
            " (a JSON array? write one object per line instead)"
            if text in ("[", "[{") or text.startswith("[{")
            else ""
        )
        raise DataError(
            f"{where}: broken JSON: {error.msg.removesuffix(' at')} at column {error.colno}{hint}: "
            f"{text[:80]!r}"
        ) from error
    if not isinstance(row, dict):
        raise DataError(
            f'{where}: a row must be an object {{"prompt": …}}, got {type(row).__name__}: {row!r:.80}'
        )
    return row


# ---------------------------------------------------------------------------------------------------------
# libraries


def _open_huggingface(config: HuggingfaceSourceConfig, name: str) -> Source:
    """A folder written by `save_to_disk`, a folder or file of data, or a hub id. options go to
    `load_dataset`.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"source {name!r}: type huggingface needs the package datasets: pip install 'rondo-rl[datasets]'"
        ) from error

    path = Path(config.path).expanduser()
    try:
        data = _load_dataset(datasets, path, config)
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        kind = "on this machine" if path.exists() else "on the hub (no local file or folder has that name)"
        raise ConfigError(
            f"source {name!r}: dataset {config.path!r} {kind}, split {config.split!r}, options "
            f"{dict(config.options)} cannot "
            f"be loaded: {type(error).__name__}: {error}"
        ) from error
    if isinstance(data, Mapping):
        if config.split not in data:
            near = did_you_mean(config.split, data)
            raise ConfigError(
                f"source {name!r}: no split {config.split!r} in {path}{near} Splits: {', '.join(data)}"
            )
        data = data[config.split]
    if config.size is not None:
        data = data.select(range(min(config.size, len(data))))
    return Source(name, config, data, f"{config.path}[{config.split}]")


def _load_dataset(datasets: Any, path: Path, config: HuggingfaceSourceConfig) -> Any:
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return datasets.load_from_disk(str(path))
    if path.is_file():
        builders = {
            ".jsonl": "json",
            ".json": "json",
            ".parquet": "parquet",
            ".csv": "csv",
            ".arrow": "arrow",
        }
        if path.suffix not in builders:
            raise ValueError(f"files must end in {', '.join(builders)}")
        data = datasets.load_dataset(
            builders[path.suffix], data_files={config.split: str(path)}, **config.options
        )
        return data[config.split]
    return datasets.load_dataset(
        str(path) if path.exists() else config.path, split=config.split, **config.options
    )


def import_reasoning_gym() -> Any:
    """The package reasoning_gym; ConfigError with the remedy when it is missing."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            "reasoning_gym tasks need the package reasoning-gym: pip install 'rondo-rl[reasoning-gym]'"
        ) from error
    return reasoning_gym


def _open_reasoning_gym(config: TaskSourceConfig, name: str) -> Source:
    """`size` entries of a task. A row carries what the `reasoning_gym` scorer needs: task, its options, and
    the entry.
    """
    gym = import_reasoning_gym()
    from reasoning_gym.factory import DATASETS

    task = config.task
    if task not in DATASETS:
        raise ConfigError(
            f"source {name!r}: reasoning_gym has no task {task!r}{did_you_mean(task, DATASETS)}"
        )
    settings = dict(config.options)
    settings.setdefault("seed", config.seed)
    if config.size is not None:
        settings["size"] = config.size
    check_options(DATASETS[task][1], settings, f"source {name!r} (task {task})", given=0)
    try:
        dataset = gym.create_dataset(task, **settings)
        entries = [dataset[i] for i in range(len(dataset))]
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(
            f"source {name!r}: reasoning_gym task {task!r} refuses {settings}: {error}"
        ) from error
    rows = [
        {
            config.prompt_key: entry["question"],
            "answer": entry["answer"],
            "task": task,
            "task_options": settings,
            "entry": entry,
        }
        for entry in entries
    ]
    return Source(name, config, rows, f"reasoning_gym {task}, seed {settings['seed']}")


def _open_function(config: TaskSourceConfig, name: str) -> Source:
    """Rows from a function."""
    task = config.task
    made = _function_of(config, name)()
    if isinstance(made, str | bytes | Mapping) or not isinstance(made, Iterable):
        raise ConfigError(
            f"source {name!r}: {task} must return a list of mappings, it returned {type(made).__name__}"
        )
    rows = list(itertools.islice(made, config.size))
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(
                f"source {name!r} ({task}, row {i}): a row must be a mapping, got {type(row).__name__}: "
                f"{row!r:.80}"
            )
    return Source(name, config, rows, task)


def _function_of(config: TaskSourceConfig, name: str) -> Callable[[], Any]:
    """The source's function. It is given `options`, and the source's `seed` and `size` where it has such
    parameters.
    """
    task = config.task or ""
    function = resolve_function(task)
    options = dict(config.options)
    accepted = inspect.signature(function).parameters
    if "seed" in accepted:
        options.setdefault("seed", config.seed)
    elif config.seed:
        raise ConfigError(f"source {name!r}: seed is set, but {task} has no parameter 'seed'")
    if "size" in accepted and config.size is not None:
        options.setdefault("size", config.size)
    check_options(function, options, f"source {name!r} (function {task})", given=0)
    return functools.partial(function, **options)


_OPENERS: Mapping[str, Callable[[Any, str], Source]] = {
    "parquet": _open_parquet,
    "jsonl": _open_jsonl,
    "huggingface": _open_huggingface,
    "reasoning_gym": _open_reasoning_gym,
    "function": _open_function,
}
