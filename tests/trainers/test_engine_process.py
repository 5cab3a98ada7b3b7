"""Runs whose engines have processes of their own: the same bits, a killed engine, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.trainers.conftest import REPOSITORY, cli

OWN = ("rollout.process=own", "rollout.replicas=2")


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def export(folder: Path) -> bytes:
    return (folder / "export" / "model.safetensors").read_bytes()


def engines_of(pid: int) -> list[int]:
    """Process ids of the engines below a process: its guards' children."""
    found = []
    for guard in children(pid):
        if "guard.py" in command(guard):
            found += children(guard)
    return found


def children(pid: int) -> list[int]:
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def start(recipe: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rondo", "train", str(recipe), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_for(what: str, get: object) -> object:
    end = time.monotonic() + 600
    while not (got := get()):  # type: ignore[operator]
        assert time.monotonic() < end, what
        time.sleep(0.02)
    return got


def test_the_same_bits_as_in_the_host_also_when_an_engine_is_killed(recipe: Path, tmp_path: Path) -> None:
    steps = ("trainer.total_steps=12", "checkpoint.every=100")
    host, own = tmp_path / "host", tmp_path / "own"
    cli("train", str(recipe), f"trainer.run_dir={host}", *steps, timeout=600)
    run = start(recipe, f"trainer.run_dir={own}", *steps, *OWN)
    wait_for("a step", lambda: (own / "metrics.jsonl").exists() and metrics(own))
    engines = engines_of(run.pid)
    assert len(engines) == 2
    os.kill(engines[0], signal.SIGKILL)
    out, _ = run.communicate(timeout=600)
    assert run.returncode == 0, out
    assert sum(row.get("rollout/engine_restarts", 0) for row in metrics(own)) == 1
    assert export(own) == export(host)
    assert not any(map(command, engines))


def test_ctrl_c_leaves_no_process(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start(recipe, f"trainer.run_dir={folder}", "trainer.total_steps=100000", *OWN)
    wait_for("a step", lambda: (folder / "metrics.jsonl").exists() and metrics(folder))
    below = [*children(run.pid), *engines_of(run.pid)]
    assert len(below) >= 4
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=600)
    wait_for("all end", lambda: not any(map(command, below)))
