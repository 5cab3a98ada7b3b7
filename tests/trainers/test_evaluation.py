"""What an evaluation reports, by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rondo.config.schema import EvaluationConfig
from rondo.core.errors import WorkerError
from rondo.core.types import Prompt, SamplingParams
from rondo.trainers.loop.evaluation import evaluate, summarise
from rondo.workers.rollout import EvaluationRecord


def record(prompt: str, sample: int, reward: float, *, source: str = "a", **more: Any) -> EvaluationRecord:
    fields = {"finish_reason": "stop", "outcome": "scored", "scores": {"right": reward}} | more
    return EvaluationRecord(prompt, source, sample, reward, 4, prompt=prompt, text="", **fields)


def test_means_best_and_majority() -> None:
    found = summarise(
        [
            record("p", 0, 1.0, answer="4"),
            record("p", 1, 0.0, answer="5"),
            record("p", 2, 0.0, answer="5", finish_reason="length"),
            record("q", 0, 1.0, answer="7"),
            record("q", 1, float("nan"), outcome="reward_error", scores={}),
        ],
        "sampled",
    )
    assert found == {
        "eval/sampled/failed_share": pytest.approx(1 / 5),
        "eval/sampled/reward": pytest.approx((1 / 3 + 1) / 2),
        "eval/sampled/best@3": 1.0,
        "eval/sampled/majority@3": 0.5,
        "eval/sampled/response_length": 4.0,
        "eval/sampled/truncated_share": 1 / 4,
    }


def test_answers_that_no_function_scores_are_in_no_reward() -> None:
    unjudged = record("q", 0, 0.0, source="b", scores={})
    assert summarise([unjudged], "greedy") == {
        "eval/greedy/failed_share": 0.0,
        "eval/greedy/response_length": 4.0,
        "eval/greedy/truncated_share": 0.0,
    }
    assert summarise([record("p", 0, 1.0), unjudged], "greedy")["eval/greedy/reward"] == 1.0


def test_scores_that_are_not_the_reward_are_reported_by_name() -> None:
    found = summarise(
        [
            record("p", 0, 0.0, scores={"right": 1.0}),  # weight 0
            record("q", 0, 0.5, scores={"right": 0.0, "short": 0.5}),
        ],
        "greedy",
    )
    assert found["eval/greedy/score/right"] == 0.5
    assert found["eval/greedy/score/short"] == 0.5


class Ranks:
    """Two ranks; rank 1 dies of its first call."""

    def __init__(self, last: bool) -> None:
        self.alive, self.size, self._last = (0, 1), 2, last

    async def call_rank(self, rank: int, method: Any, prompts: list[Prompt], *rest: Any) -> Any:
        if rank == 1:
            self.alive = () if self._last else (0,)
            error = WorkerError("rollout", 1, "evaluate", "gone")
            error.died = True
            raise error
        return [record(prompt.prompt_id, 0, 1.0) for prompt in prompts]


@pytest.mark.parametrize("last", [False, True])
def test_prompts_of_a_lost_rank_are_answered_by_the_others(last: bool) -> None:
    prompts = [Prompt(i, f"p{i}", "a", np.array([1], np.int32)) for i in range(5)]
    evaluating = evaluate(
        Ranks(last),  # type: ignore[arg-type]
        prompts,
        EvaluationConfig(greedy=True, samples=0),
        SamplingParams(4),
    )
    if last:
        with pytest.raises(WorkerError, match=r"rollout\[1\]\.evaluate failed: gone"):
            asyncio.run(evaluating)
    else:
        samples = asyncio.run(evaluating).samples
        assert [sample.prompt_id for sample in samples] == [f"p{i}" for i in range(5)]
