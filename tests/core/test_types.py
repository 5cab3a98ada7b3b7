"""Completions: parts of them, and parts put together."""

from __future__ import annotations

import numpy as np

from rondo.core.types import Completion, GenerateRequest, RouteShape, SamplingParams

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
