"""Engines of another environment (`rollout.engine.python`): trainer and engine have their own packages.

RONDO_ENGINE_PYTHON names that environment's interpreter; `make test-engines` makes one, and runs these tests
from the trainer's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml

from rondo.config import load
from rondo.rollout.build import build_engine, start_engine
from rondo.trainers.commands.train import train
from tests.engines.conftest import TOLERANCE, Bench, engine_spec, prompt, request
from tests.trainers.conftest import RECIPE, metrics

PYTHON = os.environ.get("RONDO_ENGINE_PYTHON")

pytestmark = pytest.mark.skipif(PYTHON is None, reason="RONDO_ENGINE_PYTHON names no environment of engines")


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_it_samples_from_the_same_policy(kind: str) -> None:
    """Greedy tokens and log-probs are those of the native engine here; and so after an update."""
    here = Bench("native", build_engine(engine_spec("native")))
    there = Bench(kind, start_engine(engine_spec(kind, python=PYTHON), bucket_bytes=1 << 16))
    try:
        for model in (here.model, here.other):
            here.load(model)
            there.load(model)
            asked = [request(prompt(9, seed), 20, temperature=0.0) for seed in range(4)]
            for ours, theirs in zip(here.run(asked), there.run(asked), strict=True):
                assert theirs.token_ids.tolist() == ours.token_ids.tolist()
                assert abs(theirs.log_probs - ours.log_probs).max() < TOLERANCE
        command = Path(f"/proc/{there.engine.pid}/cmdline").read_text().split("\0")  # type: ignore[attr-defined]
        assert command[0] == os.path.abspath(str(PYTHON))
        assert command[0] != sys.executable
    finally:
        there.engine.close()
        here.engine.close()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_two_steps_of_training(kind: str, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    settings = [
        f"rollout.engine={{name: {kind}, python: {PYTHON}}}",
        "model.config.head_dim=32",
        "trainer.total_steps=2",
        "trainer.evaluation={before: false, after: false, every: null}",
        f"trainer.run_dir={tmp_path / 'run'}",
    ]
    train(load([str(tmp_path / "tiny.yaml")], settings))
    assert [line["rollout/log_prob_gap"] < 1e-4 for line in metrics(tmp_path / "run")] == [True] * 2
