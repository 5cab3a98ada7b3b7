"""Tensors that are spread over ranks: DTensors, and this rank's part of each, wherever it rests."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a tensor, or the tensor where it is not sharded; shares its storage."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def moved(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Returns a tensor on a device; itself where it is there already, or device is None. What comes from a
    CUDA device to host memory is pinned there, which makes copies between the two fast.
    """
    if device is None or tensor.device == device:
        return tensor
    if tensor.device.type == "cuda" and device.type == "cpu":
        return torch.empty_like(tensor, device=device, pin_memory=True).copy_(tensor)
    return tensor.to(device)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy in host memory, sharded as the tensor is."""
    local = local_of(tensor)
    copy = local.clone() if local.device.type == "cpu" else moved(local, torch.device("cpu"))
    return as_shard(tensor, copy, tensor.device_mesh) if isinstance(tensor, DTensor) else copy


def as_shard(
    like: torch.Tensor, local: torch.Tensor, mesh: DeviceMesh, shape: tuple[int, ...] | None = None
) -> DTensor:
    """Returns `local`, wherever it rests, as this rank's part of a tensor that is spread as `like` is; every
    rank of the mesh has all of one that is not. The result shares the storage of `local`.

    shape: of the whole, where that is another than `like` has.
    """
    if isinstance(like, DTensor):
        mesh, placements = like.device_mesh, like.placements
    else:
        placements = (Replicate(),) * mesh.ndim
    where = _mesh_at(local, mesh)
    whole = like if shape is None else torch.empty(shape, device="meta")
    tensor = DTensor.from_local(
        local, where, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    assert tensor.to_local().data_ptr() == local.data_ptr()
    return tensor


def _mesh_at(local: torch.Tensor, mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh where the tensor rests: from_local would copy it to the device of another one."""
    kind = local.device.type
    if mesh.device_type == kind:
        return mesh
    names = mesh.mesh_dim_names
    if mesh.ndim == 1:
        return DeviceMesh.from_group(mesh.get_group(), kind, mesh_dim_names=names)
    return DeviceMesh.from_group(mesh.get_all_groups(), kind, mesh=mesh.mesh, mesh_dim_names=names)
