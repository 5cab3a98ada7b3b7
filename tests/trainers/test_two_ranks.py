"""The same program on two FSDP2 ranks, in our processes and in Ray's: equal numbers, and clear failures."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.numpy

from rondo.config import load
from rondo.core.errors import WorkerError
from rondo.trainers.commands.train import train
from rondo.trainers.loop.rl import RLTrainer
from rondo.workers.models import ActorWorker
from tests.trainers.conftest import metrics


@pytest.fixture(params=["process", pytest.param("ray", marks=pytest.mark.slow)])
def two_devices(request: pytest.FixtureRequest) -> tuple[str, ...]:
    if request.param == "ray":
        pytest.importorskip("ray")
    return (f"cluster.backend={request.param}", "cluster.devices=2")


@pytest.mark.slow
def test_two_ranks_equal_one_process(run: Any, two_devices: tuple[str, ...]) -> None:
    settings = ("trainer.total_steps=2", "checkpoint.every=2", "trainer.evaluation.every=null")
    one = run("one", *settings)
    two = run("two", *settings, *two_devices)
    first = [pq.read_table(folder / "rollouts" / "step-000001.parquet").to_pydict() for folder in (one, two)]
    order = [np.argsort(table["row_id"]) for table in first]
    for column in ("response_ids", "rollout_log_probs", "reward"):
        a, b = ([table[column][i] for i in rows] for table, rows in zip(first, order, strict=True))
        assert a == b, column  # sampling does not depend on where it runs: bit for bit
    ours, theirs = (
        safetensors.numpy.load_file(folder / "export" / "model.safetensors") for folder in (one, two)
    )
    for name in ours:
        difference = np.linalg.norm(ours[name] - theirs[name]) / np.linalg.norm(ours[name])
        assert difference < 1e-4, name  # AdamW's first steps amplify float32 rounding of tiny gradients
    for a, b in zip(metrics(one)[:2], metrics(two)[:2], strict=True):
        for key in ("actor/loss", "actor/grad_norm", "reward/mean", "eval/greedy/reward"):
            assert a.get(key, 0.0) == pytest.approx(b.get(key, 0.0), rel=1e-4, abs=1e-6), key
    # what was saved on two ranks goes on with one
    again = run("two", *settings, "trainer.total_steps=3", "checkpoint.every=1")
    assert [line["step"] for line in metrics(again)] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_killed_worker_is_an_error_that_names_it(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_devices: tuple[str, ...]
) -> None:
    """While the groups of the second step are generated; however late it is seen, its peer's "connection
    closed" is no cause.
    """
    take, killed = RLTrainer.take, []

    async def kill_and_take(self: RLTrainer) -> Any:
        if self.step == 1:
            killed.append((await self.roles.actor.call(ActorWorker.process_id))[1])
            os.kill(killed[0], signal.SIGKILL)
        return await take(self)

    loaded = load(
        [str(recipe)],
        [
            f"trainer.run_dir={tmp_path / 'run'}",
            *two_devices,
            "trainer.total_steps=500",
            "trainer.evaluation.every=null",
            "trainer.max_restarts=0",
        ],
    )
    monkeypatch.setattr(RLTrainer, "take", kill_and_take)
    monkeypatch.setattr("rondo.controller.calls.ECHO_GRACE_SECONDS", 300.0)
    with pytest.raises(WorkerError, match=r"(actor|rollout)\[1\].* died"):
        train(loaded)
    assert len(killed) == 1
