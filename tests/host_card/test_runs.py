"""Whole runs on two cards: what a real card need not repeat to the bit, and Ray, which finds no card here."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.test_paths import F32, recipe_file
from tests.host_card import on_the_host_card
from tests.trainers.conftest import inline, metrics

pytestmark = [*on_the_host_card, pytest.mark.slow]
ONE = ["cluster.device=cuda", F32]
TWO = ["cluster.devices=2"]
SPLIT = [*TWO, "cluster.pools={train: 1, serve: 1}", "cluster.placement={rollout: serve}"]


def trained(tmp_path: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    """The steps' metrics of a run."""
    inline("train", recipe_file(tmp_path), f"trainer.run_dir={tmp_path / name}", *ONE, *overrides)
    return [line for line in metrics(tmp_path / name) if "actor/grad_norm" in line]


@pytest.mark.parametrize("on_update", ["resume", "abort"])
def test_an_asynchronous_run_on_two_cards_is_repeated_on_one(tmp_path: Path, on_update: str) -> None:
    """One card trains while the other generates. By its journal one card that does both makes the same
    tokens, else the replay stops, and the same numbers.
    """
    common = ["trainer.max_staleness=1", f"trainer.on_update={on_update}", "trainer.total_steps=4"]
    steps = trained(tmp_path, "two", "cluster.backend=process", *common, *SPLIT)
    assert [step["buffer/staleness_max"] for step in steps[:1]] == [0.0]
    stale = [step["buffer/staleness_1"] for step in steps]
    assert max(stale) > 0  # else nothing was generated while the trainer computed
    for step, share in zip(steps, stale, strict=True):
        assert step["buffer/staleness_0"] + share == 1.0
        assert (step["rollout/log_prob_gap"] < 1e-4) == (share == 0)
    again = trained(tmp_path, "one", f"trainer.replay={tmp_path / 'two'}", *common)
    assert len(again) == len(steps) == 4
    for ours, theirs in zip(again, steps, strict=True):
        for name in ("actor/grad_norm", "actor/loss", "reward/mean", "rollout/log_prob_gap"):
            assert ours[name] == theirs[name], name


def test_weights_go_from_pool_to_pool_and_on_to_an_engine_by_its_card(tmp_path: Path) -> None:
    """By collectives to the host of the engine's card, and from there in buckets on the card (by name: it
    would be refused otherwise): the same steps as where all is in one process, on one card.
    """
    one = trained(tmp_path, "one", "trainer.total_steps=2")
    own = ["rollout.engine.process=own", "rollout.weight_transport=ipc", "cluster.backend=process"]
    steps = trained(tmp_path, "split", "trainer.total_steps=2", *own, *SPLIT)
    assert len(steps) == len(one) == 2
    for ours, theirs in zip(steps, one, strict=True):
        for name in ("actor/grad_norm", "actor/loss", "reward/mean"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name
        assert 0 <= ours["rollout/log_prob_gap"] < 1e-4
        assert ours["weights/bytes_moved"] > theirs["weights/bytes_moved"]


@pytest.fixture(params=["narrowed", "all are seen"])
def ray_with_cards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Ray that is told of two cards (it would ask a driver of NVIDIA's), and narrows what a process sees
    to the one that it gets, or does not.
    """
    ray = pytest.importorskip("ray")
    if request.param == "all are seen":
        monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    yield
    ray.shutdown()


@pytest.mark.usefixtures("ray_with_cards")
def test_a_run_with_ray_on_two_cards_is_that_of_one(tmp_path: Path) -> None:
    """Both train, and each generates; then one trains and the other generates."""
    one = trained(tmp_path, "one", "trainer.total_steps=2")
    for name, pools in (("two", TWO), ("split", SPLIT)):
        steps = trained(tmp_path, name, "cluster.backend=ray", "trainer.total_steps=2", *pools)
        assert len(steps) == len(one) == 2
        for ours, theirs in zip(steps, one, strict=True):
            for key in ("actor/grad_norm", "actor/loss", "reward/mean"):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-6), (name, key)
            assert 0 <= ours["rollout/log_prob_gap"] < 1e-4
