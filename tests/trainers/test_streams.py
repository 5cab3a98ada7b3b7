"""Standard output that fails under a command: /dev/full, a closed descriptor, a pipe that nobody reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rondo.cli import main as cli
from rondo.system.streams import LastingStream
from tests.trainers.conftest import PYTHONPATH, REPOSITORY, inline, metrics

TRAIN = f"{sys.executable} -m rondo train {{recipe}} trainer.total_steps=2 tracking.console=plain"
FAULTS = {
    "full": ("> /dev/full", "No space left on device"),
    "closed": (">&-", "it is closed"),
    "both closed": (">&- 2>&-", "it is closed"),
    "both full": ("> /dev/full 2>&1", "No space left on device"),
    "a pipe": ("| true", "Broken pipe"),
}


def shell(command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH}
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=REPOSITORY,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_goes_on_in_silence(recipe: Path, tmp_path: Path, fault: str) -> None:
    where, why = FAULTS[fault]
    run = tmp_path / "run"
    done = shell(f"{TRAIN.format(recipe=recipe)} trainer.run_dir={run} {where}")
    assert done.returncode == 0, done.stderr
    assert (run / "notes.txt").read_text().count("\n") == 1
    assert why in (run / "notes.txt").read_text()
    assert (why in done.stderr) == ("both" not in fault)
    assert "Traceback" not in done.stderr
    inline("train", str(recipe), "trainer.total_steps=2", f"trainer.run_dir={tmp_path / 'heard'}")
    assert metrics(run) == metrics(tmp_path / "heard")
    assert json.loads((run / "summary.json").read_text())["steps"] == 2


@pytest.mark.slow
def test_an_error_of_a_silent_run_keeps_its_exit_code(recipe: Path, tmp_path: Path) -> None:
    command = f"{TRAIN.format(recipe=recipe)} reward.functions=[tests/trainers/scorers.py:raises]"
    done = shell(f"{command} trainer.run_dir={tmp_path / 'run'} > /dev/full")
    assert done.returncode == 2
    assert "RewardError" in done.stderr


def test_a_command_whose_result_is_what_it_prints_says_that_it_could_not(recipe: Path) -> None:
    show = f"{sys.executable} -m rondo config show {recipe}"
    full = shell(f"{show} > /dev/full")
    assert full.returncode == 2
    assert (
        full.stderr
        == "rondo config: StorageError\n  standard output: cannot be written: No space left on device\n"
    )
    assert shell(f"{show} >&-").returncode == 0  # nobody asked for it
    head = shell(f"{show} | true")
    assert head.stderr == ""


def test_a_stream_fails_once_and_tells_whoever_asks(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    with open("/dev/full", "w") as full:
        stream = LastingStream(full, "standard output")
        assert stream.write("x" * 100_000) == 100_000  # more than its buffer
        stream.tell(told.append)
        assert stream.write("y") == 1
        stream.flush()
    assert told == [stream.fault]
    assert "No space left on device" in told[0]
    stream.tell(told.append)
    assert told == [stream.fault] * 2


def test_a_users_print_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: object) -> int:
        print("x" * 100_000)
        return 5

    module = SimpleNamespace(
        add_parser=lambda subparsers: subparsers.add_parser("train").add_argument("config", nargs="*"),
        run=run,
    )
    monkeypatch.setattr(cli, "offered", lambda kind: {"train": module})
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["train"]) == 5
