"""Two nodes (Ray's cluster of several nodes on one machine): the actor on one, the engines on the other."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rondo.controller import Worker
from rondo.core.errors import ConfigError, RolloutError, WeightSyncError, WorkerError
from rondo.trainers.commands import train as runner
from rondo.trainers.program.step import Roles
from tests.messages import full_text
from tests.trainers.conftest import weights
from tests.waiting import wait_for, wait_until_gone

pytest.importorskip("ray")
# The last test loses a node that all of them share.
pytestmark = [pytest.mark.slow, pytest.mark.random_order(disabled=True)]

SPLIT = (
    "cluster.backend=ray",
    "cluster.devices=2",
    "cluster.pools={train: 1, serve: 1}",
    "cluster.placement={rollout: serve}",
    "trainer.evaluation.every=null",
    "cluster.device=cpu",
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
    two = run("two", "trainer.total_steps=2", *SPLIT, f"cluster.backend.address={nodes.address}")
    assert pids["actor"] != pids["rollout"]
    assert weights(two) == weights(one)
    wait_until_gone([*pids["actor"], *pids["rollout"]])


def test_more_devices_than_both_nodes_have(run: Any, nodes: Any) -> None:
    """Refused before anything is set aside: that would be another message, after half a minute."""
    with pytest.raises(ConfigError, match=full_text("cluster.devices=3")):
        run(
            "many",
            *SPLIT,
            "cluster.devices=3",
            "cluster.pools.train=2",
            f"cluster.backend.address={nodes.address}",
        )


def test_a_node_that_is_lost_ends_the_run(run: Any, nodes: Any, tmp_path: Path, pids: Any) -> None:
    """Each node has a role without which the run cannot go on: the actor, or the only engine. Who sees it
    first is no matter: a call to that host, its peer in a sync of weights, or who fetches rows from there.
    """

    def lose_the_second_node() -> None:
        lines = tmp_path / "lost" / "metrics.jsonl"
        wait_for("two steps", lambda: lines.exists() and lines.read_text().count("\n") >= 3)
        nodes.remove_node(nodes.second, allow_graceful=False)

    threading.Thread(target=lose_the_second_node, daemon=True).start()
    ways = (
        r"(actor|rollout)\[0\].*its host process \(pid \d+ on",
        r"did not arrive from rank 0 of the trainer: it went away",
        r"no rollout rank is left",
        r"a block of this batch is lost, its host process or node is gone",
    )
    errors = (WorkerError, WeightSyncError, RolloutError)
    settings = ("trainer.total_steps=5000", "trainer.max_restarts=0", *SPLIT)
    with pytest.raises(errors, match="|".join(ways)) as caught:
        run("lost", *settings, f"cluster.backend.address={nodes.address}")
    assert caught.value.is_outage
    wait_until_gone([*pids["actor"], *pids["rollout"]])
