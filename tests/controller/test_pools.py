"""Pools on Ray: one placement group each, errors instead of waiting for devices that do not exist, and a
group that goes on without a rank whose process was killed."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rondo.config.schema import ClusterConfig, RayBackendConfig
from rondo.controller import Cluster, Mesh, Worker, WorkerGroup, start_cluster
from rondo.core.errors import ConfigError, DataError, WorkerError
from rondo.platform import platform_of
from tests.controller.conftest import Run
from tests.controller.sample_workers import Calculator
from tests.messages import full_text
from tests.waiting import wait_for

pytestmark = pytest.mark.random_order(disabled=True)  # the last tests kill the hosts that all of them share
ray = pytest.importorskip("ray")
ray_backend = pytest.importorskip("rondo.controller.ray_backend")
placement_group = ray_backend.placement_group
assigned_device = ray_backend.assigned_device


def config(devices: int, **pools: int) -> ClusterConfig:
    return ClusterConfig(backend=RayBackendConfig(), device="cpu", threads=1, devices=devices, pools=pools)


def groups_of_ray() -> dict[str, dict[str, Any]]:
    """Placement groups by id, those of earlier tests included."""
    table: dict[str, dict[str, Any]] = ray.util.placement_group_table()
    return table


@pytest.fixture(scope="module")
def three(ray_instance: None, run: Run) -> Iterator[Cluster]:
    """Three devices in two pools, each a placement group of its own, and none is left at the end. The last
    tests of this file kill their hosts.
    """
    free, before = ray.available_resources().get("CPU", 0), set(groups_of_ray())
    cluster = run(start_cluster(config(3, one=1, two=2)))
    made = {name: group for name, group in groups_of_ray().items() if name not in before}
    assert sorted(len(group["bundles"]) for group in made.values()) == [1, 2]
    assert {(group["state"], group["strategy"]) for group in made.values()} == {("CREATED", "PACK")}
    yield cluster
    run(cluster.shutdown())
    all_is_given_back(made, free)


@pytest.fixture(scope="module")
def late(three: Cluster, run: Run) -> WorkerGroup:
    """Made while all hosts live: a new group needs every one of them."""
    return run(three.create_group("late", Calculator, devices=(1, 2)))


def all_is_given_back(names: Iterable[str], cpus: float) -> None:
    """Ray does it a moment after it said so."""
    wait_for("removal", lambda: all(groups_of_ray()[name]["state"] == "REMOVED" for name in names))
    wait_for("free CPUs", lambda: ray.available_resources().get("CPU", 0) >= cpus)


def test_more_than_the_nodes_have_is_refused_at_once(ray_instance: None, run: Run) -> None:
    before = set(groups_of_ray())
    with pytest.raises(ConfigError, match=full_text("cluster.devices=9")):
        run(start_cluster(config(9, a=4, b=5)))
    assert set(groups_of_ray()) == before


def test_devices_that_another_job_has_are_named_after_a_bounded_time(
    ray_instance: None, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, before = ray.available_resources().get("CPU", 0), set(groups_of_ray())
    other = placement_group([{"CPU": 1}] * 2)
    assert other.wait(300)
    pools: list[Any] = []

    def placing(*args: Any, **kwargs: Any) -> Any:
        """There is room for the first pool, and never for the second."""
        pools.append(placement_group(*args, **kwargs))
        if len(pools) == 1:
            assert pools[0].wait(300)
            pools[0].wait = lambda seconds: True
        return pools[-1]

    monkeypatch.setattr(ray_backend, "placement_group", placing)
    clock = itertools.count(step=10**6).__next__  # the time is over when it is asked for
    monkeypatch.setattr(ray_backend, "time", SimpleNamespace(monotonic=clock))
    message = r"cluster.pools.b: Ray did not set aside 6 devices \(1 CPU each\) within 90 s; free"
    with pytest.raises(ConfigError, match=message):
        run(start_cluster(config(7, a=1, b=6)))
    ray.util.remove_placement_group(other)
    all_is_given_back(set(groups_of_ray()) - before, free)


def test_a_lost_node_is_waited_for_until_it_is_back(
    ray_instance: None, run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray's table of nodes is written here: in its cluster on one machine all have one address. For real, in
    tests/trainers/test_two_machines.py.
    """

    def node(address: str, cpus: int) -> dict[str, Any]:
        return {"NodeManagerAddress": address, "Alive": cpus > 0, "Resources": {"CPU": cpus} if cpus else {}}

    lost = [node("10.0.0.1", 2), node("10.0.0.2", 0)]
    tables = [lost, lost, [*lost, node("10.0.0.2", 2)]]
    monkeypatch.setattr(ray, "nodes", lambda: tables[0] if len(tables) == 1 else tables.pop(0))
    run(ray_backend.wait_for_room(config(4), "cpu"))  # the third table has room
    assert [len(table) for table in tables] == [3]
    assert "Ray has lost 10.0.0.2" in caplog.text

    with pytest.raises(ConfigError, match="add nodes"):  # who is back is not lost: at once
        run(ray_backend.wait_for_room(config(5), "cpu"))
    tables[:] = [lost]
    monkeypatch.setattr(ray_backend, "RETURN_SECONDS", 0.5)
    with pytest.raises(ConfigError, match=r"Ray has lost 10\.0\.0\.2"):
        run(ray_backend.wait_for_room(config(4), "cpu"))


@pytest.mark.slow
def test_a_workers_own_error_is_no_death(three: Cluster, run: Run) -> None:
    """A group over both pools: three processes."""
    group = run(three.create_group("errors", Calculator))
    assert len({pid for _, _, pid, _ in run(group.call(Calculator.place, [0, 0, 0]))}) == 3
    with pytest.raises(WorkerError) as caught:
        run(group.call_each(Calculator.fails, (1,)))
    assert (caught.value.died, type(caught.value.cause_error)) == (False, DataError)
    assert group.alive == (0, 1, 2)
    with pytest.raises(ValueError, match="one per rank"):
        run(group.call(Calculator.place, [1, 2, 3], ranks=(0, 1)))
    with pytest.raises(ValueError, match="no rank"):
        run(group.call(Calculator.fails, (), ranks=()))


def test_a_rank_on_several_devices(three: Cluster, run: Run) -> None:
    """On a CPU it is a count: the group's ranks stand on the first device of each."""
    with pytest.raises(ConfigError, match=r"a group on devices \(2, 3\)"):
        run(three.create_group("wide", Calculator, devices=(2,), devices_per_rank=2))
    with pytest.raises(ConfigError, match=r"a group on devices \(0, 1, 1, 2\)"):
        run(three.create_group("wide", Calculator, devices=(0, 1), devices_per_rank=2))
    group = run(three.create_group("wide", Calculator, devices=(1,), devices_per_rank=2))
    assert (group.size, group.devices, group.mesh) == (1, (1,), Mesh.data_parallel(1))


def test_a_group_goes_on_without_a_killed_rank(three: Cluster, late: WorkerGroup, run: Run) -> None:
    """Also when it is the first host, where torch.distributed's ranks met."""
    every = run(three.create_group("every", Calculator))
    assert every.alive == (0, 1, 2)
    pids = run(every.call(Worker.process_id))
    os.kill(pids[0], signal.SIGKILL)
    assert run(three.cpu_seconds()).keys() == {1, 2}  # before a call has found it so
    with pytest.raises(WorkerError, match=rf"every\[0\]\.napping.*pid {pids[0]} on") as caught:
        run(every.call_rank(0, Calculator.napping, 1000.0))
    assert caught.value.died
    assert every.alive == (1, 2)
    assert run(three.cpu_seconds()).keys() == {1, 2}
    assert run(every.call_each(Calculator.napping, 0.0)).keys() == {1, 2}
    assert run(every.call_each(Worker.process_id)) == {1: pids[1], 2: pids[2]}
    assert run(every.call(Calculator.fails, (), ranks=every.alive)) == "fine"
    assert [out[3] for out in run(every.call(Calculator.place, [4, 5], ranks=(1, 2)))] == [4, 5]
    with pytest.raises(WorkerError, match=r"every\[0\]\.fails failed: .*unusable") as caught:
        run(every.call(Calculator.fails, ()))
    assert caught.value.died
    assert [out[0] for out in run(late.call(Calculator.reduce_over, ["dp", "dp"]))] == [3.0, 3.0]


def test_a_rank_that_dies_during_a_call_does_not_take_slow_ones_with_it(late: WorkerGroup, run: Run) -> None:
    pids = run(late.call(Worker.process_id))

    async def kill_while_all_wait() -> Any:
        calling = asyncio.ensure_future(late.call_each(Calculator.wait_at_the_gate))
        while not all("waiting" in notes for notes in await late.call(Calculator.notes)):
            await asyncio.sleep(0.01)
        os.kill(pids[1], signal.SIGKILL)
        while late.alive != (0,):
            await asyncio.sleep(0.01)
        await late.call_rank(0, Calculator.open_gate)
        return await calling

    assert run(kill_while_all_wait()).keys() == {0}
    assert late.alive == (0,)
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(WorkerError) as caught:
        run(late.call_each(Calculator.napping, 1000.0))
    assert caught.value.died
    assert late.alive == ()
    with pytest.raises(WorkerError, match="unusable"):
        run(late.call_each(Calculator.napping, 0.0))


@pytest.mark.parametrize(
    ("assigned", "visible", "count", "device"),
    [
        ("3", "3", 1, "cuda:0"),  # Ray has narrowed it
        ("3", None, 8, "cuda:3"),  # RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1 from here on
        ("6", "4,5,6,7", 4, "cuda:2"),  # Ray itself was started with four of eight
        ("GPU-b", "GPU-a, GPU-b", 2, "cuda:1"),
    ],
)
def test_the_device_of_an_assigned_gpu(
    monkeypatch: pytest.MonkeyPatch, assigned: str, visible: str | None, count: int, device: str
) -> None:
    seen(monkeypatch, visible, count)
    assert assigned_device(platform_of("cuda"), [assigned]) == device


def seen(monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int) -> None:
    """Has a process see `count` GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("assigned", "visible", "count"),
    [(["3"], None, 0), (["3"], None, 2), ([], None, 8), (["2"], "4,5", 2)],
)
def test_an_assigned_gpu_that_torch_does_not_see(
    monkeypatch: pytest.MonkeyPatch, assigned: list[str], visible: str | None, count: int
) -> None:
    seen(monkeypatch, visible, count)
    with pytest.raises(ConfigError, match=full_text("cluster.device=cuda: Ray assigned GPU")):
        assigned_device(platform_of("cuda"), assigned)
