"""The controller's part of a checkpoint: counters, the ledger, and the buffer's groups.

controller.json        step, version, timers, and whatever else is small
compatibility.json     the settings that a resumed run must share
buffer/ledger.jsonl    the account of every prompt
buffer/group-*.parquet the complete groups that were waiting
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rondo.batch import Batch
from rondo.config.compare import changes, leaves_of
from rondo.config.schema import Config
from rondo.errors import CheckpointError

_GROUP = re.compile(r"group-(\d{8,})\.parquet")

# What decides which prompts come, in which order, with which noise, and which tensors the checkpoint holds.
# Anything else (learning rate, clip ratios, number of devices, total steps, …) may change on resume.
FIXED_KEYS = (
    "model",
    "data.train",
    "data.batch_size",
    "data.max_prompt_tokens",
    "data.overlong_prompts",
    "data.shuffle",
    "rollout.n",
    "rollout.recorded",
    "trainer.seed",
    "trainer.warm_start",
    "critic.path",
    "reference.path",
)
# Below a fixed key, but without effect on numbers.
FREE_KEYS = ("model.attention", "model.trust_remote_code")


@dataclass(frozen=True)
class ControllerState:
    """What the controller of a run goes on from. Everything but `groups` is JSON.

    No generator has a state to save: every draw is seeded by what it is for (`rondo.types.request_seed`).
    """

    step: int
    version: int
    # Totals of the run's clock (`Clock.state`).
    timers: Mapping[str, Any] = field(default_factory=dict)
    # Anything small: the KL coefficient, the position in the journal, …
    extra: Mapping[str, Any] = field(default_factory=dict)
    # The buffer's account of every prompt (`Ledger.records`).
    ledger: Sequence[Mapping[str, Any]] = ()
    # Complete groups by prompt sequence number, every column fetched.
    groups: Mapping[int, Batch] = field(default_factory=dict)


def save_controller_state(path: Path, state: ControllerState, compatibility: Mapping[str, Any]) -> None:
    """Write into a checkpoint folder under way (`CheckpointStore.writing`).

    Raises CheckpointError on what JSON has not.
    """
    names = [f.name for f in dataclasses.fields(state) if f.name not in ("ledger", "groups")]
    _write_json(path / "controller.json", {name: getattr(state, name) for name in names})
    _write_json(path / "compatibility.json", compatibility)
    folder = path / "buffer"
    folder.mkdir()
    lines = [_dump(record, folder / "ledger.jsonl") + "\n" for record in state.ledger]
    (folder / "ledger.jsonl").write_text("".join(lines), encoding="utf-8")
    for seq, batch in sorted(state.groups.items()):
        batch.write_parquet(folder / f"group-{seq:08d}.parquet")


def load_controller_state(path: Path) -> tuple[ControllerState, dict[str, Any]]:
    """(state, compatibility record) of a verified checkpoint. Raises CheckpointError naming the file."""
    small = _read_json(path / "controller.json")
    folder = path / "buffer"
    ledger = _read_lines(folder / "ledger.jsonl")
    try:
        files = {int(match[1]): file for file in folder.iterdir() if (match := _GROUP.fullmatch(file.name))}
        groups = {seq: Batch.read_parquet(file) for seq, file in sorted(files.items())}
        state = ControllerState(**small, ledger=ledger, groups=groups)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: the controller's state cannot be read: {error}") from error
    return state, _read_json(path / "compatibility.json")


def compatibility_record(config: Config) -> dict[str, Any]:
    """The settings that must not change on resume, one entry per leaf: `data.batch_size`,
    `data.train.0.path`, …

    Take it from the configuration as the user wrote it, before a warm start sets `model.path`.
    """
    record = leaves_of(config, only=FIXED_KEYS, free=FREE_KEYS)
    # A key that a later version of rondo adds, unset, must not make an older checkpoint another run's.
    return {key: value for key, value in record.items() if value not in (None, [], {})}


def check_compatible(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raises CheckpointError that lists every key whose value changed, with the old and the new value."""
    lines = "\n".join(f"  {line}" for line in changes(old, new, "in the checkpoint"))
    if lines:
        raise CheckpointError(
            f"the checkpoint was made with other settings, which a resumed run must share:\n{lines}\n"
            "Set them back, or begin another run in a folder of its own: trainer.run_dir=…"
        )


def _dump(value: Any, path: Path) -> str:
    try:
        _require_text_keys(value)
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path.name}: the state to save holds a value that JSON does not have: {error}"
        ) from error


def _require_text_keys(value: Any) -> None:
    """JSON would turn the keys of {3: …} into text without a word, and they would not come back as they
    were."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"a mapping with the key {key!r}; use text keys or a list of pairs")
            _require_text_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _require_text_keys(item)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(_dump(value, path) + "\n", encoding="utf-8")


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object is needed, found {type(value).__name__}")
    return value
