"""Resource pools as Ray's placement groups: is there room, set it aside, give it back. With `ray_backend` the
only module that imports Ray."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rondo.config.schema import ClusterConfig
from rondo.errors import ConfigError

ONE_POOL = "all"
READY_SECONDS = 30.0  # for devices that another job is just giving back


def bundle_of(device: str) -> dict[str, float]:
    """What one host process takes of a node's resources. device: "cpu" or "cuda"."""
    return {"CPU": 1, "GPU": 1} if device == "cuda" else {"CPU": 1}


def check_room(config: ClusterConfig, device: str) -> None:
    """Raises ConfigError when the nodes together have fewer devices than asked for, busy or not.

    A GPU counts as a device where its node also has a CPU for the host process.
    """
    bundle, nodes = bundle_of(device), [node for node in ray.nodes() if node["Alive"]]
    slots = {node["NodeManagerAddress"]: 0 for node in nodes}
    for node in nodes:
        slots[node["NodeManagerAddress"]] += _slots(node["Resources"], bundle)
    if sum(slots.values()) < config.devices:
        kind = "GPU" if device == "cuda" else "CPU"
        has = ", ".join(f"{count} on {address}" for address, count in slots.items())
        pools = f" (cluster.pools: {_sizes(config.pools)})" if config.pools else ""
        raise ConfigError(
            f"cluster.devices={config.devices}{pools}, but the Ray cluster has {sum(slots.values())} {kind}s "
            f"({has}): lower cluster.devices, add nodes, or set cluster.device"
        )


def assigned_device(assigned: Sequence[int | str], visible: str | None, count: int) -> str:
    """torch's name of the one GPU that Ray assigned to a process that sees `count` of them.

    assigned: ids as CUDA_VISIBLE_DEVICES has them. visible: that variable. Ray narrows it to the assigned
    GPU, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set: then the process sees all GPUs of its
    node. Raises ConfigError.
    """
    if count == 1:
        return "cuda:0"
    seen = [gpu.strip() for gpu in visible.split(",")] if visible else [str(i) for i in range(count)]
    ids = [str(gpu) for gpu in assigned]
    if len(ids) != 1 or ids[0] not in seen:
        raise ConfigError(
            f"cluster.device=cuda: Ray assigned GPU {', '.join(ids) or 'none'} to a host process that sees "
            f"{count} GPUs (CUDA_VISIBLE_DEVICES={visible}): start Ray on that node with the GPUs that torch "
            "sees there"
        )
    return f"cuda:{seen.index(ids[0])}"


class RayPools:
    """The placement groups of one cluster."""

    def __init__(self, pools: Mapping[str, int], device: str) -> None:
        self._sizes, self._bundle = dict(pools), bundle_of(device)
        self._groups: dict[str, PlacementGroup] = {}

    async def reserve(self) -> list[list[Any]]:
        """Set the devices of every pool aside, on as few nodes as there is room. Returns, per pool, a
        scheduling strategy per device. Raises ConfigError when a pool does not get its devices in time.
        """
        for name, size in self._sizes.items():
            self._groups[name] = placement_group([dict(self._bundle)] * size, strategy="PACK")
        deadline = time.monotonic() + READY_SECONDS
        for name, group in self._groups.items():
            while not group.wait(0.05):
                if time.monotonic() > deadline:
                    raise ConfigError(self._no_room(name))
                await asyncio.sleep(0.05)
        return [
            [PlacementGroupSchedulingStrategy(group, i) for i in range(self._sizes[name])]
            for name, group in self._groups.items()
        ]

    def _no_room(self, name: str) -> str:
        what = " and ".join(f"{count:.0f} {kind}" for kind, count in self._bundle.items())
        free = ray.available_resources()
        left = ", ".join(f"{free.get(kind, 0):.0f} {kind}s" for kind in self._bundle)
        return (
            f"cluster.pools.{name}: Ray did not set aside {self._sizes[name]} devices ({what} each) within "
            f"{READY_SECONDS:.0f} s; free beside what the other pools got are {left}: another job has the "
            "rest (see `ray status`); wait for it, or ask for fewer"
        )

    def remove(self) -> None:
        """Give everything back. What is gone already is no error."""
        for group in self._groups.values():
            try:
                remove_placement_group(group)
            except RayError:
                continue  # its node or the whole cluster is gone, and the reservation with it
        self._groups.clear()


def pool_sizes(config: ClusterConfig) -> dict[str, int]:
    """Name → number of devices; one pool of all where cluster.pools names none."""
    return dict(config.pools) or {ONE_POOL: config.devices}


def _slots(resources: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    return min(math.floor(resources.get(kind, 0) / need) for kind, need in bundle.items())


def _sizes(pools: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in pools.items())
