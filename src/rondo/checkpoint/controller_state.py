"""The controller's part of a checkpoint: counters, the ledger, and the buffer's groups.

controller.json        step, version, timers, and whatever else is small
compatibility.json     the settings that a resumed run must share, and how its conversations were read
rows.json              what the rows of the training data were
named.json             what the names of models and code meant
buffer/ledger.jsonl    the account of every prompt
buffer/groups.jsonl    the complete groups that were waiting: number, file, rows
buffer/groups-*.parquet their rows, in this order: a file for those that have the same columns
arrays.npz             the arrays of a program's state
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np

from rondo.checkpoint.store import Checkpoint, Draft
from rondo.config.printing import changes, leaves_of
from rondo.config.schema import Config
from rondo.core.batch import Batch, BatchRef
from rondo.core.errors import CheckpointError, DataError, OtherRunError, RondoError
from rondo.core.readonly import ReadOnlyDict, ReadOnlyList
from rondo.system.storage import DAMAGE

Rows = TypeVar("Rows", Batch, BatchRef)
_STATE = "controller.json"
_COMPATIBILITY = "compatibility.json"
_ROWS = "rows.json"
_NAMED = "named.json"
_LEDGER = "buffer/ledger.jsonl"
_GROUPS = "buffer/groups.jsonl"
_ARRAYS = "arrays.npz"
_ARRAY = "$array"  # the key under which JSON names one
_APART = ("ledger", "groups", "arrays")  # in files of their own
_GROUP = re.compile(r"buffer/group-(\d{8,})\.parquet")  # as an older rondo wrote each

# What decides which prompts come, in which order, with which noise, and which tensors the checkpoint holds.
# Anything else (learning rate, clip ratios, number of devices, total steps, …) may change on resume.
FIXED_KEYS = (
    "model",
    "data.train",
    "data.batch_size",
    "data.max_prompt_tokens",
    "data.max_tokens",
    "data.overlong_prompts",
    "data.turns",
    "data.drop_last",
    "data.shuffle",
    "data.sampler",
    "algorithm.mix",
    "rollout.n",
    "rollout.recorded",
    "trainer.seed",
    "trainer.warm_start",
    "critic.path",
    "critic.override",
    "reference.path",
    "reference.override",
)
# What fixed keys say, by their last name, where a checkpoint is older than they are.
_YOUNGER = {"response_key": "response", "messages_key": "messages", "turns": "sampled", "drop_last": False}
# Below a fixed key, but without effect on numbers.
FREE_KEYS = ("model.attention", "model.hub", "model.trust_remote_code", "model.images.check_seen")
READER = 2
"""How data is read. 0: before this was noted, conversations and a model folder's stop tokens were read
otherwise. 1: rows that are too long were left out of the order of large sources, too.
"""
_READER = "reader"


@dataclass(frozen=True)
class ControllerState:
    """What the controller of a run goes on from. Everything but `groups` and `arrays` is JSON.

    No generator has a state to save: every draw is seeded by what it is for
    (`rondo.core.types.request_seed`).
    """

    step: int
    """Steps of training that are done."""
    version: int
    """The version of the policy."""
    timers: Mapping[str, Any] = field(default_factory=dict)
    """Totals of the run's clock (`Clock.state`)."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Anything small: the KL coefficient, the position in the journal, …"""
    ledger: Sequence[Mapping[str, Any]] = ()
    """The buffer's account of every prompt (`Ledger.records`)."""
    groups: Mapping[int, Batch] = field(default_factory=dict)
    """Complete groups by prompt sequence number, every column fetched."""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The arrays that `extra` names."""


def save_controller_state(
    draft: Draft,
    state: ControllerState,
    compatibility: Mapping[str, Any],
    rows: Mapping[str, Any] | None = None,
    named: Mapping[str, Any] | None = None,
) -> None:
    """Writes into a checkpoint under way. rows: what the rows of the training data are, named: what is meant
    by the names of models and code, if it has some. Raises CheckpointError on what JSON does not have.
    """
    names = [f.name for f in dataclasses.fields(state) if f.name not in _APART]
    small = {name: getattr(state, name) for name in names}
    draft.write(_STATE, _json(small, _STATE))
    settings = _json({**compatibility, _READER: READER}, _COMPATIBILITY)
    draft.write(_COMPATIBILITY, settings, private=True)
    for file, content in ((_ROWS, rows), (_NAMED, named)):
        if content:
            draft.write(file, _json(content, file))
    draft.write(_LEDGER, b"".join(_json(record, _LEDGER) for record in state.ledger))
    places = []
    for number, groups in enumerate(alike(dict(sorted(state.groups.items())))):
        table, file = io.BytesIO(), f"buffer/groups-{number}.parquet"
        Batch.concat(list(groups.values())).write_parquet(table)
        draft.write(file, table.getvalue())
        places += [{"seq": seq, "file": file, "rows": len(batch)} for seq, batch in groups.items()]
    draft.write(_GROUPS, b"".join(_json(place, _GROUPS) for place in places))
    if state.arrays:
        file_of_arrays = io.BytesIO()
        by_name: dict[str, Any] = dict(state.arrays)
        np.savez(file_of_arrays, **by_name)
        draft.write(_ARRAYS, file_of_arrays.getvalue())


def alike(groups: Mapping[int, Rows]) -> list[dict[int, Rows]]:
    """Returns the groups, by sequence number, in parts of which all have the same columns."""
    found: dict[tuple[str, ...], dict[int, Rows]] = {}
    for seq, rows in groups.items():
        found.setdefault(tuple(sorted(rows.columns)), {})[seq] = rows
    return list(found.values())


def load_controller_state(checkpoint: Checkpoint) -> ControllerState:
    """Raises CheckpointError naming the file that is damaged, or that another version wrote."""
    with _reading(checkpoint, _LEDGER):
        ledger = [json.loads(line) for line in checkpoint.read(_LEDGER).splitlines()]
    groups = {
        int(match[1]): _rows(checkpoint, name)
        for name in sorted(checkpoint.files)
        if (match := _GROUP.fullmatch(name))
    }
    places: dict[str, dict[int, int]] = {}
    with _reading(checkpoint, _GROUPS):
        for line in checkpoint.read(_GROUPS).splitlines() if _GROUPS in checkpoint.files else ():
            place = json.loads(line)
            places.setdefault(place["file"], {})[place["seq"]] = place["rows"]
    for file, sizes in places.items():
        rows = _rows(checkpoint, file)
        with _reading(checkpoint, file):
            groups |= zip(sizes, rows.cut(list(accumulate(sizes.values()))), strict=True)
    arrays: dict[str, np.ndarray] = {}
    if _ARRAYS in checkpoint.files:
        with _reading(checkpoint, _ARRAYS):
            with np.load(io.BytesIO(checkpoint.read(_ARRAYS)), allow_pickle=False) as file_of_arrays:
                arrays = dict(file_of_arrays)
    with _reading(checkpoint, _STATE):
        small = json.loads(checkpoint.read(_STATE))
        return ControllerState(**small, ledger=ledger, groups=groups, arrays=arrays)


def _rows(checkpoint: Checkpoint, name: str) -> Batch:
    with _reading(checkpoint, name):
        return Batch.read_parquet(io.BytesIO(checkpoint.read(name)))


def load_compatibility(checkpoint: Checkpoint) -> tuple[dict[str, Any], int]:
    """Returns the settings that a resumed run must share with the checkpoint's, and the READER that wrote it.
    Raises as `load_controller_state`.
    """
    with _reading(checkpoint, _COMPATIBILITY):
        record = dict(json.loads(checkpoint.read(_COMPATIBILITY)))
        return record, int(record.pop(_READER, 0))


def load_rows(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns what the rows of the training data were; nothing where an older rondo wrote it. Raises as
    `load_controller_state`.
    """
    return _small(checkpoint, _ROWS)


def load_named(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns what the names of models and code meant; nothing where an older rondo wrote it. Raises as
    `load_controller_state`.
    """
    return _small(checkpoint, _NAMED)


def _small(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    with _reading(checkpoint, name):
        return dict(json.loads(checkpoint.read(name))) if name in checkpoint.files else {}


@contextmanager
def taking_over(checkpoint: Checkpoint) -> Iterator[None]:
    """Turns errors inside, while a state that could be read is taken over, into those of
    `load_controller_state`: it is no state of a run.
    """
    try:
        yield
    except RondoError:  # of code of the user's that goes on with a state, too
        raise
    except DAMAGE as error:
        raise _unreadable(checkpoint, _STATE, error) from error


@contextmanager
def _reading(checkpoint: Checkpoint, name: str) -> Iterator[None]:
    """Turns what a file says that is no part of a run's state into a CheckpointError that names the file."""
    try:
        yield
    except (DataError, *DAMAGE) as error:
        if isinstance(error, RondoError) and not isinstance(error, DataError):
            raise
        raise _unreadable(checkpoint, name, error) from error


def _unreadable(checkpoint: Checkpoint, name: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.path / name}: cannot be read as the part of a run that it is: {error!r}; it was "
        "changed, or another version of rondo wrote it"
    )


def compatibility_record(config: Config) -> dict[str, Any]:
    """Returns the settings that must not change on resume, one entry per leaf: `data.batch_size`,
    `data.train.0.path`, …

    Take it from the configuration as the user wrote it, before a warm start sets `model.path`.
    """
    record = leaves_of(config, only=FIXED_KEYS, free=FREE_KEYS)
    # A key that a later version of rondo adds, unset, must not make an older checkpoint another run's.
    return {
        key: value
        for key, value in record.items()
        if value not in (None, [], {}) and value != _YOUNGER.get(key.rpartition(".")[2], ())
    }


def check_compatible(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raises OtherRunError that lists every key whose value changed, with the old and the new value."""
    lines = "\n".join(f"  {line}" for line in changes(old, new, "in the checkpoint"))
    if lines:
        raise OtherRunError(
            f"the checkpoint was made with other settings, which a resumed run must share:\n{lines}\n"
            "Set them back, or begin another run in a folder of its own: trainer.run_dir=…"
        )


def _json(value: Any, name: str) -> bytes:
    """Returns a line of JSON. Raises CheckpointError naming the file where it would come back changed."""
    try:
        _require_text_keys(value)
        return json.dumps(value, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{name}: the state to save holds a value that JSON does not have: {error}"
        ) from error


def _require_text_keys(value: Any) -> None:
    """Refuses keys that are no text: JSON would silently turn those of {3: …} into text, and they would come
    back changed.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"a mapping with the key {key!r}; use text keys or a list of pairs")
            _require_text_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _require_text_keys(item)


# ---- values of a program: JSON as it is, arrays beside it, nothing that would come back as something else


def pack(value: Any, where: str, arrays: dict[str, np.ndarray]) -> Any:
    """Returns a copy of the value as JSON, which names the arrays that it adds to `arrays`.

    where: the value's name, for messages. Raises CheckpointError naming the place of what a checkpoint cannot
    give back as it is: tuples, sets, keys that are no text, numbers that are not finite, numpy's scalars of
    less than 64 bits, tensors, objects, and kinds of dict, list and array of their own (a Counter would come
    back as a dict).
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and np.isfinite(value):
        return float(value)
    if type(value) is np.ndarray and not value.dtype.hasobject:
        arrays[str(len(arrays))] = value.copy()
        return {_ARRAY: str(len(arrays) - 1)}
    if type(value) in (list, ReadOnlyList):
        return [pack(item, f"{where}[{place}]", arrays) for place, item in enumerate(value)]
    if type(value) in (dict, ReadOnlyDict) and all(isinstance(key, str) and key != _ARRAY for key in value):
        return {key: pack(item, f"{where}[{key!r}]", arrays) for key, item in value.items()}
    kind = f"a mapping with other keys than text, or {_ARRAY!r}" if type(value) is dict else f"{value!r:.60}"
    raise CheckpointError(
        f"{where} is {kind} ({type(value).__name__}), which a checkpoint cannot give back as it is; it takes "
        "None, booleans, numbers that are finite, text, lists, dicts with text as keys, and numpy arrays "
        "(of numbers, booleans or text, of any shape)"
    )


def unpack(packed: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Returns the value that `pack` was given."""
    if isinstance(packed, list):
        return [unpack(item, arrays) for item in packed]
    if isinstance(packed, dict):
        if _ARRAY in packed:
            return arrays[packed[_ARRAY]]
        return {key: unpack(item, arrays) for key, item in packed.items()}
    return packed
