"""Pools and roles to device numbers: exact numbers, and an error for whatever would stand idle or not fit."""

from __future__ import annotations

import pytest

from rondo.config.schema import ClusterConfig, RayBackendConfig
from rondo.core.errors import ConfigError
from rondo.planning.placement import SameDevices, plan_placement
from tests.messages import full_text

ROLES = ("actor", "critic", "reference", "rollout")


def cluster(devices: int, pools: dict[str, int], **placement: str) -> ClusterConfig:
    return ClusterConfig(backend=RayBackendConfig(), devices=devices, pools=pools, placement=placement)


def test_without_pools_every_role_has_every_device() -> None:
    placement = plan_placement(ClusterConfig(devices=3), ROLES)
    assert [placement.devices(role) for role in ROLES] == [(0, 1, 2)] * 4
    assert placement.colocated("actor", "rollout")
    assert placement.describe(ROLES) == ["all: devices 0 1 2: actor, critic, reference, rollout"]


def test_pools_take_consecutive_devices_in_the_order_written() -> None:
    config = cluster(6, {"train": 2, "frozen": 1, "fast": 3}, rollout="fast", reference="frozen")
    placement = plan_placement(config, ROLES)
    assert placement.devices("actor") == placement.devices("critic") == (0, 1)
    assert placement.devices("reference") == (2,)
    assert placement.devices("rollout") == (3, 4, 5)
    assert placement.idle((0, 3)) == ["frozen"]
    assert placement.idle(range(6)) == []
    assert placement.colocated("actor", "critic")
    assert not placement.colocated("actor", "rollout")
    assert placement.describe(ROLES) == [
        "train: devices 0 1: actor, critic",
        "frozen: device 2: reference",
        "fast: devices 3 4 5: rollout",
    ]


def test_the_first_pool_is_the_default_also_for_the_rollout() -> None:
    config = cluster(3, {"serve": 2, "train": 1}, actor="train", critic="train", reference="train")
    placement = plan_placement(config, ROLES)
    assert placement.devices("rollout") == (0, 1)
    assert placement.devices("actor") == (2,)


def test_an_engine_of_several_devices_is_one_rank() -> None:
    config = cluster(6, {"train": 2, "serve": 4}, rollout="serve")
    placement = plan_placement(config, ROLES, tensor_parallel=2)
    assert placement.devices("rollout") == (2, 4)
    assert placement.devices_per_rank("rollout") == 2
    assert placement.devices("actor") == (0, 1)
    assert placement.devices_per_rank("actor") == 1
    assert placement.describe(ROLES)[1] == "serve: devices 2 3 4 5: rollout (2 devices per engine)"


@pytest.mark.parametrize(
    ("config", "tensor_parallel", "message"),
    [
        (cluster(3, {"a": 2, "b": 1}), 1, full_text("cluster.pools.b=1: no role of this run")),
        (cluster(2, {"a": 1, "b": 1}, teacher="b"), 1, full_text("placement.teacher=b: this run")),
        (ClusterConfig(devices=3), 2, full_text("tensor_parallel=2 does not divide the 3")),
        (
            cluster(3, {"a": 2, "b": 1}, rollout="b"),
            2,
            full_text("b has 1 device(s): raise cluster.devices"),
        ),
    ],
)
def test_what_does_not_fit_is_an_error(config: ClusterConfig, tensor_parallel: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_placement(config, ROLES, tensor_parallel=tensor_parallel)


def test_roles_that_must_share_a_pool() -> None:
    pair = SameDevices("reference", "actor", "reference.refresh_every")
    apart = cluster(2, {"a": 1, "b": 1}, reference="b")
    with pytest.raises(ConfigError, match=full_text("reference in pool b and actor in a: name")):
        plan_placement(apart, ROLES, together=[pair])
    both = cluster(2, {"a": 1, "b": 1}, reference="b", actor="b")
    assert plan_placement(both, ROLES, together=[pair]).devices("reference") == (1,)


def test_a_program_of_ones_own_may_leave_a_pool_to_roles_that_come_later() -> None:
    placement = plan_placement(cluster(2, {"a": 1, "b": 1}, critic="b"))
    assert placement.devices("critic") == (1,)
    assert placement.devices("reward") == (0,)  # a role that no key names: the first pool
