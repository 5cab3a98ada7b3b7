"""What benchmarks/checks.py makes of stages and report logs; what it has kept is true of this checkout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import checks
from checks import BEGIN, END, File, Record, Stage
from tests import conftest

ROOT = Path(__file__).resolve().parents[2]


def report(
    nodeid: str, when: str, seconds: float, stop: float, worker: str, *keywords: str
) -> dict[str, Any]:
    kind = {"$report_type": "TestReport", "worker_id": worker, "keywords": dict.fromkeys(keywords, 1)}
    return {**kind, "nodeid": nodeid, "when": when, "duration": seconds, "stop": stop}


REPORTS = [
    {"$report_type": "CollectReport", "nodeid": "tests/a.py"},
    report("tests/a.py::one", "setup", 1.0, 101.0, "gw0"),
    report("tests/a.py::one", "call", 2.0, 103.0, "gw0"),
    report("tests/a.py::one", "teardown", 0.5, 103.5, "gw0"),
    report("tests/a.py::two[x]", "call", 30.0, 133.5, "gw0", "slow"),
    report("tests/b.py::three", "call", 20.0, 121.0, "gw1"),
    report("tests/b.py::skipped", "setup", 0.0, 121.0, "gw1"),
]
FILES = (
    File("test-all", "tests/a.py", 2, set_up=1.5, call=32.0, fast=3.5),
    File("test-all", "tests/b.py", 1, set_up=0.0, call=20.0, fast=20.0),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As a run of `.ci/run` leaves it: an installation, and tests with a log in two parts."""
    for name, begin, end, idle in (("install", 10.0, 100.0, 90.0), ("test-all", 100.0, 140.0, 4.0)):
        stage = {"name": name, "begin": begin, "end": end, "idle": idle, "processors": 2, "python": "3.11.2"}
        (tmp_path / f"{name}.json").write_text(json.dumps(stage))
    lines = [json.dumps(one) + "\n" for one in REPORTS]
    (tmp_path / "test-all.jsonl").write_text("".join(lines[:5]))
    (tmp_path / "test-all-more.jsonl").write_text("".join(lines[5:]))
    return tmp_path


def test_what_a_run_took(folder: Path) -> None:
    record = checks.read(folder)
    assert record.stages == (
        Stage("install", 10.0, 100.0, 90.0, 2, "3.11.2"),
        Stage("test-all", 100.0, 140.0, 4.0, 2, "3.11.2"),
    )
    assert record.files == FILES
    assert record.last == {"test-all": (121.0, 133.5)}


def test_the_table(folder: Path) -> None:
    lines = checks.table(checks.read(folder)).splitlines()
    assert "`.ci/run` with all installations took **2.2 minutes**" in lines[0]  # 130 s
    assert lines[0].partition(";")[2].startswith(" tests on Python 3.11.2); ")
    assert "48 are left. `make test` is 0.2 of them" in lines[0]  # 23.5 s of two workers
    # Half of two processors idle; then 4 of 80 s, one worker for the last 12.5, and 53.5 s of tests in 40 s.
    assert lines[4:6] == [
        "| install | 0.0 | 1.5 | 50% |  |  |",
        "| test-all | 1.5 | 0.7 | 5% | 12 s | costs 0.75 |",
    ]
    assert lines[9:] == [
        "| tests/a.py | test-all | 2 | 2 s | 32 s | 4 s |",
        "| tests/b.py | test-all | 1 | 0 s | 20 s | 20 s |",
        "| 0 other files |  | 0 | 0 s | 0 s | 0 s |",
    ]


def test_what_is_written_is_read_again_and_stands_in_the_page(folder: Path, tmp_path: Path) -> None:
    page, kept = tmp_path / "page.md", tmp_path / "kept.json"
    page.write_text(f"before\n{BEGIN}old\n{END}after\n")
    record = checks.read(folder)
    checks.write(record, kept, page)
    assert checks.kept(kept) == record
    assert page.read_text() == f"before\n{BEGIN}{checks.table(record)}{END}after\n"


def test_nothing_is_written_into_a_page_without_a_place_for_it(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no table\n")
    with pytest.raises(SystemExit, match=r"page\.md: has no lines"):
        checks.write(checks.read(folder), tmp_path / "kept.json", page)
    assert page.read_text() == "no table\n"
    assert not (tmp_path / "kept.json").exists()


def test_nothing_was_recorded(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no stage was recorded"):
        checks.read(tmp_path)


def test_a_stage_hands_its_log_on_and_its_exit_status_back(tmp_path: Path) -> None:
    program = "import os, sys; open(os.environ['CHECKS_LOG'], 'w').close(); sys.exit(3)"
    assert checks.stage("mine", [sys.executable, "-c", program], tmp_path) == 3
    assert (tmp_path / "mine.jsonl").exists()
    (stage,) = checks.read(tmp_path).stages
    assert stage.name == "mine"
    assert 0 < stage.seconds < 60


def test_the_page_has_what_was_kept() -> None:
    _, _, rest = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition(BEGIN)
    table, end, _ = rest.partition(END)
    assert end == END
    assert table == checks.table(checks.kept())


def test_files_that_were_measured_are_there() -> None:
    """A file that has another name now is to be measured, or renamed in benchmarks/checks.json, too."""
    assert [one.path for one in checks.kept().files if not (ROOT / one.path).exists()] == []


def test_cases_that_are_repeated_are_there() -> None:
    for line in (ROOT / "tests" / "chance.txt").read_text(encoding="utf-8").splitlines():
        path, _, name = line.partition("::")
        if not line.startswith("#"):
            assert f"def {name}" in (ROOT / path).read_text(encoding="utf-8"), line


def test_the_longest_begin_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    took = {"a.py": (5, 0), "b.py": (4, 2), "controller/c.py": (3, 1), "controller/d.py": (3, 4)}
    files = [File("x", f"tests/{path}", 1, 1.0, call, fast) for path, (call, fast) in took.items()]
    kept, page = tmp_path / "kept.json", tmp_path / "page.md"
    page.write_text(BEGIN + END)
    checks.write(Record("m", "d", (Stage("x", 0.0, 1.0, 0.0, 2, ""),), tuple(files), {}), kept, page)
    monkeypatch.setattr(conftest, "MEASURED", kept)
    assert conftest._seconds(fast=False) == {"tests/a.py": 6.0, "tests/b.py": 5.0, "tests/controller": 8.0}
    assert conftest._seconds(fast=True) == {"tests/a.py": 0.0, "tests/b.py": 2.0, "tests/controller": 5.0}
