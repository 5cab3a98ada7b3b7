"""torch.distributed in a host process: started once, and process groups for a worker group's mesh axes."""

from __future__ import annotations

from collections.abc import Sequence

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


def init_distributed(rank: int, world_size: int, device: str, store: dist.Store | None) -> bool:
    """Starts the default process group (gloo; with nccl for cuda tensors), unless there is one; says whether
    it did.

    store: where ranks meet; None for a world of one. Raises ConfigError if a world of another size is up
    already.
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
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, store=store or dist.HashStore(), rank=rank, world_size=world_size)
    return True


def new_axis_groups(mesh: Mesh, ranks: Sequence[int]) -> tuple[dist.ProcessGroup, ...]:
    """Makes process groups for a mesh over these ranks of the world; returns, of each axis, the one that this
    process is in.

    Collective over the *whole* world, as torch.distributed wants it, in one order everywhere; () for a
    process that is not among `ranks`. Always new groups: colocated roles never share one, nor the default
    group.
    """
    grid = np.asarray(ranks).reshape(mesh.shape)
    mine = []
    for axis, name in enumerate(mesh.names):
        for members in np.moveaxis(grid, axis, -1).reshape(-1, mesh.shape[axis]).tolist():
            group = dist.new_group(members, group_desc=f"rondo_{name}")
            if dist.get_rank() in members:
                mine.append(group)
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
