"""Files of a run's own folder that hold something else than it wrote: an error that names each."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from rondo.checkpoint.checked import MANIFEST, read_manifest, write_checked, write_manifest
from tests.raising import Calls
from tests.trainers.conftest import RECIPE, inline

STEPS = ("trainer={total_steps: 2, evaluation: {every: 1}}", "checkpoint={every: 1, keep: 1, export: false}")
DAMAGE = {
    "empty": b"",
    "cut off": b'{"step": 2, "steps": 2, "wal',
    "a list": b"[1, 2]\n",
    "a number": b"7\n",
    "another mapping": b'{"step": 2}\n',
    "not UTF-8": b'\xff\xfe{"steps": 2}\n',
}
OF_THE_RUN = ("summary.json", "config.yaml", "evaluations/step-000002.jsonl")
OF_THE_CHECKPOINT = ("controller.json", "compatibility.json", "buffer/ledger.jsonl")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    inline("train", str(folder / "tiny.yaml"), *STEPS, f"trainer.run_dir={folder / 'run'}")
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished / "run", tmp_path / "run"))


def rewrite(step: Path, name: str, data: bytes) -> None:
    """Puts other bytes into a file of a checkpoint, whose manifest is right then, too."""
    files = dict(read_manifest(step)[1])
    for path in (step / name, step / MANIFEST):
        path.unlink()
    files[name] = write_checked(step / name, data)
    write_manifest(step, files, step=2)


def command(finished: Path, run: Path, *overrides: str) -> list[str]:
    return ["train", str(finished / "tiny.yaml"), *STEPS, *overrides, f"trainer.run_dir={run}"]


@pytest.mark.parametrize("name", OF_THE_RUN)
def test_a_damaged_file_of_a_finished_run_is_named(finished: Path, run: Path, name: str) -> None:
    whole = (run / name).read_bytes()
    for what, data in DAMAGE.items():
        if (name, what) in HARMLESS:
            continue
        (run / name).write_bytes(data)
        done = inline(*command(finished, run), check=False)
        assert done.returncode == 2, what
        assert done.stderr.startswith(f"rondo train: CheckpointError\n  {run / name}"), what
    (run / name).write_bytes(whole)
    inline(*command(finished, run))


# No file that says nothing is damaged: of an empty configuration everything has its default.
HARMLESS = {("config.yaml", "empty"), ("evaluations/step-000002.jsonl", "empty")}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_THE_CHECKPOINT)
def test_a_file_of_a_checkpoint_that_was_written_wrongly_is_named(
    finished: Path, run: Path, name: str
) -> None:
    """Its checksum is right: that is what the manifest lists."""
    step = run / "checkpoints" / "step-00000002"
    for what, data in DAMAGE.items():
        if (name, what) == ("compatibility.json", "another mapping"):
            continue  # other settings: an error of its own
        rewrite(step, name, data)
        done = inline(*command(finished, run, "trainer.total_steps=3"), check=False)
        assert done.returncode == 2, what
        assert done.stderr.startswith(f"rondo train: CheckpointError\n  {step}"), what
        assert "No older checkpoint is valid" in done.stderr, what


@pytest.mark.slow
def test_a_checkpoint_of_somebody_else_runs_no_code(finished: Path, run: Path, tmp_path: Path) -> None:
    """Its manifest is right. What stands in the metadata would leave a marker, and be the true metadata."""
    step, marker = run / "checkpoints" / "step-00000002", tmp_path / "marker"
    name = "actor/.metadata"
    whole = (step / name).read_bytes()
    calls = (
        Calls(os.system, f"touch {marker}"),
        Calls(eval, f"open({str(marker)!r}, 'w')"),
        Calls(getattr, Path(str(marker)), "touch"),
        Calls(torch.load, str(marker)),
        Calls(subprocess.Popen, ["touch", str(marker)]),
        {"no": "metadata"},
    )
    for call in calls:
        rewrite(step, name, pickle.dumps(call))
        for tried in (
            ["export", str(run), str(tmp_path / "out")],
            command(finished, run, "trainer.total_steps=3"),
        ):
            done = inline(*tried, check=False)
            assert done.returncode == 2
            assert f"{step / name}: is no metadata of a checkpoint" in " ".join(done.stderr.split())
        assert inline("doctor", str(run), check=False).returncode == 0  # its bytes are as they were written
        assert not marker.exists()
    (step / name).write_bytes(whole)


class AsEarlyPythons(pickle.Pickler):
    """Writes members of enums as Python 3.11.0 to 3.11.3 (Debian 12's) do."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


def test_a_checkpoint_that_another_python_wrote_is_read(finished: Path, run: Path, tmp_path: Path) -> None:
    step, name = run / "checkpoints" / "step-00000002", "actor/.metadata"
    written = io.BytesIO()
    AsEarlyPythons(written).dump(pickle.loads((step / name).read_bytes()))
    assert b"getattr" in written.getvalue()
    rewrite(step, name, written.getvalue())
    for whose, folder in ((run, "theirs"), (finished / "run", "ours")):
        inline("export", str(whose), str(tmp_path / folder))
    ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "theirs"))
    assert all(torch.equal(theirs[key], one) for key, one in ours.items())
    assert ours.keys() == theirs.keys()


@pytest.mark.parametrize("trusted", [False, True])
def test_only_a_trusted_run_has_code_of_its_own_run(
    finished: Path, run: Path, tmp_path: Path, trusted: bool
) -> None:
    """What looks at a run of somebody else's, or follows it, takes nothing of its config.yaml but values."""
    marker, config = tmp_path / "marker", run / "config.yaml"
    (tmp_path / "evil.py").write_text(
        f"from rondo.recipes.quickstart import tokenizer\nopen({str(marker)!r}, 'w')\n"
    )
    settings = yaml.safe_load(config.read_text())
    settings["model"]["tokenizer"] = f"{tmp_path}/evil.py:tokenizer"
    config.write_text(yaml.safe_dump(settings))
    theirs = {**RECIPE, "model": {**RECIPE["model"], "tokenizer": f"{tmp_path}/evil.py:tokenizer"}}
    (run / "recipe.yaml").write_text(yaml.safe_dump(theirs))
    follows = command(finished, tmp_path / "follows")
    for looking in (
        ["doctor", str(run)],
        ["show", str(run)],
        ["config", "show", str(config)],
        ["config", "show", str(run / "recipe.yaml")],
        [*follows, f"trainer.replay={run}"],
        [*follows, f"rollout.recorded={run}"],
    ):
        inline(*looking, check=False)  # that another tokenizer was there may be refused
        assert not marker.exists(), looking
    export = ["export", str(run), str(tmp_path / "out"), *(["--trust-code"] if trusted else [])]
    done = inline(*export, check=False)
    assert done.returncode == (0 if trusted else 2)
    assert marker.exists() == trusted
    if not trusted:
        said = (
            f"has code run for an export: model.tokenizer={tmp_path}/evil.py:tokenizer. If the run is yours"
        )
        assert said in " ".join(done.stderr.split())


def test_a_manifest_that_lists_no_file_is_not_valid(finished: Path, run: Path) -> None:
    step = run / "checkpoints" / "step-00000002"
    (step / MANIFEST).unlink()
    write_manifest(step, {}, step=2)
    done = inline(*command(finished, run, "trainer.total_steps=3"), check=False)
    assert done.stderr.startswith(f"rondo train: CheckpointError\n  {step / MANIFEST}: ")
    assert inline("doctor", str(run), check=False).returncode == 1


def test_a_journal_whose_place_of_a_checkpoint_is_damaged_is_named(finished: Path, run: Path) -> None:
    lines = (run / "journal.jsonl").read_text().splitlines(keepends=True)
    (run / "journal.jsonl").write_text("".join("7\n".rjust(len(line)) for line in lines))
    done = inline(*command(finished, run, "trainer.total_steps=3"), check=False)
    assert done.stderr.startswith(f"rondo train: CheckpointError\n  {run / 'journal.jsonl'}:")
    (run / "journal.jsonl").unlink()
    inline(*command(finished, run, "trainer.total_steps=3"))
    assert json.loads((run / "summary.json").read_text())["steps"] == 3


def test_a_metrics_line_that_is_broken_is_moved_aside_or_named(finished: Path, run: Path) -> None:
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join([lines[0], b"\xff\n", *lines[1:]]))
    inline(*command(finished, run, "trainer.total_steps=3"))  # what is no line of it goes to discarded/
    assert b"\xff\n" not in (run / "metrics.jsonl").read_bytes()
    assert (run / "discarded" / "1" / "metrics.jsonl").exists()
