"""A run of which one rank hangs says who waits for whom, where, and goes on from its newest checkpoint. (How
Ray's hosts are given up: tests/controller/test_hangs.py; how its runs begin again: test_restarts.py.)
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import yaml

from rondo.config import load
from rondo.trainers.commands.supervised import sft
from rondo.trainers.commands.train import train
from tests.controller.test_hangs import told
from tests.trainers.conftest import RECIPE, SFT_RECIPE, inline, metrics, weights
from tests.trainers.test_parallel import DENSE
from tests.trainers.test_restarts import TWO, Kill, Killer, restarts_of
from tests.waiting import wait_until_gone

pytestmark = pytest.mark.slow

HANG = "cluster.hang_seconds=6"  # as long as a busy machine may keep a process from its processor
THREE_STEPS = (
    "trainer.total_steps=3",
    "checkpoint.every=1",
    "trainer.evaluation={before: false, every: null}",
)
SPLIT = (
    *TWO,
    "cluster.devices=3",
    "cluster.pools={train: 2, serve: 1}",
    "cluster.placement={rollout: serve}",
)
# A loss in which rank 1 sleeps, once.
SLEEPY = """
import os, time
import torch.distributed as dist
from rondo.algorithms.policy_losses.clipped import ppo_clip

def sleepy(log_probs, old_log_probs, advantages, response_mask):
    flag = os.environ["FLAG"]
    if dist.get_rank() == 1 and os.path.exists(flag):
        os.remove(flag)
        time.sleep(10_000)
    return ppo_clip(log_probs, old_log_probs, advantages, response_mask)
"""
# One after which rank 1 sleeps in the middle of a layer of the next pass, once.
SLEEPY_IN_A_LAYER = """
import os, time
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from rondo.algorithms.policy_losses.clipped import ppo_clip

def sleep(module, arguments):
    if type(module).__name__ == "Qwen3Attention":
        time.sleep(10_000)

def sleepy(log_probs, old_log_probs, advantages, response_mask):
    flag = os.environ["FLAG"]
    if dist.get_rank() == 1 and os.path.exists(flag):
        os.remove(flag)
        register_module_forward_pre_hook(sleep)
    return ppo_clip(log_probs, old_log_probs, advantages, response_mask)
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps on two ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    inline("train", str(folder / "tiny.yaml"), *THREE_STEPS, *TWO, f"trainer.run_dir={folder / 'run'}")
    return folder / "run"


@pytest.mark.parametrize(
    ("method", "number", "where", "placed"),
    [
        ("update_actor", 2, r"actor[0].update_actor", TWO),
        ("write_snapshot", 2, r"actor[0].write_snapshot > writing", TWO),
        ("send_weights", 3, r"rollout[0].receive_weights", SPLIT),
    ],
)
def test_a_stopped_rank(
    recipe: Path,
    tmp_path: Path,
    undisturbed: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    number: int,
    where: str,
    placed: tuple[str, ...],
) -> None:
    killer = Killer(monkeypatch, Kill(method, number, stopped=True))
    train(load([str(recipe)], [*THREE_STEPS, *placed, HANG, f"trainer.run_dir={tmp_path / 'run'}"]))
    report = "\n".join(told(caplog.records))
    assert "host 1" in report
    assert "it is stopped (SIGSTOP, or a debugger)" in report
    assert where in report
    assert "flight record of torch.distributed" in report
    assert "These calls fail" in report
    assert restarts_of(tmp_path / "run")[-1] == (3, 1)
    assert weights(tmp_path / "run") == weights(undisturbed)
    if placed is not SPLIT:  # it counts what moves
        assert metrics(tmp_path / "run") == metrics(undisturbed)
    wait_until_gone(killer.pids)


@pytest.mark.parametrize(
    ("loss", "axes", "call"),
    [
        (SLEEPY, (), "all_gather"),
        (SLEEPY_IN_A_LAYER, (*DENSE, "actor.parallel={tensor: 2}"), "wait_tensor"),
    ],
)
def test_a_rank_that_sleeps_in_the_middle_of_a_pass(
    recipe: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    loss: str,
    axes: tuple[str, ...],
    call: str,
) -> None:
    (tmp_path / "mine.py").write_text(loss)
    flag = tmp_path / "flag"
    settings = [f"algorithm.policy_loss={tmp_path / 'mine.py'}:sleepy", f"cluster.env={{FLAG: {flag}}}"]
    settings += [*THREE_STEPS, *TWO, *axes, HANG]
    train(load([str(recipe)], [*settings, f"trainer.run_dir={tmp_path / 'whole'}"]))
    flag.touch()
    train(load([str(recipe)], [*settings, f"trainer.run_dir={tmp_path / 'run'}"]))
    report = "\n".join(told(caplog.records))
    assert "time.sleep(10_000)" in report  # the stack of rank 1
    path = r"actor\[0\]\.update_actor > forward and backward[^,]*, since \d+ s"
    assert re.search(rf"{path}, waits in {call}\w* for host 1", report)
    assert not flag.exists()
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_a_rank_that_is_stopped_in_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(name: str, *settings: str) -> Path:
        given = SFT_RECIPE | {"trainer": {"total_steps": 2, "run_dir": str(tmp_path / name)}}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(given))
        sft(load([str(tmp_path / f"{name}.yaml")], [*TWO, HANG, "checkpoint.every=1", *settings]))
        return tmp_path / name

    whole = run("whole")
    killer = Killer(monkeypatch, Kill("update_actor", 2), Kill("load", 1, stopped=True))
    caplog.set_level(logging.WARNING)
    hurt = run("hurt")
    assert "actor[0].load" in "\n".join(told(caplog.records))
    assert restarts_of(hurt) == [(1, 0), (2, 2)]
    assert weights(hurt) == weights(whole)
    wait_until_gone(killer.pids)
