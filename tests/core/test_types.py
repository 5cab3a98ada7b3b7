"""Completions: parts of them, and parts put together. Rows that are lent."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable

import numpy as np
import pytest

from rondo.core.types import (
    Completion,
    GenerateRequest,
    PolicyCall,
    Prompt,
    RouteShape,
    Row,
    SamplingParams,
    ToolResult,
    Trajectory,
    Turn,
)

REQUEST = GenerateRequest("r", np.array([7, 8]), SamplingParams(4))
WHOLE = Completion(
    "r",
    np.array([7, 8], np.int32),
    np.array([3, 4, 5], np.int32),
    np.array([-0.5, -1.0, -2.0], np.float32),
    np.array([1, 1, 2], np.int32),
    "stop",
    np.array([[0, 1], [2, 3], [4, 5], [6, 7]], np.uint8),
)


def same(a: Completion, b: Completion) -> bool:
    arrays = ("prompt_ids", "token_ids", "log_probs", "policy_versions")
    return (
        (a.request_id, a.finish_reason) == (b.request_id, b.finish_reason)
        and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays)
        and all(getattr(a, name).dtype == getattr(b, name).dtype for name in arrays)
    )


def test_a_whole_is_its_parts() -> None:
    for cut in range(4):
        assert same(WHOLE.part(cut).after(WHOLE.part(0, cut)), WHOLE)
    assert same(WHOLE.part(2).after(None, WHOLE.part(0, 1), WHOLE.part(1, 2)), WHOLE)
    assert WHOLE.part(1, 2).log_probs.tolist() == [-1.0]
    assert WHOLE.part(1, 2).routes is None


def test_nothing_made_is_the_prefix() -> None:
    empty = Completion.empty(REQUEST, "deadline")
    assert [len(empty.token_ids), len(empty.log_probs), len(empty.policy_versions)] == [0, 0, 0]
    assert same(empty.after(None), empty)
    resumed = empty.after(WHOLE)
    assert (resumed.token_ids.tolist(), resumed.finish_reason) == ([3, 4, 5], "deadline")
    assert resumed.prompt_ids.dtype == np.int32


def test_routes_are_the_latest_that_there_are() -> None:
    """They are of prompt and response together, those of a beginning in them."""
    beginning = Completion(**{**vars(WHOLE.part(0, 1)), "routes": WHOLE.routes[:2]})
    end = Completion(**{**vars(WHOLE.part(1)), "routes": WHOLE.routes})
    assert end.after(beginning).routes is WHOLE.routes
    assert WHOLE.part(1).after(beginning).routes is beginning.routes
    assert Completion.empty(REQUEST, "deadline").after(beginning).routes is beginning.routes
    assert WHOLE.part(1).after(WHOLE.part(0, 1)).routes is None


def test_routes_of_many_experts_take_two_bytes() -> None:
    assert RouteShape(4, 255).padded(None, 2).tolist() == [[255] * 4] * 2
    wide = RouteShape(2, 256).padded(np.array([[7, 300]], np.uint16), 3)
    assert (wide.dtype, wide.tolist()) == (np.uint16, [[7, 300], [65535, 65535], [65535, 65535]])
    assert RouteShape(1, 8).padded(np.array([[1], [2]], np.uint8), 1).tolist() == [[1]]


def an_episode() -> Trajectory:
    ids, ones = np.zeros(2, np.int32), np.ones(2, np.uint8)
    prompt = Prompt(0, "s/0/0", "s", ids, {"nested": {"list": []}}, ({"role": "user", "content": "q"},))
    turn = Turn("policy", 0, 2, states=({"board": ["x"]},))
    row = Row(ids.copy(), ids.copy(), ones, np.zeros(2, np.float32), ids.copy(), (turn,), "stop")
    said = (ToolResult("x", {"ids": ["a"]}),)
    made = Completion("r", ids.copy(), ids.copy(), np.zeros(2, np.float32), ids.copy(), "stop")
    calls = (PolicyCall(made, states=({"board": ["x"]},)),)
    return Trajectory(prompt, "t", 0, (row,), calls=calls, scores={"length": 2.0}, tool_results=said)


WRITES: list[Callable[[Trajectory], object]] = [
    lambda t: t.prompt.fields["nested"]["list"].append(1),
    lambda t: t.prompt.fields.update(answer=7),  # type: ignore[attr-defined]
    lambda t: t.prompt.messages[0].update(content="x"),  # type: ignore[attr-defined]
    lambda t: t.prompt.token_ids.fill(7),
    lambda t: t.rows[0].prompt_ids.fill(7),
    lambda t: t.response_ids.fill(7),
    lambda t: t.response_mask.fill(7),
    lambda t: t.rollout_log_probs.fill(7),
    lambda t: t.policy_versions.fill(7),
    lambda t: t.scores.update(length=3.0),  # type: ignore[attr-defined]
    lambda t: t.tool_results[0].data["ids"].append("b"),
    lambda t: t.rows[0].turns[0].states[0]["board"].append("o"),
    lambda t: t.calls[0].states[0]["board"].append("o"),
    lambda t: t.calls[0].completion.policy_versions.fill(7),
]


def refuses_writes(trajectory: Trajectory) -> bool:
    for write in WRITES:
        with pytest.raises(ValueError, match="read-only"):
            write(trajectory)
    return True


def test_a_row_that_is_lent_is_read_only_at_every_depth() -> None:
    made = an_episode()
    before = repr(made)
    assert made.lent() is made
    assert refuses_writes(made)
    assert repr(made) == before
    assert made.lent() is made


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda row: pickle.loads(pickle.dumps(row, 4))])
def test_a_copy_of_a_lent_row_is_lent_anew(copied: Callable[[Trajectory], Trajectory]) -> None:
    """However often: the mark of a lent row is not copied with it."""
    lent = an_episode().lent()
    assert refuses_writes(copied(lent).lent())
    assert refuses_writes(copied(copied(lent)).lent())
    own = copy.deepcopy(lent)
    for write in WRITES:
        write(own)
    assert lent.prompt.fields == {"nested": {"list": []}}


def test_a_row_with_another_field_is_lent_anew() -> None:
    changed = dataclasses.replace(an_episode().lent(), scores={"length": 1.0})
    changed.scores.update(length=2.0)  # type: ignore[attr-defined]
    assert changed.scores == {"length": 2.0}
    assert refuses_writes(changed.lent())


def test_replaced_is_what_replace_makes() -> None:
    """Of a lent row one that is not lent, whose other fields are; a field that there is not is no field."""
    lent = an_episode().lent()
    quick, slow = (
        lent.replaced(scores={"a": 1.0}, reward=1.0),
        dataclasses.replace(lent, scores={"a": 1.0}, reward=1.0),
    )
    assert vars(quick) == vars(slow)
    assert [*vars(quick)] == [*vars(slow)]
    assert all(vars(quick)[name] is vars(slow)[name] for name in ("prompt", "rows", "calls"))
    assert refuses_writes(quick.lent())
    assert lent.scores == {"length": 2.0}
    with pytest.raises(AssertionError, match=r"Trajectory has no \{'score'\}"):
        lent.replaced(score=1.0)


def test_what_a_row_was_made_of_changes_it_no_more() -> None:
    fields = {"list": [1]}
    prompt = Prompt(0, "s/0/0", "s", np.zeros(1, np.int32), fields).lent()
    fields["list"].append(2)
    assert prompt.fields == {"list": [1]}
