"""What a SIGKILL of an engine costs an asynchronous run of a tiny model."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rondo.rollout.server import EngineProcess
from rondo.trainers.loop.rl import RLTrainer
from rondo.workers.rollout import RolloutWorker
from tests.trainers.conftest import inline, metrics
from tests.trainers.test_journal import assert_equal
from tests.trainers.test_partial import RESUME, groups_by_step


@pytest.mark.slow
@pytest.mark.parametrize(("k", "mode"), [(1, "finish"), (2, "resume")])
def test_an_engine_that_is_killed_is_replaced_and_no_prompt_is_lost(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, k: int, mode: str
) -> None:
    """The only engine, in a process of its own, when the second step begins. Its successor gets weights while
    the trainer waits for groups (and says so), or with the next publish.
    """
    workers: list[RolloutWorker] = []
    made, taken = RolloutWorker.__init__, RLTrainer.take

    def remember(self: RolloutWorker, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        workers.append(self)

    async def take(self: RLTrainer) -> Any:
        if self.step == 1:
            (engine,) = workers[0].replicas.router.engines().values()
            assert isinstance(engine, EngineProcess)
            os.kill(engine.pid, signal.SIGKILL)
        return await taken(self)

    monkeypatch.setattr(RolloutWorker, "__init__", remember)
    monkeypatch.setattr(RLTrainer, "take", take)
    run = tmp_path / "run"
    arguments = (*RESUME[1:], f"trainer.max_staleness={k}", f"trainer.on_update={mode}")
    own = ("rollout.engine.process=own", "trainer.total_steps=3")
    inline("train", str(recipe), *arguments, *own, f"trainer.run_dir={run}")
    assert sorted(seq for step in groups_by_step(run) for seq in step) == list(range(12))
    lines = metrics(run)
    assert sum(line["rollout/engine_restarts"] for line in lines) == 1
    assert max(line["buffer/staleness_max"] for line in lines) <= k
    monkeypatch.undo()
    if mode == "resume":  # no engine needs to die again
        again, steps = tmp_path / "again", "trainer.total_steps=3"
        inline("train", str(recipe), *arguments, steps, f"trainer.run_dir={again}", f"trainer.replay={run}")
        assert_equal(run, again)
