"""The trajectories of a run's rollouts: what was asked, said and done, what it earned, why it ended."""

from __future__ import annotations

import html
import json
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rondo.core.errors import DataError
from rondo.system.streams import clean_text
from rondo.tracking.pictures import Picture, looked_at, named

if TYPE_CHECKING:
    from rondo.core.images import ImageRef

Order = Literal["first", "best", "worst"]
_LAST_STEPS = 50  # of a run, whose rows are like those to come
_FILE = re.compile(r"step-(\d+)\.(?:parquet|jsonl)")
_COLUMNS = (
    *("trajectory_id", "prompt_id", "source", "sample_index", "step_index", "prompt_text", "text"),
    *("transcript", "reward", "outcome", "failure", "finish_reason", "response_length", "oldest_version"),
    "images",
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
    images: tuple[ImageRef, ...] = ()
    """Those of its rows, each once."""
    trajectory_id: str = ""
    """Its own name in the step; empty: an answer of an evaluation."""
    source: str = ""
    """The source of its prompt."""
    oldest_version: int = -1
    """Of the weights that sampled its tokens; -1: none that is known."""

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: prompt, images that are still what they were, answer."""
        head, prompt, said = (html.escape(clean_text(text)) for text in (_head(self), self.prompt, self.said))
        images = "".join(picture.html(n) for n, picture in enumerate(looked_at(self.images), 1))
        pre = '<pre style="white-space: pre-wrap">'
        return f"<div><b>{head}</b>{pre}{prompt}</pre>{images}{pre}{said}</pre></div>"


class Trajectories(list[ShownTrajectory]):
    """Trajectories, which a notebook shows with their images."""

    def _repr_html_(self) -> str:
        return "<hr>".join(one._repr_html_() for one in self)


def read_trajectories(
    run: str | Path,
    *,
    step: int | None = None,
    order: Order = "first",
    failed: bool | None = None,
    prompt: str = "",
    number: int = 3,
    evaluation: bool = False,
) -> Trajectories:
    """Returns trajectories of a run's step (default: the last one that was written).

    order: as they were written, or by reward. failed: only those that failed, or only others. prompt: only
    those whose prompt, or its id, has this text in it. number: at most. evaluation: answers of the
    evaluation at that step. Raises DataError.
    """
    if number < 1:
        raise DataError(f"at least one trajectory can be shown, not {number}")
    chosen, file = evaluation_of(run, step) if evaluation else rollouts_of(run, step)
    found = [
        one
        for one in (answers_of if evaluation else trajectories_of)(file, chosen)
        if (failed is None or failed == (one.outcome != "scored"))
        and (prompt in one.prompt or prompt in one.prompt_id)
    ]
    if order != "first":
        scored = [one for one in found if one.outcome == "scored"]
        others = [one for one in found if one.outcome != "scored"]
        found = sorted(scored, key=lambda one: one.reward, reverse=order == "best") + others
    return Trajectories(found[:number])


def rollouts_of(run: str | Path, step: int | None) -> tuple[int, Path]:
    """Returns a step of a run (None: the last one that was written), and its file of rows, or folder of them.
    Raises DataError.
    """
    return _chosen(run, step, "rollouts", "tracking.save_rollouts writes them, a file for each step")


def evaluation_of(run: str | Path, step: int | None) -> tuple[int, Path]:
    """Returns a step of a run that had an evaluation (None: the last), and the file of its answers. Raises
    DataError.
    """
    return _chosen(run, step, "evaluations", "trainer.evaluation says when there are any")


def files_of(run: str | Path, what: Literal["rollouts", "evaluations"]) -> dict[int, Path]:
    """Returns the file, or folder of files, of each step that has one."""
    named = ((_FILE.fullmatch(path.name), path) for path in (Path(run) / what).glob("*"))
    return {int(match[1]): path for match, path in named if match}


def _chosen(
    run: str | Path, step: int | None, what: Literal["rollouts", "evaluations"], who: str
) -> tuple[int, Path]:
    files = files_of(run, what)
    if not files:
        raise DataError(f"{run}: has no {what} ({who})")
    chosen = max(files) if step is None else step
    if chosen not in files:
        gaps = "" if len(files) > max(files) - min(files) else f", {len(files)} steps of these"
        raise DataError(
            f"{run}: has no {what} of step {chosen}; there are {min(files)} to {max(files)}{gaps}"
        )
    return chosen, files[chosen]


def lengths_of(run: str | Path) -> tuple[list[int], list[int]]:
    """Returns the tokens of the prompt and of the response of each row in the last steps of a run. Raises
    DataError where there is none, or a file cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rollouts_of(run, None)  # for its error
    files, columns = files_of(run, "rollouts"), ["prompt_length", "response_length"]
    prompts: list[int] = []
    responses: list[int] = []
    for step in sorted(files)[-_LAST_STEPS:]:
        try:
            table = pq.read_table(files[step], columns=columns)
            prompts += table[columns[0]].to_pylist()
            responses += table[columns[1]].to_pylist()
        except (pa.ArrowException, OSError, KeyError) as error:
            raise DataError(f"{files[step]}: cannot be read as rollouts: {error}") from error
    if not responses:
        raise DataError(f"{run}: has no rows in its last steps (rollouts/step-{max(files):06})")
    return prompts, responses


def trajectories_of(file: Path, step: int) -> list[ShownTrajectory]:
    """Returns those of a step's file of rows, in its order. Raises DataError naming the file."""
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
    ordered = [sorted(own, key=lambda row: row["step_index"]) for own in of_trajectory.values()]
    with _damaged(file):
        return [_shown(own, step, scores) for own in ordered]


def answers_of(file: Path, step: int) -> list[ShownTrajectory]:
    """Returns those of an evaluation's file. Raises DataError naming the file."""
    with _damaged(file):
        return [_answered(json.loads(line), step) for line in file.read_bytes().splitlines()]


def _answered(line: Mapping[str, Any], step: int) -> ShownTrajectory:
    """Returns what a line of an evaluation says (`rondo.workers.EvaluationRecord`)."""
    return ShownTrajectory(
        step=step,
        prompt_id=str(line["prompt_id"]),
        sample_index=int(line["sample_index"]),
        prompt=str(line["prompt"]),
        said=str(line.get("transcript") or line["text"]),
        reward=math.nan if line["reward"] is None else float(line["reward"]),
        scores={name: float(value) for name, value in line["scores"].items()},
        outcome=str(line["outcome"]),
        failure="",
        finish_reason=str(line["finish_reason"]),
        rows=1,
        tokens=int(line["response_length"]),
        images=_images([json.dumps(line.get("images", []))]),
        source=str(line.get("source", "")),
    )


@contextmanager
def _damaged(file: Path) -> Iterator[None]:
    """Names the file whose content is not what a run writes."""
    try:
        yield
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{file}: damaged ({type(error).__name__}: {error})") from error


def _images(of_rows: Iterable[str]) -> tuple[ImageRef, ...]:
    """Returns the images of a trajectory's rows, from their column. Raises TypeError for what no run wrote:
    it is printed.
    """
    from rondo.core.images import each_once, images_of_text  # with numpy; the console is there before it

    images = each_once(map(images_of_text, of_rows))
    for image in images:
        numbers = image.n_tokens, image.turn
        if not isinstance(image.ref, str) or not all(isinstance(number, int) for number in numbers):
            raise TypeError(f"an image is {image!r:.200}")
    return images


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
        images=_images(row.get("images") or "" for row in rows),
        trajectory_id=last["trajectory_id"],
        source=last.get("source") or "",
        oldest_version=min((v for row in rows if (v := row.get("oldest_version", -1)) >= 0), default=-1),
    )


def written(shown: ShownTrajectory, width: int = 100) -> str:
    """Writes a trajectory for a terminal, its images as lines."""
    return "\n".join(str(part) for part in parts_of(shown, width))


def parts_of(shown: ShownTrajectory, width: int, *, draw: bool = False) -> Iterator[str | Picture]:
    """Yields what `written` writes, line by line. draw: yields each image behind its line, where its file is
    still the row's; the line says where not.
    """
    yield f"── {_head(shown)} ".ljust(width, "─")
    yield from _indented(shown.prompt, width)
    for number, picture in enumerate(looked_at(shown.images) if draw else named(shown.images), 1):
        yield f"  {picture.line(number)}"
        if picture.png:
            yield picture
    yield ""
    yield from _indented(shown.said, width)
    yield ""


def _head(shown: ShownTrajectory) -> str:
    head = [f"step {shown.step}", shown.prompt_id, f"sample {shown.sample_index}"]
    if shown.outcome == "scored":
        parts = [f"{name} {value:.4g}" for name, value in shown.scores.items()]
        head.append(f"reward {shown.reward:.4g}" + (f" ({', '.join(parts)})" if len(parts) > 1 else ""))
        head.append({"length": "cut off (length)"}.get(shown.finish_reason, shown.finish_reason))
    else:
        head.append(f"{shown.outcome}: {shown.failure}" if shown.failure else shown.outcome)
    head.append(f"{shown.tokens} tokens" + (f" in {shown.rows} contexts" if shown.rows > 1 else ""))
    return clean_text(" · ".join(head)).replace("\n", "\\n")  # it is one line


def _indented(text: str, width: int) -> list[str]:
    """Wraps long lines, and keeps the others as they are."""
    lines: list[str] = []
    for line in clean_text(text).split("\n"):
        lines += textwrap.wrap(line, width - 2, drop_whitespace=False, replace_whitespace=False) or [""]
    return [f"  {line}".rstrip() for line in lines]
