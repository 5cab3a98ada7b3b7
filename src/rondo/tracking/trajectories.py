"""The trajectories of a run's rollouts: what was asked, said and done, what it earned, why it ended."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rondo.core.errors import DataError
from rondo.system.streams import clean_text

Order = Literal["first", "best", "worst"]
_FILE = re.compile(r"step-(\d+)\.parquet")
_COLUMNS = (
    *("trajectory_id", "prompt_id", "sample_index", "step_index", "prompt_text", "text", "transcript"),
    *("reward", "outcome", "failure", "finish_reason", "response_length"),
)


@dataclass(frozen=True)
class ShownTrajectory:
    """One trajectory."""

    step: int
    """The step that trained on it."""
    prompt_id: str
    """The id of its prompt."""
    sample_index: int
    """Which of the prompt's answers it is."""
    prompt: str
    """The prompt as text."""
    said: str
    """The transcripts of its rows; without any, the text of the last row."""
    reward: float
    """Its reward."""
    scores: Mapping[str, float]
    """Its scores by name."""
    outcome: str
    """What became of it."""
    failure: str
    """Why it failed; empty: it did not."""
    finish_reason: str
    """Why its last call ended."""
    rows: int
    """How many rows it has."""
    tokens: int
    """The tokens of all its rows."""


def read_trajectories(
    run: str | Path,
    *,
    step: int | None = None,
    order: Order = "first",
    failed: bool | None = None,
    prompt: str = "",
    number: int = 3,
) -> list[ShownTrajectory]:
    """Returns trajectories of a run's step (default: the last one that was written).

    order: as they were written, or by reward. failed: only those that failed, or only others. prompt: only
    those whose prompt, or its id, has this text in it. number: at most. Raises DataError.
    """
    if number < 1:
        raise DataError(f"at least one trajectory can be shown, not {number}")
    chosen, file = rollouts_of(run, step)
    found = [
        one
        for one in _trajectories(file, chosen)
        if (failed is None or failed == (one.outcome != "scored"))
        and (prompt in one.prompt or prompt in one.prompt_id)
    ]
    if order != "first":
        scored = [one for one in found if one.outcome == "scored"]
        others = [one for one in found if one.outcome != "scored"]
        found = sorted(scored, key=lambda one: one.reward, reverse=order == "best") + others
    return found[:number]


def rollouts_of(run: str | Path, step: int | None) -> tuple[int, Path]:
    """Returns a step of a run (None: the last one that was written), and its file of rows, or folder of them.
    Raises DataError.
    """
    named = ((_FILE.fullmatch(path.name), path) for path in (Path(run) / "rollouts").glob("*"))
    files = {int(match[1]): path for match, path in named if match}
    if not files:
        raise DataError(f"{run}: has no rollouts (tracking.save_rollouts writes them, a file for each step)")
    chosen = max(files) if step is None else step
    if chosen not in files:
        gaps = "" if len(files) > max(files) - min(files) else f", {len(files)} steps of these"
        raise DataError(
            f"{run}: has no rollouts of step {chosen}; there are {min(files)} to {max(files)}{gaps}"
        )
    return chosen, files[chosen]


def _trajectories(file: Path, step: int) -> list[ShownTrajectory]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(min(file.iterdir()) if file.is_dir() else file).names
        scores = [name for name in names if name.startswith("score/")]
        rows = pq.read_table(file, columns=[n for n in _COLUMNS if n in names] + scores).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: cannot be read as rollouts: {error}") from error
    if rows and not {"trajectory_id", "reward", "text"} <= set(rows[0]):
        raise DataError(f"{file}: these are no rollouts of rondo (no trajectory_id, reward and text)")
    of_trajectory: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        of_trajectory.setdefault(row["trajectory_id"], []).append(row)
    return [
        _shown(sorted(own, key=lambda row: row["step_index"]), step, scores) for own in of_trajectory.values()
    ]


def _shown(rows: Sequence[Mapping[str, Any]], step: int, scores: Sequence[str]) -> ShownTrajectory:
    last = rows[-1]
    return ShownTrajectory(
        step=step,
        prompt_id=last["prompt_id"],
        sample_index=last["sample_index"],
        prompt=last.get("prompt_text") or "",
        said="\n".join(filter(None, (row.get("transcript") for row in rows))) or last["text"],
        reward=last["reward"],
        scores={name.removeprefix("score/"): last[name] for name in scores},
        outcome=last["outcome"],
        failure=last.get("failure") or "",
        finish_reason=last["finish_reason"],
        rows=len(rows),
        tokens=sum(row["response_length"] for row in rows),
    )


def written(shown: ShownTrajectory, width: int = 100) -> str:
    """Writes a trajectory for a terminal."""
    head = [f"step {shown.step}", shown.prompt_id, f"sample {shown.sample_index}"]
    if shown.outcome == "scored":
        parts = [f"{name} {value:.4g}" for name, value in shown.scores.items()]
        head.append(f"reward {shown.reward:.4g}" + (f" ({', '.join(parts)})" if len(parts) > 1 else ""))
        head.append({"length": "cut off (length)"}.get(shown.finish_reason, shown.finish_reason))
    else:
        head.append(f"{shown.outcome}: {shown.failure}" if shown.failure else shown.outcome)
    head.append(f"{shown.tokens} tokens" + (f" in {shown.rows} contexts" if shown.rows > 1 else ""))
    text = clean_text(" · ".join(head)).replace("\n", "\\n")  # it is one line
    lines = [f"── {text} ".ljust(width, "─"), *_indented(shown.prompt, width), ""]
    return "\n".join([*lines, *_indented(shown.said, width), ""])


def _indented(text: str, width: int) -> list[str]:
    """Wraps long lines, and keeps the others as they are."""
    lines: list[str] = []
    for line in clean_text(text).split("\n"):
        lines += textwrap.wrap(line, width - 2, drop_whitespace=False, replace_whitespace=False) or [""]
    return [f"  {line}".rstrip() for line in lines]
