"""Ctrl-C at any moment of an asynchronous run of a tiny model: it saves, and goes on where it was."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rondo.trainers.loop.evaluation import evaluate
from rondo.workers.models import ActorWorker
from rondo.workers.rollout import RolloutWorker
from tests.trainers.conftest import inline, metrics
from tests.trainers.test_partial import RESUME, groups_by_step


@pytest.mark.parametrize("moment", ["update", "publish", "evaluation"])
@pytest.mark.parametrize("mode", ["finish", "resume"])
def test_ctrl_c_at_any_moment_saves_and_goes_on(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, mode: str
) -> None:
    interrupted: list[bool] = []

    def interrupt() -> None:
        if not interrupted:
            interrupted.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    def wrapped(original: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if when(*args):
                interrupt()
            return original(self, *args, **kwargs)

        return functools.wraps(original)(call)  # with its name and dispatch

    if moment == "update":
        update = ActorWorker.update_actor
        monkeypatch.setattr(ActorWorker, "update_actor", wrapped(update, lambda *_: True))
    elif moment == "publish":
        load = RolloutWorker.load_weights
        monkeypatch.setattr(RolloutWorker, "load_weights", wrapped(load, lambda version: version == 2))
    else:

        async def evaluating(*args: Any) -> Any:
            interrupt()
            return await evaluate(*args)

        monkeypatch.setattr("rondo.trainers.loop.engine_side.evaluate", evaluating)
    run = tmp_path / "run"
    arguments = (
        *RESUME[:1],
        "rollout.max_tokens=24",
        f"trainer.on_update={mode}",
        "trainer.evaluation={before: false, every: 2, after: true}",
        "trainer.total_steps=4",
        f"trainer.run_dir={run}",
    )
    assert inline("train", str(recipe), *arguments, check=False).returncode == 130
    assert interrupted
    assert list((run / "checkpoints").glob("step-*"))
    assert inline("train", str(recipe), *arguments).returncode == 0
    assert sorted(seq for step in groups_by_step(run) for seq in step) == list(range(16))
    lines = metrics(run)
    evaluated = [line["step"] for line in lines if "eval/greedy/reward" in line]
    assert evaluated == [2, 4]
    assert [line["step"] for line in lines if "actor/loss" in line] == [1, 2, 3, 4]
