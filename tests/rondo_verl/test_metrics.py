"""`tracking.metric_names=verl`: trackers get the same numbers by verl's names, so that dashboards go on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rondo.tracking import TrackerContext
from rondo_verl.metrics import NAMES, verl
from tests.trainers.conftest import RECIPE, inline


def test_numbers_that_are_the_same_and_all_others() -> None:
    ours = {"actor/policy_loss": 0.25, "actor/grad_norm": 1.0, "timing/step_s": 2.0, "buffer/ready": 3.0}
    assert verl(ours) == {
        "actor/pg_loss": 0.25,
        "actor/grad_norm": 1.0,
        "timing_s/step": 2.0,
        "perf/time_per_step": 2.0,
        "buffer/ready": 3.0,
    }
    assert len({name for names in NAMES.values() for name in names}) == sum(map(len, NAMES.values())) == 30


def test_rewards_with_a_penalty_in_them() -> None:
    """verl's critic/rewards is behind the penalty; a step of rondo has the number before it alone."""
    assert verl({"reward/mean": 0.5}) == {"critic/score/mean": 0.5, "critic/rewards/mean": 0.5}
    assert verl({"reward/mean": 0.5, "actor/kl_reward": 0.1, "actor/kl_coef": 0.02}) == {
        "critic/score/mean": 0.5,
        "actor/reward_kl_penalty": 0.1,
        "actor/reward_kl_penalty_coeff": 0.02,
    }
    assert verl({"actor/kl_loss": 0.1, "actor/kl_coef": 0.02}) == {
        "actor/kl_loss": 0.1,
        "actor/kl_coef": 0.02,
    }


def test_evaluations() -> None:
    several = {
        "eval/greedy/reward": 0.5,
        "eval/greedy/reward/openai/gsm8k": 0.6,
        "eval/greedy/reward/math": 0.4,
        "eval/greedy/score/verl/acc/openai/gsm8k": 0.7,
        "eval/sampled/score/verl/acc/math": 0.3,
        "eval/sampled/best@8": 0.9,
    }
    assert verl(several, source="openai/gsm8k") == {
        "eval/greedy/reward": 0.5,
        "val-aux/openai/gsm8k/reward/mean@1": 0.6,
        "val-aux/math/reward/mean@1": 0.4,
        "val-core/openai/gsm8k/acc/mean@1": 0.7,
        "val-core/math/acc/mean@8": 0.3,
        "eval/sampled/best@8": 0.9,
    }
    alone = {"eval/greedy/reward": 0.5, "eval/greedy/response_length": 7.0}
    assert verl(alone) == alone
    assert verl(alone, source="openai/gsm8k") == {
        "val-core/openai/gsm8k/reward/mean@1": 0.5,
        "eval/greedy/response_length": 7.0,
    }


class Keeps:
    """A tracker: writes down what it is called by, and what it gets."""

    def __init__(self, context: TrackerContext) -> None:
        self.where = str(context.folder.trackers_dir("own"))
        self._file = Path(self.where, "log.jsonl")
        self._file.write_text(json.dumps([context.project, context.run_name]) + "\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(metrics) + "\n")

    def log_samples(self, step: int, samples: Any) -> None: ...

    def finish(self, status: str) -> None: ...


@pytest.mark.slow
def test_a_run_whose_tracker_has_verls_names(tmp_path: Path) -> None:
    """The numbers are those of metrics.jsonl, which keeps rondo's names."""
    run, recipe = tmp_path / "run", tmp_path / "tiny.yaml"
    tracking = {
        "trackers": [f"{__name__}:Keeps"],
        "metric_names": "verl",
        "run_name": "experiment",
        "console": "off",
    }
    recipe.write_text(json.dumps({**RECIPE, "tracking": tracking}))
    inline("train", str(recipe), f"trainer.run_dir={run}", "trainer.total_steps=2")
    heads, *told = [json.loads(line) for line in (run / "trackers/own/log.jsonl").read_text().splitlines()]
    written = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert heads == ["rondo", "experiment"]
    steps = [(theirs, ours) for theirs, ours in zip(told, written, strict=True) if "actor/loss" in ours]
    assert len(steps) == 2
    for theirs, ours in steps:
        for name in ("reward/mean", "actor/policy_loss", "timing/step_s", "rollout/truncated_share"):
            assert name not in theirs
            assert [theirs[name] for name in NAMES[name]] == [ours[name]] * len(NAMES[name])
        assert theirs["actor/grad_norm"] == ours["actor/grad_norm"]
