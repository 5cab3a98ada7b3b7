"""Stages of a run (`trainer.stages`): what each changes, and that a run goes on across their borders."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rondo.config import load, number_at, stages_of
from rondo.core.errors import ConfigError
from rondo.trainers.commands.check import check_rl
from tests.trainers.conftest import RECIPE, inline, metrics, weights
from tests.trainers.test_journal import assert_equal
from tests.trainers.test_resume import SIX_STEPS, start, wait_for_line

SECOND = (
    "{step: 3, rollout: {max_tokens: 6, temperature: 0.8}, actor: {optimizer: {lr: 5.0e-4}}, "
    "algorithm: {entropy_coef: 0.01}}"
)
STAGES = "trainer.stages=[{step: 1, rollout: {max_tokens: 4}}, " + SECOND + ", {step: 5}]"
QUIET = "trainer.evaluation={before: false, after: false, every: null}"
WHOLE = (STAGES, "trainer.total_steps=6", "checkpoint.every=1")
BORDERS = (2, 3)
"""The last step before a run is killed: the last of stage 1, and the first of stage 2."""


def killed(recipe: Path, run: Path, *given: str, step: int, ahead: int = 0) -> None:
    """Starts a run and kills it behind a step, when it wants the next prompts. ahead: steps whose answers the
    next weights wait for, too.
    """
    first = (step + ahead) * RECIPE["data"]["batch_size"]
    process = start(recipe, run, *given, hold=f"{first}:{first + 4}")
    wait_for_line(run, process, step)
    process.send_signal(signal.SIGKILL)
    process.wait()


def longest(run: Path) -> list[int]:
    """The tokens of the longest response of each step."""
    files = sorted((run / "rollouts").glob("step-??????.parquet"))
    return [max(len(row) for row in pq.read_table(file)["response_ids"].to_pylist()) for file in files]


def test_each_stage_has_its_lengths_temperature_rate_and_terms(run: Callable[..., Path]) -> None:
    """Sampler and trainer have one temperature in each: at two of them their log-probs would be far apart."""
    folder = run("run", *WHOLE, QUIET)
    lines = [line for line in metrics(folder) if "actor/lr" in line]
    assert [line["trainer/stage"] for line in lines] == [1, 1, 2, 2, 3, 3]
    assert longest(folder) == [4, 4, 6, 6, 8, 8]
    assert [line["actor/lr"] for line in lines] == [1e-3, 1e-3, 5e-4, 5e-4, 1e-3, 1e-3]
    assert ["actor/entropy" in line for line in lines] == [False, False, True, True, False, False]
    assert max(line["rollout/log_prob_gap_max"] for line in lines) < 1e-5


def test_a_stage_from_the_first_step_is_the_recipe_that_says_so(run: Callable[..., Path]) -> None:
    only = "trainer.stages=[" + SECOND.replace("step: 3", "step: 1") + "]"
    said = ("rollout.temperature=0.8", "actor.optimizer.lr=5.0e-4", "algorithm.entropy_coef=0.01")
    staged, plain = run("staged", only, QUIET), run("plain", *said, "rollout.max_tokens=6", QUIET)
    assert weights(staged) == weights(plain)
    without = [{k: v for k, v in line.items() if k != "trainer/stage"} for line in metrics(staged)]
    assert without == metrics(plain)


def test_a_stage_that_changes_nothing_is_the_run_without(run: Callable[..., Path]) -> None:
    """And so is a border in the middle."""
    staged, plain = run("staged", "trainer.stages=[{step: 2}]"), run("plain")
    assert weights(staged) == weights(plain)


def test_a_rule_goes_on_from_its_number_with_the_options_of_the_stage(run: Callable[..., Path]) -> None:
    """The target is above the entropy in the first stage, and below it in the second: up, and down again."""
    rule = "{name: entropy_target, target: 100, step: 0.1, most: 1.0}"
    lower = "trainer.stages=[{step: 3, algorithm: {coefficients: {alpha: {target: 0, step: 0.05}}}}]"
    terms = "algorithm.terms=[{name: entropy, by: alpha}]"
    folder = run("run", f"algorithm.coefficients.alpha={rule}", terms, lower, "trainer.total_steps=5", QUIET)
    with_numbers = [line["actor/coefficient/alpha"] for line in metrics(folder) if "actor/lr" in line]
    assert with_numbers == pytest.approx([0, 0.1, 0.2, 0, 0])


@pytest.mark.parametrize("step", BORDERS)
@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_on_either_side_of_a_border_equals_undisturbed(
    step: int, staleness: int, recipe: Path, tmp_path: Path
) -> None:
    given = (*WHOLE, f"trainer.max_staleness={staleness}", QUIET)
    killed(recipe, tmp_path / "run", *given, step=step, ahead=staleness)
    for name in ("run", "undisturbed"):
        inline("train", str(recipe), *SIX_STEPS, *given, f"trainer.run_dir={tmp_path / name}")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "undisturbed")
    assert weights(tmp_path / "run") == weights(tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("step", BORDERS)
def test_killed_with_answers_in_flight_and_replayed(step: int, recipe: Path, tmp_path: Path) -> None:
    """Two versions ahead what was sampled when is time's choice: the journal repeats it, to the same bits."""
    given = (*WHOLE, "trainer.max_staleness=2", QUIET)
    killed(recipe, tmp_path / "run", *given, step=step)
    arguments = ("train", str(recipe), *SIX_STEPS, *given)
    inline(*arguments, f"trainer.run_dir={tmp_path / 'run'}")
    inline(*arguments, f"trainer.replay={tmp_path / 'run'}", f"trainer.run_dir={tmp_path / 'again'}")
    assert_equal(tmp_path / "run", tmp_path / "again")
    lines = [line for line in metrics(tmp_path / "run") if "actor/lr" in line]
    assert [line["trainer/stage"] for line in lines] == [1, 1, 2, 2, 3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("step", BORDERS)
def test_killed_on_two_processes(step: int, recipe: Path, tmp_path: Path) -> None:
    given = (*WHOLE, "cluster.backend=process", "cluster.devices=2", QUIET)
    killed(recipe, tmp_path / "run", *given, step=step)
    for name in ("run", "undisturbed"):
        inline("train", str(recipe), *SIX_STEPS, *given, f"trainer.run_dir={tmp_path / name}")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "undisturbed")
    assert weights(tmp_path / "run") == weights(tmp_path / "undisturbed")


WRONG = {
    "{rollout: {n: 8}}": ("trainer.stages.0.rollout.n", "no stage changes rollout.n"),
    "{rollout: {max_tokens: 9}}": ("trainer.stages.0.rollout.max_tokens", "engines and memory are made"),
    "{rollout: {max_token: 4}}": ("trainer.stages.0.rollout.max_token", "did you mean 'rollout.max_tokens'"),
    "{actor: {optimizer: {lr: -1}}}": ("trainer.stages.0.actor.optimizer.lr", "greater than 0"),
    "{critic: {optimizer: {lr: 1}}}": ("trainer.stages", "no critic learns"),
    "{algorithm: {coefficients: {beta: {target: 1}}}}": (
        "trainer.stages.0.algorithm.coefficients.beta.target",
        "there is no 'beta'",
    ),
}


@pytest.mark.parametrize("stage", WRONG)
def test_what_no_stage_can_change_is_said(stage: str, recipe: Path) -> None:
    key, said = WRONG[stage]
    written = stage.replace("{", "{step: 2, ", 1)
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        check_rl(load([str(recipe)], [f"trainer.stages=[{written}]"]))
    assert caught.value.key == key


def test_a_stage_is_checked_as_the_run_is(recipe: Path) -> None:
    """pretrain_coef is for temperature 1, in every stage."""
    pretrain = ("algorithm.pretrain_coef=0.1", "data.pretrain=[{type: jsonl, path: rows.jsonl}]")
    load([str(recipe)], pretrain)
    with pytest.raises(ConfigError, match=r"rollout\.temperature=0\.5: .*pretrain"):
        load([str(recipe)], [*pretrain, "trainer.stages=[{step: 2, rollout: {temperature: 0.5}}]"])
    with pytest.raises(ConfigError, match="later than the last"):
        load([str(recipe)], ["trainer.stages=[{step: 3}, {step: 3}]"])


def test_the_stages_of_a_run_begin_with_its_first_step(recipe: Path) -> None:
    config = load([str(recipe)], [f"trainer.stages=[{SECOND}]"]).config
    first, second = stages_of(config)
    assert (first.step, first.config, second.step) == (1, config, 3)
    assert number_at((first, second), 2) == 1
    assert number_at((first, second), 3) == 2
    assert second.config.rollout.max_tokens == 6
    assert second.config.actor.optimizer.lr == 5e-4
