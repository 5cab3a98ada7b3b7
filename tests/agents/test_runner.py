"""The episode runner, with engines and scorers that do what a test wants."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rondo.agents.runner import EpisodeRunner
from rondo.core.errors import DeadlyRequestError, RolloutError
from rondo.core.types import Completion, GenerateRequest, Prompt, SamplingParams
from rondo.data.rows import rows_from_trajectories
from rondo.workers.rollout import Unscored

PROMPT = Prompt(0, "words/0/0", "words", np.array([1, 2], np.int32))


async def generate(request: GenerateRequest) -> Completion:
    if request.request_id.endswith("/1"):
        raise DeadlyRequestError("4 replicas died of it")
    return Completion(
        request.request_id,
        request.token_ids,
        np.array([7], np.int32),
        np.zeros(1, np.float32),
        np.zeros(1, np.int32),
        "stop",
    )


def test_a_request_that_engines_die_of_is_one_failed_trajectory() -> None:
    runner = EpisodeRunner(generate, Unscored(), lambda ids: "", run_seed=0)
    group = asyncio.run(runner.run_group(PROMPT, SamplingParams(4), 3))
    assert [t.outcome for t in group] == ["scored", "rollout_error", "scored"]
    assert group[1].failure == "4 replicas died of it"
    assert group[1].trajectory_id == "train/words/0/0/1"
    rows = rows_from_trajectories(group)
    assert rows.scalars("response_length").tolist() == [1, 0, 1]


def test_other_errors_of_an_engine_are_the_groups() -> None:
    async def refuse(request: GenerateRequest) -> Completion:
        raise RolloutError("no replica left")

    runner = EpisodeRunner(refuse, Unscored(), lambda ids: "", run_seed=0)
    with pytest.raises(RolloutError, match="no replica left"):
        asyncio.run(runner.run_group(PROMPT, SamplingParams(4), 3))
