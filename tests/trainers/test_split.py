"""Engines on hosts of their own: a run that loses one of them, and a program that is written by hand."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from rondo.config import load
from rondo.controller import Worker, WorkerGroup, process_backend
from rondo.core.types import StepStats
from rondo.trainers.commands.train import train
from rondo.trainers.loop.report import Reporter
from rondo.trainers.loop.rl import RLTrainer
from rondo.trainers.sessions import open_session
from rondo.workers import RolloutWorker
from tests.trainers.conftest import metrics, weights
from tests.trainers.test_placement import PPO, SPLIT, learned

pytest.importorskip("ray")


class Deaths:
    """The devices whose host was found dead."""

    def __init__(self) -> None:
        self.devices: set[int] = set()

    def call_sent(self, role: str, rank: int, device: int, method: str) -> None: ...

    def call_ended(
        self, role: str, rank: int, device: int, method: str, start: float, end: float, *, died: bool
    ) -> None:
        if died:
            self.devices.add(device)


@pytest.mark.slow
def test_split_goes_on_without_a_host_of_engines(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompts are started again on the other one, and give the same tokens there."""

    def run(name: str, *overrides: str) -> Path:
        settings = ["trainer.total_steps=4", "trainer.evaluation.every=null", *overrides]
        train(load([str(recipe)], [f"trainer.run_dir={tmp_path / name}", *settings]))
        return tmp_path / name

    whole = run("whole")
    original, warned, lost, deaths = RLTrainer.report, [], [], Deaths()

    async def kill_after_the_second_step(trainer: RLTrainer, stats: StepStats) -> None:
        await original(trainer, stats)
        if deaths not in trainer.cluster.call_watchers:
            trainer.cluster.call_watchers.append(deaths)
        lost.append(set(deaths.devices))
        if trainer.step == 2:
            os.kill((await trainer.roles.rollout.call(Worker.process_id))[1], signal.SIGKILL)

    monkeypatch.setattr(RLTrainer, "report", kill_after_the_second_step)
    monkeypatch.setattr(Reporter, "warn", lambda self, message: warned.append(message))
    hurt = run("hurt", *SPLIT, "cluster.devices=3", "cluster.pools.serve=2")
    assert weights(hurt) == weights(whole)
    assert learned(hurt) == learned(whole)
    assert any("its prompts go to the other 1 of 2" in message for message in warned)
    assert lost[-4:] == [set(), set(), {2}, {2}]  # no part of the busy share any more


@pytest.mark.slow
def test_split_goes_on_when_a_host_takes_everybodys_connections_with_it(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with NCCL, by a stand-in: it dies while it receives weights, which its peers do not notice."""
    received: list[tuple[int, int]] = []  # rank, version
    original = WorkerGroup.call_rank

    async def kill_in_the_third(group: WorkerGroup, rank: int, method: Any, *args: Any, **kwargs: Any) -> Any:
        if method is not RolloutWorker.receive_weights:
            return await original(group, rank, method, *args, **kwargs)
        received.append((rank, args[0]))
        dies = (rank, [of for of, _ in received].count(1)) == (1, 3)
        pid = await original(group, rank, Worker.process_id)
        if dies:
            os.kill(pid, signal.SIGSTOP)
        call = asyncio.ensure_future(original(group, rank, method, *args, **kwargs))
        if dies:
            await asyncio.sleep(2)  # the others are in the middle of it
            assert not call.done()
            os.kill(pid, signal.SIGKILL)
        return await call

    def run(name: str, *overrides: str) -> Path:
        settings = ["trainer.total_steps=4", "trainer.evaluation.every=null", *overrides]
        train(load([str(recipe)], [f"trainer.run_dir={tmp_path / name}", *settings]))
        return tmp_path / name

    whole = run("whole")
    monkeypatch.setattr(WorkerGroup, "call_rank", kill_in_the_third)
    modules = [*process_backend.WORKER_MODULES, "tests.trainers.hosts_with_own_groups"]
    monkeypatch.setattr(process_backend, "WORKER_MODULES", modules)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    hurt = run("hurt", *SPLIT, "cluster.devices=3", "cluster.pools.serve=2")
    assert sorted(received) == [(0, 0), (0, 1), (0, 2), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1), (1, 2)]
    assert weights(hurt) == weights(whole)
    assert learned(hurt) == learned(whole)
    assert max(line.get("timing/weight_sync_s", 0.0) for line in metrics(hurt)) < 60


@pytest.mark.slow
def test_a_program_of_ones_own_is_placed_by_the_recipe(recipe: Path, tmp_path: Path) -> None:
    """One step by hand, mixed and split at once: the critic with the engines, the actor alone."""

    async def one_step(name: str, *overrides: str) -> dict[str, tuple[int, ...]]:
        settings = [f"trainer.run_dir={tmp_path / name}", *PPO, *overrides]
        settings += ["trainer.total_steps=1", "checkpoint.every=null"]
        settings += ["trainer.evaluation={before: false, after: false, every: null}", "algorithm.kl=null"]
        async with open_session([recipe], [x for x in settings if "reference" not in x]) as session:
            actor, critic, reward = await session.actor(), await session.critic(), await session.reward()
            async for prompts in session.prompts():
                batch = await actor.compute_log_prob(await actor.generate_sequences(prompts))
                batch = await critic.compute_values(await reward.compute_reward(batch))
                batch = await session.compute_advantages(batch)
                await session.log(batch, await critic.update_critic(batch), await actor.update_actor(batch))
        return {group.role: group.devices for group in (actor.model, actor.rollout, critic.model)}

    apart = ("cluster.placement={rollout: serve, critic: serve}",)
    assert asyncio.run(one_step("here")) == {"actor": (0,), "rollout": (0,), "critic": (0,)}
    placed = asyncio.run(one_step("there", *SPLIT[:3], *apart))
    assert placed == {"actor": (0,), "rollout": (1,), "critic": (1,)}
    assert weights(tmp_path / "here") == weights(tmp_path / "there")
