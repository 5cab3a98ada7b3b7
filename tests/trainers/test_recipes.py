"""Every recipe in recipes/, two steps each with a tiny model: it runs, and does what it is about."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

from rondo.config import load
from rondo.config.schema import Config, ImagesConfig
from rondo.system.names import offered
from tests.installed import needs, needs_programs
from tests.sandboxes import need_sandbox
from tests.trainers.conftest import MODEL, inline, weights

OTHER_COMMANDS = {
    "quickstart_sft": "sft",
    "reasoning_gym_sft": "sft",
    "frozen_lake_sft": "sft",
    "sokoban_sft": "sft",
    "frozen_lake_seen_sft": "sft",
    "sokoban_seen_sft": "sft",
    "miniwob_sft": "sft",
    "calculator_sft": "sft",
    "python_tool_sft": "sft",
    "search_r1_sft": "sft",
    "visual_sft": "sft",
    "figures_sft": "sft",
    "compare_sft": "sft",
    "dpo": "preference",
    "reward_model": "reward-model",
}
COMMANDS = {path.stem: OTHER_COMMANDS.get(path.stem, "train") for path in sorted(offered("recipes").values())}
TINY = (
    f"model={json.dumps({'config': MODEL, 'tokenizer': 'rondo.recipes.quickstart.tokenizer'})}",
    "cluster.threads=1",
    "tracking={console: 'off', plot: false, trackers: []}",
    "trainer.total_steps=2",
)
# Recipes with images, and how many different ones the eight prompts of two steps show. They are run with the
# model of their warm start, which sees.
SEEING = {"visual": 8, "figures": 8, "compare": 16}
# Those in environments, whose episodes show as many as they last.
IN_WORLDS = ("frozen_lake_seen", "sokoban_seen")
ONE_BATCH = ("data.train.0.options.size=4", "data.batch_size=4", "actor.optimizer.schedule.warmup_steps=0")
# What a recipe is about, as it shows in the second step's metrics.
ABOUT = {
    "grpo": ["actor/kl_loss"],
    "frozen_lake": ["environment/steps/frozen_lake", "environment/success/frozen_lake"],
    "sokoban": ["environment/steps/sokoban", "environment/success/sokoban"],
    "frozen_lake_seen": ["environment/success/frozen_lake"],
    "sokoban_seen": ["environment/success/sokoban"],
    "alfworld": ["environment/steps/alfworld", "environment/success/alfworld"],
    "miniwob": ["environment/steps/miniwob", "environment/success/miniwob"],
    "ppo": ["critic/loss", "critic/explained_variance", "actor/kl_reward"],
    "quickstart_ppo": ["critic/loss", "actor/clip_fraction"],
    "calculator": ["agent/tool_calls/calculator", "agent/invalid_calls"],
    "python_tool": ["agent/tool_calls/python", "agent/tool_seconds_share"],
    "search_r1": ["agent/tool_calls/search", "agent/tool_errors/search"],
    "quickstart_async": ["buffer/staleness_max", "rollout_correction/effective_sample_size"],
    "rloo": ["actor/kl_reward"],
    "reinforce_pp": ["actor/kl_reward", "actor/clip_fraction"],
    "reinforce_pp_baseline": ["actor/kl_loss"],
    "remax": ["actor/kl_reward"],
    "clip_cov": ["actor/covariance_selected", "actor/clip_fraction"],
    "kl_cov": ["actor/covariance_selected"],
    "fipo": ["actor/fipo_weight", "actor/clip_fraction_dual"],
    "pacs": ["actor/pacs_loss"],
    "luffy": ["mix/reward", "actor/given_probability"],
    "rl_plus": ["mix/reward", "actor/given_probability"],
    "exgrpo": ["sampler/pool", "actor/coefficient/replaying"],
    "top_entropy": ["actor/entropy_kept", "actor/clip_fraction"],
    "vineppo": ["rollout/branches", "actor/kl_loss", "actor/clip_fraction"],
    "starpo_s": ["buffer/selected_share", "critic/loss"],
    "grpo_roc": ["buffer/selected_share", "agent/tool_calls/calculator", "reward/score/tool_use"],
    "skywork_or1": ["actor/coefficient/alpha", "actor/term/entropy", "actor/entropy"],
    "dapo": ["buffer/filtered", "reward/generated_mean", "reward/score/overlong", "actor/clip_fraction_high"],
    "prime": ["buffer/filtered", "reward/generated_mean", "prm/loss", "prm/accuracy", "prm/reward"],
    "vapo": ["critic/loss", "actor/lm_loss"],
    "pf_ppo": ["critic/loss", "critic/explained_variance"],
    "distill_topk": ["actor/teacher_mass"],
    "sppo": ["actor/sequence_log_ratio"],
    "safe_rlhf": [
        "critic/loss",
        "cost_critic/loss",
        "actor/kl_reward",
        "actor/multiplier",
        "reward/cost_average",
        "reward/score/longer_than",
    ],
}


def of(command: str) -> list[str]:
    return [name for name, its in COMMANDS.items() if its == command]


def run(command: str, name: str, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of two tiny steps of a recipe."""
    if name.startswith("reasoning_gym") and importlib.util.find_spec("reasoning_gym") is None:
        pytest.skip("needs reasoning_gym")
    if name.startswith("alfworld"):
        needs("alfworld", "textworld")
    if name.startswith("miniwob"):
        needs("miniwob")
        needs_programs("chromium")
    inline(command, str(offered("recipes")[name]), *overrides, f"trainer.run_dir={folder}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of the tiny model that all others start from (and that teaches)."""
    folder = tmp_path_factory.mktemp("start") / "run"
    run("sft", "quickstart_sft", folder, *TINY, *ONE_BATCH)
    return folder


def settings(name: str) -> list[str]:
    return [*TINY[1:]] if name.removesuffix("_sft") in (*SEEING, *IN_WORLDS) else [*TINY]


def of_model(run: Path) -> list[str]:
    return ["model.config=null", f"model.path={run / 'export'}", f"model.tokenizer={run / 'export'}"]


def smaller(config: Config) -> list[str]:
    """Overrides that keep a recipe's structure: mini-batches become halves of a batch, warm-ups one step."""
    groups = 4 if config.rollout.n > 1 else 8
    out = [
        "trainer.warm_start=null",
        "trainer.evaluation={before: false, after: false, every: null, samples: 0}",
        "checkpoint.every=null",
        "data.eval=[]",
        f"data.batch_size={groups}",
        "data.train.0.options.size=64",
        "data.max_prompt_tokens=200",  # the tokenizer may not know the recipe's language
        f"rollout.n={min(4, config.rollout.n)}",
        f"rollout.max_tokens={8 if config.algorithm.mix is None else 28}",  # which a demonstration has, too
        "rollout.max_concurrent=32",
        "actor.optimizer.schedule.warmup_steps=0",
        "reward.functions.0={name: 'tests/trainers/scorers.py:first_is_even'}",
    ]
    if config.reward.accuracy:
        out.append("reward.accuracy=first_is_even")
    for role in ("actor", "critic"):
        if getattr(config, role).mini_batch_size:
            out.append(f"{role}.mini_batch_size={groups // 2}")
    if config.critic.warmup_steps:
        out.append("critic.warmup_steps=1")
    return out


@pytest.mark.parametrize("name", of("train"))
def test_recipe_takes_two_steps(name: str, start: Path, tmp_path: Path) -> None:
    loaded = load([str(offered("recipes")[name])])
    if name in (*SEEING, *IN_WORLDS):
        start = tmp_path / "start"
        run("sft", f"{name}_sft", start, *settings(name), *ONE_BATCH)
    overrides = [*settings(name), *smaller(loaded.config), *of_model(start)]
    if name == "python_tool":
        need_sandbox()
    if loaded.config.rollout.tools:  # a template that writes only the names of tools
        overrides.append("model.tokenizer=rondo.recipes.tool_tasks.tokenizer")
    if any(key.startswith("teacher.") for key in loaded.origins):
        overrides.append(f"teacher.path={start / 'export'}")
    lines = run("train", name, tmp_path / "run", *overrides)
    last = lines[-1]
    assert last["step"] == 2
    assert math.isfinite(last["actor/loss"])
    assert math.isfinite(last["actor/grad_norm"])
    assert last["actor/skipped_steps"] == 0
    assert weights(tmp_path / "run") != weights(start)
    kept = [path for path in (tmp_path / "run" / "images").rglob("*") if len(path.name) == 64]  # by SHA-256
    if name in IN_WORLDS:
        assert len(kept) >= 8
    else:
        assert len(kept) == SEEING.get(name, 0)
    missing = [metric for metric in ABOUT.get(name, ()) if last.get(metric) is None]
    assert not missing


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["grpo", "gigpo"])
def test_a_recipe_in_an_environment_from_the_command_line(
    advantage: str, start: Path, tmp_path: Path
) -> None:
    """With what the environment gives as the reward, and the step's reward in each row."""
    loaded = load([str(offered("recipes")["frozen_lake"])])
    settings = [*TINY, *smaller(loaded.config), *of_model(start), "reward.functions=[environment]"]
    lines = run("train", "frozen_lake", tmp_path / "run", *settings, f"algorithm.advantage={advantage}")
    for line in lines[-2:]:
        assert line["reward/mean"] == line["environment/return/frozen_lake"]
        assert line["rollout/rows_per_trajectory"] == line["environment/steps/frozen_lake"]


@pytest.mark.parametrize("name", of("sft"))
def test_supervised_recipe_takes_two_steps(name: str, tmp_path: Path) -> None:
    lines = run("sft", name, tmp_path / "run", *settings(name), *ONE_BATCH)
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[-1]["sft/loss"] < lines[0]["sft/loss"]


@pytest.mark.parametrize("name", [*of("preference"), *of("reward-model")])
def test_recipe_over_pairs_takes_two_steps(name: str, start: Path, tmp_path: Path) -> None:
    begin = ("trainer.warm_start=null", "trainer.evaluation.every=null", "data.eval=[]", *of_model(start))
    lines = run(COMMANDS[name], name, tmp_path / "run", *TINY, *ONE_BATCH, *begin)
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[-1]["pair/loss"] < lines[0]["pair/loss"]


def test_expectations_are_of_recipes_that_exist() -> None:
    assert set(ABOUT) <= set(COMMANDS)
    assert set(OTHER_COMMANDS) <= set(COMMANDS)
    images = {name: load([str(offered("recipes")[name])]).config.model.images for name in COMMANDS}
    seeing = {name for name, its in images.items() if its != ImagesConfig()}
    assert seeing == {f"{name}{end}" for name in (*SEEING, *IN_WORLDS) for end in ("", "_sft")}
