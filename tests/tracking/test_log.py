"""The controller's log in the run's folder."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from rondo.tracking import logged_to

PROGRAM = """
import logging, sys
from pathlib import Path
from rondo.tracking import logged_to

with logged_to(Path(sys.argv[1]), 2):
    logging.getLogger("rondo.anything").info("a note")
    logging.getLogger("rondo.anything").warning("a warning")
    logging.getLogger("rondo.system.process").debug("an engine's line")
    logging.getLogger("theirs").info("somebody else's note")
logging.getLogger("rondo.anything").warning("afterwards")
"""


@pytest.mark.slow
def test_everything_goes_to_the_file_and_warnings_where_they_went(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "controller.log"
    done = [
        subprocess.run([sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [each.stderr for each in done] == ["a warning\nafterwards\n"] * 2
    lines = path.read_text().splitlines()
    assert [line.rpartition(": ")[2] for line in lines[1:4]] == ["a note", "a warning", "an engine's line"]
    assert lines[0].startswith("=== attempt 2, started ")
    assert len(lines) == 8  # the second time goes behind the first


def test_a_program_that_logs_itself_keeps_its_levels(tmp_path: Path) -> None:
    ours = logging.getLogger("rondo")
    before = ours.level, list(logging.getLogger().handlers)  # pytest has handlers there
    with logged_to(tmp_path / "controller.log", 1):
        assert ours.level == before[0]
        ours.warning("a warning")
    assert (ours.level, logging.getLogger().handlers) == before
    assert "WARNING rondo: a warning" in (tmp_path / "controller.log").read_text()


@pytest.mark.parametrize("name", ["file/controller.log", "full"])
def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "full").symlink_to("/dev/full")
    with logged_to(tmp_path / name, 1):
        for _ in range(2):
            logging.getLogger("rondo").warning("a warning")
    assert (tmp_path / "file").read_text() == ""
