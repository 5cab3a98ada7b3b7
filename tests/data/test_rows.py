"""Trajectories to rows: exact columns, and what is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rondo.core.columns import PROMPT_ROUTED, ROUTED
from rondo.core.errors import DataError
from rondo.core.types import Prompt, RouteShape, Row, Trajectory, Turn, request_seed
from rondo.data.rows import is_scored, row_ids, rows_from_trajectories
from tests.messages import full_text

ROW = Row(
    prompt_ids=np.array([5, 6], np.int32),
    response_ids=np.array([7, 8, 9], np.int32),
    response_mask=np.array([1, 0, 1], np.uint8),
    rollout_log_probs=np.array([-1, 0, -2], np.float32),
    policy_versions=np.array([4, -1, 5], np.int32),
    turns=(Turn("policy", 0, 1), Turn("tool", 1, 2), Turn("policy", 2, 3)),
    finish_reason="stop",
)


def row(**changes: object) -> tuple[Row, ...]:
    return (dataclasses.replace(ROW, **changes),)  # type: ignore[arg-type]


def trajectory(sample: int, **changes: object) -> Trajectory:
    prompt = Prompt(seq=3, prompt_id="train/0/3", source="train", token_ids=np.array([5, 6], np.int32))
    made = Trajectory(
        prompt=prompt,
        trajectory_id=f"t{sample}",
        sample_index=sample,
        rows=(ROW,),
        reward=1.0,
        scores={"right": 1.0},
        text="abc",
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_columns_of_two_rows() -> None:
    failed = trajectory(1, outcome="reward_timeout", reward=float("nan"), scores={})
    batch = rows_from_trajectories([trajectory(0), failed], {"score/right": "right"})
    assert batch.scalars("row_id").tolist() == [3 << 32, (3 << 32) | (1 << 12)]
    assert batch.scalars("group_id").tolist() == [3, 3]
    assert batch.scalars("num_trained_tokens").tolist() == [2, 2]
    assert batch.scalars("oldest_version").tolist() == [4, 4]
    assert batch.padded("response_mask").tolist() == [[1, 0, 1], [1, 0, 1]]
    assert is_scored(batch).tolist() == [True, False]
    assert np.isnan(batch.scalars("reward")[1])
    assert np.isnan(batch.scalars("score/right")[1])


@pytest.mark.parametrize(
    ("prompt", "known", "before", "after"),
    [
        # Of prompt p and response r, token i routed as i: what predicts the first response token is the
        # prompt's last one, and the response's last token is never run.
        ([5, 6], 4, [[0]], [[1], [2], [3]]),
        ([5, 6], 2, [[0]], [[1], [255], [255]]),  # 255: not known
        ([5, 6], 0, [[255]], [[255], [255], [255]]),
        ([5], 3, [], [[0], [1], [2]]),
        ([5, 6, 7, 8], 6, [[0], [1], [2]], [[3], [4], [5]]),
    ],
)
def test_routes_are_those_of_what_predicts_each_token(
    prompt: list[int], known: int, before: list[list[int]], after: list[list[int]]
) -> None:
    routes = np.arange(known, dtype=np.uint8)[:, None] if known else None
    made = trajectory(0, rows=row(prompt_ids=np.array(prompt, np.int32), routes=routes))
    batch = rows_from_trajectories([made], routes=RouteShape(1, 8))
    assert [rows.tolist() for rows in batch.rows(PROMPT_ROUTED)] == [before]
    assert [rows.tolist() for rows in batch.rows(ROUTED)] == [after]


def test_the_accuracy_is_the_score_that_is_named() -> None:
    failed = trajectory(1, outcome="reward_timeout", reward=float("nan"), scores={})
    rows = [trajectory(0, scores={"right": 1.0, "short": -0.5}, reward=0.5), failed]
    assert rows_from_trajectories(rows, accuracy="right").scalars("accuracy").tolist()[0] == 1.0
    assert np.isnan(rows_from_trajectories(rows, accuracy="right").scalars("accuracy")[1])
    assert np.isnan(rows_from_trajectories(rows, {"score/right": "right"}).scalars("accuracy")).all()


def test_the_step_reward_is_the_sum_of_the_policys_turns_or_the_trajectorys() -> None:
    turns = (
        Turn("policy", 0, 1, reward=0.25),
        Turn("tool", 1, 2, reward=9.0),
        Turn("policy", 2, 3, reward=0.5),
    )
    rows = [trajectory(0), trajectory(1, rows=row(turns=turns)), trajectory(2, rows=row(turns=()))]
    batch = rows_from_trajectories(rows)
    assert batch.scalars("step_reward").tolist() == [1.0, 0.75, 1.0]
    assert batch.scalars("step_reward").dtype == np.float32


def test_the_same_anchor_is_the_same_number() -> None:
    first = (Turn("tool", 0, 1, anchor="no"), Turn("policy", 1, 2, anchor="room 1"), Turn("policy", 2, 3))
    every = [first, first, (Turn("policy", 0, 3),), ()]
    rows = [trajectory(i, rows=row(turns=turns)) for i, turns in enumerate(every)]
    ids = rows_from_trajectories(rows).scalars("anchor_id")
    assert ids.dtype == np.int64
    assert ids[0] == ids[1] == request_seed(0, "room 1")
    assert ids[2] == ids[3] == request_seed(0, "train/0/3")
    assert (ids >= 0).all()


def test_row_ids_are_unique_over_samples_steps_and_groups() -> None:
    ids = row_ids(np.arange(4)[:, None, None], np.arange(50)[:, None], np.arange(5))
    assert len(np.unique(ids)) == ids.size == 1000
    assert row_ids(3, 2, 1) == (3 << 32) + (2 << 12) + 1
    with pytest.raises(DataError, match="beyond what a row id can hold"):
        row_ids(0, np.array([0, 1 << 20]))


def test_an_agent_loop_that_forgets_a_mask_is_named() -> None:
    with pytest.raises(DataError, match=full_text("t0: response_mask has 2 entries for 3")):
        rows_from_trajectories([trajectory(0, rows=row(response_mask=np.ones(2, np.uint8)))])


def test_scored_without_a_number_is_refused() -> None:
    with pytest.raises(DataError, match="its reward is nan"):
        rows_from_trajectories([trajectory(0, reward=float("nan"))])


def test_rows_without_tokens_or_without_trained_ones_have_no_version() -> None:
    """Wherever they stand between others."""
    ints, empty = np.zeros(3, np.int32), np.empty(0, np.int32)
    none = row(
        response_ids=empty,
        response_mask=np.empty(0, np.uint8),
        rollout_log_probs=empty,
        policy_versions=empty,
    )
    inserted = row(response_mask=np.zeros(3, np.uint8), policy_versions=np.full(3, -1, np.int32))
    oldest = row(policy_versions=np.array([7, -1, 0], np.int32), rollout_log_probs=ints)
    kinds = [none, row(), none, none, inserted, oldest, none]
    batch = rows_from_trajectories([trajectory(i, rows=kind) for i, kind in enumerate(kinds)])
    assert batch.scalars("response_length").tolist() == [0, 3, 0, 0, 3, 3, 0]
    assert batch.scalars("num_trained_tokens").tolist() == [0, 2, 0, 0, 0, 2, 0]
    assert batch.scalars("oldest_version").tolist() == [-1, 4, -1, -1, -1, 0, -1]
    assert batch.lengths("response_ids").tolist() == [0, 3, 0, 0, 3, 3, 0]
    nothing = rows_from_trajectories([trajectory(0, rows=none)])
    assert nothing.scalars("oldest_version").tolist() == [-1]
    assert nothing.table.schema == batch.table.schema
