"""Learning from pairs in one process, on a tiny model: what a first step costs, that it learns, resumes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from torch.distributed.device_mesh import DeviceMesh

from rondo.algorithms import RewardModelLoss
from rondo.config import load
from rondo.config.schema import AlgorithmConfig, Config, FunctionConfig
from rondo.core.errors import CheckpointError, ConfigError
from rondo.models.source import ModelSource
from rondo.recipes.quickstart import train_rows
from rondo.trainers.commands.check_supervised import check_supervised
from rondo.trainers.commands.supervised import preference, reward_model
from rondo.trainers.supervised.tasks import PREFERENCE, pair_stream
from rondo.training import ModelSpec, make_engine
from tests.messages import full_text
from tests.trainers.conftest import RECIPE, SFT_RECIPE, inline, metrics, said_at_once, weights
from tests.training.conftest import mesh  # noqa: F401 (a fixture)

PAIRS = {"type": "function", "task": "rondo.recipes.quickstart.pairs"}
LOG_2 = math.log(2)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Eight pairs, four per step; eight held-out ones."""
    recipe = {key: RECIPE[key] for key in ("model", "cluster", "tracking")}
    recipe["data"] = {
        "train": [{**PAIRS, "name": "pairs", "options": {"size": 8}}],
        "eval": [{**PAIRS, "name": "held_out", "options": {"size": 8, "held_out": True}}],
        "batch_size": 4,
        "max_prompt_tokens": 64,
    }
    recipe["actor"] = {"token_budget": 512, "optimizer": {"lr": 2.0e-3}}
    recipe["trainer"] = {"total_steps": 4, "evaluation": {"every": 2}}
    path = tmp_path / "pairs.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.fixture
def run(recipe: Path, tmp_path: Path) -> Iterator[Any]:
    """run(command, name, *overrides) -> the run folder."""

    def start(command: Any, name: str, *overrides: str) -> Path:
        command(load([str(recipe)], [f"trainer.run_dir={tmp_path / name}", *overrides]))
        return tmp_path / name

    return start


@pytest.mark.parametrize("name", ["dpo_reference_free", "simpo"])
def test_a_loss_without_a_reference_starts_none_and_separates_the_pairs(name: str, run: Any) -> None:
    config = Config(algorithm=AlgorithmConfig(preference_loss=FunctionConfig(name)))
    assert PREFERENCE.roles(config) == ("actor",)
    lines = metrics(run(preference, "run", f"algorithm.preference_loss={name}", "trainer.total_steps=6"))
    first, last = (next(x for x in steps if "pair/margin" in x) for steps in (lines, lines[::-1]))
    assert last["pair/margin"] > first["pair/margin"] + 0.1


def test_dpo_starts_at_log_2_and_separates_the_pairs(run: Any) -> None:
    lines = metrics(run(preference, "dpo", "trainer.total_steps=6"))
    assert lines[0]["pair/loss"] == pytest.approx(LOG_2, abs=1e-6)
    assert lines[0]["pair/margin"] == pytest.approx(0, abs=1e-5)
    assert lines[-1]["pair/loss"] < LOG_2 - 0.01
    assert lines[-1]["pair/margin"] > lines[2]["pair/margin"] > 0
    assert lines[-1]["pair/accuracy"] == 1
    assert [line["step"] for line in lines if "eval/pair/accuracy" in line] == [2, 4, 6]


def test_ipo_starts_at_the_square_of_half_the_inverse_of_beta(run: Any) -> None:
    loss = "algorithm.preference_loss={name: ipo, beta: 0.25}"
    lines = metrics(run(preference, "ipo", loss, "trainer.total_steps=1"))
    assert lines[0]["pair/loss"] == pytest.approx(4.0, rel=1e-5)


@pytest.mark.parametrize("command", [preference, reward_model])
def test_micro_batching_does_not_change_the_run(run: Any, command: Any) -> None:
    small, large = run(command, "small", "actor.token_budget=180"), run(command, "large")
    for one, other in zip(metrics(small), metrics(large), strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("command", [preference, reward_model])
def test_a_run_in_two_parts_equals_one_in_one_go(run: Any, command: Any) -> None:
    whole = run(command, "whole", "checkpoint.every=2")
    run(command, "parts", "checkpoint.every=2", "trainer.total_steps=2")
    parts = run(command, "parts", "checkpoint.every=2")
    assert metrics(parts) == metrics(whole)
    assert weights(parts) == weights(whole)


def test_resume_with_other_pairs_is_refused(run: Any) -> None:
    run(preference, "other", "checkpoint.every=2", "trainer.total_steps=2")
    with pytest.raises(CheckpointError, match=full_text("data.batch_size: 4 in the checkpoint, 8")):
        run(preference, "other", "data.batch_size=8")


def test_a_reward_model_learns_and_its_export_gives_the_same_scores(
    run: Any,
    recipe: Path,
    mesh: DeviceMesh,  # noqa: F811
) -> None:
    folder = run(reward_model, "scores", "trainer.total_steps=12")
    lines = metrics(folder)
    assert lines[0]["pair/loss"] == pytest.approx(LOG_2, abs=1e-6)  # the value head starts at 0
    assert lines[-1]["pair/loss"] < 0.8 * LOG_2
    assert lines[-1]["pair/accuracy"] == 1
    config = load([str(recipe)]).config
    pairs = pair_stream(config, True, RewardModelLoss(config.algorithm.reward_model_loss))
    batch = pairs.batch(range(pairs.rows_per_epoch))
    source = ModelSource(path=str(folder / "export"))
    engine = make_engine(ModelSpec(source, config.actor, head="value"), mesh=mesh)
    scores = [row[-1] for row in engine.forward(batch, {"scores": "scores"}).rows("scores")]
    margins = np.array(scores[::2]) - np.array(scores[1::2])
    assert lines[-1]["eval/pair/margin"] == pytest.approx(margins.mean(), rel=1e-4)
    assert lines[-1]["eval/pair/accuracy"] == pytest.approx((margins > 0).mean())


def test_a_margin_in_the_data_makes_the_loss_ask_for_more(run: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1?", "chosen": str(i + 1), "rejected": str(i), "margin": 1} for i in range(2, 6)]
    (tmp_path / "margins.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    source = f"[{{type: jsonl, path: {tmp_path / 'margins.jsonl'}}}]"
    first = metrics(run(reward_model, "margin", f"data.train={source}", "trainer.total_steps=1"))[0]
    assert first["pair/loss"] == pytest.approx(math.log(1 + math.e), rel=1e-5)  # -log sigmoid(0 - 1)


def test_a_warm_start_comes_first_and_is_the_reference(run: Any, tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(SFT_RECIPE))
    model = ("model.config=null", "model.tokenizer=null", f"trainer.warm_start={tmp_path / 'sft.yaml'}")
    folder = run(preference, "warm", *model, "trainer.total_steps=2", "checkpoint.every=1")
    assert metrics(folder)[0]["pair/loss"] == pytest.approx(LOG_2, abs=1e-6)
    assert (folder / "warm_start" / "export" / "config.json").exists()
    longer = run(preference, "warm", *model, "trainer.total_steps=3")  # neither is trained again
    assert [line["step"] for line in metrics(longer)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("command", "override", "said"),
    [
        ("preference", "rollout.n=4", "rollout.n has no meaning for preference learning"),
        ("preference", "actor.epochs=2", "actor.epochs has no meaning for preference learning"),
        ("preference", "algorithm.reward_model_loss.name=other", "algorithm.reward_model_loss.name has no"),
        ("preference", "reference.refresh_every=2", "reference.refresh_every has no meaning"),
        ("preference", "algorithm.preference_loss=dpp", "dpo"),
        ("preference", "algorithm.preference_loss.bata=0.2", "beta"),
        ("preference", "reference.token_budget=100", "reference.token_budget=100 is less than"),
        ("preference", "data.eval=[]", "but data.eval is empty"),
        ("reward-model", "algorithm.preference_loss.beta=0.2", "has no meaning for reward-model training"),
        ("reward-model", "reference.path=other", "reference.path has no meaning for reward-model training"),
        ("reward-model", "algorithm.reward_model_loss=cost_bradley_terry", "chosen_safe and rejected_safe"),
        ("reward-model", "data.train=[{type: jsonl, path: missing.jsonl}]", "missing.jsonl"),
    ],
)
def test_what_a_command_does_not_read_is_an_error(
    recipe: Path, tmp_path: Path, command: str, override: str, said: str
) -> None:
    done = inline(command, str(recipe), override, f"trainer.run_dir={tmp_path / 'run'}", check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_all_that_does_not_fit_is_said_at_once(recipe: Path) -> None:
    wrong = {
        "rollout.n": "rollout.n=4",
        "reference.token_budget": "reference.token_budget=100",
        "tracking.trackers.0": "tracking.trackers=[wandbb]",
        "model.chat_template": "model.chat_template=nowhere.jinja",
        "data.train.0": "data.train=[{type: jsonl, path: nowhere.jsonl}]",
    }
    said_at_once(wrong, recipe, lambda loaded: check_supervised(loaded, PREFERENCE))


def test_the_commands_run_what_config_yaml_says(run: Any, recipe: Path, tmp_path: Path) -> None:
    one = ("trainer.total_steps=1", "checkpoint.every=1")
    inline("reward-model", str(recipe), f"trainer.run_dir={tmp_path / 'a'}", *one)
    inline("reward-model", str(recipe), f"trainer.run_dir={tmp_path / 'a'}", *one)  # finished: nothing to do
    with pytest.raises(ConfigError, match="this run is finished"):
        run(reward_model, "a", *one, "actor.optimizer.lr=1e-5")
    inline("preference", str(recipe), f"trainer.run_dir={tmp_path / 'b'}", *one)
    inline("preference", str(tmp_path / "b" / "config.yaml"), f"trainer.run_dir={tmp_path / 'c'}")
    assert weights(tmp_path / "b") == weights(tmp_path / "c")


def test_the_spin_program_of_the_docs_writes_pairs(run: Any, tmp_path: Path) -> None:
    docs = (Path(__file__).parents[2] / "docs" / "preference.md").read_text()
    program: dict[str, Any] = {}
    exec(docs.split("# my_spin.py\n")[1].split("```")[0], program)
    model = str(run(preference, "first", "trainer.total_steps=1") / "export")
    rows = [{"prompt": row["prompt"], "response": row["solution"]} for row in train_rows(6)]
    program["write_pairs"](model, rows, str(tmp_path / "own.jsonl"), max_tokens=4)
    own = f"[{{type: jsonl, path: {tmp_path / 'own.jsonl'}}}]"
    second = run(preference, "second", f"data.train={own}", "algorithm.preference_loss=spin")
    assert metrics(second)[-1]["pair/margin"] > 0
