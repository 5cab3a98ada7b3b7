"""Runs whose checkpoints lie at a URL, and models there: numbers are those of folders, bit for bit, whatever
is interrupted, and also where the run's own folder is lost.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rondo.checkpoint import CheckpointStore, Draft, Grown
from rondo.cli.doctor_run import examine
from rondo.config import load
from rondo.core.errors import ConfigError, StorageError
from rondo.system.urls import Far
from rondo.trainers.commands.export import export_checkpoint
from rondo.trainers.commands.train import train
from tests import begun
from tests.far import PLUGIN, Fault, far, fault, shelf  # noqa: F401
from tests.trainers.conftest import PYTHONPATH, RECIPE, REPOSITORY, cli, inline, metrics, weights
from tests.trainers.scorers import HOLD
from tests.trainers.test_resume import SIX_STEPS, tokens, wait_for_line
from tests.waiting import wait_for

TWO = ("cluster.backend=process", "cluster.devices=2")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps in one go, with checkpoints in the run's folder."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    inline("train", str(folder / "tiny.yaml"), *SIX_STEPS, f"trainer.run_dir={folder / 'run'}")
    return folder / "run"


def start(
    recipe: Path, run: Path, *overrides: str, hold: str = "90:91", forked: bool = True
) -> subprocess.Popen[str]:
    """As a user starts it, with the shelf installed. hold: as in `test_resume.start`. forked: it and its
    processes begin with their imports.
    """
    path = os.pathsep.join([PYTHONPATH, str(PLUGIN)])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, HOLD: hold}
    command = ["-m", "rondo.cli.main", "train", str(recipe), *SIX_STEPS, *overrides, f"trainer.run_dir={run}"]
    options: Any = {"cwd": REPOSITORY, "env": env, "text": True}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    if forked:
        return begun.Program(command, **options)
    return subprocess.Popen([sys.executable, *command], **options)


def assert_equal(run: Path, other: Path) -> None:
    assert tokens(run) == tokens(other)
    assert metrics(run) == metrics(other)
    assert weights(run) == weights(other)


@pytest.mark.slow
def test_a_run_whose_machine_is_lost_goes_on_elsewhere_to_the_same_bits(
    far: str,  # noqa: F811
    recipe: Path,
    tmp_path: Path,
    undisturbed: Path,
) -> None:
    place = f"checkpoint.path={far}/run"
    process = start(recipe, tmp_path / "lost", place, hold="16:20")
    wait_for_line(tmp_path / "lost", process, 4)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not list((tmp_path / "lost").glob("checkpoints/*"))
    shutil.rmtree(tmp_path / "lost")
    assert CheckpointStore(f"{far}/run").steps() == [3]

    command = ("train", str(recipe), *SIX_STEPS, place, "tracking.console=plain")
    run = tmp_path / "run"
    done = inline(*command, f"trainer.run_dir={run}")
    assert f"{run} has nothing of this run yet: it goes on from {far}/run/step-00000003" in done.stdout
    assert_equal(run, undisturbed)
    assert CheckpointStore(f"{far}/run").steps() == [3, 6]
    assert [(saved.folder, saved.faults) for saved in examine(run)][:2] == [
        (f"{far}/run/step-00000003", []),
        (f"{far}/run/step-00000006", []),
    ]
    # a folder that holds less than the checkpoint, with other settings, which are told
    shutil.rmtree(run)
    done = inline(*command, "trainer.total_steps=7", "actor.optimizer.lr=2e-3", f"trainer.run_dir={run}")
    assert "actor.optimizer.lr: 0.001 before, 0.002 now" in done.stdout
    assert [line["step"] for line in metrics(run)] == [0, 1, 2, 3, 4, 5, 6, 7]
    # another run is refused, as it is in its folder
    done = inline(*command, "trainer.seed=1", f"trainer.run_dir={tmp_path / 'other'}", check=False)
    assert done.returncode == 2
    assert "trainer.seed: 0 in the checkpoint, 1 now" in done.stderr
    never = ("checkpoint.resume=never", f"trainer.run_dir={tmp_path / 'other'}")
    done = inline(*command, *never, check=False)
    assert (
        f"{far}/run holds an earlier run (a checkpoint of step 7) and checkpoint.resume=never" in done.stderr
    )
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_kill_9_while_a_checkpoint_is_sent_leaves_the_earlier_one(
    shelf: str,  # noqa: F811
    fault: Fault,  # noqa: F811
    recipe: Path,
    tmp_path: Path,
    undisturbed: Path,
) -> None:
    place = f"checkpoint.path={shelf}"
    fault.set("hang step-00000006/actor/.metadata")
    process = start(recipe, tmp_path / "run", place)
    wait_for("the last file of the actor", lambda: fault.hangs or process.poll() is not None)
    assert process.poll() is None, process.communicate()[0]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    fault.clear()
    assert "step-00000006/actor/rank-0.bin" in Far(shelf).files()
    assert CheckpointStore(shelf).steps() == [3]
    inline("train", str(recipe), *SIX_STEPS, place, f"trainer.run_dir={tmp_path / 'run'}")
    assert_equal(tmp_path / "run", undisturbed)
    assert {name.partition("/")[0] for name in Far(shelf).files()} == {
        "metrics",
        "step-00000003",
        "step-00000006",
    }


@pytest.mark.slow
def test_an_upload_that_fails_ends_the_run_and_says_how_it_goes_on(
    shelf: str,  # noqa: F811
    fault: Fault,  # noqa: F811
    recipe: Path,
    tmp_path: Path,
    undisturbed: Path,
) -> None:
    command = (
        "train",
        str(recipe),
        *SIX_STEPS,
        f"checkpoint.path={shelf}",
        f"trainer.run_dir={tmp_path / 'run'}",
    )
    for what in ("actor/rank-0.bin", "buffer/ledger.jsonl", "manifest.json", "metrics"):
        what = "metrics/step-00000006.jsonl" if what == "metrics" else f"step-00000006/{what}"
        fault.set(f"fail {what}")
        done = inline(*command, check=False)
        assert done.returncode == 2
        assert f"{shelf}/{what}: cannot be written: OSError: the shelf would not" in done.stderr
        assert "Nothing was lost: the checkpoint of step 3 is intact" in done.stderr
        assert f"all up to step 3 is saved ({shelf}/step-00000003): the same command" in done.stderr
        assert CheckpointStore(shelf).steps() == [3]
    fault.clear()
    inline(*command)
    assert_equal(tmp_path / "run", undisturbed)


def lines_of(text: bytes) -> list[int]:
    return [json.loads(line)["step"] for line in text.splitlines()]


@pytest.mark.slow
def test_each_checkpoint_sends_the_metrics_that_are_new(
    far: str,  # noqa: F811
    recipe: Path,
    tmp_path: Path,
) -> None:
    """Through a kill of the folder, a checkpoint that is given up, and a part that is left of it."""
    settings = ("trainer.evaluation.every=null", f"checkpoint={{path: '{far}', every: 2, keep: 2}}")
    run, other = tmp_path / "run", tmp_path / "other"

    def parts() -> dict[str, list[int]]:
        files = Far(far).files()
        found = sorted(name for name in files if name.startswith("metrics/"))
        return {name: lines_of((Far(far) / name).read_bytes()) for name in found}

    def trained(steps: int, folder: Path) -> None:
        inline("train", str(recipe), *settings, f"trainer.total_steps={steps}", f"trainer.run_dir={folder}")
        assert [line["step"] for line in metrics(folder)] == list(range(steps + 1))

    trained(4, run)
    of_four = {"metrics/step-00000002.jsonl": [0, 1, 2], "metrics/step-00000004.jsonl": [3, 4]}
    assert parts() == of_four
    assert CheckpointStore(far).steps() == [2, 4]
    first = (run / "metrics.jsonl").read_bytes()
    shutil.rmtree(run)
    trained(6, run)  # elsewhere, from the parts, and only what is new is sent
    assert (run / "metrics.jsonl").read_bytes().startswith(first)
    assert parts() == of_four | {"metrics/step-00000006.jsonl": [5, 6]}
    (Far(far) / "step-00000006" / "manifest.json").remove()  # as the way out of damage says
    trained(5, run)  # the checkpoint of its last step comes before that of step 6
    assert parts() == of_four | {"metrics/step-00000005.jsonl": [5]}
    trained(6, other)
    assert parts() == of_four | {"metrics/step-00000005.jsonl": [5], "metrics/step-00000006.jsonl": [6]}
    # in the first folder again, which has other clocks in the line of step 6 than those who went on
    (run / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes() + b'{"step": 6, "x": 1}\n')
    (run / "summary.json").unlink()
    trained(7, run)
    assert (run / "metrics.jsonl").read_bytes().startswith((other / "metrics.jsonl").read_bytes())
    assert parts()["metrics/step-00000007.jsonl"] == [7]
    saved = examine(run)
    assert [(one.folder, one.num_files, one.faults) for one in saved if "step" not in one.folder][:1] == [
        (f"{far}/metrics", 5, [])
    ]
    (Far(far) / "metrics" / "step-00000004.jsonl").remove()
    assert any("metrics: the parts up to step 7 have" in str(one.faults) for one in examine(run))
    trained(8, run)  # which has them all
    shutil.rmtree(other)
    done = inline("train", str(recipe), *settings, f"trainer.run_dir={other}", check=False)
    assert done.returncode == 2
    assert f"{far}/metrics: the parts up to step 8 have" in done.stderr


@pytest.mark.slow
def test_a_checkpoint_with_all_metrics_in_it_is_gone_on_with(
    far: str,  # noqa: F811
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As an older rondo wrote it."""
    command = ("train", str(recipe), "checkpoint.every=1", f"checkpoint.path={far}")
    run = tmp_path / "run"

    def all_of_it(self: Grown, draft: Draft) -> None:
        draft.write("metrics.jsonl", (run / "metrics.jsonl").read_bytes())

    with monkeypatch.context() as patch:
        patch.setattr(Grown, "note", all_of_it)
        patch.setattr(Grown, "with_part", lambda self, folder, step, data: self)
        inline(*command, "trainer.total_steps=2", f"trainer.run_dir={run}")
    assert not [name for name in Far(far).files() if name.startswith("metrics/")]
    first = (run / "metrics.jsonl").read_bytes()
    shutil.rmtree(run)
    inline(*command, "trainer.total_steps=3", f"trainer.run_dir={run}")
    whole = (run / "metrics.jsonl").read_bytes()
    assert whole.startswith(first)
    (part,) = (name for name in Far(far).files() if name.startswith("metrics/"))
    assert part == "metrics/step-00000003.jsonl"
    assert (Far(far) / part).read_bytes() == whole[: len((Far(far) / part).read_bytes())]
    assert lines_of((Far(far) / part).read_bytes())[-1] == 3


@pytest.fixture(scope="module")
def two_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    cli("train", str(folder / "tiny.yaml"), *SIX_STEPS, *TWO, f"trainer.run_dir={folder / 'run'}")
    return folder / "run"


@pytest.mark.slow
def test_two_processes_send_what_each_holds_and_go_on(
    far: str,  # noqa: F811
    recipe: Path,
    tmp_path: Path,
    two_undisturbed: Path,
) -> None:
    place = f"checkpoint.path={far}"
    process = start(recipe, tmp_path / "lost", place, *TWO, hold="16:20")
    wait_for_line(tmp_path / "lost", process, 4)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    sizes = {name: entry["size"] for name, entry in Far(far).files().items()}
    assert sizes["step-00000003/actor/rank-0.bin"] > 10_000
    assert sizes["step-00000003/actor/rank-1.bin"] > 10_000
    process = start(recipe, tmp_path / "run", place, *TWO)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert_equal(tmp_path / "run", two_undisturbed)
    # and on one
    inline(
        "train",
        str(recipe),
        *SIX_STEPS,
        place,
        "trainer.total_steps=7",
        f"trainer.run_dir={tmp_path / 'run'}",
    )
    assert metrics(tmp_path / "run")[-1]["step"] == 7


@pytest.mark.slow
def test_a_rank_that_cannot_send_its_part_is_an_error_of_the_run(
    shelf: str,  # noqa: F811
    fault: Fault,  # noqa: F811
    recipe: Path,
    tmp_path: Path,
) -> None:
    fault.set("fail step-00000003/actor/rank-1.bin")
    process = start(recipe, tmp_path / "run", f"checkpoint.path={shelf}", *TWO, forked=False)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 2
    assert f"{shelf}/step-00000003/actor/rank-1.bin: cannot be written: OSError: the shelf" in output
    assert "there was no earlier checkpoint" in output
    assert CheckpointStore(shelf).steps() == []


@pytest.mark.slow
def test_the_best_checkpoint_stays_where_it_is_sent(far: str, recipe: Path, tmp_path: Path) -> None:  # noqa: F811
    settings = ["trainer.total_steps=5", "trainer.evaluation={every: 1, samples: 0}", "checkpoint.keep=1"]
    settings += ["checkpoint.best={metric: eval/greedy/reward}"]
    here = train(load([str(recipe)], [*settings, f"trainer.run_dir={tmp_path / 'here'}"]))
    there = train(
        load([str(recipe)], [*settings, f"checkpoint.path={far}", f"trainer.run_dir={tmp_path / 'there'}"])
    )
    assert there["best"] == here["best"]
    kept = CheckpointStore(tmp_path / "here" / "checkpoints").steps()
    assert CheckpointStore(far).steps() == kept == sorted({here["best"]["step"], 5})
    assert weights(tmp_path / "there") == weights(tmp_path / "here")
    shutil.rmtree(tmp_path / "there")  # which evaluation was the best is told by the checkpoint
    again = train(
        load([str(recipe)], [*settings, f"checkpoint.path={far}", f"trainer.run_dir={tmp_path / 'there'}"])
    )
    assert again["best"] == here["best"]
    assert weights(tmp_path / "there") == weights(tmp_path / "here")


@pytest.mark.slow
def test_an_export_at_a_url_is_the_one_in_a_folder_and_can_be_a_model(
    far: str,  # noqa: F811
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = tmp_path / "run"
    inline("train", str(recipe), "checkpoint.every=3", f"checkpoint.path={far}/run", f"trainer.run_dir={run}")
    assert export_checkpoint(str(run), str(tmp_path / "exported")) == 3
    done = inline("export", str(run), f"{far}/model")
    assert done.stdout == f"wrote step 3 of {run} to {far}/model\n"
    files = {name: (Far(f"{far}/model") / name).read_bytes() for name in Far(f"{far}/model").files()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "exported").iterdir()}
    assert not list((tmp_path / "cache" / "rondo").glob("export-*"))
    with pytest.raises(ConfigError, match="is not an empty folder"):
        export_checkpoint(str(run), f"{far}/model")

    said = [
        [
            json.loads(line)
            for line in inline(
                "generate", model, "1 + 1 =", "--json", "--max-tokens", "8"
            ).stdout.splitlines()
        ]
        for model in (str(tmp_path / "exported"), f"{far}/model")
    ]
    assert said[0] == said[1]
    made = {}
    for name, model in (("here", tmp_path / "exported"), ("there", f"{far}/model")):
        settings = (
            f"model={{path: {model}, config: null, tokenizer: null}}",
            "trainer.total_steps=1",
            f"trainer.run_dir={tmp_path / name}",
        )
        inline("train", str(recipe), *settings)
        made[name] = (metrics(tmp_path / name), weights(tmp_path / name))
    assert made["here"] == made["there"]
    assert len(list((tmp_path / "cache" / "rondo" / "models").glob("model-*[!k]"))) == 1  # without the lock


@pytest.mark.slow
def test_an_export_that_cannot_be_sent_leaves_nothing(
    shelf: str,  # noqa: F811
    fault: Fault,  # noqa: F811
    recipe: Path,
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    inline("train", str(recipe), "checkpoint.every=3", f"trainer.run_dir={run}")
    for what, said in (
        ("fail model.safetensors", "cannot be written: OSError: the shelf would not fail it"),
        ("cut model.safetensors", "bytes are there, of "),
        ("cut config.json", "bytes are there, of "),
    ):
        fault.set(what)
        with pytest.raises(StorageError, match=said):
            export_checkpoint(str(run), f"{shelf}/model")
        assert Far(shelf).files() == {}
    fault.set("fail .trial")  # before anything is loaded
    done = inline("export", str(run), f"{shelf}/model", check=False)
    assert done.returncode == 2
    assert f"{shelf}/model/.trial: cannot be written" in done.stderr


def test_a_place_that_cannot_be_written_is_told_before_anything_starts(
    shelf: str,  # noqa: F811
    fault: Fault,  # noqa: F811
    recipe: Path,
    tmp_path: Path,
) -> None:
    fault.set("fail .trial")
    done = inline(
        "train", str(recipe), f"checkpoint.path={shelf}", f"trainer.run_dir={tmp_path / 'run'}", check=False
    )
    assert done.returncode == 2
    assert f"{shelf}/.trial: cannot be written: OSError" in done.stderr
    assert not (tmp_path / "run").exists()
