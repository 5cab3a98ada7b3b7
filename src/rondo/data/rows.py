"""Trajectories to training rows: the one place where an episode becomes columns of a Batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from rondo.core.arrays import aligned_arrays, bounds_of, flattened
from rondo.core.batch import ROW_ID, Batch, ragged_rows
from rondo.core.columns import (
    EPISODE,
    GREEDY_ANSWER,
    IMAGES,
    PROMPT_ROUTED,
    RECORD,
    ROUTED,
    SCORE,
    TRANSCRIPT,
    made_by,
)
from rondo.core.errors import DataError
from rondo.core.images import images_as_text
from rondo.core.types import (
    MAX_ROWS,
    SCORED,
    TURN_FLAGS,
    TURN_KINDS,
    Prompt,
    RouteShape,
    Row,
    Trajectory,
    Turn,
    request_seed,
)

_NEVER = np.iinfo(np.int32).max  # the version of a token that the policy did not sample
FIRST_GIVEN = 1 << 19
"""The sample index of a prompt's first row that was given, not sampled: nobody samples so many."""


def index_columns(score_names: Iterable[str] = (), *, greedy_baseline: bool = False) -> tuple[str, ...]:
    """Returns the per-row columns of a group, which controller, buffer and loop hold; the rest stays where it
    was made.
    """
    greedy = made_by(GREEDY_ANSWER) if greedy_baseline else ()
    return (*made_by(EPISODE, per="row"), *greedy, *map(SCORE, score_names))


def row_ids(
    seq: np.ndarray | int, sample_index: np.ndarray | int, step_index: np.ndarray | int = 0
) -> np.ndarray:
    """Makes numbers that no other row of the run has: 20 bits for the sample, 12 for the step within the
    trajectory. int64, of the arguments' common shape.
    """
    samples, steps = np.asarray(sample_index, np.int64), np.asarray(step_index, np.int64)
    if np.any((samples < 0) | (samples >= 1 << 20)) or np.any((steps < 0) | (steps >= MAX_ROWS)):
        raise DataError(f"sample {samples.max()}, step {steps.max()}: beyond what a row id can hold")
    return (np.asarray(seq, np.int64) << 32) | (samples << 12) | steps


def rows_from_trajectories(
    trajectories: Sequence[Trajectory],
    scores: Mapping[str, str] = MappingProxyType({}),
    *,
    accuracy: str | None = None,
    of_agents: bool = False,
    routes: RouteShape | None = None,
    images: Callable[[], str] | None = None,
    records: bool = False,
) -> Batch:
    """Makes the rows of trajectories, one after the other, with the identity, token, structure and outcome
    columns of DESIGN §5. What belongs to the whole trajectory (reward, scores, outcome, text) is repeated on
    each of its rows. scores: by column, the name of the score in it. accuracy: the score that is the column
    of this name; None: it is NaN. of_agents: with the columns that agents make (transcript, turns). routes:
    with those of a mixture of this shape. images: with those
    of a model that is given images, and says what read them (`ImageRef.read_by`); None: of one that is not.
    records: with those of environments that can be restored.
    """
    _check(trajectories)
    owners = [t for t in trajectories for _ in t.rows]
    rows = [row for t in trajectories for row in t.rows]
    steps = np.array([step for t in trajectories for step in range(len(t.rows))], np.int32)
    seq = np.array([t.prompt.seq for t in owners], np.int64)
    samples = np.array([t.sample_index for t in owners], np.int32)
    lengths = np.array([len(row.response_ids) for row in rows], np.int32)
    mask = flattened([row.response_mask for row in rows], np.uint8)
    versions = flattened([row.policy_versions for row in rows], np.int32)
    offsets = bounds_of(lengths.tolist()).astype(np.int32)
    trained = mask > 0
    credit = [_step_credit(t, row) for t, row in zip(owners, rows, strict=True)]
    # Without an observation in between a step's state is the prompt itself.
    anchors = [anchor or t.prompt.prompt_id for t, (_, anchor) in zip(owners, credit, strict=True)]
    anchor_ids = {anchor: request_seed(0, anchor) for anchor in set(anchors)}
    prompts = {t.prompt.prompt_id: t.prompt for t in trajectories}
    texts = {prompt_id: prompt_text(prompt) for prompt_id, prompt in prompts.items()}
    columns: dict[str, object] = {
        ROW_ID: row_ids(seq, samples, steps),
        "seq": seq,
        "group_id": seq,
        "prompt_id": [t.prompt.prompt_id for t in owners],
        "source": [t.prompt.source for t in owners],
        "trajectory_id": [t.trajectory_id for t in owners],
        "sample_index": samples,
        "step_index": steps,
        "prompt_length": np.array([len(row.prompt_ids) for row in rows], np.int32),
        "response_length": lengths,
        "num_trained_tokens": _reduced(np.add, trained.astype(np.int32), lengths, offsets, 0),
        "oldest_version": _oldest(np.where(trained, versions, _NEVER), lengths, offsets),
        "finish_reason": [row.finish_reason for row in rows],
        "outcome": [t.outcome for t in owners],
        "reward": np.array([t.reward for t in owners], np.float32),
        "accuracy": np.array([t.scores.get(accuracy or "", np.nan) for t in owners], np.float32),
        # For step-level credit (GiGPO): each row is a step.
        "step_reward": np.array([reward for reward, _ in credit], np.float32),
        "anchor_id": np.array([anchor_ids[anchor] for anchor in anchors], np.int64),
    }
    for column, name in scores.items():
        columns[column] = np.array([t.scores.get(name, np.nan) for t in owners], np.float32)
    columns |= {
        "prompt_ids": ragged_rows([row.prompt_ids for row in rows], np.int32),
        **aligned_arrays(
            {
                "response_ids": flattened([row.response_ids for row in rows], np.int32),
                "response_mask": mask,
                "rollout_log_probs": flattened([row.rollout_log_probs for row in rows], np.float32),
                "policy_versions": versions,
            },
            offsets,
        ),
        "prompt_text": [texts[t.prompt.prompt_id] for t in owners],
        "text": [t.text for t in owners],
    }
    if of_agents:
        columns |= {
            TRANSCRIPT: [text for t in trajectories for text in t.transcripts or [""] * len(t.rows)],
            "anchor": [anchor for _, anchor in credit],
            "failure": [t.failure for t in owners],
            **_turns(rows),
        }
    if records:
        columns[RECORD] = [t.record for t in owners]
    if images is not None:
        read_by = images() if any(row.images for row in rows) else ""
        shown = [[replace(image, read_by=read_by) for image in row.images] for row in rows]
        columns[IMAGES] = list(map(images_as_text, shown))
    if routes is not None:
        columns |= route_columns([(len(r.prompt_ids), len(r.response_ids), r.routes) for r in rows], routes)
    return Batch.of(columns)  # type: ignore[arg-type]


def _reduced(
    how: np.ufunc, values: np.ndarray, lengths: np.ndarray, offsets: np.ndarray, empty: int
) -> np.ndarray:
    """Returns one number for each row of packed values, int32 [B]: of a row without tokens `empty`."""
    out = np.full(len(lengths), empty, np.int32)
    filled = lengths > 0  # `reduceat` takes the next row's value for a row without any
    if len(values):
        out[filled] = how.reduceat(values, offsets[:-1][filled])
    return out


def _oldest(versions: np.ndarray, lengths: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Returns the lowest version of each row; -1: it has none."""
    lowest = _reduced(np.minimum, versions, lengths, offsets, -1)
    return np.where(lowest == _NEVER, np.int32(-1), lowest)


def route_columns(
    rows: Iterable[tuple[int, int, np.ndarray | None]], shape: RouteShape
) -> dict[str, list[np.ndarray]]:
    """Returns the routes of prompts, but for their last tokens, and of what predicted each response token.
    rows: of each how many tokens prompt and response have, and the routes that are known of them, [n, W].
    """
    before, after = [], []
    for num_prompt, num_response, routes in rows:
        # A route belongs to the token that was run: the prompt's last one predicts the first of the response.
        first = max(num_prompt - 1, 0)
        along = shape.padded(routes, first + num_response)
        before.append(along[:first])
        after.append(along[first:])
    both = ((PROMPT_ROUTED, before), (ROUTED, after))
    return {name: ragged_rows(parts, shape.dtype) for name, parts in both}


def _turns(rows: Sequence[Row]) -> dict[str, object]:
    """Returns the columns with a number for each turn."""
    turns = [row.turns for row in rows]
    rewards = [[np.nan if t.reward is None else t.reward for t in row] for row in turns]
    return {
        "turn_stops": ragged_rows([np.array([t.stop for t in row], np.int32) for row in turns], np.int32),
        "turn_kinds": ragged_rows(
            [np.array([TURN_KINDS.index(t.kind) for t in row], np.uint8) for row in turns], np.uint8
        ),
        "turn_rewards": ragged_rows([np.array(row, np.float32) for row in rewards], np.float32),
        "turn_flags": ragged_rows([np.array([_bits(t) for t in row], np.uint8) for row in turns], np.uint8),
    }


def _bits(turn: Turn) -> int:
    return sum(1 << bit for bit, flag in enumerate(TURN_FLAGS) if flag in turn.flags)


def firsts(index: Batch) -> np.ndarray:
    """Returns the place of each trajectory's first row, int64 [N]: what is counted where trajectories are."""
    return np.flatnonzero(index.scalars("step_index") == 0)


def lasts(index: Batch) -> np.ndarray:
    """Returns the place of each trajectory's last row, in the order of `firsts`."""
    of_rows = trajectory_of_rows(index)
    # The last key sorts first: by trajectory, then by step.
    order = np.lexsort((index.scalars("step_index"), of_rows))
    return order[np.cumsum(np.bincount(of_rows)) - 1] if len(order) else order


def trajectory_of_rows(index: Batch) -> np.ndarray:
    """Returns for each row the position in `firsts` of its trajectory's first row: int64 [B], from 0. Raises
    DataError for rows of a trajectory whose first row is not there.
    """
    first = firsts(index)
    # The common case, without comparing names: each row is a trajectory.
    if len(first) == len(index):
        return np.arange(len(index))
    names, number = np.unique(index.scalars("trajectory_id").astype(str), return_inverse=True)
    if not np.array_equal(np.sort(number[first]), np.arange(len(names))):
        raise DataError("a trajectory has no first row (step_index 0), or several; its rows stay together")
    place = np.empty(len(names), np.int64)
    place[number[first]] = np.arange(len(first))
    return place[number]


def is_cut_off(index: Batch) -> np.ndarray:
    """Says of each row, bool [B], whether it or its trajectory was cut off because no more tokens fitted. The
    outcome of an episode that was cut off is not the policy's doing, whatever its earlier steps were.
    """
    own = index.scalars("finish_reason") == "length"
    return np.asarray(own | own[lasts(index)][trajectory_of_rows(index)])


def prompt_text(prompt: Prompt) -> str:
    """Returns the prompt as people read it: the messages' contents, or the raw text."""
    if prompt.messages:
        return "\n".join(str(message.get("content") or "") for message in prompt.messages)
    return str(prompt.fields.get("prompt", ""))


def is_scored(batch: Batch) -> np.ndarray:
    """Says of each row, bool [B], whether its trajectory has a reward; the others are typed failures, on
    which nothing is trained.
    """
    return np.asarray(batch.scalars("outcome") == SCORED)


def is_given(batch: Batch) -> np.ndarray:
    """Says of each row, bool [B], whether it was given (`session.rows`, algorithm.mix): the policy did not
    sample it in its step.
    """
    return np.asarray(batch.scalars("sample_index") >= FIRST_GIVEN)


def _step_credit(t: Trajectory, row: Row) -> tuple[float, str]:
    """Returns the sum of what the agent loop gave the row's policy turns, else the trajectory's reward on its
    last row and 0 on others, NaN on a row of notes; and a name of the observation before the first policy
    turn, empty where it has none.
    """
    turns = [turn for turn in row.turns if turn.kind == "policy"]
    given = [turn.reward for turn in turns if turn.reward is not None]
    anchor = turns[0].anchor if turns else ""
    if turns and all("aside" in turn.flags for turn in turns):
        return math.nan, anchor
    return sum(given) if given else t.reward if row is t.rows[-1] else 0.0, anchor


def _check(trajectories: Sequence[Trajectory]) -> None:
    for t in trajectories:
        for row in t.rows:
            length = len(row.response_ids)
            if length == len(row.response_mask) == len(row.rollout_log_probs) == len(row.policy_versions):
                continue
            for name in ("response_mask", "rollout_log_probs", "policy_versions"):
                if len(getattr(row, name)) != length:
                    raise DataError(
                        f"trajectory {t.trajectory_id}: {name} has {len(getattr(row, name))} entries for "
                        f"{length} response tokens; an agent loop must give one per token (mask 0, log-prob "
                        "0 and version -1 for tokens it did not sample)"
                    )
        if t.outcome == SCORED and not math.isfinite(t.reward):
            raise DataError(
                f"trajectory {t.trajectory_id}: outcome is {SCORED!r} but its reward is {t.reward}"
            )
