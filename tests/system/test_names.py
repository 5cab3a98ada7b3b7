"""Names that installed packages offer: each fault of a package is told with its name, all other names work.

A package is a module and the folder that pip would have written beside it, in a folder on the path.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from rondo import __version__
from rondo.cli import main as cli
from rondo.config import load
from rondo.core.errors import ConfigError
from rondo.environments.registry import check_protocol
from rondo.system import names
from rondo.system.names import KINDS, OURS, offered, read_groups

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "packages.md").read_text(encoding="utf-8").split())
ESCAPE = "would end or cancel the run from inside; raise an exception that says what is wrong"
WORLD = "class Coins:\n    pass\n"
Install = Callable[..., None]


@pytest.fixture(autouse=True)
def _read_anew() -> Iterator[None]:
    """What is offered is read once per process."""
    before = set(sys.modules)
    for read in (offered, names._others, names._warn_once):
        read.cache_clear()
    yield
    for read in (offered, names._others, names._warn_once):
        read.cache_clear()
    for module in set(sys.modules) - before:
        if module.startswith(("rondo_coins", "more_coins")):
            del sys.modules[module]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """`install(name, {kind: {name: target}}, {file: text}, requires=[…])`: a package, version 1.0."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(
        name: str,
        groups: dict[str, dict[str, str]] | str,
        files: dict[str, str] = {},
        *,
        requires: list[str] = [],
        version: str = "1.0",
        folder: Path = tmp_path,
    ) -> None:
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requires)]
        text = groups if isinstance(groups, str) else "\n".join(map(_group, groups, groups.values()))
        info = f"{re.sub(r'[-_.]+', '_', name).lower()}-{version}.dist-info"
        written = {f"{info}/METADATA": "\n".join(lines), f"{info}/entry_points.txt": text, **files}
        for path, content in written.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(content, encoding="utf-8")

    return write


def _group(kind: str, entries: dict[str, str]) -> str:
    return "\n".join([f"[rondo.{kind}]", *(f"{name} = {target}" for name, target in entries.items())])


def refused(kind: str, name: str) -> str:
    """What is said to whoever looks the name up."""
    assert name in offered(kind)
    with pytest.raises(ConfigError) as caught:
        offered(kind)[name]
    return str(caught.value)


def faults(kind: str) -> list[str]:
    return [entry.told for entry in offered(kind).faults()]


def on_the_page(text: str) -> bool:
    """Whether docs/packages.md has a message, in this version of rondo."""
    return f"`{text.replace(__version__, '0.2.0')}`" in PAGE


class TestOurs:
    def test_what_is_offered_without_other_packages_is_the_file(self) -> None:
        groups = read_groups(OURS.read_text(encoding="utf-8"))
        assert set(groups) == {f"rondo.{kind}" for kind in KINDS}
        for kind in set(KINDS) - {"recipes"}:
            ours = [entry.name for entry in offered(kind).entries.values() if not entry.package]
            assert ours == list(groups[f"rondo.{kind}"])

    def test_each_is_what_its_kind_says(self) -> None:
        for name, found in offered("environments").items():
            check_protocol(found, name)
        for name in offered("rewards"):
            assert callable(offered("rewards")[name])
        for name, tool in offered("tools").items():
            assert tool.__name__ == name or tool.__name__ == "McpServer" or tool.tool_name == name
        for name, path in offered("recipes").items():
            assert path.name == f"{name}.yaml"
            assert path.is_file()
        for kind, members in names._OF_MODULES.items():
            for module in offered(kind).values():
                assert isinstance(module, ModuleType)
                assert all(callable(getattr(module, member)) for member in members)

    def test_none_has_a_fault(self) -> None:
        assert [fault for kind in KINDS for fault in offered(kind).faults()] == []


class TestAnother:
    def test_a_name_is_found_without_an_import_and_imported_when_it_is_looked_up(
        self, install: Install
    ) -> None:
        install("Rondo_Coins", {"environments": {"coins": "rondo_coins:Coins"}}, {"rondo_coins.py": WORLD})
        assert [*offered("environments")][-1] == "coins"
        assert offered("environments").entries["coins"].package == "rondo-coins 1.0"
        assert offered("environments").faults() == []
        assert "rondo_coins" not in sys.modules
        assert offered("environments")["coins"] is sys.modules["rondo_coins"].Coins

    def test_names_that_differ_in_case_are_two(self, install: Install) -> None:
        files = {"rondo_coins.py": "class A: ...\nclass B: ..."}
        install("rondo-coins", {"environments": {"coins": "rondo_coins:A", "Coins": "rondo_coins:B"}}, files)
        install("more-coins", {"environments": {"COINS": "rondo_coins:A"}})
        found = offered("environments")
        assert [found[name].__name__ for name in ("coins", "Coins", "COINS")] == ["A", "B", "A"]
        assert found.faults() == []

    def test_of_two_copies_the_first_on_the_path_counts(
        self, install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also where it has another spelling, or no longer offers the name."""
        files = {"rondo_coins.py": WORLD}
        entries = {"environments": {"coins": "rondo_coins:Coins", "old": "rondo_coins:Coins"}}
        install("rondo-coins", entries, files)
        first = tmp_path / "first"
        entries = {"environments": {"coins": "rondo_coins:Coins"}}
        install("Rondo.Coins", entries, files, version="2.0", folder=first)
        monkeypatch.syspath_prepend(first)
        assert offered("environments").entries["coins"].package == "rondo-coins 2.0"
        assert "old" not in offered("environments")
        assert offered("environments").faults() == []
        (first / "rondo_coins-2.0.dist-info" / "entry_points.txt").unlink()
        names._others.cache_clear()
        offered.cache_clear()
        assert "coins" not in offered("environments")

    def test_recipes_are_the_files_of_a_folder(self, install: Install, tmp_path: Path) -> None:
        """Which a name in the place of a recipe, an include and a warm start find."""
        recipe = "include: quickstart\ntrainer: {total_steps: 7, warm_start: slow_coins.yaml}"
        files = {
            "rondo_coins/__init__.py": "raise OSError('no recipe needs it')",
            "rondo_coins/recipes/coins.yaml": recipe,
            "rondo_coins/recipes/slow_coins.yaml": "include: coins\ntrainer: {total_steps: 99}",
        }
        install("rondo-coins", {"recipes": {"any": "rondo_coins.recipes"}}, files)
        assert "any" not in offered("recipes")
        assert offered("recipes")["coins"] == tmp_path / "rondo_coins" / "recipes" / "coins.yaml"
        loaded = load(["slow_coins"]).config
        assert (loaded.trainer.total_steps, loaded.data.batch_size) == (99, 16)
        assert load(["coins"]).config.trainer.warm_start == "slow_coins"

    def test_a_command_runs(self, install: Install, capsys: pytest.CaptureFixture[str]) -> None:
        text = "def add_parser(all):\n    all.add_parser('toss', help='toss a coin')\n"
        text += "def run(args):\n    print('heads')\n    return 3\n"
        install("rondo-coins", {"commands": {"toss": "rondo_coins"}}, {"rondo_coins.py": text})
        assert cli.main(["toss"]) == 3
        assert capsys.readouterr().out == "heads\n"
        assert cli.main([]) == 0
        assert re.search(r"\n    toss +toss a coin\n", capsys.readouterr().out)

    def test_another_spelling_of_keys_is_translated(self, install: Install, in_tmp_path: Path) -> None:
        """Also where another translator, which is asked before, cannot be used."""
        install("more-coins", {"keys": {"broken": "more_coins"}})
        text = (
            "from rondo.config.load import Translation, with_settings\n"
            "from rondo.config.tree import Node\n"
            "def program(name):\n"
            "    return {'trainer.seed': 7} if name == 'coiner' else None\n"
            "def argument(text):\n"
            "    return text\n"
            "def translate(tree):\n"
            "    rest = dict(tree.value)\n"
            "    told = rest.pop('tosses')\n"
            "    tree = Node(rest, tree.origin, tree.layer)\n"
            "    tree = with_settings(tree, [('trainer.total_steps', told)], [])\n"
            "    return Translation(tree, ('tosses are steps',))\n"
        )
        install("rondo-coins", {"keys": {"coiner": "rondo_coins"}}, {"rondo_coins.py": text})
        loaded = load(["quickstart"], ["tosses=5"])
        assert loaded.config.trainer.total_steps == 5
        assert loaded.notes == ("tosses are steps",)
        coined = load(["coiner"], ["model.path=m", "tosses=6"])
        assert (coined.config.trainer.total_steps, coined.config.trainer.seed, coined.files) == (6, 7, ())
        assert coined.origins["trainer.seed"].where == "program coiner"
        assert load(["coiner"], ["model.path=m", "tosses=6", "trainer.seed=8"]).config.trainer.seed == 8


class TestFaults:
    def test_two_packages_with_one_name(self, install: Install) -> None:
        install("rondo-coins", {"environments": {"coins": "rondo_coins.world:Coins"}})
        more = {"coins": "more_coins:Coins", "dice": "more_coins:Coins"}
        install("more-coins", {"environments": more}, {"more_coins.py": WORLD})
        text = refused("environments", "coins")
        assert text == (
            "environment 'coins' of more-coins 1.0 and rondo-coins 1.0: both offer this name; write "
            "more_coins:Coins or rondo_coins.world:Coins instead"
        )
        assert on_the_page(text)
        assert faults("environments") == [text]
        assert offered("environments")["dice"] is sys.modules["more_coins"].Coins

    def test_two_packages_with_one_command_have_no_other_name_for_it(
        self, install: Install, capsys: pytest.CaptureFixture[str]
    ) -> None:
        install("rondo-coins", {"commands": {"toss": "rondo_coins"}})
        install("more-coins", {"commands": {"toss": "more_coins"}})
        text = "command 'toss' of more-coins 1.0 and rondo-coins 1.0: both offer this name; uninstall one"
        assert cli.main(["toss"]) == 2
        assert capsys.readouterr().err == f"rondo toss: ConfigError\n  {text}\n"

    def test_two_packages_with_one_recipe(self, install: Install, tmp_path: Path) -> None:
        for name in ("rondo_coins", "more_coins"):
            install(name, {"recipes": {name: name}}, {f"{name}/coins.yaml": "", f"{name}/{name}.yaml": ""})
        packages = "more-coins 1.0 and rondo-coins 1.0"
        places = f"{tmp_path}/more_coins/coins.yaml or {tmp_path}/rondo_coins/coins.yaml"
        assert refused("recipes", "coins") == (
            f"recipe 'coins' of {packages}: both offer this name; write {places} instead"
        )
        assert offered("recipes")["more_coins"] == tmp_path / "more_coins" / "more_coins.yaml"

    def test_a_name_that_rondo_has_is_rondos(
        self, install: Install, caplog: pytest.LogCaptureFixture
    ) -> None:
        entries = {"bandit": "rondo_coins.world:Bandit"}
        install("rondo-coins", {"environments": entries}, {"rondo_coins.py": "raise OSError"})
        from rondo_worlds.bandit import Bandit

        text = (
            "environment 'bandit' of rondo-coins 1.0: rondo has this name, and its own is meant; write "
            "rondo_coins.world:Bandit for this one"
        )
        assert on_the_page(text)
        assert faults("environments") == [text]
        with caplog.at_level(logging.WARNING):
            assert [offered("environments")["bandit"] for _ in range(3)] == [Bandit] * 3
            assert offered("environments")["shop"].__name__ == "Shop"
        assert [record.getMessage() for record in caplog.records] == [text]

    @pytest.mark.parametrize(
        ("line", "told"),
        [
            ("rondo-rl<0.2", "<0.2"),
            ("Rondo.RL[serve] ==99.*", "==99.*"),
            ('rondo-rl>=99 ; python_version >= "3"', ">=99"),
            ("rondo-rl>=0.0.1", ""),
            ("rondo-rl @ https://example.org/rondo.whl", ""),
            ('rondo-rl>=99; extra == "new"', ""),
            ('rondo-rl>=99; python_version < "3"', ""),
            ("rondo-rl-plots>=99", ""),
            ("this is no requirement", ""),
        ],
    )
    def test_a_package_for_another_rondo(self, line: str, told: str, install: Install) -> None:
        entries = {"coins": "rondo_coins:Coins"}
        files = {"rondo_coins.py": WORLD}
        install("rondo-coins", {"environments": entries}, files, requires=["numpy", line])
        if not told:
            assert offered("environments")["coins"].__name__ == "Coins"
            return
        fault = f"it was made for rondo-rl{told}, and this is {__version__}; update one of them"
        assert refused("environments", "coins") == f"environment 'coins' of rondo-coins 1.0: {fault}"
        assert told != "<0.2" or on_the_page(f"environment 'coins' of rondo-coins 1.0: {fault}")
        assert "rondo_coins" not in sys.modules
        assert offered("environments")["bandit"].__name__ == "Bandit"

    def test_a_version_before_a_release_counts(
        self, install: Install, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(names, "__version__", "0.3.0.dev1")
        entries = {"environments": {"coins": "rondo_coins:Coins"}}
        install("rondo-coins", entries, {"rondo_coins.py": WORLD}, requires=["rondo-rl>=0.2"])
        assert offered("environments")["coins"].__name__ == "Coins"

    def test_recipes_for_another_rondo_are_found_by_their_names(self, install: Install) -> None:
        files = {"rondo_coins/recipes/coins.yaml": "include: quickstart"}
        entries = {"recipes": {"any": "rondo_coins.recipes"}}
        install("rondo-coins", entries, files, requires=["rondo-rl<0.2"])
        assert refused("recipes", "coins").startswith(
            "recipe 'coins' of rondo-coins 1.0: it was made for rondo"
        )

    @pytest.mark.parametrize(
        ("raised", "told"),
        [
            ("raise OSError('no mint')", "OSError: no mint (rondo_coins.py, line 1)"),
            (
                "import nothing_here",
                "ModuleNotFoundError: No module named 'nothing_here' (rondo_coins.py, line 1)",
            ),
            (
                "raise SystemExit(3)",
                f"EscapeError: SystemExit(3) {ESCAPE} (rondo_coins.py, line 1)",
            ),
        ],
    )
    def test_one_that_raises_when_it_is_imported(self, raised: str, told: str, install: Install) -> None:
        install("rondo-coins", {"environments": {"coins": "rondo_coins:Coins"}}, {"rondo_coins.py": raised})
        assert offered("environments").faults() == []  # nothing was imported
        text = refused("environments", "coins")
        assert text == (
            "environment 'coins' of rondo-coins 1.0: 'rondo_coins:Coins': module rondo_coins could not be "
            f"imported: {told}"
        )
        assert "mint" not in text or on_the_page(text)
        assert offered("environments")["bandit"].__name__ == "Bandit"

    def test_what_is_not_there(self, install: Install) -> None:
        entries = {
            "module": "rondo_mint:Coins",
            "inner": "rondo_coins.mint:Coins",
            "name": "rondo_coins:Coin",
        }
        entries |= {"whole": "rondo_coins", "number": "rondo_coins:n", "empty": ""}
        install("rondo-coins", {"environments": entries}, {"rondo_coins.py": f"{WORLD}n = 3"})
        whose = "environment '{}' of rondo-coins 1.0: "
        told = {name: refused("environments", name).removeprefix(whose.format(name)) for name in entries}
        place = sys.modules["rondo_coins"].__file__
        missing = "install it, or run where it can be imported"
        assert told.pop("inner").startswith("'rondo_coins.mint:Coins': ")
        assert told.pop("empty").startswith(
            "'': module  could not be imported: ValueError: Empty module name"
        )
        assert told == {
            "module": f"'rondo_mint:Coins': there is no module rondo_mint; {missing}",
            "name": f"'rondo_coins:Coin': {place} has no 'Coin'; did you mean 'Coins'?",
            "whole": "rondo_coins is a module; name what is meant in it: module:name",
            "number": "'rondo_coins:n' is int, not a function",
        }

    @pytest.mark.parametrize(
        "target", ["rondo_coins.recipes", "rondo_coins.other", "rondo_mint", "sys", ".x", "a:b"]
    )
    def test_recipes_that_are_not_there(
        self, target: str, install: Install, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A package's data that nobody has put into its wheel."""
        files = {"rondo_coins/__init__.py": "", "rondo_coins/recipes/README.md": ""}
        install("rondo-coins", {"recipes": {"rondo_coins": target}}, files)
        whose = "recipe 'rondo_coins' of rondo-coins 1.0: "
        text = (
            f"{whose}{target} is no folder of a package with YAML files in it; put them into its package-data"
        )
        assert target != "rondo_coins.recipes" or on_the_page(text)
        assert refused("recipes", "rondo_coins") == text
        assert faults("recipes") == [text]
        assert cli.main(["recipes"]) == 0
        printed = capsys.readouterr()
        assert printed.err == f"note: {text}\n"
        assert "\nquickstart " in printed.out

    @pytest.mark.parametrize(
        "text", ["[rondo.environments]\ncoins", "coins = rondo.x:Y", "[rondo.rewards]\na=b\na=c"]
    )
    def test_entry_points_that_cannot_be_read(self, text: str, install: Install) -> None:
        """Every kind has it, since any may be in it."""
        install("rondo-coins", text)
        install("more-coins", {"environments": {"dice": "more_coins:Coins"}}, {"more_coins.py": WORLD})
        for kind in KINDS:
            (fault,) = faults(kind)
            start = f"{KINDS[kind]} 'rondo-coins' of rondo-coins 1.0: its entry_points.txt cannot be read: "
            assert fault.startswith(start)
            assert fault.endswith("; install another version of it")
            assert "\n" not in fault
        assert offered("environments")["dice"].__name__ == "Coins"

    def test_files_that_are_no_text_and_folders_without_metadata_offer_nothing(
        self, install: Install, tmp_path: Path
    ) -> None:
        install("rondo-coins", {"environments": {"coins": "rondo_coins:Coins"}})
        (tmp_path / "rondo_coins-1.0.dist-info" / "entry_points.txt").write_bytes(b"rondo. \xff")
        install("more-coins", {"environments": {"dice": "rondo_coins:Coins"}})
        (tmp_path / "more_coins-1.0.dist-info" / "METADATA").unlink()
        assert not {"coins", "dice"} & set(offered("environments"))


class TestBrokenCommands:
    GOOD = "def add_parser(all):\n    all.add_parser('toss')\ndef run(args):\n    return 0\n"

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            (
                "raise SystemExit(0)",
                "command 'toss' of rondo-coins 1.0: 'rondo_coins': module rondo_coins could not be imported: "
                f"EscapeError: SystemExit(0) {ESCAPE} (rondo_coins.py, line 1)",
            ),
            ("def run(args): ...", "command 'toss' of rondo-coins 1.0: rondo_coins has no add_parser"),
            (GOOD.replace("run(", "ran("), "command 'toss' of rondo-coins 1.0: rondo_coins has no run"),
            (
                GOOD.replace("all.add_parser('toss')", "exit(1)"),
                f"command 'toss': add_parser raised EscapeError: SystemExit(1) {ESCAPE} "
                "(rondo_coins.py, line 2)",
            ),
            (
                GOOD.replace("'toss'", "'throw'"),
                "command 'toss': add_parser of rondo_coins makes none of that name",
            ),
        ],
        ids=["import", "no add_parser", "no run", "add_parser raises", "another name"],
    )
    def test_the_help_and_other_commands_work(
        self, text: str, told: str, install: Install, capsys: pytest.CaptureFixture[str]
    ) -> None:
        install("rondo-coins", {"commands": {"toss": "rondo_coins"}}, {"rondo_coins.py": text})
        assert cli.main([]) == 0
        printed = capsys.readouterr()
        assert printed.err == f"note: {told}\n"
        assert "\n    train " in printed.out
        assert cli.main(["recipes", "grpo"]) == 0
        assert capsys.readouterr().err == ""  # and nothing of it is looked at
        assert cli.main(["toss"]) == 2
        assert capsys.readouterr().err.splitlines()[:2] == ["rondo toss: ConfigError", f"  {told}"]

    def test_a_translator_that_cannot_be_used_is_told_where_keys_are_unknown(self, install: Install) -> None:
        install(
            "rondo-coins", {"keys": {"coiner": "rondo_coins"}}, {"rondo_coins.py": "def translate(): ..."}
        )
        assert load(["quickstart"]).notes == ()
        verl = ["actor_rollout_ref.rollout.n=3", "actor_rollout_ref.actor.ppo_mini_batch_size=16"]
        loaded = load(["quickstart"], verl)
        assert loaded.config.rollout.n == 3
        assert "coin" not in " ".join(loaded.notes)
        with pytest.raises(ConfigError) as caught:
            load(["quickstart"], ["tosses=5"])
        fault, unknown = map(str, caught.value.problems)
        assert "tosses" in unknown
        assert fault == "translator of keys 'coiner' of rondo-coins 1.0: rondo_coins has no program"
