"""torch.distributed in a host process: started once, and process groups for a worker group's mesh axes."""

from __future__ import annotations

from collections.abc import Sequence

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
    """Start the default process group (gloo; with nccl for cuda tensors), unless there is one. True if
    started here.

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


def new_device_mesh(mesh: Mesh, ranks: Sequence[int], device_type: str) -> DeviceMesh:
    """A DeviceMesh over these ranks of the world, each axis on new process groups. Collective over `ranks`
    only."""
    grid = torch.tensor(ranks, dtype=torch.int).reshape(mesh.shape)
    here = (grid == dist.get_rank()).nonzero()[0].tolist()
    groups = []
    for axis, name in enumerate(mesh.names):
        members = grid[tuple(slice(None) if k == axis else at for k, at in enumerate(here))].tolist()
        groups.append(dist.new_group(members, use_local_synchronization=True, group_desc=f"rondo_{name}"))
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=mesh.names)
    return DeviceMesh.from_group(groups, device_type, mesh=grid, mesh_dim_names=mesh.names)


def is_echo(error: BaseException) -> bool:
    """Whether an error only says that a peer went away during a collective."""
    if not isinstance(error, RuntimeError):  # torch.distributed's errors are RuntimeErrors
        return False
    text = f"{type(error).__name__}: {error}".lower()
    return type(error).__name__.startswith("Dist") or any(sign in text for sign in _ECHOES)
