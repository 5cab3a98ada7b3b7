"""Completions: parts of them, and parts put together."""

from __future__ import annotations

import numpy as np

from rondo.types import Completion, GenerateRequest, SamplingParams

REQUEST = GenerateRequest("r", np.array([7, 8]), SamplingParams(4))
WHOLE = Completion(
    "r",
    np.array([7, 8], np.int32),
    np.array([3, 4, 5], np.int32),
    np.array([-0.5, -1.0, -2.0], np.float32),
    np.array([1, 1, 2], np.int32),
    "stop",
    {"choices": np.array([[0, 1], [2, 3], [4, 5]])},
)


def same(a: Completion, b: Completion) -> bool:
    arrays = ("prompt_ids", "token_ids", "log_probs", "policy_versions")
    return (
        (a.request_id, a.finish_reason, a.extras.keys()) == (b.request_id, b.finish_reason, b.extras.keys())
        and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays)
        and all(getattr(a, name).dtype == getattr(b, name).dtype for name in arrays)
        and all(np.array_equal(a.extras[name], b.extras[name]) for name in a.extras)
    )


def test_a_whole_is_its_parts() -> None:
    for cut in range(4):
        assert same(WHOLE.part(cut).after(WHOLE.part(0, cut)), WHOLE)
    assert same(WHOLE.part(2).after(None, WHOLE.part(0, 1), WHOLE.part(1, 2)), WHOLE)
    assert WHOLE.part(1, 2).log_probs.tolist() == [-1.0]
    assert WHOLE.part(1, 2).extras["choices"].tolist() == [[2, 3]]


def test_nothing_made_is_the_prefix() -> None:
    empty = Completion.empty(REQUEST, "deadline")
    assert [len(empty.token_ids), len(empty.log_probs), len(empty.policy_versions)] == [0, 0, 0]
    assert same(empty.after(None), empty)
    resumed = empty.after(WHOLE)
    assert (resumed.token_ids.tolist(), resumed.finish_reason) == ([3, 4, 5], "deadline")
    assert resumed.prompt_ids.dtype == np.int32


def test_extras_are_kept_where_every_token_has_them() -> None:
    bare = Completion.empty(REQUEST, "length").after(WHOLE.part(0, 1))
    without = Completion("r", bare.prompt_ids, bare.token_ids, bare.log_probs, bare.policy_versions, "length")
    assert WHOLE.part(1).after(without).extras == {}
