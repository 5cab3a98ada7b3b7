"""Every command and block of Python in README.md and docs/ is parsed and dry-run, and run where that takes a
moment; tests/documented.tsv says why one is not. `pytest -s` prints how many are what.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from rondo.cli import main as cli
from rondo.cli.arguments import load_arguments
from rondo.system.names import offered
from tests import begun
from tests.documented import (
    FEATURES,
    ROOT,
    Piece,
    commands,
    exemptions,
    feature_rows,
    parsable,
    python_blocks,
    words,
)

QUICK = ("config", "recipes", "list", "init", "check")
"""Commands of rondo that are run here, where their recipes are shipped ones."""
TRAINS = ("train", "sft", "preference", "reward-model")
# Files of the reader's own that commands name, as small as they may be.
FILES = {
    "recipe.yaml": "include: quickstart\n",
    "my_task.yaml": "rollout: {n: 4}\n",
    "my_changes.yaml": "rollout: {n: 4}\n",
}
KINDS = ("parsed", "elsewhere", "long")


def _exempt(piece: Piece) -> str | None:
    """Returns how a piece is handled instead of being run; None: it is run here."""
    found = exemptions().get((piece.page, piece.first))
    return None if found is None else found.how


def _has_tests(node: str) -> bool:
    """Says whether a file, a folder or a file::function has tests."""
    path, _, name = node.partition("::")
    if (ROOT / path).is_dir():
        return any((ROOT / path).rglob("test_*.py"))
    wanted = f"def {name}(" if name else "def test_"
    return (ROOT / path).is_file() and wanted in (ROOT / path).read_text(encoding="utf-8")


def test_every_exemption_is_of_a_piece_and_has_its_reason() -> None:
    table = exemptions()
    pieces = [*python_blocks(), *commands()]
    assert set(table) - {(piece.page, piece.first) for piece in pieces} == set()
    for (page, first), one in table.items():
        assert one.how in KINDS, (page, first)
        if one.how == "elsewhere":
            assert _has_tests(one.why), one.why
        elif one.how == "parsed":
            assert len(one.why.split()) >= 3, one.why


@pytest.mark.parametrize("block", python_blocks(), ids=str)
def test_python_is_python_and_names_of_rondo_exist(block: Piece) -> None:
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    tree = compile(parsable(block), f"{block.page}:{block.line}", "exec", flags)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split("_")[0].split(".")[0] == "rondo":
            if node.module == "rondo_coins" or (node.module or "").startswith("rondo_coins."):
                continue  # the reader's own, in docs/packages.md
            module = importlib.import_module(str(node.module))
            for name in node.names:
                assert hasattr(module, name.name) or importlib.import_module(f"{node.module}.{name.name}")
        elif (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "rondo"
        ):
            assert hasattr(importlib.import_module("rondo"), node.attr), node.attr


RUN = """
import json, sys
for page, line, text in json.load(open(sys.argv[1])):
    try:
        exec(compile(text, f"{page}:{line}", "exec"), {"__name__": "documented"})
    except BaseException as error:
        print(f"{page}:{line}: {type(error).__name__}: {error}")
"""


def test_python_that_takes_a_moment_runs(tmp_path: Path) -> None:
    """In a process of its own, since some of it registers names."""
    blocks = [block for block in python_blocks() if _exempt(block) is None and block.page != "docs/api.md"]
    assert len(blocks) >= 23
    file = tmp_path / "blocks.json"
    file.write_text(json.dumps([(one.page, one.line, one.text) for one in blocks]), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = begun.run(["-c", RUN, str(file)], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the pages say that one has."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for block in python_blocks():
        named = re.match(r"# (\w+\.py)$", block.first)
        if named and block.page == "README.md":
            (tmp_path / named[1]).write_text(block.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", [one for one in commands() if words(one)[0] == "rondo"], ids=str)
def test_a_command_of_rondo_is_one(command: Piece, folder: Path) -> None:
    given = [word for word in words(command)[1:] if word != "…"]
    if _exempt(command) == "parsed" and given[0] not in offered("commands"):
        return  # of a package that the page writes
    parser, subparsers = cli._parser()
    cli._registered(given[0], subparsers)
    args = cli._parse(parser, given)
    if given[0] in (*TRAINS, "eval", "check") and _exempt(command) != "parsed":
        load_arguments(args.config)  # every recipe is there, every key and value is allowed


@pytest.mark.parametrize("command", [one for one in commands() if words(one)[0] != "rondo"], ids=str)
def test_what_other_commands_name_is_there(command: Piece) -> None:
    program, *given = words(command)
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert [one for one in given if "=" not in one and one not in targets] == []
    elif program == "pytest":
        assert [one for one in given if not _has_tests(one)] == []
    elif program == "bash":
        assert (ROOT / given[0]).is_file()
    elif program == "python" and given[0] == "-m":
        assert importlib.util.find_spec(given[1]) is not None
    elif program == "python":
        assert (ROOT / given[0]).is_file()
        text = (ROOT / given[0]).read_text(encoding="utf-8")
        options = [one for one in given[1:] if one.startswith("--")]
        assert [one for one in options if f'"{one}"' not in text] == []
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        named = re.findall(r"\[([\w,-]+)\]", command.text)
        wanted = {extra for some in named for extra in some.split(",")}
        assert wanted <= set(extras["optional-dependencies"])
    elif program == "ray":
        ray = importlib.import_module("ray.scripts.scripts").cli.commands[given[0]]
        known = {option for parameter in ray.params for option in parameter.opts}
        assert {one.partition("=")[0] for one in given[1:]} <= known
    else:
        known = ((".", [".venv/bin/activate"]), ("ray", ["start"]))
        assert (program, given[:1]) in known, command.text


def test_the_page_of_features_stays_short_and_each_row_has_one_command() -> None:
    """It once told what each test asserts, in 14,000 words; what a row says was run is a word of the head."""
    assert len((ROOT / FEATURES).read_text(encoding="utf-8").split()) <= 2500
    rows = feature_rows()
    assert len(rows) > 80
    for line, cells in rows:
        assert len(cells) == 3, line
        what, status, command = cells
        assert what, line
        assert re.match(r"(CPU|H100|host card)\b", status), (line, status)
        assert re.fullmatch(r"`(rondo|make|pytest|python|bash) [^`…]+`", command), (line, command)


def _is_quick(command: Piece) -> bool:
    return words(command)[0] == "rondo" and words(command)[1] in QUICK and _exempt(command) is None


@pytest.mark.parametrize("command", [one for one in commands() if _is_quick(one)], ids=str)
def test_a_command_that_takes_a_moment_runs(
    command: Piece, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words(command)[1:]) == 0
    assert len(capsys.readouterr().out) > 50


def _how(command: Piece) -> str:
    """Returns what becomes of a command: run, elsewhere, long, dry-run or parsed."""
    given = words(command)
    if _is_quick(command):
        return "run"
    exempt = _exempt(command)
    if exempt is not None:
        return exempt
    if given[0] == "rondo" and given[1] in TRAINS:
        return "elsewhere" if len(given) == 3 else "long"
    return "parsed"


LONG = [one for one in commands() if _how(one) == "long"]


@pytest.mark.parametrize("command", LONG, ids=str)
def test_a_command_that_takes_longer_runs(
    command: Piece, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """For two steps; what they start from is made once and kept."""
    cache = tmp_path_factory.getbasetemp() / "rondo-cache"
    done = subprocess.run(
        [sys.executable, "-m", "rondo", *words(command)[1:], "trainer.total_steps=2", "trainer.run_dir=run"],
        env={**os.environ, "RONDO_CACHE": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((folder / "run" / "metrics.jsonl").read_text().splitlines()) >= 2


BLOCKS = [one for one in python_blocks() if _exempt(one) == "long"]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_python_that_takes_longer_runs(block: Piece, folder: Path) -> None:
    (folder / "block.py").write_text(f"if __name__ == '__main__':\n{_indented(block.text)}", encoding="utf-8")
    done = subprocess.run([sys.executable, "block.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _indented(text: str) -> str:
    return "".join(f"    {line}" for line in text.splitlines(keepends=True)) + "\n"


def test_how_many_are_run_and_how_many_are_not() -> None:
    """The counter: a page's new command or block is run, or this says what it is."""
    of_python = Counter(
        "made of the code" if one.page == "docs/api.md" else _exempt(one) or "run" for one in python_blocks()
    )
    of_commands = Counter(_how(one) for one in commands())
    print(f"Python: {dict(of_python)}; commands: {dict(of_commands)}")
    assert sum(of_python.values()) == len(python_blocks())
    assert of_python["run"] >= 23
    assert of_commands["run"] >= 7
    assert of_commands["long"] >= 7
    # A command that trains is run by a test, or the table says why not.
    table = [one for one in commands() if _exempt(one) == "parsed"]
    others = [one for one in commands() if _how(one) == "parsed" and one not in table]
    assert [one for one in others if words(one)[0] == "rondo" and words(one)[1] in TRAINS] == []
