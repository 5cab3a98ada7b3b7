"""Rows from calls: every sampled token once, behind exactly what the engine had before it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rondo.agents.record import rows_of
from rondo.core.types import Completion, PolicyCall, Row, Turn


def call(
    prompt: list[int], made: list[int], inserted: str = "tool", version: int = 0, **more: object
) -> PolicyCall:
    completion = Completion(
        "r",
        np.array(prompt, np.int32),
        np.array(made, np.int32),
        -np.array(made, np.float32) / 16,
        np.full(len(made), version, np.int32),
        "stop",
    )
    return PolicyCall(completion, inserted, **more)  # type: ignore[arg-type]


def plain(row: Row) -> tuple[list[int], list[int], list[int], list[float], list[int]]:
    assert [a.dtype for a in (row.prompt_ids, row.response_ids, row.policy_versions)] == [np.int32] * 3
    assert (row.response_mask.dtype, row.rollout_log_probs.dtype) == (np.uint8, np.float32)
    return (
        row.prompt_ids.tolist(),
        row.response_ids.tolist(),
        row.response_mask.tolist(),
        row.rollout_log_probs.tolist(),
        row.policy_versions.tolist(),
    )


def test_one_call_is_one_row() -> None:
    (row,) = rows_of([call([1, 2], [3, 4], version=5)])
    assert plain(row) == ([1, 2], [3, 4], [1, 1], [-3 / 16, -4 / 16], [5, 5])
    assert row.turns == (Turn("policy", 0, 2),)
    assert row.finish_reason == "stop"


def test_calls_that_go_on_are_one_row() -> None:
    """With what was put in between, by whom, and what each turn was given."""
    first = call([1, 2], [3, 4], version=0, reward=0.5, anchor="start")
    second = call([1, 2, 3, 4, 8, 9], [5], "tool", version=1)
    third = call([1, 2, 3, 4, 8, 9, 5], [6], "user", version=1, reward=1.0)  # nothing in between
    (row,) = rows_of([first, second, third])
    assert plain(row) == (
        [1, 2],
        [3, 4, 8, 9, 5, 6],
        [1, 1, 0, 0, 1, 1],
        [-3 / 16, -4 / 16, 0, 0, -5 / 16, -6 / 16],
        [0, 0, -1, -1, 1, 1],
    )
    assert row.turns == (
        Turn("policy", 0, 2, 0.5, "start"),
        Turn("tool", 2, 4),
        Turn("policy", 4, 5),
        Turn("policy", 5, 6, 1.0),
    )


def test_a_context_that_was_written_anew_is_a_row_of_its_own() -> None:
    """Planner and solver by turns, a summary, two answers to one question; the last call's row comes last."""
    planner = [call([1], [2]), call([1, 2, 3], [4])]
    solver = [call([7], [8]), call([7, 8, 9], [9])]
    rows = rows_of([planner[0], solver[0], solver[1], planner[1]])
    assert [plain(row)[:3] for row in rows] == [([7], [8, 9, 9], [1, 0, 1]), ([1], [2, 3, 4], [1, 0, 1])]
    summary = rows_of([call([1], [2]), call([1, 5], [6])])
    assert [plain(row)[:2] for row in summary] == [([1], [2]), ([1, 5], [6])]
    choices = rows_of([call([1], [2]), call([1], [3]), call([1, 2, 9], [4])])
    assert [plain(row)[:2] for row in choices] == [([1], [3]), ([1], [2, 9, 4])]


def test_a_branch_from_the_middle_trains_what_came_before_once() -> None:
    """The second branch has the first answer in its prompt, without loss."""
    rows = rows_of([call([1], [2]), call([1, 2, 3], [4]), call([1, 2, 5], [6])])
    assert [plain(row)[:3] for row in rows] == [([1], [2, 3, 4], [1, 0, 1]), ([1, 2, 5], [6], [1])]


def test_the_longest_of_two_that_fit_goes_on() -> None:
    rows = rows_of([call([1], [2]), call([1, 2], [3]), call([1], [2]), call([1, 2, 3], [4])])
    assert [plain(row)[:2] for row in rows] == [([1], [2]), ([1], [2, 3, 4])]


def test_a_call_without_a_token_is_in_no_row() -> None:
    assert rows_of([call([1], [])]) == []
    (row,) = rows_of([call([1], [2]), call([1, 2, 3], [])])
    assert plain(row)[:2] == ([1], [2])


ids = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@st.composite
def episodes(draw: st.DrawFn) -> list[PolicyCall]:
    """Calls that go on from any earlier one, from the middle of one, or from nothing; few tokens, so that
    prefixes meet by accident, too.
    """
    calls: list[PolicyCall] = []
    for number in range(draw(st.integers(1, 8))):
        prompt = draw(ids)
        if calls and draw(st.booleans()):
            made = calls[draw(st.integers(0, len(calls) - 1))].completion
            whole = [*made.prompt_ids.tolist(), *made.token_ids.tolist()]
            cut = draw(st.integers(0, len(whole))) if draw(st.booleans()) else len(whole)
            prompt = [*whole[:cut], *(draw(ids) if draw(st.booleans()) else [])] or prompt
        calls.append(call(prompt, draw(st.lists(st.integers(0, 3), max_size=3)), version=number))
    return calls


@given(episodes())
def test_every_sampled_token_is_trained_on_once_behind_what_the_engine_had(calls: list[PolicyCall]) -> None:
    wanted = []
    for one in calls:
        made = one.completion
        context = made.prompt_ids.tolist()
        for token, log_prob in zip(made.token_ids.tolist(), made.log_probs.tolist(), strict=True):
            wanted.append((context, token, log_prob, int(made.policy_versions[0])))
            context = [*context, token]
    found = []
    for row in rows_of(calls):
        prompt, response, mask, log_probs, versions = plain(row)
        assert len(response) == len(mask) == len(log_probs) == len(versions)
        for t in np.flatnonzero(mask):
            found.append(([*prompt, *response[:t]], response[t], log_probs[t], versions[t]))
        others = np.flatnonzero(np.array(mask) == 0)
        assert {log_probs[t] for t in others} <= {0.0}
        assert {versions[t] for t in others} <= {-1}
        assert mask[-1] == 1
        assert [turn.start for turn in row.turns] == [0, *(turn.stop for turn in row.turns[:-1])]
        assert row.turns[-1].stop == len(response)
        for turn in row.turns:
            assert set(mask[turn.start : turn.stop]) == {int(turn.kind == "policy")}
    assert sorted(found) == sorted(wanted)
