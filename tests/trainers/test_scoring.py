"""Reward models in the loop: what is trained on is what the files say, and failures are not scored."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from rondo.config import load
from rondo.core.batch import ROW_ID, Batch, BatchRef
from rondo.core.errors import TrainError
from rondo.core.types import Prompt, Row, Trajectory
from rondo.trainers.commands.supervised import reward_model
from rondo.trainers.program.stages import model_scores
from rondo.workers.rollout import Unscored
from tests.messages import full_text
from tests.trainers.conftest import RECIPE, inline, metrics, weights


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward model as an override."""
    folder = tmp_path_factory.mktemp("judge")
    recipe = {key: RECIPE[key] for key in ("model", "cluster", "tracking")}
    pairs = {"type": "function", "task": "rondo.recipes.quickstart.pairs", "options": {"size": 8}}
    recipe["data"] = {"train": [pairs], "batch_size": 4, "max_prompt_tokens": 64}
    recipe["actor"] = {"token_budget": 512, "optimizer": {"lr": 1.0e-2}}
    recipe["trainer"] = {"total_steps": 2, "run_dir": str(folder / "run")}
    (folder / "pairs.yaml").write_text(yaml.safe_dump(recipe))
    reward_model(load([str(folder / "pairs.yaml")]))
    return f"reward.models=[{{path: {folder / 'run' / 'export'}, name: judge, weight: 2, token_budget: 512}}]"


@pytest.mark.slow
def test_rollouts_have_the_reward_that_is_trained_on(judge: str, recipe: Path, tmp_path: Path) -> None:
    """Sample 1 of each prompt fails: it is in the file, and the model does not score it."""
    run, failing = tmp_path / "run", "reward.functions=[tests/trainers/scorers.py:raises]"
    overrides = [judge, failing, "reward.on_error=drop", "trainer.total_steps=1", "data.eval=[]"]
    inline("train", str(recipe), *overrides, "trainer.evaluation.every=null", f"trainer.run_dir={run}")
    rows = pq.read_table(run / "rollouts" / "step-000001.parquet").to_pydict()
    outcomes = np.array(rows["outcome"])
    assert (outcomes == "reward_error").tolist() == [False, True, False, False] * 4
    reward, function, model = (
        np.array(rows[name], float) for name in ("reward", "score/raises", "score/judge")
    )
    failed = outcomes != "scored"
    assert all(np.isnan(column[failed]).all() for column in (reward, function, model))
    np.testing.assert_allclose(reward[~failed], (function + 2 * model)[~failed], rtol=1e-5)
    line = metrics(run)[0]
    assert line["reward/mean"] == pytest.approx(reward[~failed].mean(), rel=1e-5)
    assert line["reward/score/judge"] == pytest.approx(model[~failed].mean(), rel=1e-5)
    assert line["reward/score/judge"] != 0
    assert line["reward/failed_share"] == 0.25
    recorded = (f"rollout.recorded={run}", f"trainer.run_dir={tmp_path / 'recorded'}")
    inline("train", str(recipe), *overrides, "trainer.evaluation.every=null", *recorded)
    assert weights(tmp_path / "recorded") == weights(run)  # the score is in the reward, and not added again
    (again,) = metrics(tmp_path / "recorded")
    names = [name for name in line if name.startswith(("actor/", "reward/score", "reward/mean"))]
    assert {name: again[name] for name in names} == {name: line[name] for name in names}


def test_without_functions_evaluation_has_no_reward(judge: str, recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = [judge, "reward.functions=[]", "trainer.total_steps=1", "tracking.console=plain"]
    inline("train", str(recipe), *overrides, f"trainer.run_dir={run}")
    reported = {name for line in metrics(run) for name in line if name.startswith("eval/")}
    assert "eval/greedy/response_length" in reported
    assert not {name for name in reported if "reward" in name or "@" in name}


def test_an_answer_without_a_token_is_a_failure_where_nothing_scores_it() -> None:
    failed = Trajectory(
        prompt=Prompt(0, "p", "train", np.array([1])),
        trajectory_id="t",
        sample_index=0,
        rows=(Row.empty(np.array([1]), "deadline"),),
        outcome="rollout_error",
    )
    assert asyncio.run(Unscored().score(failed)) is failed


class Broken:
    """A worker group whose model gives NaN to the second row."""

    role = "judge"

    async def call(self, method: Any, batch: BatchRef) -> BatchRef:
        return batch.with_index({"score/judge": np.array([1.0, np.nan], np.float32)})


def test_a_score_that_is_no_number_is_named_with_its_row() -> None:
    rows = {
        ROW_ID: np.array([5, 6]),
        "prompt_id": ["train/0/3", "train/0/4"],
        "sample_index": np.array([0, 2]),
        "response_length": np.array([7, 8]),
    }
    with pytest.raises(TrainError, match=full_text("judge gave the score nan to row 1 of 2")):
        asyncio.run(model_scores(Broken(), BatchRef(Batch.of(rows))))  # type: ignore[arg-type]
