"""Rows from files, datasets, procedural tasks and functions. Nothing here knows tokens.

A source gives mappings by position, and can say where a row came from, so that every error names file and
line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rondo.chat import Conversation, ImagePart, MessageError, MessageReader, TemplateKeys, as_messages
from rondo.config.functions import called_with, check_options, resolve_function
from rondo.config.schema import (
    FileSourceConfig,
    HuggingfaceSourceConfig,
    SourceConfig,
    TaskSourceConfig,
)
from rondo.core.errors import ConfigError, DataError, did_you_mean, is_deep
from rondo.core.images import ImageRef
from rondo.core.masking import masked
from rondo.data.content import counted
from rondo.data.files import JsonRows, open_jsonl, open_parquet
from rondo.data.images import COLUMNS, ImageFolder, Images
from rondo.data.plain import (
    MOST_LEVELS,
    DatasetRows,
    Rows,
    WithoutColumns,
    is_media,
    kept_columns,
    plain,
)
from rondo.data.shards import files_of, is_pattern
from rondo.system.border import users_code
from rondo.system.streams import drawing
from rondo.system.urls import is_url

_WAY_OUT = {
    "unknown_parameter": ". Take it out, or leave it out here: ignore_message_keys of the source",
    "invalid_value": ". Mend it, or leave the key out here: ignore_message_keys of the source",
}
"""By what is wrong with a message."""

_OF_TEMPLATE = ("enable_thinking", "chat_template_kwargs")
"""Columns that other trainers (verl, TRL) give to the template, row by row."""

FIRST = 1 << 12
"""Rows of a large source that are looked at before anything starts."""
WHOLE = 1 << 15
"""Rows of a source that is read whole before anything starts, at most."""


@dataclass(frozen=True)
class Source(Rows):
    """The rows of one configured source, which know where they are from."""

    config: SourceConfig = field(kw_only=True)
    """The source as data.sources configures it."""
    shared_tools: Sequence[Any] = ()
    """Schemas of rollout.tools, which every prompt is written with."""
    template: TemplateKeys = field(default_factory=TemplateKeys)
    """What the chat template reads of a message."""
    images: Images | None = None
    """How images of rows are found; None: the model reads none."""

    @functools.cached_property
    def name(self) -> str:
        """Its name, which goes into prompt ids and metrics."""
        return source_name(self.config)

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, row: int) -> str:
        """Says where a row is from, for messages: `prompts.jsonl, line 17`."""
        return f"{self.origin}, row {row}" if self.place is None else self.place(row)

    def error(self, row: int, message: str) -> DataError:
        """Returns a DataError that says which row of which source it is about."""
        return DataError(f"source {self.name!r} ({self.where(row)}): {message}")

    @contextlib.contextmanager
    def about(self, row: int) -> Iterator[None]:
        """Adds source, file and line to a DataError raised inside."""
        try:
            yield
        except DataError as error:
            raise self.error(row, str(error)) from error

    def check_meant(self, row: int) -> None:
        """Raises DataError for a row that says what nothing here reads: options of the template, or pictures,
        films or sound of which the model would see nothing.
        """
        found = self.rows[row]
        for name in _OF_TEMPLATE:
            if found.get(name) not in (None, {}, "{}"):
                raise self.error(
                    row,
                    f"column {name!r} is an option of the chat template for this row, and here all rows have "
                    "those of model.chat_template_options; train on rows that share it, and leave the column "
                    f"out: drop_columns: [{name}] of the source (or call it otherwise, if it is none)",
                )
        shown = self.image_column(row)
        of = "text" if shown is None else f"text and the images of column {shown!r}"
        for name in found if self.media is None else [name for name in self.media if name in found]:
            if name != shown and is_media(name, found[name]):
                raise self.error(
                    row,
                    f"column {name!r} holds pictures, films or sound, and rondo trains on {of}; take such "
                    f"rows out, or train without what they show: drop_columns: [{name}] of the source",
                )

    def fields(self, row: int) -> dict[str, Any]:
        """Returns what rewards get of a row: its columns but for the prompt and the images."""
        without = (self.config.prompt_key, self.image_column(row))
        return {name: value for name, value in self.rows[row].items() if name not in without}

    def digest(self, size: int) -> str:
        """Returns what is another where one of the first `size` rows has other content, in a column that is
        kept. Of more than WHOLE rows it reads FIRST, evenly spaced, and the last one.
        """
        read = range(size) if size <= WHOLE else [*(i * size // FIRST for i in range(FIRST)), size - 1]
        found = hashlib.sha256()
        for row in counted(read, f"{self.name}: compared"):
            found.update(_line(self.rows[row]).encode() + b"\n")
        return found.hexdigest()[:32]

    def image_column(self, row: int) -> str | None:
        """Returns the column with a row's images; None: it has none, or the model reads none. Raises
        DataError where there is none of the configured name.
        """
        if self.images is None:
            return None
        there, key = self.rows[row], self.config.image_key
        if key is not None and key not in there:
            raise self.error(row, f"no column {key!r} (image_key){did_you_mean(key, there)}")
        return key or next((name for name in COLUMNS if name in there), None)

    def read(self, row: int, given: Any, *, takes_flags: bool = False, whole: bool = True) -> Conversation:
        """Reads a string (one user message) or a list of messages of a row.

        takes_flags: whether messages may say that they are not learnt. whole: it is all that the row asks,
        and gets the source's system prompt in front, and the row's images. Raises DataError.
        """
        with self.about(row):
            try:
                messages = as_messages(given) if isinstance(given, str) else plain(given)
                read = self._readers[takes_flags].read(messages)
                if self.images is not None and whole:
                    column = self.image_column(row)
                    read = self.images.of_row(read, column and plain(self.rows[row][column]))
            except MessageError as error:
                raise DataError(f"{error}{_WAY_OUT.get(error.code, '')}") from error
        return read.behind(self.config.system_prompt) if whole else read

    def expanded(
        self, row: int, arrays: Sequence[np.ndarray], images: Sequence[ImagePart]
    ) -> list[np.ndarray]:
        """Returns a row's token ids, and arrays beside them, with all tokens of images in the place of their
        placeholders. Raises DataError.
        """
        if not images:
            return list(arrays)
        assert self.images is not None
        with self.about(row):
            return self.images.expanded(arrays, images, self._image_folder)

    @functools.cached_property
    def _image_folder(self) -> ImageFolder:
        return ImageFolder.of(self.config)

    def references(self, row: int, images: Sequence[ImagePart]) -> tuple[ImageRef, ...]:
        """Returns what rows hold of a row's images. Raises DataError."""
        if not images:
            return ()
        assert self.images is not None
        with self.about(row):
            return self.images.references(images, self._image_folder)

    @functools.cached_property
    def _readers(self) -> tuple[MessageReader, MessageReader]:
        """The reader of messages without flags, and that of messages that may have some."""
        reader = MessageReader(
            self.template,
            frozenset(self.config.ignore_message_keys),
            takes_images=self.images is not None,
        )
        return reader, dataclasses.replace(reader, takes_flags=True)

    def prompt(self, row: int) -> Any:
        """Returns the prompt of a row as it was written. Raises DataError for an absent or empty one."""
        found, key = self.rows[row], self.config.prompt_key
        prompt = plain(below(found, key))
        if prompt is None and key not in found:
            raise self.error(
                row,
                f"no column {key!r}{did_you_mean(key, found)} "
                f"Columns: {', '.join(found)}. Set prompt_key to the column that holds the prompt",
            )
        if prompt is None or prompt == [] or (isinstance(prompt, str) and not prompt.strip()):
            raise self.error(row, f"the prompt (column {key!r}) is empty; take the row out")
        return prompt

    def tools(self, row: int) -> Any:
        """Returns a row's tool schemas for the chat template: of rollout.tools, or the row's own (column
        `tools`: a list, or its JSON text), which clients and agents know what to do with. Raises DataError
        where it has both, and they differ.
        """
        own = self._own_tools(row)
        if not self.shared_tools:
            return own
        shared = list(self.shared_tools)
        if own is not None and own != shared:
            raise self.error(
                row,
                "column 'tools' and rollout.tools both say which tools there are, and differ; leave one out "
                "(drop_columns: [tools] leaves out the column)",
            )
        return shared

    def _own_tools(self, row: int) -> list[Any] | None:
        tools = plain(self.rows[row].get("tools"))
        if not tools:
            return None
        schemas = self._from_json(row, tools)
        if isinstance(schemas, list):
            schemas = [self._from_json(row, schema) for schema in schemas]
        if not isinstance(schemas, list) or not all(isinstance(schema, Mapping) for schema in schemas):
            raise self.error(
                row, f"column 'tools' must be a list of schemas or its JSON text, got {tools!r:.80}"
            )
        return schemas or None

    def _from_json(self, row: int, given: Any) -> Any:
        try:
            return json.loads(given) if isinstance(given, str) else given
        except ValueError as error:
            raise self.error(row, f"column 'tools' is no JSON: {error}") from error


def below(columns: Mapping[str, Any], key: str) -> Any:
    """Returns a row's column of that name; of `a.b`, where there is none, what the mapping in column `a` has
    under `b`. None: there is nothing.
    """
    first, _, rest = key.partition(".")
    if key in columns or not rest:
        return columns.get(key)
    found = plain(columns.get(first))
    return below(found, rest) if isinstance(found, Mapping) else None


def source_name(config: SourceConfig) -> str:
    """Returns the configured name, or the last part of path or task without its suffix."""
    if config.name:
        return config.name
    text = config.task if isinstance(config, TaskSourceConfig) else config.path
    if not isinstance(text, str):
        if len(text) > 1:
            raise ConfigError("data: a source of several paths needs a name of its own: {name: …}")
        text = text[0]
    if config.type == "function":
        return text.replace(":", ".").rsplit(".", 1)[-1]
    if is_url(text):
        text = text.partition("?")[0]  # the query may be a key, and a name is in every prompt's id
    path = Path(text)
    while is_pattern(path.name) and path.parent != path:  # the folder that a pattern looks in
        path = path.parent
    return path.stem if config.type in ("parquet", "jsonl") else path.name


def open_source(config: SourceConfig) -> Source:
    """Reads or makes the rows of one source.

    Raises ConfigError for missing files, packages and functions; DataError for content: broken lines, rows
    that are no objects, no rows at all. Which keys a type has is checked when a configuration is loaded.
    """
    name = source_name(config)
    with _named(name):
        found = _OPENERS[config.type](config)
        if not len(found.rows):
            raise DataError(f"{found.origin} has no rows")
        if config.drop_columns and isinstance(found.rows, list | JsonRows):  # Arrow reads what is kept
            shown = found.rows if isinstance(found.rows, list) else found.rows[:FIRST]
            kept_columns(dict.fromkeys(name for row in shown for name in row), config, found.origin)
            found = dataclasses.replace(found, rows=WithoutColumns(found.rows, config.drop_columns))
    return Source(found.rows, found.origin, found.place, found.media, found.stamp, config=config)


def _line(row: Mapping[str, Any]) -> str:
    """Writes a row down: the same text in every process, whatever the order of its columns."""
    try:
        return json.dumps(sorted(row.items()), default=_told)
    except TypeError:  # keys that are no text
        return json.dumps(sorted(plain(row).items()), default=_told)


def _told(value: Any) -> Any:
    """Returns what stands for a value that JSON lacks. Of an object nobody knows it is its kind: its text may
    say where it lies.
    """
    if isinstance(value, Mapping | np.ndarray | np.generic):
        return plain(value)
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, Set):
        return sorted(map(str, value))
    module, _, _ = type(value).__module__.partition(".")
    is_value = module in ("datetime", "decimal", "fractions", "pandas", "pathlib", "uuid")
    return str(value) if is_value else type(value).__name__


def check_source(config: SourceConfig) -> None:
    """Raises ConfigError, as `open_source` would, without reading rows: for the file, or the function and its
    options.
    """
    with _named(source_name(config)):
        if isinstance(config, FileSourceConfig):
            files_of(config)
        elif isinstance(config, TaskSourceConfig) and config.type == "function":
            _function_of(config)


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Puts the source's name in front of an error raised inside."""
    try:
        yield
    except (ConfigError, DataError) as error:
        raise type(error)(f"source {name!r}: {error}") from error


def open_sources(
    configs: Sequence[SourceConfig],
    tools: Sequence[Any] = (),
    template: TemplateKeys | None = None,
    images: Images | None = None,
) -> tuple[Source, ...]:
    """Opens all sources. tools: schemas that all prompts are written with. template: what the chat template
    reads of messages. images: how those of rows are found; None: the model reads none. Raises ConfigError
    when there are none, or two have one name (names go into prompt ids and metrics).
    """
    if not configs:
        raise ConfigError(
            "data: no source of rows is configured; add one under data.train, e.g. {type: jsonl, path: …}"
        )
    names = [source_name(config) for config in configs]
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(
                f"data: {count} sources are called {name!r}; give each its own name: {{name: …}}"
            )
        if "/" in name:
            raise ConfigError(f"data: source name {name!r} must not contain '/'; it is a part of prompt ids")
    for config in configs:
        if images is None and (config.image_key or config.image_dir):
            raise ConfigError(
                f"source {source_name(config)!r}: image_key and image_dir are for a model that reads images, "
                "and this one does not; remove them"
            )
    keys = template or TemplateKeys()
    return tuple(
        dataclasses.replace(open_source(config), shared_tools=tools, template=keys, images=images)
        for config in configs
    )


# ---------------------------------------------------------------------------------------------------------
# libraries


def _open_huggingface(config: HuggingfaceSourceConfig) -> Rows:
    """Opens a folder written by `save_to_disk`, a folder or file of data, or a hub id. options go to
    `load_dataset`.
    """
    try:
        import datasets
    except ImportError as error:
        remedy = "pip install 'rondo-rl[datasets]'"
        raise ConfigError(f"type huggingface needs the package datasets: {remedy}") from error

    path = Path(config.path).expanduser()
    try:
        with drawing():
            data = _load_dataset(datasets, path, config)
    except ConfigError:
        raise
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        kind = "on this machine" if path.exists() else "on the hub (no local file or folder has that name)"
        shown = masked("options", config.options)
        raise ConfigError(
            f"dataset {config.path!r} {kind}, split {config.split!r}, options {shown} "
            f"cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if isinstance(data, Mapping):
        if config.split not in data:
            near = did_you_mean(config.split, data)
            raise ConfigError(f"no split {config.split!r} in {path}{near} Splits: {', '.join(data)}")
        data = data[config.split]
    if config.size is not None:
        data = data.select(range(min(config.size, len(data))))
    origin = f"{config.path}[{config.split}]"
    data = data.select_columns(kept_columns(data.column_names, config, origin)).with_format(None)
    features = data.features  # a copy
    _leave_files(datasets, features)
    data.info.features = datasets.Features(features)
    return Rows(DatasetRows(data, origin), origin, stamp=data._fingerprint)


def _leave_files(datasets: Any, features: Any) -> None:
    """Has features of a data set hand out images as the files that they are, not decoded: what a file says of
    itself (how it is turned, say) would be lost.
    """
    if isinstance(features, datasets.Image):
        features.decode = False
    elif isinstance(features, Mapping | list | tuple):
        for feature in features.values() if isinstance(features, Mapping) else features:
            _leave_files(datasets, feature)
    elif hasattr(features, "feature"):  # of a list
        _leave_files(datasets, features.feature)


_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}


def _load_dataset(datasets: Any, path: Path, config: HuggingfaceSourceConfig) -> Any:
    has_splits = (path / "dataset_dict.json").is_file()
    if has_splits or (path / "state.json").is_file():
        if config.options:
            raise ConfigError(
                f"options are for datasets.load_dataset, and {path} is read as save_to_disk wrote it"
            )
        if config.split != HuggingfaceSourceConfig.split and not has_splits:
            raise ConfigError(
                f"split {config.split!r}: {path} is one data set of save_to_disk and has no splits; leave "
                "split out to read all of it, or save a DatasetDict"
            )
        return datasets.load_from_disk(str(path))
    options = called_with(config.options, "options")
    if path.is_file():
        if path.suffix not in _BUILDERS:
            raise ValueError(f"files must end in {', '.join(_BUILDERS)}")
        files = {config.split: str(path)}
        return datasets.load_dataset(_BUILDERS[path.suffix], data_files=files, **options)[config.split]
    name = str(path) if path.exists() else config.path
    return datasets.load_dataset(name, split=config.split, **options)


def import_reasoning_gym() -> Any:
    """Returns the package reasoning_gym. Raises ConfigError with the remedy when it is missing."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            "reasoning_gym tasks need the package reasoning-gym: pip install 'rondo-rl[reasoning-gym]'"
        ) from error
    return reasoning_gym


def _open_reasoning_gym(config: TaskSourceConfig) -> Rows:
    """Makes `size` entries of a task. A row carries what the `reasoning_gym` scorer needs: task, its options,
    and the entry.
    """
    gym = import_reasoning_gym()
    from reasoning_gym.factory import DATASETS

    task = config.task
    if task not in DATASETS:
        raise ConfigError(f"reasoning_gym has no task {task!r}{did_you_mean(task, DATASETS)}")
    settings = dict(config.options)
    settings.setdefault("seed", config.seed)
    if config.size is not None:
        settings["size"] = config.size
    check_options(DATASETS[task][1], settings, f"task {task}", given=0)
    try:
        dataset = gym.create_dataset(task, **settings)
        entries = [dataset[i] for i in range(len(dataset))]
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"reasoning_gym task {task!r} refuses {settings}: {error}") from error
    same = {"task": task, "task_options": settings}
    rows = [
        {config.prompt_key: entry["question"], "answer": entry["answer"], **same, "entry": entry}
        for entry in entries
    ]
    return Rows(rows, f"reasoning_gym {task}, seed {settings['seed']}")


def _open_function(config: TaskSourceConfig) -> Rows:
    task = config.task
    make = _function_of(config)
    with users_code(task, DataError):
        made = make()
        if isinstance(made, str | bytes | Mapping) or not isinstance(made, Iterable):
            raise ConfigError(f"{task} must return a list of mappings, it returned {type(made).__name__}")
        rows = list(counted(itertools.islice(made, config.size), task))
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            kind = type(row).__name__
            raise DataError(f"{task}, row {i}: a row must be a mapping, got {kind}: {row!r:.80}")
        if is_deep(row, MOST_LEVELS):
            raise DataError(f"{task}, row {i}: is nested more than {MOST_LEVELS} deep, or holds itself")
    return Rows(rows, task)


def _function_of(config: TaskSourceConfig) -> Callable[[], Any]:
    """Binds the source's function to its options, and to its `seed` and `size` where it takes these."""
    task = config.task
    function = resolve_function(task)
    options = called_with(config.options, f"function {task}")
    accepted = inspect.signature(function).parameters
    if "seed" in accepted:
        options.setdefault("seed", config.seed)
    elif config.seed:
        raise ConfigError(f"seed is set, but {task} has no parameter 'seed'")
    if "size" in accepted and config.size is not None:
        options.setdefault("size", config.size)
    check_options(function, options, f"function {task}", given=0)
    return functools.partial(function, **options)


_OPENERS: Mapping[str, Callable[[Any], Rows]] = {
    "parquet": open_parquet,
    "jsonl": open_jsonl,
    "huggingface": _open_huggingface,
    "reasoning_gym": _open_reasoning_gym,
    "function": _open_function,
}
