"""`rondo config show`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from rondo.cli.main import main
from rondo.config import load
from rondo.config.load import RECIPES

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS = ["model.path=m", "trainer.total_steps=1", "rollout.n=4"]


def test_yaml_can_be_trained_from(in_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--yaml", *ARGUMENTS]) == 0
    (in_tmp_path / "all.yaml").write_text(capsys.readouterr().out, encoding="utf-8")
    assert load(["all.yaml"]).config == load([], ARGUMENTS).config


def test_keys_with_origins(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", *ARGUMENTS]) == 0  # no scorers: no RL recipe, so no stages
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if line.startswith("rollout.n:")] == [
        ["rollout.n:", "4", "#", "argument", "'rollout.n=4'"]
    ]
    assert not [line for line in lines if line.startswith("One step")]


def test_stages_follow_from_the_functions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    recipe = str(RECIPES / "quickstart.yaml")
    assert main(["config", "show", recipe, "algorithm.kl={name: k3, where: loss, coef: 0.1}"]) == 0
    stages = capsys.readouterr().out.split("One step:\n")[1]
    assert (
        "ref_log_probs <- reference.compute_ref_log_prob" in stages or "ref_log_probs <- reference." in stages
    )
    assert main(["config", "show", recipe, "--no-stages"]) == 0
    assert "One step" not in capsys.readouterr().out


def test_every_recipe_that_rondo_ships_passes_the_second_check(capsys: pytest.CaptureFixture[str]) -> None:
    """As it is, with the model that a warm start has yet to make; only a teacher is for the user to name.
    A recipe whose package is not here says so (where the package is, `make test-environments` checks it).
    """
    missing = [name for name in ("alfworld", "miniwob") if importlib.util.find_spec(name) is None]
    for path in sorted(RECIPES.glob("*.yaml")):
        teacher = ["teacher.path=."] if path.stem.startswith("distill") else []
        code = main(["config", "show", path.stem, *teacher])
        said = capsys.readouterr().err
        if path.stem in missing:
            assert code == 2
            assert f"needs a package: pip install 'rondo-rl[{path.stem}]'" in said
        else:
            assert code == 0 or (teacher and "teacher.path" in said), (path.stem, said)
