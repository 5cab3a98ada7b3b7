"""What benchmarks/planted_edits.py draws from a small checkout, and which of the edits its tests catch."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

import planted_edits
from drawn_edits import Edit, draw, edited, offered, planted
from planted_edits import ROOT, Result, compare, files_of, main, places_of, pytest_in, scratch
from tests.messages import full_text
from tests.waiting import wait_for

LIMITS = '''"""A module: nothing of it is changed outside functions."""
import logging
from typing import TYPE_CHECKING, Literal
MOST = 3 + 4


class Clamp:
    least: int = 1

    def __init__(self, least: int = 2) -> None:
        """Keeps 1 number."""
        self.least = least
        logging.info("not changed", 5)

    def of(self, é: float, strict: bool) -> float | None:
        first: Literal[7] = min(é, MOST)
        if (é) < (self.least) and not strict:
            raise ValueError(f"below {self.least + 1}")
        if TYPE_CHECKING:
            print(8)
        while strict is not True:
            print(é * 9)
        return None

    def both(self) -> object:
        return len(
            [self]
        )
'''
OFFERED = [  # line, kind, before, after: in the order of the lines
    (12, "deletion", "self.least = least", "pass"),
    (16, "extreme", "min", "max"),
    (17, "comparison", "<", "<="),
    (17, "condition", "(é) < (self.least) and not strict", "not ((é) < (self.least) and not strict)"),
    (17, "logic", "and", "or"),
    (21, "comparison", "is not", "is"),
    (21, "condition", "strict is not True", "not (strict is not True)"),
    (21, "truth", "True", "False"),
    (22, "arithmetic", "*", "/"),
    (22, "deletion", "print(é * 9)", "pass"),
    (22, "number", "9", "10"),
]
BATCH = """def larger(a, b):
    return a if a > b else b


def is_even(a):
    return a % 2 == 0


def wait(count):
    while count > 100:
        pass
"""
TEST_BATCH = """import os, subprocess
from rondo.batch import is_even, larger, wait

def test_larger():
    assert larger(1, 2) == 2

def test_is_even():
    with open(os.environ["PIDS"], "a") as pids:
        pids.write(f"{subprocess.Popen(['sleep', '600'], start_new_session=True).pid} ")
    assert is_even(2)

def test_wait():
    wait(3)
"""
CAUGHT = Edit(1, "src/rondo/batch.py", 6, "    return a % 2 == 0", 17, 19, "comparison", "!=", "batch")
SURVIVED = replace(CAUGHT, number=2, line=2, text="    return a if a > b else b", start=18, end=19, new=">=")
TIME = replace(CAUGHT, number=3, line=10, text="    while count > 100:", start=16, end=17, new="<")
BROKEN = Edit(4, "src/rondo/view.py", 1, "X = 1", 4, 5, "number", "2", "view")


@pytest.fixture(autouse=True)
def _light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares pytest the plugins that take seconds to start and have no part in this."""
    kept = tuple(option for option in planted_edits.OPTIONS if "hypothesis" not in option)
    heavy = ("-pno:hypothesispytest", "-pno:langsmith_plugin", "-pno:anyio", "-pno:xdist")
    monkeypatch.setattr(planted_edits, "OPTIONS", kept + heavy)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with src/rondo and tests."""
    files = {
        "src/rondo/__init__.py": "",
        "src/rondo/batch.py": BATCH,
        "src/rondo/view.py": "X = 1\n",
        "tests/test_batch.py": TEST_BATCH,
        "tests/test_view.py": "def test_view():\n    assert False\n",
    }
    folder = tmp_path / "checkout"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for command in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "x")):
        subprocess.run(["git", "-C", folder, *command], check=True)
    return folder


def sample(path: Path, *edits: Edit) -> str:
    path.write_text(json.dumps({"seed": 0, "edits": [asdict(edit) for edit in edits]}))
    return str(path)


def test_what_may_be_changed_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "src/rondo/room/limits.py"
    path.parent.mkdir(parents=True)
    path.write_text(LIMITS)
    edits, lines = offered(tmp_path, path)
    found = [(edit.line, edit.kind, edit.text[edit.start : edit.end], edit.new) for edit in edits]
    assert sorted(found) == OFFERED
    assert {(edit.file, edit.room) for edit in edits} == {("src/rondo/room/limits.py", "room")}
    assert lines == 22
    for edit in edits:
        was, now = LIMITS.split("\n"), edited(tmp_path, edit).split("\n")
        assert [n for n, (old, new) in enumerate(zip(was, now, strict=True), 1) if old != new] == [edit.line]


def test_a_seed_draws_one_sample(checkout: Path, tmp_path: Path) -> None:
    drawn = draw(checkout, 0, 3)
    assert draw(checkout, 0, 2) == drawn[:2]
    assert any(draw(checkout, seed, 3) != drawn for seed in range(1, 9))
    for seed in range(9):  # one edit a line, and only three lines have any
        edits = draw(checkout, seed, 3)
        assert [edit.number for edit in edits] == [1, 2, 3]
        assert sorted(edit.line for edit in edits) == [2, 6, 10]
    with pytest.raises(SystemExit, match="has room for 3 edits"):
        draw(checkout, 0, 4)
    (checkout / "tests/test_batch.py").unlink()  # the tests are no part of it
    main(["draw", str(checkout), "--sample", str(tmp_path / "sample.json"), "--count", "3"])
    rows = json.loads((tmp_path / "sample.json").read_text())["edits"]
    assert [Edit(**row) for row in rows] == drawn


def test_an_edit_is_taken_back(checkout: Path) -> None:
    path = checkout / "src/rondo/batch.py"
    before, times = path.read_bytes(), path.stat()
    for edit in draw(checkout, 0, 3):
        with planted(checkout, edit):
            assert path.read_text() == edited_by_hand(edit)
            assert int(path.stat().st_mtime) != int(times.st_mtime)  # byte code of the old text is not taken
        assert path.read_bytes() == before
        assert path.stat().st_mtime_ns == times.st_mtime_ns


def edited_by_hand(edit: Edit) -> str:
    assert BATCH.count(edit.text) == 1
    return BATCH.replace(edit.text, edit.text[: edit.start] + edit.new + edit.text[edit.end :])


def test_an_edit_is_looked_for_where_its_line_is_now(checkout: Path) -> None:
    path = checkout / "src/rondo/batch.py"
    path.write_text(f"# new\n\n{BATCH}")
    assert edited(checkout, CAUGHT) == "# new\n\n" + BATCH.replace("% 2 == 0", "% 2 != 0")
    path.write_text(f"# new\n{BATCH}{BATCH}")
    with pytest.raises(SystemExit, match=full_text("2 times in the file")):
        edited(checkout, CAUGHT)
    path.write_text(f"{BATCH}{BATCH}")  # it is at its line
    assert edited(checkout, CAUGHT) == BATCH.replace("% 2 == 0", "% 2 != 0") + BATCH
    path.write_text(BATCH.replace("% 2", "% 4"))
    with pytest.raises(SystemExit, match=full_text("0 times in the file")):
        edited(checkout, CAUGHT)
    path.unlink()
    with pytest.raises(SystemExit, match=r"edit 1 \(src/rondo/batch.py:6, "):
        edited(checkout, CAUGHT)
    (checkout / "src/rondo/view.py").write_text("X = 1\n")
    with pytest.raises(SystemExit, match="does not compile"):
        edited(checkout, replace(BROKEN, new="("))


@pytest.mark.slow
def test_outcomes(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One is caught by a test that left a process, one survives, one is in a room whose tests always fail."""
    pids, out = tmp_path / "pids", tmp_path / "out.json"
    monkeypatch.setenv("PIDS", str(pids))
    line = ["run", str(checkout), "--sample", sample(tmp_path / "s.json", CAUGHT, SURVIVED, TIME, BROKEN)]
    main([*line, "--out", str(out), "--only", "1", "2", "4"])
    results = json.loads(out.read_text())["results"]
    assert [(row["edit"]["number"], row["outcome"], row["test"]) for row in results] == [
        (1, "caught", "tests/test_batch.py::test_is_even"),
        (2, "survived", ""),
        (4, "fails anyway", "tests/test_view.py::test_view"),
    ]
    assert len(capsys.readouterr().out.splitlines()) == 4
    started = pids.read_text().split()
    assert len(started) == 3  # with the edit, without it, and by the one that survives
    wait_for("their ends", lambda: not any(psutil.pid_exists(int(pid)) for pid in started), 30)
    main([*line, "--out", str(out), "--only", "1", "2"])  # both are there
    assert capsys.readouterr().out == "1 caught, 1 survived, 0 time, 0 fails anyway\n"
    assert json.loads(out.read_text())["results"] == results
    with pytest.raises(SystemExit, match=r"out.json is of .*60\.0.* this is .*3\.0"):
        main([*line, "--out", str(out), "--only", "3", "--seconds", "3"])
    assert pids.read_text().split() == started
    assert subprocess.run(["git", "-C", checkout, "status", "-s"], capture_output=True).stdout == b""


@pytest.mark.slow
def test_an_edit_that_runs_into_the_limit(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids, out = tmp_path / "pids", tmp_path / "out.json"
    monkeypatch.setenv("PIDS", str(pids))
    line = ["run", str(checkout), "--sample", sample(tmp_path / "s.json", TIME), "--out", str(out)]
    main([*line, "--seconds", "2.5"])
    [row] = json.loads(out.read_text())["results"]
    assert (row["outcome"], row["test"]) == ("time", "")
    assert 2.5 <= row["took"] < 30
    started = pids.read_text().split() if pids.exists() else []  # a busy machine may not come to it
    wait_for("their ends", lambda: not any(psutil.pid_exists(int(pid)) for pid in started), 30)


def results(path: Path, outcomes: str, seconds: float = 60.0) -> Path:
    rows = []
    for number, letter in enumerate(outcomes, 1):
        outcome = {"c": "caught", "s": "survived", "t": "time"}[letter]
        rows.append(asdict(Result(replace(CAUGHT, number=number), outcome, "", 1.0)))
    path.write_text(json.dumps({"commit": "abc", "seconds": seconds, "results": rows}))
    return path


def test_fewer_that_are_caught_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = results(tmp_path / "before.json", "ccst")
    for outcomes, differ, fewer in (
        ("ccst", 0, 0),
        ("scct", 2, 0),
        ("cctt", 1, 0),
        ("csst", 1, 1),
        ("cccc", 2, 0),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["compare", str(before), str(results(tmp_path / "after.json", outcomes))])
        assert ended.value.code == fewer
        printed = capsys.readouterr().out.splitlines()
        assert len(printed) == 5 + differ
        assert printed[1].split() == ["caught", "2", str(outcomes.count("c"))]
    with pytest.raises(SystemExit, match=r"edits \[4\] are not the same"):
        compare(before, results(tmp_path / "after.json", "ccs"))
    with pytest.raises(SystemExit, match="same --seconds"):
        compare(before, results(tmp_path / "after.json", "ccst", 30.0))


def test_what_is_missing_is_named(checkout: Path, tmp_path: Path) -> None:
    made, out = sample(tmp_path / "s.json", CAUGHT), str(tmp_path / "out.json")
    for line, said in (
        (["run", str(checkout), "--sample", "none.json", "--out", out], "none.json: No such file"),
        (["run", str(checkout), "--sample", __file__, "--out", out], "was not written by this program"),
        (["run", str(checkout), "--sample", made, "--out", out, "--only", "7"], r"no edits \[7\]"),
        (["run", str(tmp_path), "--sample", made, "--out", out], "name a checkout of rondo"),
        (["list", str(tmp_path)], f"{tmp_path} has no Python files in src"),
        (["compare", "none.json", "none.json"], "none.json: No such file"),
    ):
        with pytest.raises(SystemExit, match=said):
            main(line)


def test_folders_of_any_depth_are_gone_before_the_next_edit(checkout: Path) -> None:
    deep = "import os\n\ndef test_deep():\n    os.chdir(os.environ['TMPDIR'])\n"
    deep += "    for _ in range(1500):\n        os.mkdir('d')\n        os.chdir('d')\n"
    (checkout / "tests" / "test_deep.py").write_text(deep)
    with scratch(checkout) as folder:
        for _ in range(2):
            assert pytest_in(folder, ["tests/test_deep.py"], 60) == (0, "")
            assert not (folder / "t").exists()
    assert not folder.exists()


def test_every_room_has_tests() -> None:
    for path in [*(ROOT / "src/rondo").iterdir(), *(ROOT / "src").glob("rondo_*/")]:
        if path.suffix == ".py" or list(path.glob("*.py")):
            assert places_of(ROOT, path.stem)
    with pytest.raises(SystemExit, match="no tests of nothing: say in ROOMS"):
        places_of(ROOT, "nothing")


def test_files_that_name_the_module_come_first(tmp_path: Path) -> None:
    texts = {
        "test_a.py": "",
        "test_b.py": "from rondo.room.inner import part",
        "test_c.py": "import rondo.room.inner.parts",
        "test_d.py": "x = 'rondo.room.inner.part:f'",
        "test_part_of_it.py": "",
    }
    (tmp_path / "tests/room").mkdir(parents=True)
    for name, text in texts.items():
        (tmp_path / "tests/room" / name).write_text(text)
    edit = replace(CAUGHT, file="src/rondo/room/inner/part.py", room="room")
    names = ("test_b.py", "test_d.py", "test_part_of_it.py", "test_a.py", "test_c.py")
    assert files_of(tmp_path, edit) == [f"tests/room/{name}" for name in names]
