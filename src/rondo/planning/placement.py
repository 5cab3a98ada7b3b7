"""Placement: which role stands on which devices. Pure: from pools and roles to device numbers.

cluster.pools       {train: 2, rollout: 1}      train: devices 0 1    rollout: device 2
cluster.placement   {rollout: rollout}          every other role: the first pool
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rondo.config.schema import ClusterConfig
from rondo.core.errors import ConfigError
from rondo.core.roles import ROLLOUT

ALL = "all"  # the name of the one pool where cluster.pools names none

# Of a step: "train" from its batch until the next version is loaded. A model at rest is on its device or in
# host memory (<role>.offload_*) whatever the phase; the engines' key/value cache is given back in "train"
# with rollout.sleep.
Phase = Literal["generate", "train"]


@dataclass(frozen=True)
class SameDevices:
    """Two roles that must share a pool, and the key that requires this."""

    role: str
    """One of the two."""
    other: str
    """The other one."""
    because: str
    """The key that wants it."""


@dataclass(frozen=True)
class Placement:
    """Says which role stands on which devices."""

    pools: Mapping[str, tuple[int, ...]]
    """Name → device numbers, ascending."""
    pool_of: Mapping[str, str] = field(default_factory=dict)
    """Role → pool; a role that is not in it is in the first one."""
    tensor_parallel: int = 1
    """Devices of one rollout engine."""

    def pool(self, role: str) -> str:
        """Returns the name of the role's pool."""
        return self.pool_of.get(role, next(iter(self.pools)))

    def devices(self, role: str) -> tuple[int, ...]:
        """Returns a device number per rank, ascending; of a rollout engine the first of its devices."""
        return self.pools[self.pool(role)][:: self.devices_per_rank(role)]

    def devices_per_rank(self, role: str) -> int:
        """Says how many devices, with consecutive numbers, one rank of the role computes on."""
        return self.tensor_parallel if role == ROLLOUT else 1

    def idle(self, devices: Collection[int]) -> list[str]:
        """Returns the pools of which none of `devices`, those in use, is one."""
        return [name for name, own in self.pools.items() if not set(own) & set(devices)]

    def colocated(self, role: str, other: str) -> bool:
        """Says whether both roles are in one pool, and so in the same host processes."""
        return self.pool(role) == self.pool(other)

    def describe(self, roles: Sequence[str]) -> list[str]:
        """Returns a line per pool: `train: devices 0 1: actor, critic`; for `rondo check`."""
        lines = []
        for name, devices in self.pools.items():
            here = [self._named(role) for role in roles if self.pool(role) == name]
            numbers = " ".join(map(str, devices))
            lines.append(f"{name}: device{'s' if len(devices) > 1 else ''} {numbers}: {', '.join(here)}")
        return lines

    def _named(self, role: str) -> str:
        size = self.devices_per_rank(role)
        return role if size == 1 else f"{role} ({size} devices per engine)"


def plan_placement(
    cluster: ClusterConfig,
    roles: Sequence[str] | None = None,
    *,
    tensor_parallel: int = 1,
    together: Sequence[SameDevices] = (),
) -> Placement:
    """Gives pools consecutive device numbers in the order in which they are written.

    roles: all of the run; None: not known (a program of your own), then no pool counts as unused. together:
    roles that must share a pool. Raises ConfigError: a role that the run does not have, a pool without a
    role, a rollout pool that does not divide into engines, and roles that must share a pool and do not.
    """
    sizes = dict(cluster.pools) or {ALL: cluster.devices}
    assert sum(sizes.values()) == cluster.devices, cluster  # the configuration was checked when it was loaded
    pools, first = {}, 0
    for name, size in sizes.items():
        pools[name] = tuple(range(first, first + size))
        first += size
    placement = Placement(pools, dict(cluster.placement), tensor_parallel)
    assert set(cluster.placement.values()) <= set(pools), cluster
    if roles is not None:
        _check_roles(placement, roles)
    _check_engines(placement)
    for pair in together:
        if not placement.colocated(pair.role, pair.other):
            raise ConfigError(
                f"{pair.because} needs {pair.role} and {pair.other} on the same devices, and "
                f"cluster.placement puts {pair.role} in pool {placement.pool(pair.role)} and {pair.other} in "
                f"{placement.pool(pair.other)}: name one pool for both, or remove {pair.because}"
            )
    return placement


def _check_roles(placement: Placement, roles: Sequence[str]) -> None:
    for role, pool in placement.pool_of.items():
        if role not in roles:
            raise ConfigError(
                f"cluster.placement.{role}={pool}: this run has no {role}, only {', '.join(roles)}; remove "
                "the key, or choose functions that read what that role makes"
            )
    for name, devices in placement.pools.items():
        if not any(placement.pool(role) == name for role in roles):
            raise ConfigError(
                f"cluster.pools.{name}={len(devices)}: no role of this run is in that pool and its devices "
                f"would stand idle; name it for one of {', '.join(roles)} in cluster.placement, or remove it"
            )


def _check_engines(placement: Placement) -> None:
    name, size = placement.pool(ROLLOUT), placement.tensor_parallel
    devices = len(placement.pools[name])
    if devices < size:
        raise ConfigError(
            f"rollout.engine.tensor_parallel={size}, but the rollout's pool {name} has {devices} device(s): "
            "raise cluster.devices (or that pool of cluster.pools), or lower it"
        )
    if devices % size:
        raise ConfigError(
            f"rollout.engine.tensor_parallel={size} does not divide the {devices} devices of the rollout's "
            f"pool {name}: some would stand idle; change either"
        )
