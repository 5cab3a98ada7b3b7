"""What the cluster's settings say to its host processes: variables, time limits; and what roles share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from rondo.config.schema import ClusterConfig
from rondo.controller import Cluster, Worker, dispatch, start_cluster
from rondo.core.errors import WorkerError
from tests.controller.conftest import BACKENDS, Run
from tests.messages import full_text

pytestmark = pytest.mark.random_order(disabled=True)  # the last test breaks the group that all of them share

SETTINGS = {"GLOO_SOCKET_IFNAME": "lo", "RONDO_TEST_NUMBER": 7}
_SAY = "import os; print(os.environ['RONDO_TEST_NUMBER'])"


class Settings(Worker):
    @dispatch("broadcast")
    def variables(self) -> tuple[str | None, str, str]:
        """Of this process, and of one that it starts."""
        said = subprocess.run([sys.executable, "-c", _SAY], capture_output=True, text=True, check=True)
        return os.environ.get("GLOO_SOCKET_IFNAME"), said.stdout.strip(), os.environ["OMP_NUM_THREADS"]

    @dispatch("broadcast")
    def group(self) -> tuple[str, int]:
        """Its name, and the sum of a 1 from each rank."""
        group = self.context.device_mesh().get_group("dp")
        ones = torch.ones(1)
        dist.all_reduce(ones, group=group)
        return group.group_name, int(ones)

    @dispatch("broadcast")
    def meets(self, without: int) -> None:
        if self.context.rank != without:
            dist.all_reduce(torch.ones(1), group=self.context.device_mesh().get_group("dp"))


@pytest.fixture(scope="module", params=["process", pytest.param("ray", marks=pytest.mark.slow)])
def pair(request: pytest.FixtureRequest, run: Run) -> Iterator[Cluster]:
    if request.param == "ray":
        request.getfixturevalue("ray_instance")
    backend = BACKENDS[request.param]
    config = ClusterConfig(
        backend, devices=2, device="cpu", threads=1, env=SETTINGS, timeout_seconds=3.0, hang_seconds=None
    )
    cluster = run(start_cluster(config))
    yield cluster
    run(cluster.shutdown())


@pytest.mark.slow
def test_variables_reach_hosts_and_what_they_start(pair: Cluster, run: Run) -> None:
    group = run(pair.create_group("variables", Settings))
    assert run(group.call(Settings.variables)) == ("lo", "7", "1")


def test_roles_on_the_same_ranks_share_their_groups(pair: Cluster, run: Run) -> None:
    one, other = (run(pair.create_group(role, Settings)) for role in ("one", "other"))
    alone = run(pair.create_group("alone", Settings, devices=(1,)))
    name, total = run(one.call(Settings.group))
    assert run(other.call(Settings.group)) == (name, total)
    assert total == 2
    own, total = run(alone.call(Settings.group))
    assert (own != name, total) == (True, 1)


@pytest.mark.slow
def test_whoever_waits_too_long_for_the_others_fails(pair: Cluster, run: Run) -> None:
    group = run(pair.create_group("late", Settings))
    with pytest.raises(WorkerError, match=full_text("waiting 3000ms")):
        run(group.call(Settings.meets, without=1))
