"""docs/packages.md, done: its package is written, installed by pip into an environment of its own, and each
of the page's commands run there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from rondo import __version__

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "packages.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`(rondo-coins/[^`]+)`[^\n]*\n```\w+\n(.*?)^```$", PAGE, re.M | re.S))
FILES |= dict.fromkeys(re.findall(r"^`(rondo-coins/[^`]+)` is empty", PAGE, re.M), "")
COMMANDS = [
    line.split("#")[0].strip()
    for line in re.findall(r"^## Install it and look\n```bash\n(.*?)^```$", PAGE, re.M | re.S)[0].splitlines()
]
COINS = "coins A coin falls `flips` times, nine times of ten on one side; a right guess pays 1 [flips=3]"


class Place:
    """A folder with the package's source, and an environment with what the tests run with, but no network."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in FILES.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        venv.create(folder / "venv")
        self._python = str(folder / "venv" / "bin" / "python")
        there = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        lines = [f"import site; site.addsitedir({path!r})" for path in there]
        (self.site / "beside.pth").write_text("\n".join(lines))

    @property
    def site(self) -> Path:
        (found,) = (self.folder / "venv" / "lib").glob("python*/site-packages")
        return found

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs `rondo …`, `pip …` or `python …`."""
        program = {"rondo": ["-m", "rondo.cli.main"], "pip": ["-m", "pip"], "python": []}[words[0]]
        beside = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "RONDO_CACHE": ""}
        beside |= {"PIP_NO_INDEX": "1", "PIP_NO_CACHE_DIR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        return subprocess.run(
            [self._python, *program, *words[1:]],
            cwd=self.folder,
            env={**os.environ, **beside},
            capture_output=True,
            text=True,
            check=False,
        )

    def said(self, *words: str) -> str:
        """What a program prints that has nothing to complain about, each run of spaces as one."""
        done = self.run(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        return re.sub(r" +", " ", done.stdout)

    def pip_install(self, *arguments: str) -> None:
        self.said("pip", "install", "--no-deps", "--no-build-isolation", *arguments)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """With the package installed."""
    made = Place(tmp_path_factory.mktemp("coins"))
    assert "coins" not in made.said("rondo", "recipes")
    made.pip_install("./rondo-coins")
    return made


def metrics(run: Path) -> list[dict[str, float]]:
    """The metrics of each step, without those before the first."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [one for one in map(json.loads, lines) if one["step"] > 0]


def test_the_page_has_all_files_and_these_commands() -> None:
    assert {name.removeprefix("rondo-coins/") for name in FILES} == {
        "pyproject.toml",
        "rondo_coins/__init__.py",
        "rondo_coins/world.py",
        "rondo_coins/command.py",
        "rondo_coins/recipes/coins.yaml",
        "tests/test_coins.py",
    }
    assert COMMANDS == [  # each is run below
        "pip install ./rondo-coins",
        "rondo list environments",
        "rondo recipes coins",
        "rondo toss 7",
        "rondo check coins",
        "rondo train coins",
        "rondo doctor",
        "python -m pytest rondo-coins/tests",
    ]


@pytest.mark.slow
class TestInstalled:
    def test_its_wheel_has_what_the_names_lead_to(self, place: Place) -> None:
        files = place.said("pip", "show", "--files", "rondo-coins").partition("Files:\n")[2].split()
        assert {name for name in files if name.startswith("rondo_coins/") and ".pyc" not in name} == {
            "rondo_coins/__init__.py",
            "rondo_coins/command.py",
            "rondo_coins/recipes/coins.yaml",
            "rondo_coins/world.py",
        }

    def test_lists_have_it_behind_rondos(self, place: Place) -> None:
        assert place.said("rondo", "list", "environments").splitlines()[-1] == COINS
        assert f"`flips` times{COINS.partition('`flips` times')[2]}\n" in PAGE
        last = "brief 1 when the last answer has at most `most` characters [most=20]"
        assert place.said("rondo", "list", "rewards").splitlines()[-1] == last
        assert place.said("rondo", "list", "tools").splitlines()[-1] == (
            "count_heads Counts the coins that show heads"
        )

    def test_its_recipe_is_listed_and_printed(self, place: Place) -> None:
        line = "coins A tiny model guesses how coins fall: seconds on a CPU"
        assert line in place.said("rondo", "recipes").splitlines()
        recipe = FILES["rondo-coins/rondo_coins/recipes/coins.yaml"]
        assert place.said("rondo", "recipes", "coins") == re.sub(r" +", " ", recipe)

    def test_its_command_is_one_of_rondos(self, place: Place) -> None:
        assert place.said("rondo", "toss", "7") == "tails tails tails\n"
        assert "rondo toss 7                         # tails tails tails\n" in PAGE
        assert "\n toss show how the coins of a seed fall\n" in place.said("rondo", "--help")
        done = place.run("rondo", "toss", "seven")
        assert done.returncode == 2
        assert done.stderr == (
            "usage: rondo toss [-h] seed\nrondo toss: error: argument seed: invalid int value: 'seven'\n"
        )

    def test_check(self, place: Place) -> None:
        said = place.said("rondo", "check", "coins")
        assert "\n rollout.agent.action: rondo_coins.world.said\n" in said
        assert "\n 4. advantages <- controller (grpo)\n" in said

    def test_doctor(self, place: Place) -> None:
        found = json.loads(place.said("rondo", "doctor", "--json"))
        assert [one for one in found if one["section"] == "packages"] == [
            {
                "section": "packages",
                "what": "rondo-coins 1.0",
                "state": "ok",
                "detail": (
                    "environment coins, reward function brief, tool count_heads, recipe coins, command toss"
                ),
                "remedy": "",
            }
        ]

    def test_training_writes_what_happened_in_the_environment(self, place: Place) -> None:
        place.said("rondo", "train", "coins")
        steps = metrics(place.folder / "runs" / "coins")
        assert [one["step"] for one in steps] == [1, 2, 3, 4]
        for one in steps:
            assert one["environment/steps/coins"] == 3
            assert one["environment/failures/coins"] == 0
            assert 0 < one["environment/return/coins"] < 3
            assert 0 < one["environment/invalid_share/coins"] < 1
            scores = one["reward/score/environment"], one["reward/score/brief"]
            assert scores[0] == pytest.approx(one["environment/return/coins"])
            assert one["reward/mean"] == pytest.approx(scores[0] + 0.1 * scores[1], abs=1e-5)
        assert "eval/greedy/score/brief" in steps[-1]

    def test_its_own_tests_pass(self, place: Place) -> None:
        assert "2 passed" in place.said(
            "python", "-m", "pytest", "-p", "no:cacheprovider", "rondo-coins/tests"
        )

    def test_nothing_of_it_is_imported_before_it_is_used(self, place: Place) -> None:
        code = """
import sys
from rondo.config import load
from rondo.system.names import KINDS, offered
def imported():
    return sorted(name for name in sys.modules if name.startswith("rondo_coins"))
print([name for kind in KINDS for name, entry in offered(kind).entries.items() if entry.package])
print([fault for kind in KINDS for fault in offered(kind).faults()], imported())
print(load(["coins"], ["trainer.total_steps=7"]).config.trainer.total_steps, imported())
print(offered("commands")["toss"].__name__, imported())
print(offered("environments")["coins"].__name__, imported())
"""
        assert place.said("python", "-c", code).splitlines() == [
            "['coins', 'brief', 'count_heads', 'coins', 'toss']",
            "[] []",
            "7 []",
            "rondo_coins.command ['rondo_coins', 'rondo_coins.command']",
            "Coins ['rondo_coins', 'rondo_coins.command', 'rondo_coins.world']",
        ]

    def test_from_python(self, place: Place) -> None:
        """A run by the recipe's name, and the tool as a run has it."""
        code = """
import rondo
from rondo.agents.tools import load_tools
from rondo.config import load
short = {"trainer.total_steps": 1, "rollout.n": 2, "trainer.evaluation.every": None}
run = rondo.train("coins", **short, **{"trainer.run_dir": "runs/one", "tracking.console": "off"})
print(run.metrics["environment/steps/coins"].dropna().tolist())
loaded = load(["quickstart"], ["rollout.tools=[count_heads]"])
(tool,) = load_tools(loaded.config.rollout.tools)
print(tool.name, tool.schema["function"]["parameters"]["properties"], tool.make()(coins="HTTH"))
"""
        assert place.said("python", "-c", code).splitlines()[-2:] == [
            "[3.0]",
            "count_heads {'coins': {'type': 'string', 'description': 'a letter for each, such as HTTH'}} 2",
        ]
        assert len(metrics(place.folder / "runs" / "one")) == 1


@pytest.mark.slow
def test_an_editable_install_follows_its_source_and_an_uninstalled_one_is_gone(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.pip_install("--editable", "./rondo-coins")
    assert place.said("rondo", "toss", "7") == "tails tails tails\n"
    recipe = place.folder / "rondo-coins" / "rondo_coins" / "recipes" / "coins.yaml"
    recipe.with_name("more_coins.yaml").write_text("# More of it.\ninclude: coins\n")
    assert "\nmore_coins More of it\n" in place.said("rondo", "recipes")
    place.said("pip", "uninstall", "--yes", "rondo-coins")
    assert "coins" not in place.said("rondo", "recipes")


@pytest.mark.slow
def test_one_that_was_made_for_another_rondo_says_so_and_leaves_all_else(tmp_path: Path) -> None:
    place = Place(tmp_path)
    project = place.folder / "rondo-coins" / "pyproject.toml"
    project.write_text(project.read_text().replace("rondo-rl>=0.2", "rondo-rl>=99"))
    place.pip_install("./rondo-coins")
    why = f"of rondo-coins 1.0: it was made for rondo-rl>=99, and this is {__version__}; update one of them\n"
    for words, whose in [
        (("train", "coins"), "recipe 'coins'"),
        (("toss", "7"), "command 'toss'"),
    ]:
        done = place.run("rondo", *words)
        assert done.returncode == 2
        assert done.stderr == f"rondo {words[0]}: ConfigError\n  {whose} {why}"
    done = place.run("rondo", "list", "environments")
    assert done.returncode == 0
    assert done.stderr == f"note: environment 'coins' {why}"
    assert re.search(r"^bandit ", done.stdout, re.M)
