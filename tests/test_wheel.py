"""Installed, by a wheel or editable, rondo is found and has what the commands need: recipes, schema, the new
project's files, the kernels' source; in an empty environment what it and its extras depend on, too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from rondo.core.errors import our_folders
from rondo.system.names import KINDS, OURS, read_groups

ROOT = Path(__file__).resolve().parents[1]
# Those that add a minute to an installation at most, and what `rondo doctor` calls what they bring.
EXTRAS = {
    "quickstart": ("matplotlib", "tensorboard", "math-verify"),
    "serve": ("aiohttp",),
    "lora": ("peft",),
    "mcp": (),
    "images": (),
}
MODEL = "{model_type: qwen3, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, head_dim: 8, "
MODEL += "num_attention_heads: 2, num_key_value_heads: 1}"
SHORT = (
    *(f"model.config={MODEL}", "model.tokenizer=rondo.recipes.quickstart.tokenizer"),
    *("trainer.warm_start=null", "trainer.total_steps=1", "trainer.evaluation.every=null"),
    *("data.batch_size=2", "rollout.n=2", "actor.mini_batch_size=2", "tracking.console=off"),
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", str(copied(folder / "source")), "--wheel-dir", str(folder))
    (path,) = folder.glob("rondo_rl-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The wheel, unpacked where nothing else of rondo is."""
    folder = wheel.parent / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


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


def test_pinned_versions_allow_the_oldest_python() -> None:
    """Where one does not, pip looks for others for minutes and says that it is impossible."""
    pins = (ROOT / "constraints" / "cpu.txt").read_text(encoding="utf-8").splitlines()
    (oldest,) = SpecifierSet(metadata("rondo-rl")["Requires-Python"])
    refuse, asked = [], 0
    for name, version in (line.split("==") for line in pins if not line.startswith("#") and line):
        try:
            found = metadata(name)
        except PackageNotFoundError:
            continue  # another machine's
        if Version(found["Version"]).public == Version(version).public:
            asked += 1
            if not SpecifierSet(found["Requires-Python"] or "").contains(f"{oldest.version}.0"):
                refuse.append(f"{name} {version} wants Python {found['Requires-Python']}")
    assert refuse == []
    assert asked > 0


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
    rondo(installed, tmp_path / "mine", "train", "recipe.yaml", *SHORT, "tracking.plot=false")
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


# ---- in an environment that has nothing else


def python_of(version: str | None) -> str:
    """Returns a Python of that version; None: this one. Skips where there is none: `make test-long
    PYTHON=python3.12` names one, otherwise it is looked for by its name.
    """
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if version is None:
        return sys.executable
    if version == here:
        pytest.skip(f"this Python is {version}: the test of `this` is that of it")
    ask = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    for python in (os.environ.get("RONDO_PYTHON"), f"python{version}"):
        if python and shutil.which(python):
            done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
            if done.returncode == 0 and done.stdout.strip() == version:
                return python
    pytest.skip(f"no Python {version} here that makes environments: make test-long PYTHON=python{version}")


@pytest.fixture(scope="module", params=[None, "3.12", "3.13"], ids=["this", "3.12", "3.13"])
def environment(request: pytest.FixtureRequest, wheel: Path) -> Iterator[Path]:
    """An environment made for the wheel and its extras, with the versions that are tested. Where no index has
    torch for CPUs of that Python, it is CUDA's: gigabytes. Removed at the end.
    """
    python = python_of(request.param)
    with tempfile.TemporaryDirectory(prefix="rondo-wheel-") as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        command = [
            "install",
            "--quiet",
            "--no-compile",
            "--constraint",
            str(ROOT / "constraints" / "cpu.txt"),
        ]
        alone([f"{folder}/bin/python", "-m", "pip", *command, f"{wheel}[{','.join(EXTRAS)}]"], wheel.parent)
        yield Path(folder)


def alone(command: list[str], cwd: Path) -> str:
    """Returns what a program prints that finds nothing of this checkout."""
    left_out = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(
        command, cwd=cwd, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_empty_environment_trains_with_the_extras(environment: Path, tmp_path: Path) -> None:
    """Adapters, TensorBoard, curves and an export, of a run from a folder that is nobody's."""
    python, rondo = str(environment / "bin" / "python"), str(environment / "bin" / "rondo")
    assert "No broken requirements" in alone([python, "-m", "pip", "check"], tmp_path)
    imported = alone([python, "-c", "import rondo, mcp, PIL; print(rondo.__file__)"], tmp_path)
    assert Path(imported.strip()).is_relative_to(environment)
    found = {one["what"]: one["state"] for one in json.loads(alone([rondo, "doctor", "--json"], tmp_path))}
    wanted = {name for names in EXTRAS.values() for name in names} | {"torch", "transformers", "native"}
    assert {name: found[name] for name in wanted} == dict.fromkeys(wanted, "ok")
    assert {name for name in ("ray", "datasets", "gymnasium") if found[name] == "ok"} == set()
    alone(
        [rondo, "train", "quickstart", *SHORT, "actor.lora={rank: 2}", "tracking.trackers=[tensorboard]"],
        tmp_path,
    )
    run = tmp_path / "runs" / "quickstart"
    assert json.loads((run / "summary.json").read_text())["steps"] == 1
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list(run.rglob("events.out.tfevents.*"))
    assert json.loads((run / "export" / "config.json").read_text())["hidden_size"] == 16
    assert json.loads((run / "export" / "adapter" / "adapter_config.json").read_text())["r"] == 2
