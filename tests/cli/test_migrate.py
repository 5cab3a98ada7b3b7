"""`rondo migrate`: names that have moved, in files of a user's; all else stays byte for byte."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rondo.cli import main as cli
from rondo.cli.renaming import changes_in
from rondo.core import moved
from rondo.core.errors import DataError

TABLE = {
    "rondo.types": "rondo.core.types",
    "rondo.batch": "rondo.core.batch",
    "rondo.hub": "rondo.system.hub",
    "rondo.interrupts": "rondo.system.signals",
    "rondo.transport": "rondo.system",
    "rondo.transport.frames": "rondo.system.link",
    "rondo.config.functions.near": "rondo.core.errors.near",
    "rondo.environments.sokoban": "rondo_worlds.sokoban",
}


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved, "rows", lambda: TABLE)


def rewritten(text: str, suffix: str = ".py") -> str:
    """Nothing is left to the owner, and a second time nothing is changed."""
    changes = changes_in(Path(f"file{suffix}"), text)
    assert changes.notes == []
    again = changes_in(Path(f"file{suffix}"), changes.made())
    assert again.made() == changes.made()
    return changes.made()


IMPORTS = {
    "import rondo.types": "import rondo.core.types",
    "import rondo.types as t": "import rondo.core.types as t",
    "import os, rondo.types, rondo.hub as h  # c": "import os, rondo.core.types, rondo.system.hub as h  # c",
    "from rondo.types import A, B as C": "from rondo.core.types import A, B as C",
    "from rondo.types import *": "from rondo.core.types import *",
    "from  rondo.types  import (A,  # a\n B)": "from  rondo.core.types  import (A,  # a\n B)",
    "from \\\n  rondo.types import A": "from \\\n  rondo.core.types import A",
    "from rondo import types": "from rondo.core import types",
    "from rondo import types as t, batch": "from rondo.core import types as t, batch",
    "from rondo import interrupts": "from rondo.system import signals as interrupts",
    "from rondo import interrupts as i": "from rondo.system import signals as i",
    "from rondo import transport": "from rondo import system as transport",
    "from rondo.transport.frames import f": "from rondo.system.link import f",
    "from rondo.transport import frames, child": "from rondo.system import link as frames, child",
    "from rondo.environments import sokoban": "from rondo_worlds import sokoban",
    # What moves elsewhere than its neighbours gets a statement of its own.
    "from rondo import types, train": "from rondo.core import types\nfrom rondo import train",
    "from rondo import types, hub": "from rondo.system import hub\nfrom rondo.core import types",
    "from rondo import (types, train)": "from rondo.core import types\nfrom rondo import (train)",
    "from rondo import types, \\\n  train": "from rondo.core import types\nfrom rondo import train",
    "x = 1; from rondo import types, train": "x = 1; from rondo.core import types; from rondo import train",
    "if x: from rondo import types, train": "if x: from rondo.core import types; from rondo import train",
    "if x:\n\tfrom rondo import types, train  # c": (
        "if x:\n\tfrom rondo.core import types\n\tfrom rondo import train  # c"
    ),
    "from rondo.config.functions import (\n    a,  # the first\n    near,\n)\n": (
        "from rondo.core.errors import near\nfrom rondo.config.functions import (\n    a,  # the first\n)\n"
    ),
    "from rondo.config.functions import (\n    near as n,  # the nearest\n    a,\n)\n": (
        "from rondo.core.errors import near as n\n"
        "from rondo.config.functions import (  # the nearest\n    a,\n)\n"
    ),
    "from rondo.config.functions import (\n    a, near, b,\n    c, near as n\n)\n": (
        "from rondo.core.errors import near, near as n\n"
        "from rondo.config.functions import (\n    a, b,\n    c,\n)\n"
    ),
    "from rondo.config.functions import (a,  # c\n    near, b)\n": (
        "from rondo.core.errors import near\nfrom rondo.config.functions import (a,  # c\n    b)\n"
    ),
    "from rondo.config.functions import (a,  # c\n    near)\n": (
        "from rondo.core.errors import near\nfrom rondo.config.functions import (a,  # c\n    )\n"
    ),
}


@pytest.mark.parametrize("old", IMPORTS)
def test_imports(old: str) -> None:
    assert rewritten(old) == IMPORTS[old]


USES = {
    "import rondo.types\nrondo.types.A.b(rondo.types)": (
        "import rondo.core.types\nrondo.core.types.A.b(rondo.core.types)"
    ),
    "import rondo\nrondo.interrupts.a(), rondo.train": "import rondo\nrondo.system.signals.a(), rondo.train",
    "import rondo as r\nr.types.A": "import rondo as r\nr.core.types.A",
    "import rondo.types as t\nt.A": "import rondo.core.types as t\nt.A",
    "from rondo import types, interrupts\ntypes.A, interrupts.B": (
        "from rondo.system import signals as interrupts\nfrom rondo.core import types\ntypes.A, interrupts.B"
    ),
    "from rondo import transport as t\nt.frames.A": "from rondo import system as t\nt.link.A",
    "import rondo.types\nrondo . types . A": "import rondo.core.types\nrondo.core . types . A",
    "import rondo\n'äö', rondo.types.A": "import rondo\n'äö', rondo.core.types.A",
    "import rondo\nrondo.types.A = rondo.hub.b\ndel rondo.hub.b": (
        "import rondo\nrondo.core.types.A = rondo.system.hub.b\ndel rondo.system.hub.b"
    ),
    "import rondo\nx = f'''ä {rondo.types.A!r:{rondo.hub.w}}\n ö{rondo.batch.B}'''": (
        "import rondo\nx = f'''ä {rondo.core.types.A!r:{rondo.system.hub.w}}\n ö{rondo.core.batch.B}'''"
    ),
    "try:\n import rondo\nexcept ImportError: rondo = None\nrondo.types": (
        "try:\n import rondo\nexcept ImportError: rondo = None\nrondo.core.types"
    ),
    # What the new names need is imported, and what stays in use, too.
    "import rondo.config.functions\nrondo.config.functions.near": (
        "import rondo.config.functions, rondo.core.errors\nrondo.core.errors.near"
    ),
    "import rondo.environments.sokoban\nrondo.environments.sokoban.A, rondo.train": (
        "import rondo_worlds.sokoban, rondo\nrondo_worlds.sokoban.A, rondo.train"
    ),
    "import rondo.environments.sokoban\nrondo.environments.sokoban.A": (
        "import rondo_worlds.sokoban\nrondo_worlds.sokoban.A"
    ),
}


@pytest.mark.parametrize("old", USES)
def test_what_is_written_out_behind_an_import(old: str) -> None:
    assert rewritten(old) == USES[old]


STRINGS = {
    '"rondo.types"': '"rondo.core.types"',
    "r'rondo.types.Prompt'": "r'rondo.core.types.Prompt'",
    '["""rondo.batch:Batch""", x("rondo.config.functions:near")]': (
        '["""rondo.core.batch:Batch""", x("rondo.core.errors:near")]'
    ),
    "f'{x(\"rondo.hub\")}'": "f'{x(\"rondo.system.hub\")}'",
}


@pytest.mark.parametrize("old", STRINGS)
def test_strings_that_are_a_name(old: str) -> None:
    assert rewritten(old) == STRINGS[old]


@pytest.mark.parametrize(
    "text",
    [
        "import rondo.typesetting, rondos.types\nfrom rondo.config import types\nfrom .rondo.types import A",
        "from . import types\nfrom rondo.train import types  # rondo.types",
        "rondo.types.A  # nothing has imported it",
        "def f(rondo): return rondo.types.A",
        '"rondo.types is", b"rondo.types", "rondo", "types", "rondo.types.", "a rondo.types", f"rondo.types"',
        "import rondo.core.types\nrondo.core.types.A",
        "'\\d'  # warned of by Python\n",
        "",
    ],
)
def test_what_is_something_else_stays(text: str) -> None:
    assert rewritten(text) == text


@pytest.mark.parametrize(
    ("text", "line", "note"),
    [
        ("import rondo\ndef f(rondo):\n return rondo.types", 3, "rondo.types is rondo.core.types"),
        ("import rondo\nclass A:\n rondo = 1\nrondo.hub.B", 4, "rondo.hub.B is rondo.system.hub.B"),
        ("from rondo.config import functions\nfunctions.near", 2, "functions.near is rondo.core.errors.near"),
        ("import rondo as r\nr.environments.sokoban", 2, "r.environments.sokoban is rondo_worlds.sokoban"),
        ("import rondo as r, os as r\nr.types", 1, ""),
        ("x = ('rondo.'\n 'types')", 1, "'rondo.types' is 'rondo.core.types'"),
        ("'rondo\\x2etypes'", 1, "'rondo.types' is 'rondo.core.types'"),
        ("import rondo\n(rondo.\ninterrupts)", 2, "rondo.interrupts is rondo.system.signals"),
    ],
)
def test_what_is_left_to_the_owner(text: str, line: int, note: str) -> None:
    changes = changes_in(Path("a.py"), text)
    assert changes.made() == text
    if note:
        assert changes.notes == [(line, f"{note} now, which you have to write yourself here")]
    else:
        assert changes.notes == [
            (2, "r.types is rondo.core.types now, which you have to write yourself here")
        ]


YAML = """\
# rondo.types
rondo.types: rondo.types.Prompt   # rondo.types
plain: [rondo.batch:Batch, rondo.config.functions.near, "rondo.hub", 'rondo.hub.x']
anchored: &a rondo.interrupts
again: [*a, !!str rondo.types, ! "rondo.types"]
path: rondo.types.py/a
words: a rondo.types
text: |
  rondo.types
--- {ä: rondo.hub, ? rondo.hub : 1}
"""


def test_values_of_yaml() -> None:
    assert rewritten(YAML, ".yaml") == (
        """\
# rondo.types
rondo.types: rondo.core.types.Prompt   # rondo.types
plain: [rondo.core.batch:Batch, rondo.core.errors.near, "rondo.system.hub", 'rondo.system.hub.x']
anchored: &a rondo.system.signals
again: [*a, !!str rondo.core.types, ! "rondo.core.types"]
path: rondo.types.py/a
words: a rondo.types
text: |
  rondo.types
--- {ä: rondo.system.hub, ? rondo.hub : 1}
"""
    )
    for same in ("", "# nothing\n", "--- \n---\n", "a: &a [*a]\n", "a: ''\n"):
        assert rewritten(same, ".yml") == same
    changes = changes_in(Path("a.yml"), "a:\n - |-\n  rondo.types\n")
    assert changes.notes == [
        (2, "rondo.types is rondo.core.types now, which you have to write yourself here")
    ]
    assert changes.made() == changes.text


PROGRAM = b"\xef\xbb\xbf# \xc3\xa4\r\nfrom rondo import types, train\r\n\tx = 1 \r\n".replace(b"\tx", b"x")


def test_a_diff_and_then_the_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_bytes(b"import rondo.types\nx = 1")
    Path("b.yaml").write_bytes(b"a: 1\nb: rondo.hub")
    Path("c.py").write_bytes(b"x = 1\n")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert cli.main(["migrate", "a.py", "b.yaml", "c.py"]) == 1
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out == (
        "--- a.py\n+++ a.py\n@@ -1,2 +1,2 @@\n-import rondo.types\n+import rondo.core.types\n x = 1\n"
        "\\ No newline at end of file\n"
        "--- b.yaml\n+++ b.yaml\n@@ -1,2 +1,2 @@\n a: 1\n-b: rondo.hub\n\\ No newline at end of file\n"
        "+b: rondo.system.hub\n\\ No newline at end of file\n"
        "2 of 3 files would change\n"
    )
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert cli.main(["migrate", "a.py", "b.yaml", "c.py", "--write"]) == 0
    assert capsys.readouterr().out == "changed a.py\nchanged b.yaml\n2 of 3 files changed\n"
    assert Path("a.py").read_bytes() == b"import rondo.core.types\nx = 1"
    assert Path("b.yaml").read_bytes() == b"a: 1\nb: rondo.system.hub"
    for last in ([], ["--write"]):
        assert cli.main(["migrate", "a.py", "b.yaml", "c.py", *last]) == 0
        assert capsys.readouterr().out == f"0 of 3 files {'changed' if last else 'would change'}\n"


def test_line_ends_marks_and_permissions_stay(tmp_path: Path) -> None:
    one, old_mac, private = tmp_path / "a.py", tmp_path / "b.py", tmp_path / "config.yaml"
    one.write_bytes(PROGRAM)
    old_mac.write_bytes(b"x = 1\rimport rondo.types\rrondo.types.A\r")
    private.write_bytes(b"\xef\xbb\xbfa: rondo.hub\r\n")
    one.chmod(0o755)
    private.chmod(0o600)
    assert cli.main(["migrate", str(tmp_path), "--write"]) == 0
    assert one.read_bytes() == (
        b"\xef\xbb\xbf# \xc3\xa4\r\nfrom rondo.core import types\r\nfrom rondo import train\r\nx = 1 \r\n"
    )
    assert old_mac.read_bytes() == b"x = 1\rimport rondo.core.types\rrondo.core.types.A\r"
    assert private.read_bytes() == b"\xef\xbb\xbfa: rondo.system.hub\r\n"
    assert [path.stat().st_mode & 0o777 for path in (one, private)] == [0o755, 0o600]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.py", "b.py", "config.yaml"]


def test_which_files_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.py", "b/c.yml", "b/d.txt", ".git/e.py", "env/pyvenv.cfg", "env/f.py", "g.yaml/h.py"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("import rondo.types\n" if name.endswith(".py") else "rondo.types\n")
    Path("linked").symlink_to(".git")
    assert cli.main(["migrate", ".", "b/c.yml", "./a.py", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert [line for line in shown.out.splitlines() if line[:3] == "+++"] == [
        "+++ a.py",
        "+++ b/c.yml",
        "+++ g.yaml/h.py",
    ]
    assert shown.out.endswith("\n3 of 3 files would change\n")
    assert shown.err == ""
    assert cli.main(["migrate", ".git"]) == 1  # by name


def test_what_cannot_be_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    bad = {
        "a.py": b"x = 1\nimport rondo.types as\n",
        "b.py": b"x = 1\n# \xe4\n",
        "c.py": b"x = 1\x00\n",
        "d.py": b"import rondo.types\n\\\n(" + b"(" * 500,
        "e.yaml": b"a: 1\nb: [rondo.types\n",
        "f.yaml": b"a: \x01\n",
        "g.yaml": b"[" * 1000,
        "h.py": b"return 1\nx = 1\ndef f(a, a): pass\n",
    }
    for name, data in bad.items():
        Path(name).write_bytes(data)
    Path("z.py").write_text("import rondo.types\n")
    Path("link.py").symlink_to("z.py")
    os.mkfifo("pipe.py")
    assert cli.main(["migrate", ".", "missing.py", "notes.ipynb", "--write"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "changed z.py\n1 of 12 files changed\n"
    assert Path("z.py").read_text() == "import rondo.core.types\n"
    assert Path("link.py").is_symlink()
    assert {name: Path(name).read_bytes() for name in bad} == bad
    version = f"is no Python that Python {sys.version_info[0]}.{sys.version_info[1]} reads:"
    said = dict(line.removeprefix("rondo migrate: ").split(": ", 1) for line in shown.err.splitlines())
    assert said.pop("a.py, line 2") == f"{version} invalid syntax"
    assert said.pop("b.py, line 2") == "is not UTF-8; save it as UTF-8"
    assert said.pop("e.yaml, line 3").startswith("is no YAML: expected ")
    assert said.pop("f.yaml").startswith("is no YAML: unacceptable character #x0001")
    assert said.pop("g.yaml") == "is nested too deep to be read"
    assert said.pop("link.py") == "is a link; name what it leads to"
    assert said.pop("pipe.py") == "is no file"
    assert said.pop("missing.py") == (
        "cannot be read: No such file or directory. It, or a folder above it, is not there: was it removed?"
    )
    assert said.pop("notes.ipynb") == "only folders and files that end in .py, .yaml, .yml are taken"
    assert {name[:4]: text.startswith(version) for name, text in said.items()} == {
        "c.py": True,
        "d.py": True,
        "h.py": True,
    }


def test_what_the_file_system_refuses_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.py", "b.py"):
        Path(name).write_text("import rondo.types\n")
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "a.py" and access(path, mode))
    assert cli.main(["migrate", ".", "--write"]) == 2
    shown = capsys.readouterr()
    assert shown.err == (
        "rondo migrate: a.py: cannot be written: Permission denied. This user may not do that there: change "
        "the permissions, or choose another folder\n"
    )
    assert shown.out == "changed b.py\n1 of 2 files changed\n"
    assert [Path(name).read_text() for name in ("a.py", "b.py")] == [
        "import rondo.types\n",
        "import rondo.core.types\n",
    ]


def test_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a/x.py", "b/y.py"):
        Path(name).parent.mkdir()
        Path(name).write_text("import rondo.types\n")
    scan = os.scandir

    def refusing(path: str) -> object:
        if Path(path).name == "a":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert cli.main(["migrate", "."]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("rondo migrate: ./a: cannot be read: Permission denied. ")
    assert shown.out.endswith("\n1 of 1 file would change\n")


def test_what_is_left_to_the_owner_is_said_and_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text("import rondo.types\nx = 'rondo' '.types'\n")
    for last in ([], ["--write"], ["--write"]):
        assert cli.main(["migrate", "a.py", *last]) == 1
        assert capsys.readouterr().err == (
            "rondo migrate: a.py, line 2: 'rondo.types' is 'rondo.core.types' now, which you have to write "
            "yourself here\n"
        )
    assert Path("a.py").read_text() == "import rondo.core.types\nx = 'rondo' '.types'\n"


def test_a_diff_can_be_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_bytes(b"import rondo.types\r\nx = 'a\x0cb'")
    Path("b.py").write_bytes(b"# 1\n" * 9 + b"import rondo.hub\n")
    cli.main(["migrate", "a.py", "b.py"])
    subprocess.run(["git", "apply", "-p0"], input=capsys.readouterr().out.encode(), check=True)
    assert Path("a.py").read_bytes() == b"import rondo.core.types\r\nx = 'a\x0cb'"
    assert Path("b.py").read_bytes() == b"# 1\n" * 9 + b"import rondo.system.hub\n"


def test_the_help_says_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["migrate", "--help"])
    text = capsys.readouterr().out
    assert "0 nothing is to be changed" in text
    assert "1 something is, or is left to you" in text
    assert "2 a file could not be read" in text


def test_what_is_no_python_is_an_error_of_the_file() -> None:
    with pytest.raises(DataError, match=r"a\.py, line 1: is no Python"):
        changes_in(Path("a.py"), "x =")
