"""Recorded rollouts: the prompt groups in the Parquet files of an earlier run, in the order in which it
trained on them. One file is one step. What is wrong with a file is a DataError that names it, and the row.
"""

from __future__ import annotations

import glob
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rondo.core.batch import Batch, parquet_parts
from rondo.core.columns import (
    EPISODE,
    GREEDY_REWARD,
    IMAGES,
    SCORE,
    SCORE_PREFIX,
    TOKENIZER,
    column,
    declared,
    judges,
    made_by,
)
from rondo.core.errors import ConfigError, DataError
from rondo.data.rows import is_given, is_scored, trajectory_of_rows

KEY = "rollout.recorded"
_STEP = re.compile(r"step-(\d{6,})\.parquet")
# The columns that `rows_from_trajectories` writes, all of them needed; score/<name> and greedy_reward beside.
NEEDED = made_by(EPISODE, TOKENIZER)
_OF_TOKENS = ".tokens.parquet"  # stands beside a step's rows (tracking.token_columns), and is no recording
_PER_TOKEN = declared("response_mask", "rollout_log_probs", "policy_versions")


@dataclass(frozen=True)
class RowLimits:
    """What the models that read the rows can take."""

    vocab_size: int
    """Of the policy."""
    tokens: int
    """Prompt and response together, at most."""
    tokens_key: str
    """The setting that says so."""
    accuracy: bool = False
    """Whether scored rows must have one."""


@dataclass(frozen=True)
class Recording:
    """What there is to train on."""

    path: str
    """As the user wrote it."""
    run: Path | None
    """Its folder, where it is a whole run's from the first step on."""
    files: tuple[Path, ...]
    """The files to read, in the order of training."""
    groups: tuple[tuple[int, ...], ...]
    """The ids of each file's prompt groups, in the order of training."""
    num_rows: int
    """Rows in all files together."""
    scores: tuple[str, ...]
    """Their names."""
    has_greedy_reward: bool
    """Whether the files have the reward of a greedy answer (ReMax)."""
    has_images: bool = False
    """Whether their rows may have images."""

    @property
    def num_groups(self) -> int:
        return self._ends[-1]

    @cached_property
    def _ends(self) -> list[int]:
        """Returns how many groups there are up to the end of each file."""
        return list(accumulate(map(len, self.groups)))

    def step_sizes(self, batch_size: int) -> list[int]:
        """Counts the prompt groups of each step: as recorded (a run that was made longer has a short step in
        its middle), or, where the recorded steps have another size, one after the other.
        """
        recorded = [len(groups) for groups in self.groups]
        if max(recorded) == batch_size:
            return recorded
        whole, rest = divmod(self.num_groups, batch_size)
        return [batch_size] * whole + [rest] * (rest > 0)

    def place(self, seq: int) -> tuple[int, int]:
        """Returns file and group id of the recording's group number `seq`."""
        if seq >= self.num_groups:
            raise DataError(
                f"{KEY}={self.path} has {self.num_groups} prompt groups; there is none after them"
            )
        file = bisect_right(self._ends, seq)
        return file, self.groups[file][seq - self._ends[file]]

    def version(self, file: int) -> int:
        """Returns the policy version at which the file's step was trained: by its name, or else its place."""
        named = _STEP.fullmatch(self.files[file].name)
        return int(named[1]) - 1 if named else file

    def read(self, file: int, limits: RowLimits) -> Batch:
        """Reads and checks the rows of a file. Raises DataError for rows that would train on something else
        than they say.
        """
        path = self.files[file]
        names = [*NEEDED, *map(SCORE, self.scores)]
        names += [GREEDY_REWARD] if self.has_greedy_reward else []
        names += [IMAGES] if self.has_images else []
        batch = _read(path, names)
        _check_lengths(path, batch, limits)
        _check_tokens(path, batch, limits)
        _check_numbers(path, batch, limits)
        return batch


def open_recording(path: str) -> Recording:
    """Finds what was recorded. path: a run folder, a folder of Parquet files, one file, or a pattern (`*`,
    `?`, `[1-5]`), relative to the working directory. Reads the group ids only. Raises ConfigError where there
    is nothing, DataError naming a file that is broken, empty, missing in the middle, or no recording.
    """
    run, files = _find(path)
    groups: list[tuple[int, ...]] = []
    first: dict[int, Path] = {}  # group id → file
    columns, num_rows = set(_columns(files[0])), 0
    for file in files:
        _check_columns(file, files[0], columns)
        ids = _read(file, ["group_id"]).scalars("group_id")
        if not len(ids):
            raise DataError(f"{file}: has no rows; remove it from the recording")
        groups.append(tuple(_in_order(ids)))
        num_rows += len(ids)
        for group in groups[-1]:
            if group in first:
                raise DataError(
                    f"{file}: prompt group {group} is in {first[group]} too; a recording is of one run, each "
                    f"group once: name other files in {KEY}"
                )
            first[group] = file
    scores = tuple(sorted(filter(None, map(SCORE.member, columns))))
    greedy, images = GREEDY_REWARD in columns, IMAGES in columns
    return Recording(path, run, tuple(files), tuple(groups), num_rows, scores, greedy, images)


def _find(path: str) -> tuple[Path | None, list[Path]]:
    """Returns the run folder, if it is one, and the files in the order of training."""
    place = Path(path)
    if place.name == "rollouts" and (place.parent / "config.yaml").is_file():
        place = place.parent
    if any(character in path for character in "*?[") and not place.exists():
        run, files = None, _sorted(Path(p) for p in glob.glob(path) if not p.endswith(_OF_TOKENS))
    elif place.is_file() or (place.is_dir() and _STEP.fullmatch(place.name)):
        run, files = None, [place]
    elif (place / "rollouts").is_dir():
        run, files = place, _sorted(p for p in (place / "rollouts").iterdir() if _STEP.fullmatch(p.name))
        _check_steps(place, files)
    elif place.is_dir():
        run, files = None, _sorted(p for p in place.glob("*.parquet") if not p.name.endswith(_OF_TOKENS))
    else:
        raise ConfigError(
            f"{KEY}={path}: there is no such file or folder (relative to {Path.cwd()}); name the folder of a "
            "run, or Parquet files from its rollouts/"
        )
    if not files:
        raise ConfigError(
            f"{KEY}={path}: there are no recorded rollouts; a run writes rollouts/step-….parquet with "
            "tracking.save_rollouts=true"
        )
    return run, files


def _sorted(files: Iterator[Path]) -> list[Path]:
    """Sorts files by step number; other names come after those, by name."""

    def key(file: Path) -> tuple[bool, int, str]:
        step = _STEP.fullmatch(file.name)
        return step is None, int(step[1]) if step else 0, str(file)

    return sorted(files, key=key)


def _check_steps(run: Path, files: Sequence[Path]) -> None:
    for step, file in enumerate(files, start=1):
        if file.name != f"step-{step:06d}.parquet":
            raise DataError(
                f"{run / 'rollouts'}: step-{step:06d}.parquet is missing, and {file.name} is there: the run "
                "cannot be trained step by step; put it back (tracking.keep_rollouts removes the oldest), or "
                f"name the files that are wanted in {KEY}"
            )


def _columns(file: Path) -> list[str]:
    try:
        return list(pq.read_schema(parquet_parts(file)[0]).names)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> DataError:
    first = str(error).partition("\n")[0]
    return DataError(f"{file}: cannot be read as Parquet ({first}); a cut-off copy? Copy it again")


def _check_columns(file: Path, first: Path, columns: set[str]) -> None:
    """Checks that a file has what is needed, and the same scores as the first one."""
    found = set(_columns(file))
    missing = [name for name in NEEDED if name not in found]
    if missing:
        raise DataError(
            f"{file}: lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}, which a file "
            "written with tracking.save_rollouts has (see docs/recorded.md)"
        )
    differ = found ^ columns
    differ -= {name for name in differ if name in found and not judges(name)}  # rondo was older at first
    optional = [name for name in differ if name == GREEDY_REWARD or name.startswith(SCORE_PREFIX)]
    if optional:
        name = min(optional)
        has, lacks = (file, first) if name in found else (first, file)
        raise DataError(f"{has} has the column {name}, and {lacks} does not; a recording is of one run")


def _in_order(ids: np.ndarray) -> list[int]:
    """Returns each id once, by its first place."""
    return [int(ids[at]) for at in sorted(np.unique(ids, return_index=True)[1])]


def _read(file: Path, names: Sequence[str]) -> Batch:
    """Reads these columns, in their types."""
    try:
        table = pa.concat_tables(
            [pq.ParquetFile(one).read(columns=list(names)) for one in parquet_parts(file)]
        )
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(file, error) from error
    arrays = {}
    for name in names:
        kind, found = column(name).type, table.column(name)
        try:
            arrays[name] = found.cast(kind)
        except pa.ArrowException as error:
            raise DataError(f"{file}: column {name} is {found.type}, not {kind}: {error}") from error
        if pa.types.is_floating(kind):
            arrays[name] = arrays[name].fill_null(float("nan"))  # pandas writes one for the other
        elif found.null_count:
            _wrong(file, int(np.flatnonzero(found.is_null().to_numpy())[0]), f"{name} is null")
        elif pa.types.is_list(kind) and any(chunk.flatten().null_count for chunk in found.chunks):
            raise DataError(f"{file}: column {name} has a null among its tokens")
    try:
        return Batch.of(arrays)
    except pa.ArrowException as error:
        raise _unreadable(file, error) from error


def _wrong(file: Path, row: int, what: str) -> NoReturn:
    raise DataError(f"{file}: row {row}: {what}")


def _check_lengths(file: Path, batch: Batch, limits: RowLimits) -> None:
    prompt, response = batch.lengths("prompt_ids"), batch.lengths("response_ids")
    found = {name: batch.lengths(name) for name in _PER_TOKEN}
    for name, lengths in found.items():
        for row in np.flatnonzero(lengths != response)[:1]:
            _wrong(file, row, f"{name} has {lengths[row]} entries for {response[row]} response tokens")
    values, bounds = batch.ragged("response_mask")
    trained = np.add.reduceat(np.append(values.numpy(), 0), bounds.numpy()[:-1], dtype=np.int64)
    said = {"prompt_length": prompt, "response_length": response}
    said["num_trained_tokens"] = np.where(response > 0, trained, 0)
    for name, lengths in said.items():
        for row in np.flatnonzero(batch.scalars(name) != lengths)[:1]:
            _wrong(file, row, f"{name} is {batch.scalars(name)[row]}, and there are {lengths[row]}")
    for row in np.flatnonzero(prompt + response > limits.tokens)[:1]:
        _wrong(
            file,
            row,
            f"{prompt[row]} prompt and {response[row]} response tokens are more than {limits.tokens_key}="
            f"{limits.tokens}; raise it, or leave the file out",
        )


def _check_tokens(file: Path, batch: Batch, limits: RowLimits) -> None:
    """Refuses ids that the model does not have: they are of another tokenizer."""
    for name in ("prompt_ids", "response_ids"):
        values, bounds = batch.ragged(name)
        ids = values.numpy()
        for at in np.flatnonzero((ids < 0) | (ids >= limits.vocab_size))[:1]:
            row = int(np.searchsorted(bounds.numpy(), at, side="right")) - 1
            what = f"{name} has the token id {ids[at]}, and the model's vocabulary has {limits.vocab_size}"
            _wrong(file, row, f"{what}: the recording was made with another tokenizer")


def _check_numbers(file: Path, batch: Batch, limits: RowLimits) -> None:
    scored = is_scored(batch)
    for name in ("reward", *(["accuracy"] if limits.accuracy else [])):
        for row in np.flatnonzero(scored & ~np.isfinite(batch.scalars(name)))[:1]:
            needs = "" if name == "reward" else ", which the configured algorithm reads"
            _wrong(file, row, f"its outcome is scored, and its {name} is {batch.scalars(name)[row]}{needs}")
    values, bounds = batch.ragged("rollout_log_probs")
    mask = batch.ragged("response_mask")[0].numpy()
    said = np.repeat(~is_given(batch), np.diff(bounds.numpy()))  # of others the sampler may have said nothing
    said |= ~np.isnan(values.numpy())
    for at in np.flatnonzero((mask > 0) & said & ~np.isfinite(values.numpy()))[:1]:
        row = int(np.searchsorted(bounds.numpy(), at, side="right")) - 1
        _wrong(file, row, f"rollout_log_probs has {values.numpy()[at]} for a token of the policy")
    try:
        trajectory_of_rows(batch)
    except DataError as error:
        raise DataError(f"{file}: {error}") from error
    ids = batch.scalars("row_id")
    for row in np.setdiff1d(np.arange(len(ids)), np.unique(ids, return_index=True)[1])[:1]:
        _wrong(file, row, f"its row_id {ids[row]} is another row's too")
