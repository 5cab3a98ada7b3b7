"""Runs whose engines have processes of their own: the same bits, a killed engine, and Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rondo.core.types import GenerateRequest
from rondo.rollout.server import EngineProcess
from tests import begun
from tests.trainers.conftest import REPOSITORY, inline, metrics, weights
from tests.waiting import engine_processes, wait_for, wait_until_gone

OWN = ("rollout.engine.process=own", "rollout.replicas=2")


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
    return begun.Program(
        ["-m", "rondo", "train", str(recipe), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), ("actor.lora={rank: 4, send: adapters}",)])
def test_the_same_bits_as_in_the_host_also_when_an_engine_is_killed(
    settings: tuple[str, ...], recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the fortieth request, one of the second step's, on its way to it. One that starts again gets the
    base, too, where adapters come by themselves.
    """
    if settings:
        pytest.importorskip("peft")
    pids: dict[int, int] = {}  # of the engine → requests that it got
    generate = EngineProcess.generate

    async def generate_and_kill(self: EngineProcess, request: GenerateRequest, on_tokens: Any = None) -> Any:
        pids[self.pid] = pids.get(self.pid, 0) + 1
        answer = asyncio.ensure_future(generate(self, request, on_tokens))
        if sum(pids.values()) == 40:
            await asyncio.sleep(0)
            os.kill(self.pid, signal.SIGKILL)
        return await answer

    others = [engine.pid for engine in engine_processes()]
    host, own = tmp_path / "host", tmp_path / "own"
    inline("train", str(recipe), f"trainer.run_dir={host}", *settings)
    monkeypatch.setattr(EngineProcess, "generate", generate_and_kill)
    inline("train", str(recipe), f"trainer.run_dir={own}", *OWN, *settings)
    assert sum(line.get("rollout/engine_restarts", 0) for line in metrics(own)) == 1
    assert weights(own) == weights(host)
    assert len(pids) in (2, 3)  # the third may have come too late to get a request
    assert not engine_processes(but=others)
    assert not any(map(command, pids))


@pytest.mark.slow
def test_ctrl_c_leaves_no_process(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start(
        recipe, f"trainer.run_dir={folder}", "trainer.total_steps=100000", "rollout.engine.process=own"
    )
    lines = folder / "metrics.jsonl"
    wait_for("a step", lambda: run.poll() is not None or (lines.exists() and "\n" in lines.read_text()))
    below = [*children(run.pid), *(engine.pid for engine in engine_processes(run.pid))]
    assert len(below) >= 2
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=400)
    wait_until_gone(below)
