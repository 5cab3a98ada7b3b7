"""One trajectory with its rows and their tokens, as the run's files have them: nothing is computed anew."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rondo.core.errors import DataError
from rondo.core.types import TURN_KINDS
from rondo.tracking.run_folder import TOKENS
from rondo.tracking.runs import settings_of

# What a token may be coloured by: columns of a step's tokens, beside those of its rows.
_OF_TOKENS = ("advantages", "old_log_probs", "values", "entropy", "ref_log_probs")
_LONG = ("prompt_ids", "response_ids", "prompt_text", "text", "transcript", "anchor", "images")


def rows_of(run: Path, file: Path, trajectory: str) -> list[dict[str, Any]]:
    """Returns the rows of a trajectory for a page: numbers of the row (`about`), its texts, and its
    tokens (`tokens`: columns of the same length). Raises DataError.
    """
    rows = sorted(_read(file, "trajectory_id", trajectory), key=lambda row: row["step_index"])
    if not rows:
        raise DataError(f"{file}: has no trajectory {trajectory}")
    kept = file.with_name(file.name.removesuffix(".parquet") + TOKENS)
    by_row = {row["row_id"]: row for row in _read(kept, "trajectory_id", trajectory)} if kept.exists() else {}
    return [_page_row(run, row, by_row.get(row["row_id"])) for row in rows]


def schema_of(file: Path) -> pa.Schema:
    """Returns the columns of a step's file. Raises DataError."""
    try:
        return pq.read_schema(min(file.iterdir()) if file.is_dir() else file).remove_metadata()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error


def selected(file: Path, ids: Sequence[str]) -> pa.Table:
    """Returns whole rows of a step's file. Raises DataError."""
    try:
        return pq.read_table(file, filters=[("trajectory_id", "in", ids)])
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error


def _read(file: Path, column: str, value: str) -> list[dict[str, Any]]:
    try:
        return pq.read_table(file, filters=[(column, "=", value)]).to_pylist()  # type: ignore[no-any-return]
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error


def _page_row(run: Path, row: Mapping[str, Any], kept: Mapping[str, Any] | None) -> dict[str, Any]:
    ids, length = row["response_ids"], len(row["response_ids"])
    columns: dict[str, Any] = {
        "id": ids,
        "trained": row["response_mask"],
        "log_prob": row["rollout_log_probs"],
        "version": row["policy_versions"],
        "turn": _turns(row, length),
    }
    for name in _OF_TOKENS:
        value = (kept or {}).get(name)
        if isinstance(value, int | float):  # of a row, where the estimator gives one for all its tokens
            value = [value if trained else 0.0 for trained in row["response_mask"]]
        if value is not None and len(value) == length:
            columns[name] = value
    if "old_log_probs" in columns:
        pairs = zip(columns["old_log_probs"], columns["log_prob"], columns["trained"], strict=True)
        columns["gap"] = [new - old if trained else None for new, old, trained in pairs]
    columns["text"], why = _texts(run, row)
    return {
        "about": {k: v for k, v in row.items() if k not in _LONG and not isinstance(v, list)},
        "prompt": row.get("prompt_text") or "",
        "said": row.get("transcript") or row["text"],
        "tokens": columns,
        "no_texts": why,
        "kept": kept is not None,
    }


def _turns(row: Mapping[str, Any], length: int) -> list[str]:
    """Returns who wrote each token."""
    kinds: list[str] = []
    for kind, stop in zip(row.get("turn_kinds") or (), row.get("turn_stops") or (), strict=False):
        kinds += [TURN_KINDS[kind]] * (stop - len(kinds))
    if kinds:
        return (kinds + [""] * length)[:length]
    return ["policy" if trained else "" for trained in row["response_mask"]]


def _texts(run: Path, row: Mapping[str, Any]) -> tuple[list[str] | None, str]:
    """Returns the text of each token; or None, and why: no tokenizer is there, or another one than the run's,
    by which these tokens say something else.
    """
    found = _tokenizer(run)
    if found is None:
        return None, "no tokenizer.json lies in its export or its model's folder"
    from tokenizers.decoders import DecodeStream

    path, tokenizer = found
    said, ids = tokenizer.decode(row["response_ids"], skip_special_tokens=True), row["response_ids"]
    if row["text"].strip() not in said:
        return None, f"{path} reads these tokens differently than the run did"
    stream = DecodeStream(skip_special_tokens=False)
    # Of a character in several tokens the last one has it; one that is cut off stands behind all.
    texts = [stream.step(tokenizer, one) or "" for one in ids]
    whole, joined = tokenizer.decode(ids, skip_special_tokens=False), "".join(texts)
    if texts and whole.startswith(joined):
        texts[-1] += whole[len(joined) :]
    return texts, ""


@functools.lru_cache(maxsize=8)
def _tokenizer(run: Path) -> tuple[Path, Any] | None:
    """Returns the tokenizer of a run's model, without any of its code."""
    from tokenizers import Tokenizer

    settings = settings_of(run) if (run / "config.yaml").is_file() else {}
    named = [str(settings[key]) for key in ("model.tokenizer", "model.path") if settings.get(key)]
    for folder in (run / "export", *map(Path, named), run / "warm_start" / "export"):
        path = folder / "tokenizer.json"
        if path.is_file():
            return path, Tokenizer.from_file(str(path))
    return None
