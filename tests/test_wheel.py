"""Installed, by a wheel or editable, rondo is found and has what the commands need: recipes, schema, the new
project's files, the kernels' source.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rondo.core.errors import our_folders
from rondo.system.names import KINDS, OURS, read_groups

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, unpacked where nothing else of rondo is."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", str(copied(folder / "source")), "--wheel-dir", str(folder))
    (wheel,) = folder.glob("rondo_rl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def copied(folder: Path) -> Path:
    """This tree, as far as builds read it: they write beside that."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def pip(command: str, *arguments: str) -> None:
    whole = [sys.executable, "-m", "pip", command, "--no-deps", "--quiet", *arguments]
    subprocess.run(whole, check=True, capture_output=True, text=True)


def rondo(installed: Path, cwd: Path, *arguments: str) -> str:
    code = f"import rondo; assert rondo.__file__.startswith({str(installed)!r}), rondo.__file__\n"
    code += "import sys; from rondo.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_file_of_the_package_is_in_the_wheel(installed: Path) -> None:
    def files(folder: Path) -> set[str]:
        found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {str(path.relative_to(folder)) for path in found}

    packages = {path.name for path in (ROOT / "src").iterdir() if (path / "__init__.py").is_file()}
    assert packages == {Path(folder).name for folder in our_folders()}
    for package in packages:
        assert files(installed / package) == files(ROOT / "src" / package)


@pytest.mark.slow
def test_the_wheel_offers_what_the_file_says(installed: Path) -> None:
    """Where `rondo` itself reads the file, other programs read the metadata."""
    (text,) = installed.glob("rondo_rl-*.dist-info/entry_points.txt")
    groups = dict(read_groups(text.read_text(encoding="utf-8")))
    assert groups.pop("console_scripts") == {"rondo": "rondo.cli.main:main"}
    assert groups == read_groups(OURS.read_text(encoding="utf-8"))
    assert set(groups) == {f"rondo.{kind}" for kind in KINDS}


@pytest.mark.slow
def test_a_project_made_by_the_wheel_trains(installed: Path, tmp_path: Path) -> None:
    assert "quickstart " in rondo(installed, tmp_path, "recipes")
    rondo(installed, tmp_path, "init", "mine")
    model = "{model_type: qwen3, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, head_dim: 8, "
    model += "num_attention_heads: 2, num_key_value_heads: 1}"
    short = [f"model.config={model}", "model.tokenizer=rondo.recipes.quickstart.tokenizer"]
    short += ["trainer.warm_start=null", "trainer.total_steps=1", "data.batch_size=2", "rollout.n=2"]
    short += ["trainer.evaluation.every=null", "tracking.console=off", "tracking.plot=false"]
    rondo(installed, tmp_path / "mine", "train", "recipe.yaml", *short, "actor.mini_batch_size=2")
    assert (tmp_path / "mine" / "runs" / "first" / "export" / "config.json").is_file()


@pytest.mark.slow
def test_an_editable_install_is_found_beside_its_clone(tmp_path: Path) -> None:
    """`git clone` makes a folder `rondo`, which Python takes for a package without a file where it finds no
    other one: from its parent folder, or from inside.
    """
    clone, site = copied(tmp_path / "rondo"), tmp_path / "site"
    pip("install", "--target", str(site), "--editable", str(clone))
    code = f"import site; site.addsitedir({str(site)!r}); import rondo; print(rondo.__file__)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    alone = [sys.executable, "-S", "-c", code]  # without the rondo that the tests run with
    for folder in (tmp_path, clone):
        found = subprocess.run(alone, cwd=folder, env=environment, capture_output=True, text=True, check=True)
        assert Path(found.stdout.strip()) == clone / "src" / "rondo" / "__init__.py"
