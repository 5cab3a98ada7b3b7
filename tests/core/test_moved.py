"""The table of names that have moved: what it holds, who follows it, and that its new names are there."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest

from rondo.config.functions import resolve_function, written_down
from rondo.core import moved
from rondo.core.errors import ConfigError
from rondo.core.moved import advice, rows, successor
from tests.messages import full_text
from tests.test_names import leads_somewhere

ROOT = Path(__file__).resolve().parents[2]
NAMES = Path(__file__).with_name("names_of_9bbdfff.txt")
"""Modules, and what packages offer."""
GONE = {"rondo.rewards.BUILTINS", "rondo.trainers.program.section_at"}
"""What no name has taken the place of: CHANGELOG.md says what to write."""


def test_the_longest_row_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"a.b": "n.b", "a.b.c": "m", "a.b.c.Old": "k.New", "a.f": "n.g"}
    monkeypatch.setattr(moved, "rows", lambda: table)
    assert successor("a.b") == "n.b"
    assert successor("a.b.x.Y.z") == "n.b.x.Y.z"
    assert successor("a.b.c.X") == "m.X"
    assert successor("a.b.c.Old.method") == "k.New.method"
    assert successor("a.f") == "n.g"
    for name in ("a", "a.bc", "b.a.b", "n.b", ""):
        assert successor(name) is None


def test_a_colon_stays_before_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved, "rows", lambda: {"a.b": "n.m.b", "a.c.Old": "k.New"})
    assert successor("a.b:C") == "n.m.b:C"
    assert successor("a.b:C.method") == "n.m.b:C.method"
    assert successor("a.b.c:D") == "n.m.b.c:D"
    assert successor("a.c:Old") == "k:New"
    assert successor("a.c:Old.method") == "k:New.method"
    assert successor("a/b.py:C") is None


def test_a_new_name_is_no_old_one() -> None:
    """A second migration changes nothing."""
    assert [new for new in rows().values() if successor(new) is not None] == []


@pytest.mark.slow
@pytest.mark.parametrize("old", NAMES.read_text(encoding="utf-8").splitlines()[1:])
def test_what_9bbdfff_had_is_there_or_in_the_table(old: str) -> None:
    assert leads_somewhere(successor(old) or old) != (old in GONE)


def test_the_page_has_the_table() -> None:
    lines = (ROOT / "docs" / "moved.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("| `rondo")] == [
        f"| `{old}` | `{new}` |" for old, new in rows().items()
    ]


def found(dotted: str) -> object:
    """The module, or what is called so in a module."""
    module, _, name = dotted.rpartition(".")
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError as error:
        if error.name != dotted:
            raise
        return getattr(importlib.import_module(module), name)


def is_there(dotted: str) -> bool:
    """Says so of what is defined there: not of a name that another module's was imported by, nor of a folder
    in which a move has left __pycache__ only.
    """
    try:
        one = found(dotted)
    except (ModuleNotFoundError, AttributeError):
        return False
    is_empty = getattr(one, "__file__", dotted) is None
    return not is_empty and getattr(one, "__module__", dotted) in (dotted, dotted.rpartition(".")[0])


@pytest.mark.parametrize("old", rows())
def test_the_new_name_can_be_imported_and_the_old_one_has_gone(old: str) -> None:
    found(rows()[old])
    assert not is_there(old)


def test_importing_and_loading_read_no_table() -> None:
    code = "import sys, rondo, rondo.config, rondo.cli.main; print('rondo.core.moved' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "False\n"


# From here on a package stands for rondo: `shelf.old`, which somebody's code names, is `shelf.new.young` now.
TABLE = {"shelf.old": "shelf.new.young", "shelf.functions.near": "shelf.new.young.near"}
MODULE = "class Prompt: ...\ndef near(): return 7\n"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An old and a new version, of which none is imported yet; the folder stands in sys.path."""
    for path in ("old.py", "functions.py", "new/young.py"):
        (tmp_path / "shelf" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "shelf" / path).write_text(MODULE)
    for folder in ("shelf", "shelf/new"):
        (tmp_path / folder / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(moved, "rows", lambda: TABLE)
    yield tmp_path
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("shelf", "mine")]:
        del sys.modules[name]


def move(folder: Path) -> None:
    (folder / "shelf" / "old.py").unlink()
    (folder / "shelf" / "functions.py").write_text("def other(): ...\n")
    forget()
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    ("line", "why", "old", "new"),
    [
        ("import shelf.old", "ModuleNotFoundError: No module named 'shelf.old'", "old", "young"),
        ("from shelf.old import Prompt", "ModuleNotFoundError: No module named 'shelf.old'", "old", "young"),
        ("from shelf import old", "ImportError: cannot import name 'old' from 'shelf' (…)", "old", "young"),
        (
            "from shelf.functions import near",
            "ImportError: cannot import name 'near' from 'shelf.functions' (…)",
            "functions.near",
            "young.near",
        ),
        (
            "import shelf; shelf.old",
            "AttributeError: module 'shelf' has no attribute 'old'",
            "old",
            "young",
        ),
    ],
)
def test_an_import_of_a_users_file_says_where_the_name_is(
    shelf: Path, line: str, why: str, old: str, new: str
) -> None:
    move(shelf)
    (shelf / "my rewards.py").write_text(f"import re\n{line}\ndef reward(): ...\n")
    place = {"shelf": shelf / "shelf" / "__init__.py", "shelf.functions": shelf / "shelf" / "functions.py"}
    why = why.replace("…", str(place["shelf.functions" if "near" in line else "shelf"]))
    with pytest.raises(ConfigError) as caught:
        resolve_function("my rewards.py:reward")
    assert str(caught.value) == (
        f"'my rewards.py:reward': {shelf / 'my rewards.py'} could not be imported: {why} (my rewards.py, "
        f"line 2). shelf.{old} is shelf.new.{new} now: `rondo migrate '{shelf / 'my rewards.py'}'` shows the "
        "change, and makes it with --write"
    )


def test_the_file_that_is_to_be_changed_is_the_one_that_imports(shelf: Path) -> None:
    move(shelf)
    (shelf / "rewards.py").write_text("import mine\n")
    (shelf / "mine.py").write_text("import shelf.old\n")
    with pytest.raises(ConfigError, match=rf"rondo migrate {shelf / 'mine.py'}` shows"):
        resolve_function("rewards.py:reward")
    with pytest.raises(ConfigError, match=rf"rondo migrate {shelf / 'mine.py'}` shows"):
        resolve_function("mine.reward")


def test_what_is_in_no_table_is_said_as_before(shelf: Path) -> None:
    (shelf / "rewards.py").write_text("import shelf.missing\n")
    with pytest.raises(ConfigError) as caught:
        resolve_function("rewards.py:reward")
    assert str(caught.value) == (
        f"'rewards.py:reward': {shelf / 'rewards.py'} could not be imported: ModuleNotFoundError: No module "
        "named 'shelf.missing' (rewards.py, line 1)"
    )
    for other in (
        ImportError("cannot load it"),
        AttributeError("no"),
        ValueError("shelf.old"),
        ImportError(),
    ):
        assert advice(other) == ""
    with pytest.raises(AttributeError) as unknown:
        _ = "text".old  # type: ignore[attr-defined]
    assert advice(unknown.value) == ""


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("shelf.old.Prompt", "shelf.new.young.Prompt"),
        ("shelf.old:Prompt", "shelf.new.young:Prompt"),
        ("shelf.functions.near", "shelf.new.young.near"),
        ("shelf.functions:near", "shelf.new.young:near"),
    ],
)
def test_a_recipe_that_names_it_is_told(shelf: Path, name: str, new: str) -> None:
    resolve_function(name)  # in the old version
    move(shelf)
    with pytest.raises(ConfigError) as caught:
        resolve_function(name)
    assert str(caught.value) == (
        f"'{name}' is '{new}' now: write that (`rondo migrate FILE` does it in a file)"
    )
    assert callable(resolve_function(new))


PROGRAM = """
import shelf.old
from shelf import old
from shelf.functions import near
from shelf.old import Prompt

def reward(value: Prompt, one: "Prompt" = Prompt()) -> int:
    assert type(value) is Prompt and type(one) is old.Prompt
    return near()
"""


@pytest.mark.parametrize("by_value", [True, False])
def test_a_pickle_of_an_older_version_is_read(shelf: Path, by_value: bool) -> None:
    """A class, a function and a module that have moved, in a function pickled by value; and one by name."""
    if by_value:
        names: dict[str, object] = {"__name__": "__main__"}
        exec(PROGRAM, names)
        data = cloudpickle.dumps(names["reward"])
        assert b"subimport" in data
    else:
        data = pickle.dumps(importlib.import_module("shelf.functions").near)
    move(shelf)
    Path("reward.pkl").write_bytes(written_down(data))
    function = resolve_function(f"reward.pkl:{by_value}")
    from shelf.new import young  # type: ignore[import-not-found]

    assert function(*[young.Prompt()] * by_value) == 7
    assert "shelf.old" not in sys.modules


def test_a_pickle_that_names_what_is_nowhere_is_refused_as_before(shelf: Path) -> None:
    data = pickle.dumps(importlib.import_module("shelf.functions").near)
    Path("reward.pkl").write_bytes(written_down(data.replace(b"near", b"neat")))
    with pytest.raises(ConfigError, match=full_text("could not be imported: AttributeError")) as caught:
        resolve_function("reward.pkl:nowhere")
    assert "rondo migrate" not in str(caught.value)


def test_who_reads_the_table_by_hand_sees_rows_and_comments() -> None:
    lines = Path(moved.__file__).with_name("moved.tsv").read_text(encoding="utf-8").splitlines()
    assert all(line.startswith("#") or line.count("\t") == 1 for line in lines)
    assert len([line for line in lines if not line.startswith("#")]) == len(rows())  # none twice
