"""An interrupted run equals one that was never interrupted: weights and metrics, bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.trainers.conftest import REPOSITORY, cli, inline, metrics, weights

SIX_STEPS = ("trainer.total_steps=6", "checkpoint.every=3", "trainer.evaluation.every=3")
SLOW_SCORER = "reward.functions=[tests/trainers/scorers.py:slow]"  # so that there is time to kill it


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps in one go."""
    import yaml

    from tests.trainers.conftest import RECIPE

    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    cli("train", str(folder / "tiny.yaml"), *SIX_STEPS, SLOW_SCORER, f"trainer.run_dir={folder / 'run'}")
    return folder / "run"


def start(recipe: Path, run: Path, *overrides: str) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    arguments = ["train", str(recipe), *SIX_STEPS, *overrides, f"trainer.run_dir={run}"]
    command = [sys.executable, "-m", "rondo.cli.main", *arguments]
    return subprocess.Popen(
        command, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for_line(run: Path, process: subprocess.Popen[str], step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        path = run / "metrics.jsonl"
        if path.exists() and f'"step": {step},' in path.read_text():
            return
        time.sleep(0.01)
    output = process.communicate(timeout=10)[0] if process.poll() is not None else "still running"
    raise AssertionError(f"step {step} never came:\n{output}")


def test_kill_nine_and_resume_equals_undisturbed(recipe: Path, tmp_path: Path, undisturbed: Path) -> None:
    run = tmp_path / "run"
    process = start(recipe, run, SLOW_SCORER)
    wait_for_line(run, process, 4)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (run / "checkpoints" / "step-00000003").is_dir()
    cli("train", str(recipe), *SIX_STEPS, SLOW_SCORER, f"trainer.run_dir={run}")
    assert metrics(run) == metrics(undisturbed)
    assert weights(run) == weights(undisturbed)
    assert any((run / "discarded" / "1").iterdir())


def test_interrupt_saves_at_once_and_resume_equals_undisturbed(
    recipe: Path, tmp_path: Path, undisturbed: Path
) -> None:
    run = tmp_path / "run"
    process = start(recipe, run, SLOW_SCORER)
    wait_for_line(run, process, 2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "run the same command again" in output
    assert list((run / "checkpoints").glob("step-*"))
    cli("train", str(recipe), *SIX_STEPS, SLOW_SCORER, f"trainer.run_dir={run}")
    assert metrics(run) == metrics(undisturbed)
    assert weights(run) == weights(undisturbed)


def test_interrupt_while_groups_wait_in_the_buffer_loses_none_of_them(recipe: Path, tmp_path: Path) -> None:
    uneven = "reward.functions=[tests/trainers/scorers.py:uneven]"
    for name in ("whole", "cut"):
        run = tmp_path / name
        if name == "cut":
            process = start(recipe, run, uneven, "trainer.total_steps=3")
            wait_for_line(run, process, 2)
            time.sleep(0.4)  # three of the four groups of step 3 are ready, the fourth is being scored
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=60)
            assert process.returncode == 130, output
            buffered = run / "checkpoints" / "step-00000002" / "buffer"
            assert len(list(buffered.glob("group-*.parquet"))) == 3
            assert '"kind": "reissue", "seq": 11' in (buffered / "ledger.jsonl").read_text()
        cli("train", str(recipe), *SIX_STEPS, "trainer.total_steps=3", uneven, f"trainer.run_dir={run}")
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")


def test_two_runs_with_one_seed_are_equal_and_another_seed_is_not(recipe: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        cli("train", str(recipe), f"trainer.run_dir={tmp_path / name}", f"trainer.seed={seed}")
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    assert weights(tmp_path / "a") != weights(tmp_path / "c")


def test_a_finished_run_started_again_changes_nothing(undisturbed: Path, recipe: Path) -> None:
    before = (metrics(undisturbed), weights(undisturbed))
    cli("train", str(recipe), *SIX_STEPS, SLOW_SCORER, f"trainer.run_dir={undisturbed}")
    assert (metrics(undisturbed), weights(undisturbed)) == before


def test_resume_with_other_settings_is_refused_with_the_keys(recipe: Path, undisturbed: Path) -> None:
    done = cli(
        "train",
        str(recipe),
        *SIX_STEPS,
        SLOW_SCORER,
        "rollout.n=2",
        f"trainer.run_dir={undisturbed}",
        check=False,
    )
    assert done.returncode == 2
    assert "rollout.n: 4 in the checkpoint, 2 now" in done.stderr


def test_a_truncated_checkpoint_is_named_with_the_way_out(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("train", str(recipe), "checkpoint.every=1", f"trainer.run_dir={run}")
    cli(*arguments)
    victim = max(
        (run / "checkpoints" / "step-00000003" / "actor").glob("*.distcp"), key=lambda p: p.stat().st_size
    )
    victim.write_bytes(victim.read_bytes()[:-10])
    done = cli(*arguments, check=False)
    assert done.returncode == 2
    assert str(victim.name) in done.stderr
    assert "checkpoint of step 2 is valid" in done.stderr


def test_a_finished_run_with_another_algorithm_is_refused(undisturbed: Path, recipe: Path) -> None:
    before = (undisturbed / "config.yaml").read_text()
    done = cli(
        "train",
        str(recipe),
        *SIX_STEPS,
        SLOW_SCORER,
        "algorithm.advantage=rloo",
        f"trainer.run_dir={undisturbed}",
        check=False,
    )
    assert done.returncode == 2
    assert "algorithm.advantage.name: grpo before, rloo now" in done.stderr
    assert (undisturbed / "config.yaml").read_text() == before


def test_a_longer_run_with_another_setting_goes_on_and_says_so(recipe: Path, tmp_path: Path) -> None:
    arguments = ("train", str(recipe), "checkpoint.every=1", f"trainer.run_dir={tmp_path / 'run'}")
    inline(*arguments, "trainer.total_steps=1")
    done = inline(*arguments, "trainer.total_steps=2", "actor.optimizer.lr=5e-4", "tracking.console=plain")
    assert "actor.optimizer.lr: 0.001 before, 0.0005 now" in done.stdout + done.stderr
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2]


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
    whole, bits = metrics(run), weights(run)
    ledger = next((run / "checkpoints" / "step-00000002").rglob("ledger.jsonl")).read_text()
    assert '"kind": "failed"' in ledger
    assert whole[-1]["buffer/dropped"] > 0
    for path in (*(run / "checkpoints").glob("step-0000000[45]"), run / "export"):
        shutil.rmtree(path)
    (run / "summary.json").unlink()
    inline("train", str(recipe), *common, f"trainer.run_dir={run}")
    assert metrics(run) == whole
    assert weights(run) == bits
