"""torch.distributed in a host process: started once, and process groups for a worker group's mesh axes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rondo.controller.mesh import Mesh
from rondo.errors import ConfigError

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
    """Starts the default process group (gloo; with nccl for cuda tensors), unless there is one; says whether
    it did.

    store: where ranks meet; None for a world of one. timeout: of one operation. Raises ConfigError if a world
    of another size is up already.
    """
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    if dist.is_initialized():
        if dist.get_world_size() != world_size:
            raise ConfigError(
                f"torch.distributed is already initialised here with {dist.get_world_size()} ranks, not the "
                f"{world_size} of the cluster: start rondo without torchrun (cluster.devices sets the ranks)"
            )
        return False
    cuda = device.startswith("cuda")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store or dist.HashStore(),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=torch.device(device) if cuda else None,  # a rank's GPU is not guessed from its number
    )
    return True


Groups = dict[tuple[int, ...], dist.ProcessGroup]


def axis_groups(
    mesh: Mesh, ranks: Sequence[int], known: Groups, timeout: timedelta
) -> tuple[dist.ProcessGroup, ...]:
    """Returns, of each axis of a mesh over these ranks of the world, the process group that this process is
    in; () for a process that is not among `ranks`.

    known: groups by their ranks, to which new ones are added. Roles on the same ranks share theirs (with NCCL
    each has buffers of hundreds of MB): their calls run in one order on all ranks (`Host`). The default group
    is none of them. Collective over the *whole* world, in one order everywhere.
    """
    grid = np.asarray(ranks).reshape(mesh.shape)
    mine = []
    for axis, name in enumerate(mesh.names):
        for members in map(tuple, np.moveaxis(grid, axis, -1).reshape(-1, mesh.shape[axis]).tolist()):
            if members not in known:
                known[members] = dist.new_group(members, timeout=timeout, group_desc=f"rondo_{name}")
            if dist.get_rank() in members:
                mine.append(known[members])
    return tuple(mine)


def device_mesh_of(
    mesh: Mesh, ranks: Sequence[int], groups: Sequence[dist.ProcessGroup], device_type: str
) -> DeviceMesh:
    """Makes a DeviceMesh with the mesh's axis names on existing groups. Moves nothing."""
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=mesh.names)
    grid = torch.tensor(ranks, dtype=torch.int).reshape(mesh.shape)
    return DeviceMesh.from_group(list(groups), device_type, mesh=grid, mesh_dim_names=mesh.names)


def is_echo(error: BaseException) -> bool:
    """Says whether an error only reports that a peer went away during a collective."""
    if not isinstance(error, RuntimeError):  # torch.distributed's errors are RuntimeErrors
        return False
    text = f"{type(error).__name__}: {error}".lower()
    return type(error).__name__.startswith("Dist") or any(sign in text for sign in _ECHOES)
