"""Partial rollouts with the real engine on a tiny model: versions and log-probs of every token."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rondo.weights.sync import Sent
from rondo.workers.rollout import RolloutWorker
from tests.trainers.conftest import inline, metrics

RESUME = (
    "trainer.max_staleness=2",
    "rollout.max_tokens=64",
    "rollout.max_concurrent=2",
    "trainer.evaluation={before: false, after: false, every: null}",
)


def rows_of(run: Path) -> dict[str, list[Any]]:
    """All rows that were trained on, in the order of steps."""
    tables = [
        pq.read_table(path).to_pydict() for path in sorted((run / "rollouts").glob("step-??????.parquet"))
    ]
    return {name: [value for table in tables for value in table[name]] for name in tables[0]}


def groups_by_step(run: Path) -> list[list[int]]:
    paths = sorted((run / "rollouts").glob("step-??????.parquet"))
    return [sorted(set(pq.read_table(path)["group_id"].to_pylist())) for path in paths]


def log_probs_of(
    folder: Path, parameters: Mapping[str, torch.Tensor], rows: Mapping[str, Any], at: int
) -> Any:
    """Of the response's tokens, by a plain model with these parameters."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float().eval()
    missing, unknown = model.load_state_dict(dict(parameters), strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unknown
    prompt, response = rows["prompt_ids"][at], rows["response_ids"][at]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)].numpy()


@pytest.mark.slow
@pytest.mark.usefixtures("begun_at_first_update")
def test_a_trajectory_begins_under_old_weights_and_ends_under_new_ones(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token's log-prob is that of the weights whose version it carries."""
    loaded: dict[int, dict[str, torch.Tensor]] = {}
    original = RolloutWorker.load_weights

    def load_weights(self: RolloutWorker, version: int, *what: Sent) -> Any:
        loaded[version] = {
            name: p.clone() for name, p in self.context.peers["actor"].engine.parameters_in_place().items()
        }
        return original(self, version, *what)

    monkeypatch.setattr(RolloutWorker, "load_weights", functools.wraps(original)(load_weights))
    run = tmp_path / "run"
    inline("train", str(recipe), *RESUME, "trainer.total_steps=4", f"trainer.run_dir={run}")
    rows = rows_of(run)
    mixed = [i for i, versions in enumerate(rows["policy_versions"]) if len(set(versions)) > 1]
    assert mixed
    for i in mixed[:3]:
        versions = np.array(rows["policy_versions"][i])
        assert (np.diff(versions) >= 0).all()
        for version in set(versions.tolist()):
            ours = log_probs_of(run / "export", loaded[version], rows, i)
            there = versions == version
            sampled = np.array(rows["rollout_log_probs"][i])
            np.testing.assert_allclose(sampled[there], ours[there], atol=2e-5)
            assert np.abs(sampled[~there] - ours[~there]).max() > 1e-4
    lines = metrics(run)
    assert max(line["buffer/staleness_max"] for line in lines) <= 2
    for line in lines:
        shares = [line[f"buffer/staleness_{k}"] for k in range(3)]
        assert sum(shares) == pytest.approx(1)
        assert line["buffer/staleness_mean"] == pytest.approx(shares[1] + 2 * shares[2])
        assert line["rollout_correction/weight_max"] <= 2.0  # on by itself
    assert lines[-1]["rollout_correction/kl"] != 0


@pytest.mark.slow
@pytest.mark.usefixtures("begun_at_first_update")
@pytest.mark.parametrize("how", ["abort", "completion"])
def test_the_other_ways_train_every_prompt_once_too(recipe: Path, tmp_path: Path, how: str) -> None:
    chosen = ["trainer.order=completion"]
    if how == "abort":
        chosen = ["trainer.on_update=abort"]
    run = tmp_path / "run"
    inline("train", str(recipe), *RESUME, *chosen, "trainer.total_steps=5", f"trainer.run_dir={run}")
    assert sorted(seq for step in groups_by_step(run) for seq in step) == list(range(20))
    lines = metrics(run)
    assert max(line["buffer/staleness_max"] for line in lines) <= 2
    if how == "abort":
        assert sum(line["buffer/aborted"] for line in lines) > 0
        assert sum(line["buffer/wasted_tokens"] for line in lines) > 0
