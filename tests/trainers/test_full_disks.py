"""File systems that refuse while a run goes on: one named error, nothing half-written, and the way on."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rondo.tracking import RunFolder
from tests.trainers.conftest import PYTHONPATH, REPOSITORY, inline, metrics, weights

SHORT = ("trainer={total_steps: 2, evaluation: {before: false, every: 1}}", "checkpoint={every: 1, keep: 9}")
REPLAYABLE = "trainer.max_staleness=1"
# What is put in the way, once the run has begun: a folder where a file comes, a file where a folder is.
FOLDERS = (
    "metrics.jsonl",
    "journal.jsonl",
    "summary.json",
    "curves.png",
    "rollouts/step-000002.parquet",
    "evaluations/step-000002.jsonl",
)
FILES = ("timeline", "evaluations", "checkpoints", "rollouts")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FOLDERS, *FILES])
def test_what_cannot_be_written_is_one_error_that_names_it(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run = tmp_path / "run"
    begin = RunFolder.begin

    def obstruct(self: RunFolder, config: str) -> None:
        begin(self, config)
        if name in FOLDERS:
            (run / name / "in the way").mkdir(parents=True)
        else:
            shutil.rmtree(run / name, ignore_errors=True)
            (run / name).write_text("")

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "begin", obstruct)
        command = ("train", str(recipe), *SHORT, REPLAYABLE, "tracking.plot=true", f"trainer.run_dir={run}")
        done = inline(*command, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"rondo train: StorageError\n  {run / name}")
    assert not [*run.rglob(".*.tmp"), *run.rglob(".writing-*")]
    saved = sorted((run / "checkpoints").glob("step-*")) if (run / "checkpoints").is_dir() else []
    assert ("goes on from there" in done.stderr) == bool(saved)


@pytest.mark.slow
def test_a_run_that_a_file_system_ended_goes_on_to_the_same_bits(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("train", str(recipe), *SHORT)
    run = tmp_path / "run"
    obstacle = run / "rollouts" / "step-000002.parquet" / "in the way"
    begin = RunFolder.begin

    def obstruct(self: RunFolder, config: str) -> None:
        begin(self, config)
        obstacle.mkdir(parents=True)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "begin", obstruct)
        assert inline(*command, f"trainer.run_dir={run}", check=False).returncode == 2
    shutil.rmtree(obstacle.parent)
    for name in ("run", "whole"):
        inline(*command, f"trainer.run_dir={tmp_path / name}")
    assert metrics(run) == metrics(tmp_path / "whole")
    assert weights(run) == weights(tmp_path / "whole")


def test_a_run_folder_that_is_a_file(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "a file"
    run.write_text("")
    done = inline("train", str(recipe), *SHORT, f"trainer.run_dir='{run}'", check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("rondo train: ConfigError\n  argument 'trainer.run_dir=")


@pytest.mark.parametrize("output", ["nowhere/a.jsonl", "folder", "folder/" + "x" * 300, "file/a.jsonl"])
def test_an_output_that_cannot_be_is_said_before_the_evaluation(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(
        "rondo.trainers.commands.evaluate.evaluate_model", lambda loaded: pytest.fail("began")
    )
    done = inline("eval", str(recipe), "--output", str(tmp_path / output), check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"rondo eval: StorageError\n  {tmp_path / output}: cannot be written: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "tiny.yaml"]


def test_an_output_that_fails_at_the_end_leaves_the_result_on_the_screen(
    recipe: Path, tmp_path: Path
) -> None:
    done = inline("eval", str(recipe), "--output", "/dev/full", check=False)
    assert done.returncode == 2
    assert "/dev/full: cannot be written: No space left on device (" in done.stderr
    assert set(json.loads(done.stdout)) >= {"eval/greedy/reward", "eval/sampled/reward"}
    whole = inline("eval", str(recipe), "--output", str(tmp_path / "answers.jsonl"))
    assert whole.stdout == done.stdout
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 4
    assert not [*tmp_path.glob(".*.tmp")]


@pytest.mark.slow
def test_an_export_is_whole_or_absent(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run, broken off in its last write, and then of its checkpoint."""
    run = tmp_path / "run"

    def refused(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # injected: no file system fills up just there

    with monkeypatch.context() as patch:
        patch.setattr("rondo.training.export.write_manifest", refused)
        done = inline("train", str(recipe), *SHORT, f"trainer.run_dir={run}", check=False)
        assert done.returncode == 2
        assert "goes on from there" in done.stderr
        assert not (run / "export").exists()
        exported = inline("export", str(run), str(tmp_path / "model"), check=False)
        assert exported.returncode == 2
    (tmp_path / "file").write_text("")
    for target in ("file/model", "x" * 300):
        done = inline("export", str(run), str(tmp_path / target), check=False)
        assert done.stderr.startswith(f"rondo export: StorageError\n  {tmp_path / target}: cannot be ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run", "tiny.yaml"]
    assert not [*run.glob(".writing-*")]
    inline("train", str(recipe), *SHORT, f"trainer.run_dir={run}")
    inline("export", str(run), str(tmp_path / "model"))
    assert weights(run) == (tmp_path / "model" / "model.safetensors").read_bytes()


IN_A_SMALL_DISK = """\
mount -t tmpfs -o {options} none {disk} || exit 77
{python} -m rondo train {recipe} {settings} trainer.run_dir={disk}/run
code=$?
ls -A {disk}/run {disk}/run/*
exit $code
"""


def on_a_disk_of_its_own(recipe: Path, folder: Path, options: str) -> subprocess.CompletedProcess[str]:
    """`rondo train` into a mount that other processes do not see, and then what is in its folder."""
    values = {"disk": folder / "disk", "python": sys.executable, "recipe": recipe, "options": options}
    values["disk"].mkdir()
    script = IN_A_SMALL_DISK.format(**values, settings="trainer.total_steps=40 checkpoint.every=5")
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        cwd=REPOSITORY,
        env={"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("this machine lets nobody mount a disk of their own")
    assert done.returncode == 2, done.stderr
    title, where = done.stderr.splitlines()[:2]  # where a rank writes, it is said
    assert title in ("rondo train: StorageError", "rondo train: StorageError in actor[0]"), done.stderr
    assert where.startswith(f"  {values['disk']}/run"), done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.slow
@pytest.mark.parametrize("size", ["96k", "300k", "700k"])
def test_a_disk_that_is_really_full(recipe: Path, tmp_path: Path, size: str) -> None:
    done = on_a_disk_of_its_own(recipe, tmp_path, f"size={size}")
    assert "No space left on device (" in done.stderr
    assert " are free)" in done.stderr
    assert ".tmp" not in done.stdout
    assert ".writing-" not in done.stdout


@pytest.mark.slow
def test_a_disk_that_is_really_read_only(recipe: Path, tmp_path: Path) -> None:
    assert "Read-only file system" in on_a_disk_of_its_own(recipe, tmp_path, "ro").stderr


ENDED_AND_GONE_ON = """\
import subprocess, sys, rondo
from pathlib import Path
from rondo.core.errors import StorageError

recipe, run, how = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
folder, filler = run / "checkpoints" if how == "read-only checkpoints" else run, run.with_name("filler")

def obstruct(metrics):
    if metrics["step"] != 2:
        return
    if how == "full":
        with open(filler, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                return
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)

settings = {"trainer.run_dir": run, "trainer.total_steps": 4, "checkpoint.every": 1}
try:
    rondo.train(recipe, on_step=obstruct, **settings)
except StorageError as error:
    print(error, *error.__notes__)
filler.unlink() if how == "full" else subprocess.run(["umount", "-l", folder], check=True)
assert not [*run.rglob(".*.tmp"), *run.rglob(".writing-*")]
rondo.train(recipe, **settings, config={"checkpoint.resume": "auto"})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("read-only run", "Read-only file system"),
        ("read-only checkpoints", "Read-only file system"),
        ("full", "No space left on device"),
    ],
)
def test_a_disk_that_refuses_in_the_middle_and_takes_it_again_costs_no_bit(
    recipe: Path, tmp_path: Path, how: str, said: str
) -> None:
    """From step 2 on, before its checkpoint is written; then the run goes on from that of step 1."""
    disk, out = tmp_path / "disk", tmp_path / "out"
    disk.mkdir()
    (tmp_path / "script.py").write_text(ENDED_AND_GONE_ON)
    mount = f"mount -t tmpfs -o size=16m none {disk} || exit 77"
    call = f"{sys.executable} {tmp_path / 'script.py'} {recipe} {disk / 'run'} '{how}'"
    done = subprocess.run(
        [
            "unshare",
            "--user",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            f"{mount}\n{call} && cp -r {disk} {out}",
        ],
        cwd=REPOSITORY,
        env={"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "PATH": "/usr/sbin:/sbin:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("this machine lets nobody mount a disk of their own")
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert "all up to step 1 is saved" in done.stdout
    inline("train", str(recipe), "trainer.total_steps=4", f"trainer.run_dir={tmp_path / 'whole'}")
    assert metrics(out / "run") == metrics(tmp_path / "whole")
    assert weights(out / "run") == weights(tmp_path / "whole")
