"""Two nodes (Ray's cluster of several nodes on one machine): the actor on one, the engines on the other."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rondo.controller import Worker
from rondo.errors import ConfigError, WeightSyncError, WorkerError
from rondo.trainers import run as runner
from rondo.trainers.roles import Roles
from tests.trainers.conftest import weights

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

SPLIT = (
    "cluster.backend=ray",
    "cluster.devices=2",
    "cluster.pools={train: 1, serve: 1}",
    "cluster.placement={rollout: serve}",
    "trainer.evaluation.every=null",
)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A Ray cluster of two nodes with one CPU each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.second = cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()


@pytest.fixture
def pids(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Role → process ids of the run that was started last."""
    found: dict[str, list[int]] = {}
    original = runner.create_roles

    async def create(*args: Any, **kwargs: Any) -> Roles:
        roles = await original(*args, **kwargs)
        for group in roles.all():
            found[group.role] = await group.call(Worker.process_id)
        return roles

    monkeypatch.setattr(runner, "create_roles", create)
    return found


def test_two_nodes_equal_one(run: Any, nodes: Any, pids: dict[str, list[int]]) -> None:
    one = run("one", "trainer.total_steps=2", "trainer.evaluation.every=null")
    assert pids["actor"] == pids["rollout"] == [os.getpid()]
    two = run("two", "trainer.total_steps=2", *SPLIT, f"cluster.ray_address={nodes.address}")
    assert pids["actor"] != pids["rollout"]
    assert weights(two) == weights(one)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in (*pids["actor"], *pids["rollout"]))


def test_more_devices_than_both_nodes_have(run: Any, nodes: Any) -> None:
    started = time.monotonic()
    with pytest.raises(
        ConfigError, match=r"cluster.devices=3 \(cluster.pools: train 2, serve 1\).* has 2 CPUs"
    ):
        run(
            "many",
            *SPLIT,
            "cluster.devices=3",
            "cluster.pools.train=2",
            f"cluster.ray_address={nodes.address}",
        )
    assert time.monotonic() - started < 10


def test_a_node_that_is_lost_ends_the_run(run: Any, nodes: Any, tmp_path: Path, pids: Any) -> None:
    """Each node has a role without which the run cannot go on: the actor, or the only engine."""
    killed: list[float] = []

    def lose_the_second_node() -> None:
        lines = tmp_path / "lost" / "metrics.jsonl"
        while not lines.exists() or lines.read_text().count("\n") < 3:
            time.sleep(0.1)
        killed.append(time.monotonic())
        nodes.remove_node(nodes.second, allow_graceful=False)

    threading.Thread(target=lose_the_second_node, daemon=True).start()
    where = r"(actor|rollout)\[0\].*its host process \(pid \d+ on"  # found by the call, or before it
    with pytest.raises((WorkerError, WeightSyncError), match=where):  # in a sync: no rollout rank is left
        run("lost", "trainer.total_steps=5000", *SPLIT, f"cluster.ray_address={nodes.address}")
    assert time.monotonic() - killed[0] < 60
    assert not any(os.path.exists(f"/proc/{pid}") for pid in (*pids["actor"], *pids["rollout"]))
