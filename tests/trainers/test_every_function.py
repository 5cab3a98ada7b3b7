"""Every registered estimator and policy loss that no recipe uses takes two steps in the real loop."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from rondo.algorithms import columns_read, lookup, names
from rondo.config import load
from rondo.system.names import offered
from tests.trainers.conftest import RECIPE, inline, metrics

FIRST_IS_EVEN = "tests/trainers/scorers.py:first_is_even"
OPTIONS = {
    "passk_analytic": ", k: 2",
    "seq-mean-token-sum-norm": ", divisor: 8",
    "chunk-mean-token-mean": ", rows: 2",
}
CORRECTIONS = {
    "tis": "{importance: {level: token, upper: 2.0}}",
    "icepop": "{importance: {level: token, lower: 0.5, upper: 5.0, outside: mask}}",
    "sequence": "{importance: {level: sequence, upper: 5.0, normalize: true}}",
    "geometric_rejection": "{reject: [{statistic: k1, level: mean, lower: 0.999, upper: 1.001}]}",
    "bypass": "{mode: bypass}",
    "bypass_rejection": "{mode: bypass, reject: [{statistic: k3, level: mean, upper: 1.0e-3}]}",
}


# What some recipe chooses runs in test_recipes.py.
CHOSEN = [load([str(path)]).config.algorithm for path in offered("recipes").values()]


def left_over(kind: str) -> list[str]:
    used = {getattr(algorithm, kind).name for algorithm in CHOSEN}
    left = [name for name in names(kind) if name not in used and "." not in name]  # type: ignore[arg-type]
    # Trees are made in programs (examples/tree_grpo.py, tests/trainers/test_branches.py).
    made = {"tree_id", "parent_id", "fork"}
    return [name for name in left if not made & {*columns_read(lookup(kind, name))}]  # type: ignore[arg-type]


def two_steps(folder: Path, *overrides: str) -> dict[str, float]:
    recipe = folder / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    common = (f"trainer.run_dir={folder / 'run'}", "trainer.total_steps=2", "checkpoint.export=false")
    off = ("data.eval=[]", "trainer.evaluation.every=null", f"reward.functions=[{FIRST_IS_EVEN}]")
    inline("train", str(recipe), *common, *off, *overrides)
    last: dict[str, float] = metrics(folder / "run")[-1]
    return last


def check(last: dict[str, float]) -> None:
    assert last["step"] == 2
    assert math.isfinite(last["actor/loss"])
    assert last["actor/grad_norm"] > 0
    assert last["actor/skipped_steps"] == 0


@pytest.mark.parametrize("name", left_over("advantage"))
def test_estimator(name: str, tmp_path: Path) -> None:
    option = OPTIONS.get(name, "")
    overrides = [f"algorithm.advantage={{name: {name}{option}}}"]
    if name == "passk":  # two equally good answers at the top are no signal: a graded score
        overrides.append("reward.functions=[tests/trainers/scorers.py:even_share]")
    if name == "bi_level_gae":  # reads turns, which an agent makes
        overrides.append("rollout.agent={name: tools, max_turns: 1}")
    check(two_steps(tmp_path, *overrides))


@pytest.mark.parametrize("name", left_over("policy_loss"))
def test_policy_loss(name: str, tmp_path: Path) -> None:
    start = tmp_path / "teacher"
    start.mkdir()
    overrides = [f"algorithm.policy_loss={name}"]
    if name.endswith("topk"):
        recipe = start / "tiny.yaml"
        recipe.write_text(yaml.safe_dump(RECIPE))
        inline("train", str(recipe), "trainer.total_steps=1", f"trainer.run_dir={start / 'run'}")
        overrides += [f"teacher={{path: '{start / 'run' / 'export'}', top_k: 4, token_budget: 512}}"]
    check(two_steps(tmp_path, *overrides))


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_rollout_correction(name: str, tmp_path: Path) -> None:
    last = two_steps(tmp_path, f"algorithm.rollout_correction={CORRECTIONS[name]}")
    check(last)
    if name == "bypass_rejection":  # two mini-batches: the second is judged by weights that moved
        assert 0 <= last["rollout_correction/rejected_row_share"] < 1
    elif name != "bypass":  # the native engine's numbers are the trainer's: nothing to correct or reject
        assert last["rollout_correction/kl"] == pytest.approx(0, abs=1e-5)
        assert last["rollout_correction/rejected_token_share"] == 0
        assert last["rollout_correction/effective_sample_size"] == pytest.approx(1, abs=1e-4)


def test_two_scores_normalised_apart(tmp_path: Path) -> None:
    """GDPO reads every named score."""
    two = f"reward.functions=[{FIRST_IS_EVEN}, tests/trainers/scorers.py:even_share]"
    check(two_steps(tmp_path, two, "algorithm.advantage={name: gdpo, weights: [1.0, 0.5]}"))
