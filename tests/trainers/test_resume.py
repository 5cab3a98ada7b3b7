"""An interrupted run equals one that was never interrupted: weights and metrics, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from rondo.checkpoint import ControllerState
from rondo.tracking.sums import each_sums
from rondo.trainers.loop import checkpoints
from rondo.trainers.loop.buffer import Buffer, Group
from tests import begun
from tests.trainers.conftest import PYTHONPATH, RECIPE, REPOSITORY, SFT_RECIPE, cli, inline, metrics, weights
from tests.trainers.scorers import HOLD
from tests.waiting import wait_for

SIX_STEPS = (
    "trainer.total_steps=6",
    "checkpoint.every=3",
    "trainer.evaluation.every=3",
    "tracking.token_columns=1",
    "reward={functions: ['tests/trainers/scorers.py:held'], timeout_seconds: 3600}",
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps in one go."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    inline("train", str(folder / "tiny.yaml"), *SIX_STEPS, f"trainer.run_dir={folder / 'run'}")
    return folder / "run"


def start(recipe: Path, run: Path, *overrides: str, hold: str) -> subprocess.Popen[str]:
    """hold: numbers of prompts, "8:16"; the run stands still when it needs them."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH, HOLD: hold}
    arguments = ["train", str(recipe), *SIX_STEPS, *overrides, f"trainer.run_dir={run}"]
    command = ["-m", "rondo.cli.main", *arguments]
    return begun.Program(
        command, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for_line(run: Path, process: subprocess.Popen[str], step: int) -> None:
    def there() -> bool:
        assert process.poll() is None, f"it ended before step {step}:\n{process.communicate()[0]}"
        path = run / "metrics.jsonl"
        return path.exists() and f'"step": {step},' in path.read_text()

    wait_for(f"step {step}", there)


def tokens(run: Path) -> tuple[int, int]:
    """All that the run has generated and trained."""
    summary = json.loads((run / "summary.json").read_text())
    return summary["generated_tokens"], summary["trained_tokens"]


def test_kill_nine_and_resume_equals_undisturbed(recipe: Path, tmp_path: Path, undisturbed: Path) -> None:
    run = tmp_path / "run"
    for hold, step in (("16:20", 4), ("20:24", 5)):
        process = start(recipe, run, hold=hold)
        wait_for_line(run, process, step)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (run / "checkpoints" / "step-00000003").is_dir()
    inline("train", str(recipe), *SIX_STEPS, f"trainer.run_dir={run}")
    assert tokens(run) == tokens(undisturbed)
    assert metrics(run) == metrics(undisturbed)
    assert weights(run) == weights(undisturbed)
    assert list(each_sums(run)) == list(each_sums(undisturbed))
    assert [step for step, _ in each_sums(run)] == [1, 2, 3, 4, 5, 6]
    assert rollouts_of(run) == named(range(1, 7)) == rollouts_of(undisturbed)
    for name in rollouts_of(run):
        assert pq.read_table(run / "rollouts" / name) == pq.read_table(undisturbed / "rollouts" / name)
    assert any((run / "discarded" / "1").iterdir())
    assert any((run / "discarded" / "2").iterdir())


def rollouts_of(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "rollouts").iterdir())


def named(steps: Iterable[int], tokens: Iterable[int] | None = None) -> list[str]:
    """The files of rows of these steps, and of columns of tokens; None: of the same."""
    steps = list(steps)
    of_tokens = steps if tokens is None else tokens
    files = {f"step-{step:06d}.parquet" for step in steps}
    return sorted(files | {f"step-{step:06d}.tokens.parquet" for step in of_tokens})


@pytest.mark.slow
def test_a_resumed_run_keeps_the_rollouts_that_an_undisturbed_one_does(
    recipe: Path, tmp_path: Path, undisturbed: Path
) -> None:
    """Killed behind step 4, gone on with from the checkpoint of step 3, and stopped behind step 5."""
    run, keep = tmp_path / "run", ("tracking.keep_rollouts=3", "tracking.keep_token_columns=2")
    for signum, hold, step in ((signal.SIGKILL, "16:20", 4), (signal.SIGINT, "20:24", 5)):
        process = start(recipe, run, *keep, hold=hold)
        wait_for_line(run, process, step)
        process.send_signal(signum)
        output, _ = process.communicate(timeout=400)
        assert rollouts_of(run) == named(range(1, step + 1), range(2, step + 1)), output
    inline("train", str(recipe), *SIX_STEPS, *keep, f"trainer.run_dir={run}")
    assert rollouts_of(run) == named((4, 5, 6), (5, 6))
    for name in rollouts_of(run):
        assert pq.read_table(run / "rollouts" / name) == pq.read_table(undisturbed / "rollouts" / name)
    assert metrics(run) == metrics(undisturbed)
    longer = ("trainer.total_steps=7", "tracking.keep_rollouts=2")
    inline("train", str(recipe), *SIX_STEPS, *longer, f"trainer.run_dir={run}")
    assert rollouts_of(run) == named((6, 7))


@pytest.mark.slow
def test_interrupt_saves_at_once_and_resume_equals_undisturbed(
    recipe: Path, tmp_path: Path, undisturbed: Path
) -> None:
    run = tmp_path / "run"
    process = start(recipe, run, hold="8:12")
    wait_for_line(run, process, 2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 130, output
    assert "run the same command again" in output
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000002"]
    inline("train", str(recipe), *SIX_STEPS, f"trainer.run_dir={run}")
    assert tokens(run) == tokens(undisturbed)
    assert metrics(run) == metrics(undisturbed)
    assert weights(run) == weights(undisturbed)


@pytest.mark.slow
def test_interrupt_while_groups_wait_in_the_buffer_loses_none_of_them(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When three of the four groups of step 3 are ready, and the fourth is being scored."""
    put = Buffer.put

    def put_and_interrupt(self: Buffer, group: Group) -> None:
        put(self, group)
        if set(self.ready) == {8, 9, 10}:
            os.kill(os.getpid(), signal.SIGINT)

    arguments = ("train", str(recipe), *SIX_STEPS, "trainer.total_steps=3")
    run = tmp_path / "cut"
    with monkeypatch.context() as patch:
        patch.setattr(Buffer, "put", put_and_interrupt)
        patch.setenv(HOLD, "11:12")
        done = inline(*arguments, f"trainer.run_dir={run}", check=False)
    assert done.returncode == 130, done.stderr
    buffered = run / "checkpoints" / "step-00000002" / "buffer"
    groups = [json.loads(line) for line in (buffered / "groups.jsonl").read_text().splitlines()]
    assert [(group["seq"], group["file"], group["rows"]) for group in groups] == [
        (seq, "buffer/groups-0.parquet", 4) for seq in (8, 9, 10)
    ]
    assert '"kind": "reissue", "seq": 11' in (buffered / "ledger.jsonl").read_text()
    shutil.copytree(run, tmp_path / "older")
    for name in ("whole", "cut"):
        inline(*arguments, f"trainer.run_dir={tmp_path / name}")
    assert tokens(tmp_path / "cut") == tokens(tmp_path / "whole")
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")

    load = checkpoints.load_controller_state

    def load_without_a_score(*given: Any) -> ControllerState:
        state = load(*given)
        groups = {seq: batch.without("score/held") for seq, batch in state.groups.items()}
        return dataclasses.replace(state, groups=groups)

    monkeypatch.setattr(checkpoints, "load_controller_state", load_without_a_score)
    inline(*arguments, f"trainer.run_dir={tmp_path / 'older'}")
    assert weights(tmp_path / "older") == weights(tmp_path / "whole")
    last, whole = metrics(tmp_path / "older")[-1], metrics(tmp_path / "whole")[-1]
    apart = {key for key in whole if last[key] != whole[key]}
    assert apart == {"reward/score/held", "reward/spread/held"}  # of one group in four


@pytest.mark.slow
def test_two_runs_with_one_seed_are_equal_and_another_seed_is_not(recipe: Path, tmp_path: Path) -> None:
    """Also in another process, with other hashes of strings."""
    for start_run, name, seed in ((cli, "a", 0), (inline, "b", 0), (inline, "c", 1)):
        start_run("train", str(recipe), f"trainer.run_dir={tmp_path / name}", f"trainer.seed={seed}")
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    assert weights(tmp_path / "a") != weights(tmp_path / "c")


def test_a_finished_run_started_again_changes_nothing(undisturbed: Path, recipe: Path) -> None:
    before = (metrics(undisturbed), weights(undisturbed))
    inline("train", str(recipe), *SIX_STEPS, f"trainer.run_dir={undisturbed}")
    assert (metrics(undisturbed), weights(undisturbed)) == before


def test_resume_with_other_settings_is_refused_with_the_keys(recipe: Path, undisturbed: Path) -> None:
    done = inline(
        "train",
        str(recipe),
        *SIX_STEPS,
        "rollout.n=2",
        f"trainer.run_dir={undisturbed}",
        check=False,
    )
    assert done.returncode == 2
    assert "rollout.n: 4 in the checkpoint, 2 now" in done.stderr


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_with_the_way_out(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("train", str(recipe), "checkpoint.every=1", f"trainer.run_dir={run}")
    inline(*arguments)
    newest = run / "checkpoints" / "step-00000003"
    victim = newest / "actor" / "rank-0.bin"
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-10])
    done = inline(*arguments, check=False)
    assert done.returncode == 2
    assert f"{victim}: damaged: {len(whole) - 10} bytes" in done.stderr
    assert "checkpoint of step 2 is valid" in done.stderr
    victim.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])  # its size is right: found as the rank reads it
    done = inline(*arguments, "trainer.total_steps=4", check=False)
    assert done.returncode == 2
    assert f"{victim}: damaged: bytes 0 to " in done.stderr
    assert "(tensor model." in done.stderr
    assert f"checkpoint of step 2 is valid. To go on from it: `mv {newest} " in done.stderr
    checked = inline("doctor", str(run), check=False)
    assert checked.returncode == 1
    assert f"{newest.with_name('step-00000002')}: ok" in checked.stdout
    assert f"{newest}: damaged" in checked.stdout
    assert f"{run / 'export'}: ok" in checked.stdout
    newest.rename(newest.with_name("damaged"))  # as the message says
    inline(*arguments, "trainer.total_steps=4")
    assert [line["step"] for line in metrics(run)] == [0, 1, 2, 3, 4]
    assert inline("doctor", str(run)).returncode == 0


def test_a_finished_run_with_another_algorithm_is_refused(undisturbed: Path, recipe: Path) -> None:
    before = (undisturbed / "config.yaml").read_text()
    done = inline(
        "train",
        str(recipe),
        *SIX_STEPS,
        "algorithm.advantage=rloo",
        f"trainer.run_dir={undisturbed}",
        check=False,
    )
    assert done.returncode == 2
    assert 'algorithm.advantage.name: "grpo" before, "rloo" now' in done.stderr
    assert (undisturbed / "config.yaml").read_text() == before


@pytest.mark.slow
def test_a_finished_run_without_a_checkpoint_is_shown_and_kept(recipe: Path, tmp_path: Path) -> None:
    """The default. Nothing of it moves, whatever is asked for."""
    run = tmp_path / "run"
    sft = tmp_path / "sft.yaml"
    sft.write_text(yaml.safe_dump(SFT_RECIPE))

    def files() -> dict[Path, bytes]:
        return {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != "run.lock"}

    for command in (["train", str(recipe), "trainer.total_steps=1"], ["sft", str(sft)]):
        command += ["checkpoint.export=true", f"trainer.run_dir={run / command[0]}"]
        inline(*command)
        before = files()
        inline(*command)
        for others in (["actor.optimizer.lr=5e-4"], ["trainer.total_steps=9"]):
            done = inline(*command, *others, check=False)
            assert done.returncode == 2
            assert others[0].split("=")[0] in done.stderr
            assert "trainer.run_dir" in done.stderr
        assert files() == before


@pytest.mark.slow
def test_a_run_that_is_made_longer_and_killed_is_not_finished(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("train", str(recipe), *SIX_STEPS, "checkpoint.every=1", f"trainer.run_dir={run}")
    inline(*arguments, "trainer.total_steps=2")
    process = start(recipe, run, "checkpoint.every=1", hold="12:16")
    wait_for_line(run, process, 3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    inline(*arguments)
    assert [line["step"] for line in metrics(run)] == [0, 1, 2, 3, 4, 5, 6]
    assert json.loads((run / "summary.json").read_text())["steps"] == 6


def test_a_longer_run_with_another_setting_goes_on_and_says_so(recipe: Path, tmp_path: Path) -> None:
    arguments = ("train", str(recipe), "checkpoint.every=1", f"trainer.run_dir={tmp_path / 'run'}")
    inline(*arguments, "trainer.total_steps=1")
    done = inline(*arguments, "trainer.total_steps=2", "actor.optimizer.lr=5e-4", "tracking.console=plain")
    assert "actor.optimizer.lr: 0.001 before, 0.0005 now" in done.stdout + done.stderr
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2]
    before = weights(tmp_path / "run")
    done = inline(*arguments, "trainer.total_steps=1", "actor.optimizer.lr=5e-4", "tracking.console=plain")
    said = "this run has 2 steps already, and 1 are asked for (trainer.total_steps, trainer.epochs): nothing"
    assert said in " ".join((done.stdout + done.stderr).split())
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2]
    assert weights(tmp_path / "run") == before


@pytest.mark.slow
def test_failures_in_flight_survive_a_resume(recipe: Path, tmp_path: Path) -> None:
    """One step off-policy, with trajectories and whole groups that fail: a run that goes on from its second
    checkpoint counts for each step what the undisturbed one counts.
    """
    (tmp_path / "mine.py").write_text(
        "def sometimes(prompt, trajectory):\n"
        "    if int(trajectory.response_ids[0]) % 5 == 0:\n"
        "        raise ValueError('unlucky')\n"
        "    return float(trajectory.response_ids[0] % 2)\n"
    )
    common = [
        f"reward.functions=[{tmp_path}/mine.py:sometimes]",
        "reward={on_error: drop, max_dropped_share: 1.0}",
        "trainer={total_steps: 5, max_staleness: 1, evaluation: {every: null}}",
        "checkpoint={every: 2, keep: 9}",
        "data.eval=[]",
        "rollout.n=2",
        "algorithm.rollout_correction=null",
    ]
    run = tmp_path / "run"
    inline("train", str(recipe), *common, f"trainer.run_dir={run}")
    whole, bits, counted = metrics(run), weights(run), tokens(run)
    ledger = next((run / "checkpoints" / "step-00000002").rglob("ledger.jsonl")).read_text()
    assert '"kind": "failed"' in ledger
    assert whole[-1]["buffer/dropped"] > 0
    for path in (*(run / "checkpoints").glob("step-0000000[45]"), run / "export"):
        shutil.rmtree(path)
    (run / "summary.json").unlink()
    inline("train", str(recipe), *common, f"trainer.run_dir={run}")
    assert metrics(run) == whole
    assert weights(run) == bits
    assert tokens(run) == counted
