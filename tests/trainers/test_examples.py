"""The examples: short, complete, and the same computation as the built-in loop, bit for bit."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from rondo.config import load
from rondo.trainers.commands.check import check_rl
from rondo.trainers.commands.recipe import settled_recipe
from rondo.trainers.commands.train import train
from tests.agents import calling
from tests.trainers.conftest import MODEL, metrics, weights

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

COMMANDS = [
    line.strip()
    for path in EXAMPLES
    for line in path.read_text().splitlines()
    if re.match(r" {4}rondo (train|sft) ", line)
]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_examples_are_whole(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their recipes load, and can be run as they stand: nothing is left to the reader."""
    for module in ("agents", "langchain"):
        pytest.importorskip(module)
    monkeypatch.chdir(ROOT)
    recipe, *overrides = shlex.split(command)[2:]
    assert "…" not in overrides
    check_rl(settled_recipe(load([recipe], [*overrides, f"trainer.run_dir={tmp_path / 'run'}"])))


TINY = [
    f"model={json.dumps({'config': MODEL, 'tokenizer': 'rondo.recipes.quickstart.tokenizer'})}",
    "trainer={warm_start: null, total_steps: 2, evaluation: {before: false, after: false}}",
    "tracking={console: 'off', plot: false, trackers: [], save_rollouts: false}",
    "data.batch_size=4",
    "data.train.0.options.size=16",
    "rollout={max_tokens: 8, max_concurrent: 16}",
    "actor.optimizer.schedule.warmup_steps=0",
    "reward.functions.0={name: 'tests/trainers/scorers.py:first_is_even'}",
]
HALVES = ["actor.mini_batch_size=2", "critic={mini_batch_size: 2, warmup_steps: 1}", "rollout.n=4"]
SMALLER: dict[str, list[str]] = {
    "ppo": [
        *HALVES,
        "algorithm.rollout_correction={mode: decoupled, importance: {upper: 1.0}, "
        "reject: [{statistic: k1, level: token, lower: 0.5, upper: 1.0}]}",
    ],  # about half of the tokens
    "remax": ["actor.optimizer.lr=1e-3"],
    "safe_rlhf": [*HALVES, "reward.functions.1.tokens=7", "reward.accuracy=first_is_even"],
    "agent": [  # a model of random weights, to which a call is one token
        "model.tokenizer=tests.agents.calling.tokenizer",
        "model.config.max_position_embeddings=2048",
        f"rollout={{max_tokens: 300, n: 4, stop: {json.dumps([calling.STOP])}}}",
        "data.max_prompt_tokens=700",
        "actor.optimizer.lr=1e-3",
    ],
    "grpo_from_scratch": ["actor.mini_batch_size=2", "rollout.n=4", "actor.optimizer.lr=1e-2"],
}


@pytest.fixture(params=EXAMPLES, ids=lambda path: path.stem)
def example(request: pytest.FixtureRequest) -> Path:
    return request.param  # type: ignore[no-any-return]


def test_an_example_is_under_60_lines(example: Path) -> None:
    assert len(example.read_text().splitlines()) < 60


def run_example(name: str, folder: Path, *overrides: str) -> dict[str, Any]:
    """Runs it, and returns its globals."""
    program = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))
    settings = [*TINY, *SMALLER[name], *overrides, f"trainer.run_dir={folder}"]
    asyncio.run(program["main"](settings))
    return program


def run_recipe(program: dict[str, Any], name: str, folder: Path, *overrides: str) -> None:
    """The built-in loop with the example's settings."""
    settings = [*program["SETTINGS"], *TINY, *SMALLER[name], *overrides, f"trainer.run_dir={folder}"]
    train(load([str(recipe) for recipe in program["RECIPES"]], settings))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "remax", "safe_rlhf", "agent"])
def test_an_example_is_its_recipe_spelled_out(name: str, tmp_path: Path) -> None:
    program = run_example(name, tmp_path / "example")
    run_recipe(program, name, tmp_path / "recipe")
    assert weights(tmp_path / "example") == weights(tmp_path / "recipe")
    ours, theirs = metrics(tmp_path / "example"), metrics(tmp_path / "recipe")
    assert [line["step"] for line in ours] == [line["step"] for line in theirs] == [1, 2]
    for mine, its in zip(ours, theirs, strict=True):
        assert (name == "agent") == (mine.get("agent/tool_calls/calculator", 0) > 0)
        groups = ("actor/", "agent/", "critic/", "cost_critic/", "reward/", "rollout_correction/")
        learned = [key for key in its if key.startswith(groups)]
        assert (name == "ppo") == (0.1 < its.get("rollout_correction/rejected_token_share", 0.0) < 0.9)
        loops_own = {"reward/errors", "reward/timeouts", "reward/retries", "actor/kl_coef"}
        assert {key: mine.get(key) for key in learned if key not in loops_own} == {
            key: its[key] for key in learned if key not in loops_own
        }


@pytest.mark.slow
def test_grpo_from_scratch_is_grpo(tmp_path: Path) -> None:
    program = run_example("grpo_from_scratch", tmp_path / "example")
    run_recipe(
        program,
        "grpo_from_scratch",
        tmp_path / "recipe",
        "algorithm.policy_loss={name: ppo_clip, clip_low: 0.25, clip_high: 0.25}",
    )
    files = [tmp_path / name / "export" / "model.safetensors" for name in ("example", "recipe")]
    ours, theirs = (safetensors.numpy.load_file(file) for file in files)
    for name, tensor in theirs.items():
        np.testing.assert_allclose(ours[name], tensor, atol=1e-6)
    clipped = [line["actor/clip_fraction"] for line in metrics(tmp_path / "example")]
    assert max(clipped) > 0
