"""torch.distributed in a host process: started once, and process groups for a worker group's mesh axes."""

from __future__ import annotations

import fcntl
import ipaddress
import json
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rondo.controller.mesh import Axes
from rondo.core.errors import ConfigError
from rondo.platform import platform_of

# Where torch keeps it: of all backends but NCCL, and, in builds for CUDA, of NCCL. Each holds the last
# TORCH_FR_BUFFER_SIZE (2000) collectives.
_FLIGHT_RECORDS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface, in a struct ifreq
# How the transports say that the *other* end went away: the echo of a failure, never its cause.
_ECHOES = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "gloo",
    "nccl",
    "remote process",
)


def init_distributed(
    rank: int, world_size: int, device: str, store: dist.Store | None, timeout: timedelta
) -> bool:
    """Starts the default process group, for tensors of the host and of the device, unless there is one; says
    whether it did.

    store: where ranks meet; None for a world of one. timeout: of one operation. Raises ConfigError if a world
    of another size is up already.
    """
    platform = platform_of(device)
    platform.use(device)
    if dist.is_initialized():
        if dist.get_world_size() != world_size:
            raise ConfigError(
                f"torch.distributed is already initialised here with {dist.get_world_size()} ranks, not the "
                f"{world_size} of the cluster: start rondo without torchrun (cluster.devices sets the ranks)"
            )
        return False
    host = platform_of("cpu").collectives
    shown = sys.excepthook
    dist.init_process_group(
        host if platform.host else f"cpu:{host},{platform.kind}:{platform.collectives}",
        store=store or dist.HashStore(),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=None if platform.host else torch.device(device),  # not guessed from the rank's number
    )
    # Torch would put "[rank0]:" before every line of an error; of which worker it is, ours say.
    sys.excepthook = shown
    return True


def interface_towards(address: str) -> str | None:
    """Returns the name of the network interface by which this machine reaches an IPv4 address, its own
    included; None where that cannot be said: of an IPv6 address, or behind one that an interface has beside
    its first. Sends nothing.
    """
    if ipaddress.ip_address(address).version != 4:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))  # of UDP: looks up the way, no more
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no IPv4 address
                continue
            if found[20:24] == own:
                return name
    return None


Groups = dict[tuple[int, ...], dist.ProcessGroup]


def axis_groups(
    axes: Axes, ranks: Sequence[int], known: Groups, timeout: timedelta
) -> tuple[dist.ProcessGroup, ...]:
    """Returns, of each axis of a grid of these ranks of the world, the process group that this process is in;
    () for a process that is not among `ranks`.

    known: groups by their ranks, to which new ones are added. Roles on the same ranks share theirs (with NCCL
    each has buffers of hundreds of MB): their calls run in one order on all ranks (`Host`). The default group
    is none of them. Collective over the *whole* world, in one order everywhere.
    """
    # With NCCL a group is split off the default one's communicator, in which all of that must take part.
    alone_together = getattr(dist.group.WORLD, "bound_device_id", None) is not None
    shape = [size for _, size in axes]
    grid, here = np.asarray(ranks).reshape(shape), dist.get_rank()
    mine = []
    for axis, (name, size) in enumerate(axes):
        for members in map(tuple, np.moveaxis(grid, axis, -1).reshape(-1, size).tolist()):
            if members not in known and (size > 1 or here in members or alone_together):
                # Else a rank alone makes its group alone: the world would wait for each of them.
                known[members] = dist.new_group(
                    members,
                    timeout=timeout,
                    group_desc=f"rondo_{name}",
                    use_local_synchronization=size == 1 and not alone_together,
                )
            if here in members:
                mine.append(known[members])
    return tuple(mine)


def device_mesh_of(
    axes: Axes, ranks: Sequence[int], groups: Sequence[dist.ProcessGroup], device_type: str
) -> DeviceMesh:
    """Makes a DeviceMesh with the axes' names on existing groups. Moves nothing."""
    names = tuple(name for name, _ in axes)
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
    grid = torch.tensor(ranks, dtype=torch.int).reshape([size for _, size in axes])
    return DeviceMesh.from_group(list(groups), device_type, mesh=grid, mesh_dim_names=names)


def flight_record() -> str:
    """Writes what torch's flight record has of the collectives of this process, by process group: how many it
    has begun, and those that have not ended. Laid beside those of other ranks it says who is behind, and in
    what. Empty where nothing was begun.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for dump in filter(None, (getattr(c10d, name, None) for name in _FLIGHT_RECORDS)):
        for entry in json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", ()):
            groups.setdefault(" ".join(entry["process_group"]), []).append(entry)
    lines = []
    for group, entries in groups.items():
        lines.append(f"  group {group}: {max(map(_number, entries))} begun")
        for entry in entries:
            if not entry["retired"] and not _is_nccl_message(entry):
                what = f"{entry['profiling_name']} of {entry['input_dtypes']} {entry['input_sizes']}"
                seconds = time.time() - entry["time_created_ns"] / 1e9
                lines.append(f"    {_number(entry)}: {what}, open since {seconds:.0f} s")
    return "\n".join(["flight record of torch.distributed", *lines]) if lines else ""


def _is_nccl_message(entry: Mapping[str, Any]) -> bool:
    """Says whether it is a message of NCCL's: these go in batches (`weights/own_group.py`), whose end is not
    recorded.
    """
    return bool(entry["is_p2p"]) and str(entry["profiling_name"]).startswith("nccl:")


def _number(entry: Mapping[str, Any]) -> int:
    return int(entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"])


def is_echo(error: BaseException) -> bool:
    """Says whether an error, or what it was raised from, only reports that a peer went away during a
    collective.
    """
    if not isinstance(error, RuntimeError):  # torch.distributed's errors are RuntimeErrors
        return error.__cause__ is not None and is_echo(error.__cause__)
    text = f"{type(error).__name__}: {error}".lower()
    return type(error).__name__.startswith("Dist") or any(sign in text for sign in _ECHOES)
