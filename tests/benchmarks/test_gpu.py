"""The GPU programme's training part, with a model small enough for a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import train
from tests.trainers.conftest import MODEL


@pytest.mark.slow
def test_a_steps_cost_is_that_of_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, run = tmp_path / "train.json", tmp_path / "run"
    small = {**MODEL, "vocab_size": 1024}
    settings = [f"model.config.{key}={json.dumps(value)}" for key, value in small.items()]
    settings += ["cluster.device=cpu", "rollout.max_tokens=8", "trainer.total_steps=3"]
    monkeypatch.setattr(sys, "argv", ["train.py", "--json", str(report), f"trainer.run_dir={run}", *settings])
    train.main()
    result = json.loads(report.read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["seconds"] for step in result["steps"]] == [line["timing/step_s"] for line in lines]
    gaps = [line["rollout/log_prob_gap"] for line in lines]
    assert [step["log_prob_gap"] for step in result["steps"]] == gaps
    assert result["median"]["log_prob_gap"] == pytest.approx(sum(gaps[1:]) / 2)  # the first one warms up
    assert result["steps"][1]["tokens_per_s"] * lines[1]["timing/step_s"] == pytest.approx(
        lines[1]["rollout/generated_tokens"]
    )
