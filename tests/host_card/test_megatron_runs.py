"""Runs on Megatron's stages, on cards in host memory: they end as torch's do."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rondo.controller import Worker, WorkerGroup
from rondo.core.errors import WorkerError
from tests.gpu.test_paths import F32, GAE, KL, recipe_file
from tests.host_card import on_the_host_card
from tests.trainers.conftest import inline, metrics
from tests.trainers.test_parallel import DENSE
from tests.trainers.test_parallel_roles import Run, compare, run  # noqa: F401 (a fixture)
from tests.trainers.test_restarts import Kill, Killer, restarts_of
from tests.training.helpers import (
    ARCHITECTURES,
    relative_difference,
)
from tests.waiting import wait_until_gone

pytestmark = [*on_the_host_card, pytest.mark.slow]
Tensors = dict[str, torch.Tensor]

ALL_F32 = [F32, "critic.compute_dtype=float32", "reference.compute_dtype=float32"]
RUN = ["cluster.device=cuda", *ALL_F32, "cluster.backend=process", "checkpoint.every=2"]
EVEN = {"num_key_value_heads": 2}  # what two tensor ranks divide
MEGATRON = ["actor.backend=megatron", "cluster.devices=2"]
SPLIT = ["cluster.devices=3", "cluster.pools={train: 2, serve: 1}", "cluster.placement={rollout: serve}"]
REFRESH = "reference.refresh_every=2"
RESTS = ["actor.offload_params=true", "actor.offload_optimizer=true", "reference.offload_params=true"]
MIXTURE = [
    f"model.config.{key}={value}"
    for key, value in ARCHITECTURES["qwen3_moe"].items()
    if key.startswith(("moe", "num_experts", "model_type"))
]
SEVERAL = "actor.token_budget=128"  # micro-batches
RUNS = {
    "ppo, with a critic and a reference": ([*GAE, KL, SEVERAL], ["actor.parallel.pipeline=2"]),
    "grpo, weights go to another pool": ([KL, REFRESH], ["actor.parallel.tensor=2", *SPLIT, *RESTS]),
    "grpo, adapters, and the model without them": (
        [KL, SEVERAL, "actor.lora={rank: 4, alpha: 8, send: adapters}"],
        ["actor.parallel.pipeline=2", *SPLIT, "actor.offload_params=true"],
    ),
    "grpo, a mixture": ([*MIXTURE, "actor.router.replay=sampler"], ["actor.parallel.expert=2"]),
}


def trained(folder: Path, *overrides: str) -> tuple[list[dict[str, Any]], Tensors]:
    """The steps' metrics of a run, and what it exports."""
    inline("train", recipe_file(folder.parent), f"trainer.run_dir={folder}", *RUN, *overrides)
    lines = [line for line in metrics(folder) if "actor/grad_norm" in line]
    return lines, load_file(folder / "export" / "model.safetensors")


# A loss in which the last stage stays while there is a file.
HELD = """
import os, time
from rondo.algorithms.policy_losses.clipped import ppo_clip

def held(log_probs, old_log_probs, advantages, response_mask):
    while os.path.exists(os.environ["HELD"]):
        time.sleep(0.01)
    return ppo_clip(log_probs, old_log_probs, advantages, response_mask)
"""


class SenderKiller(Killer):
    """The first stage is killed in its send to the last one, which is held in its loss until then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: Path, *kills: Kill) -> None:
        super().__init__(monkeypatch, *kills)
        self.held = held

    async def _kill(self, kill: Kill, group: WorkerGroup, method: Any, *args: Any, **kwargs: Any) -> Any:
        self.pids += await self._call(group, Worker.process_id)
        self.held.touch()
        call = asyncio.ensure_future(self._call(group, method, *args, **kwargs))
        waits_in: list[str] = []
        while "_communicate_shapes" not in waits_in:
            assert not call.done()
            await asyncio.sleep(0.01)
            first = await asyncio.wrap_future(group._hosts[0].pulse(stacks=False))
            waits_in = [deed.collective for deed in first.deeds]
        os.kill(self.pids[0], signal.SIGKILL)
        self.held.unlink()
        with pytest.raises(WorkerError, match=r"host process 0 died \(signal SIGKILL\)") as caught:
            await call
        assert (caught.value.role, caught.value.rank, caught.value.method) == ("actor", 0, "update_actor")
        raise caught.value


@pytest.mark.parametrize("name", list(RUNS))
def test_a_run_is_that_of_torch_and_goes_on_to_the_same_end(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rewards and numbers, step after step, and weights within 1e-4 at the end; and those of a run
    that stopped between, and lost a pipeline stage in a send later, are the same bits.
    """
    both, megatron = RUNS[name]
    (tmp_path / "mine.py").write_text(HELD)
    held = tmp_path / "held"
    common = [*(f"model.config.{key}={value}" for key, value in EVEN.items()), "trainer.total_steps=3", *both]
    common += [f"algorithm.policy_loss={tmp_path / 'mine.py'}:held", f"cluster.env={{HELD: {held}}}"]
    expected, weights = trained(tmp_path / "torch", *common)
    steps, ours = trained(tmp_path / "megatron", *common, *MEGATRON, *megatron)
    assert len(steps) == len(expected) == 3
    for mine, theirs in zip(steps, expected, strict=True):
        assert mine["reward/mean"] == theirs["reward/mean"]
        for key in ("actor/grad_norm", "actor/loss"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), key
        assert 0 <= mine["rollout/log_prob_gap"] < 1e-4
    for key, one in weights.items():
        assert relative_difference(ours[key], one) < 1e-4, key
    trained(tmp_path / "parts", *common, *MEGATRON, *megatron, "trainer.total_steps=2")
    kills = [Kill("update_actor", 1)] if "pipeline" in megatron[0] else []
    killer = SenderKiller(monkeypatch, held, *kills)
    again = trained(tmp_path / "parts", *common, *MEGATRON, *megatron)[1]
    assert killer.left == []
    assert restarts_of(tmp_path / "parts")[-1] == (3, len(kills))
    assert all(torch.equal(again[key], one) for key, one in ours.items())
    wait_until_gone(killer.pids)


@pytest.mark.parametrize(
    ("task", "axes"),
    [
        ("sft", "{tensor: 2}"),
        ("preference", "{pipeline: 2}"),
        ("reward model", "{tensor: 2}"),
        ("judged and distilled", "{pipeline: 2}"),
    ],
)
def test_every_role_ends_as_with_torch(run: Run, task: str, axes: str) -> None:  # noqa: F811
    compare(task, run(task, DENSE), run(task, DENSE, 2, axes, "actor.backend=megatron"))
